"""Hugging Face hub: files in its cache, and its availability."""

import os
from contextlib import suppress
from pathlib import Path


def find_hub_error(timeout_s: float = 3.0) -> str | None:
    """Return None if the hub (or $HF_ENDPOINT) responds, otherwise the reason in a few words."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "on", "yes", "true"):
        return "HF_HUB_OFFLINE is set"
    import urllib.error  # slow to import, and needed only for names that are not in the cache
    import urllib.request

    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=timeout_s):
            return None
    except urllib.error.HTTPError:
        return None  # an HTTP error is a response too
    except (OSError, ValueError) as error:
        return f"{address}: {getattr(error, 'reason', error)}"


def find_cached_file(repo: str, name: str) -> Path | None:
    """Return the path of a file of a model repository, revision `main`, in the hub's local cache, or None."""
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # not a name of the hub
        # the library reads the variable once, when it is imported
        path = try_to_load_from_cache(repo, name, cache_dir=os.environ.get("HF_HUB_CACHE"))
        return Path(path) if isinstance(path, str) else None
    return None


def download_file(repo: str, name: str) -> Path | None:
    """Download a file of a model repository into the cache; None if the hub lacks it. Raises ValueError."""
    reason = find_hub_error()
    if reason is None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError

        try:
            return Path(hf_hub_download(repo, name, endpoint=os.environ.get("HF_ENDPOINT")))
        except RemoteEntryNotFoundError:
            return None
        except (HfHubHTTPError, OSError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise ValueError(
        f"{repo}: no such folder, and not available on the Hugging Face hub ({reason}). "
        "Set a folder with tokenizer.json."
    )
