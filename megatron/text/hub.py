"""Downloads from the Hugging Face hub by `huggingface_hub`: shards of text, tokenizers and weights.

A shard is stored as it is, complete or absent. Weights are safetensors only:
loading a pickle executes code in it.
"""

import fnmatch
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.io import read_json, write_json
from megatron.tokenizer.hub_cache import find_cached_snapshot, find_hub_error

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile

# repository and files of a text
TEXT_DATASETS = {
    "c4": ("allenai/c4", "en/c4-{split}.*.json.gz"),
    "slimpajama": ("DKYoon/SlimPajama-6B", "data/{split}-*.parquet"),
}
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
TOKENIZER_REQUIRED = ("tokenizer.json", "tokenizer.model", "vocab.json")
WEIGHT_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json")
WEIGHT_REQUIRED = ("*.safetensors",)
# owner/name@revision; owner and revision are optional. No part begins with a dot, so none is "..".
HUB_NAME = re.compile(r"((?:\w[\w.-]*/)?\w[\w.-]*)(?:@(\w[\w.-]*))?", re.ASCII)


@contextmanager
def explain_hub_errors(repo: str) -> Iterator[None]:
    """Convert the library's errors to ConnectionError or FileNotFoundError with one line."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # its HTTP library's, of any name

    try:
        yield
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


class HubRepository:
    """A repository at the commit that `revision` refers to at construction."""

    def __init__(self, repo: str, kind: str, revision: str = "main", token: str | None = None) -> None:
        """`kind`: dataset or model. Raises ConnectionError or FileNotFoundError."""
        self.repo, self.kind = repo, kind
        # the library would retry for 20 s
        if (error := find_hub_error()) is not None:
            raise ConnectionError(f"{repo}: {error}. Download it where there is a network.")
        self.api = _open_api(token)
        # Resolve the branch once. All later requests name the commit, so that two calls never mix versions.
        with explain_hub_errors(repo):
            info = self.api.model_info if kind == "model" else self.api.dataset_info
            self.commit = str(info(repo, revision=revision, expand=["sha"]).sha)

    def list_files(self, pattern: str) -> "list[RepoFile]":
        """List matching files, sorted; `*` does not match a slash. Raises FileNotFoundError for none."""
        from huggingface_hub import RepoFile

        folder = pattern.rpartition("/")[0] or None
        with explain_hub_errors(self.repo):
            entries = list(
                self.api.list_repo_tree(self.repo, folder, revision=self.commit, repo_type=self.kind)
            )
        files = [entry for entry in entries if isinstance(entry, RepoFile)]
        files = [file for file in files if fnmatch.fnmatchcase(file.path, pattern)]
        if not files:
            raise FileNotFoundError(
                f"{self.repo}: no file {pattern}. See the list of files on the repository's page."
            )
        return sorted(files, key=lambda file: file.path)

    def fetch(self, path: str, folder: Path) -> Path:
        """Download to <folder>/<path>, unless it is there at this commit. Raises ConnectionError."""
        with explain_hub_errors(self.repo):
            return Path(
                self.api.hf_hub_download(
                    self.repo, path, repo_type=self.kind, revision=self.commit, local_dir=folder
                )
            )


def _open_api(token: str | None) -> "HfApi":
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)


def fetch_folder(
    repository: HubRepository, patterns: Sequence[str], required: Sequence[str], folder: Path
) -> list[Path]:
    """Download the top-level files that match a pattern. Raises ValueError if none matches `required`."""
    paths = [file.path for file in repository.list_files("*")]
    if not any(fnmatch.filter(paths, pattern) for pattern in required):
        raise ValueError(f"{repository.repo}: expected {' or '.join(required)}, got {', '.join(paths)}")
    chosen = {path for pattern in patterns for path in fnmatch.filter(paths, pattern)}
    return [repository.fetch(path, folder) for path in sorted(chosen)]


def fetch_text(
    repository: HubRepository, pattern: str, folder: Path, split: str, n_shards: int | None
) -> Iterator[tuple[Path, bool]]:
    """Download shards as <folder>/<split>-<number> with their suffix; yield (file, whether it is new).

    Raises ValueError if the folder has the same split from another request.
    """
    # sorted by name: the first n shards are the same in every call at the same commit
    shards = repository.list_files(pattern)[:n_shards]
    about = folder / f"{split}.about"
    # style: earlier versions also wrote other formats
    request = {
        "repository": repository.repo, "commit": repository.commit, "files": pattern, "style": "packed"
    }  # fmt: skip
    earlier = (read_json(about) or {"asked": request})["asked"]
    if changed := [key for key in request if earlier.get(key) != request[key]]:
        raise ValueError(
            f"{folder}: got {split} with other {', '.join(changed)}. Choose another folder, or delete it."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(about, {"asked": request})
    for i, shard in enumerate(shards):
        # c4-train.00001-of-01024.json.gz, i = 1: after the last "00001" is "-of-01024.json.gz", suffix
        # ".json.gz"
        suffix = Path(shard.path).name.rpartition(f"{i:05d}")[2].partition(".")[2]
        target = folder / f"{split}-{i:05d}.{suffix}"
        is_new = not target.is_file()
        if is_new:
            scratch = folder / f".{target.name}.fetched"
            repository.fetch(shard.path, scratch).rename(target)
            shutil.rmtree(scratch)  # after the shard has its final name
        yield target, is_new


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
        # ranks of a job start together: the library locks each file
        with explain_hub_errors(repo):
            patterns = [*WEIGHT_FILES, *TOKENIZER_FILES]
            return Path(_open_api(None).snapshot_download(repo, revision=revision, allow_patterns=patterns))
    snapshot = find_cached_snapshot(repo, revision)
    if snapshot is None:
        raise FileNotFoundError(
            f"{name}: no file or folder of this name, and no model in the hub's cache. Download it where "
            f"there is a network ({error})."
        )
    return snapshot
