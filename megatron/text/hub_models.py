"""Models by their name on the Hugging Face hub: from its local cache, else downloaded into it."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from megatron.io import wait_for_lock, write_atomic
from megatron.tokenizer.hub_cache import find_cached_snapshot, find_hub_error, get_hub_cache

# owner/name@revision; owner and revision are optional. No part begins with a dot, so none is "..".
HUB_NAME = re.compile(r"((?:\w[\w.-]*/)?\w[\w.-]*)(?:@(\w[\w.-]*))?", re.ASCII)
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def parse_hub_name(text: str) -> tuple[str, str] | None:
    """Return (repository, revision) of NAME, OWNER/NAME or either with @REVISION; None for other text.

    A path below an existing folder is not a name of the hub.
    """
    match = HUB_NAME.fullmatch(text)
    if match is None or ("/" in match[1] and Path(match[1]).parts[0] and Path(match[1]).parent.is_dir()):
        return None
    return match[1], match[2] or "main"


def open_hub_model(name: str) -> Path:
    """Return the cached folder of a model of the hub; missing files are downloaded into the hub's cache.

    Only safetensors are downloaded: loading a pickle executes code in it.
    Raises FileNotFoundError if it is not complete in the cache and the hub does not respond or lacks it,
    ConnectionError and ValueError for a failed download.
    """
    parsed = parse_hub_name(name)
    if parsed is None:
        raise FileNotFoundError(f"{name}: got neither a file or folder nor a name of the hub")
    repo, revision = parsed
    snapshot = find_cached_snapshot(repo, revision)
    if snapshot is not None and is_complete_model(snapshot):
        return snapshot
    if (error := find_hub_error()) is not None:
        raise FileNotFoundError(
            f"{name}: got no file or folder of this name, and no complete model in the hub's cache "
            f"{get_hub_cache()}. Download it where there is a network ({error})."
        )
    return _download_model(repo, revision)


def is_complete_model(folder: Path) -> bool:
    """Return whether a folder has config.json and all files of the weights."""
    if not (folder / CONFIG).is_file():
        return False
    if (folder / INDEX).is_file():
        return all((folder / shard).is_file() for shard in _iter_shards(folder / INDEX))
    return any(True for pattern in WEIGHTS for _ in folder.glob(pattern))


def _iter_shards(index: Path) -> Iterator[str]:
    """Yield the file names in an index of sharded weights. Raises ValueError for other content."""
    try:
        yield from sorted({str(shard) for shard in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: got no weight_map ({error}), expected one. Download it again.") from error


def _download_model(repo: str, revision: str) -> Path:
    """Download into the hub's cache, in its layout but with plain files, and return the folder."""
    from megatron.text.hub_assets import TOKENIZER_FILES, WEIGHT_FILES, WEIGHT_REQUIRED, fetch_folder
    from megatron.text.hub_download import HubRepository  # slow import

    folder = get_hub_cache() / f"models--{repo.replace('/', '--')}"
    folder.mkdir(parents=True, exist_ok=True)
    # ranks of a job start together: the first downloads, the others wait and have nothing left to download
    with wait_for_lock(folder / ".megatron.lock"):
        repository = HubRepository(repo, "models", revision, os.environ.get("HF_TOKEN") or None)
        snapshot = folder / "snapshots" / repository.commit
        fetch_folder(repository, WEIGHT_FILES + TOKENIZER_FILES, WEIGHT_REQUIRED, snapshot)
        (folder / "refs").mkdir(exist_ok=True)
        # last: the reference names only complete downloads
        write_atomic(folder / "refs" / revision, repository.commit)
    return snapshot
