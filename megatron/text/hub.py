"""Models of the Hugging Face hub by their name, through `huggingface_hub`.

Weights are safetensors only: loading a pickle executes code in it.
"""

import os
import re
from pathlib import Path

from megatron.tokenizer.hub_cache import find_cached_snapshot, find_hub_error

# files of a model: configuration, weights, tokenizer
MODEL_FILES = (
    "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json",
    "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
# owner/name@revision; owner and revision are optional. No part begins with a dot, so none is "..".
HUB_NAME = re.compile(r"((?:\w[\w.-]*/)?\w[\w.-]*)(?:@(\w[\w.-]*))?", re.ASCII)


def parse_hub_name(text: str) -> tuple[str, str] | None:
    """Return (repository, revision) of NAME, OWNER/NAME or either with @REVISION; None for other text.

    A path below an existing folder is not a name of the hub.
    """
    match = HUB_NAME.fullmatch(text)
    if match is None or ("/" in match[1] and Path(match[1]).parts[0] and Path(match[1]).parent.is_dir()):
        return None
    return match[1], match[2] or "main"


def open_hub_model(name: str) -> Path:
    """Return the folder of a model of the hub in the hub's cache; missing files are downloaded into it.

    Raises FileNotFoundError if it is neither on the hub nor, without a network, in
    the cache, and ConnectionError for a failed download.
    """
    parsed = parse_hub_name(name)
    if parsed is None:
        raise FileNotFoundError(f"{name}: got neither a file or folder nor a name of the hub")
    repo, revision = parsed
    if (error := find_hub_error()) is None:
        return _download_model(repo, revision)
    snapshot = find_cached_snapshot(repo, revision)
    if snapshot is None:
        raise FileNotFoundError(
            f"{name}: no file or folder of this name, and no model in the hub's cache. Download it where "
            f"there is a network ({error})."
        )
    return snapshot


def _download_model(repo: str, revision: str) -> Path:
    """Download a model into the hub's cache; several ranks may do so at the same time."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # its HTTP library's, of any name

    endpoint = os.environ.get("HF_ENDPOINT")
    try:
        return Path(
            snapshot_download(repo, revision=revision, allow_patterns=[*MODEL_FILES], endpoint=endpoint)
        )
    except (OSError, HTTPError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403, 404):
            raise FileNotFoundError(
                f"{repo}: not on the hub, or private, or requires consent on its page. Check its name, or "
                "set HF_TOKEN to a token with read access."
            ) from error
        reason = str(error).strip().splitlines()[0]
        raise ConnectionError(f"{repo}: {reason}. Run the same command again to resume.") from error
