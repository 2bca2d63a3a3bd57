"""The Hugging Face hub: what its cache holds, and whether it answers, without its library's long import."""

import os
from pathlib import Path


def why_hub_is_silent(timeout_s: float = 3.0) -> str | None:
    """None where the hub (or $HF_ENDPOINT) answers, else the reason in a few words."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "on", "yes", "true"):
        return "HF_HUB_OFFLINE is set"
    import urllib.error  # slow to import, and only names that are not in the cache want it
    import urllib.request

    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=timeout_s):
            return None
    except urllib.error.HTTPError:
        return None  # an answer, if not a friendly one
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return f"{address}: {getattr(reason, 'strerror', None) or reason}"


def cached_file(repo: str, name: str) -> Path | None:
    """A file of a model repository in the hub's cache on this machine, of the revision `main`, or None.

    The cache's layout is huggingface_hub's: models--<owner>--<name>/{refs/main, snapshots/<commit>/<file>}.
    """
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("HF_HOME") or own / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub")
    folder = cache / f"models--{repo.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    path = folder / "snapshots" / commit / name
    return path if path.is_file() else None
