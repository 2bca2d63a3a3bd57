"""Names of input files: which files a command reads, and the suffixes of their formats."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from megatron.io import read_json
from megatron.remote_files import find_remote
from megatron.remote_requests import is_url, redact

PLAIN_SUFFIXES = (".jsonl", ".json")
COMPRESSED_SUFFIXES = tuple(
    plain + packed for packed in (".gz", ".zst", ".bz2", ".xz") for plain in PLAIN_SUFFIXES
)
COLUMN_SUFFIXES = (".parquet", ".arrow")
INPUT_SUFFIXES = (*PLAIN_SUFFIXES, *COMPRESSED_SUFFIXES, *COLUMN_SUFFIXES)
STDIN = Path("-")
REJECTS_SUFFIX = ".rejects.jsonl"
UNSUPPORTED_SUFFIXES = (
    ".lz4",
    ".lzma",
    ".br",
    ".7z",
    ".zip",
    ".tar",
    ".tar.gz",
    ".tgz",
    ".tar.zst",
    ".tar.bz2",
    ".tar.xz",
)


def find_inputs(words: Sequence[str], suffixes: Sequence[str] = INPUT_SUFFIXES) -> list[Path]:
    """Resolve words to files: a file, a folder (all files below, sorted), a glob pattern (sorted), or `-`.

    A word may be a URL of a file, or in an object store of a folder or a pattern: its paths are RemotePaths.

    Folders and patterns skip outputs of preprocessing; folders also skip hidden names. A folder saved by
    `datasets` gives the files listed in its state.json. Raises FileNotFoundError for a word without files,
    and ValueError for a file of another format, a file named twice or a folder of several splits.
    """
    inputs: list[Path] = []
    for word in words:
        _check_input_name(word, suffixes)
        path = Path(word)
        if is_url(word):
            paths = list[Path](find_remote(word, suffixes))
        elif path == STDIN or path.is_file():
            paths = [path]
        elif path.is_dir():
            paths = _list_files(path, suffixes)
        else:
            matched = [Path(p) for p in sorted(glob.glob(word, recursive=True))]
            groups = [
                _list_files(p, suffixes) if p.is_dir() else [p]
                for p in matched
                if not _is_preprocess_output(p)
            ]
            paths = list(dict.fromkeys(p for files in groups for p in files))  # ** matches both
        if not paths:
            raise FileNotFoundError(
                f"{redact(word)}: no such file, and no folder or pattern of {', '.join(suffixes)}."
            )
        inputs += paths
    seen: set[Path] = set()
    for path in inputs:
        resolved = path if path == STDIN else path.resolve()
        if resolved in seen:
            raise ValueError(f"{path}: got this file twice, expected each input once")
        seen.add(resolved)
        if path != STDIN and not path.name.endswith(tuple(suffixes)):
            raise ValueError(f"{path}: expected one of {', '.join(suffixes)}, or - for standard input")
    return inputs


def add_root(words: Sequence[str], root: Path) -> list[str]:
    """Return the words, with those that name nothing here but something in `root` below it.

    Megatron-DeepSpeed's script always reads its input from --root.
    """
    return [
        str(root / word) if not _names_files(word) and _names_files(str(root / word)) else word
        for word in words
    ]


def _names_files(word: str) -> bool:
    return word == str(STDIN) or is_url(word) or Path(word).exists() or bool(glob.glob(word, recursive=True))


def _check_input_name(word: str, suffixes: Sequence[str]) -> None:
    """Raise ValueError for an unsupported compression, whether the file exists or not."""
    if word.endswith(UNSUPPORTED_SUFFIXES) and not word.endswith(tuple(suffixes)) and not Path(word).is_dir():
        raise ValueError(
            f"{word}: got {Path(word).suffix}, expected one of {', '.join(suffixes)}. Unpack it first."
        )


def describe_inputs(words: Sequence[str]) -> str:
    """Format input names for a message."""
    return ", ".join("standard input" if word == str(STDIN) else redact(word) for word in words)


def _list_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """List the input files of a folder, sorted by path."""
    files: list[Path] = []
    for directory, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [
            name for name in folders if not name.startswith(".") and not _is_link_loop(directory, name)
        ]
        if "dataset_dict.json" in names:
            dataset_dict = read_json(Path(directory, "dataset_dict.json")) or {}
            splits = [str(Path(directory, split)) for split in dataset_dict.get("splits", [])]
            raise ValueError(
                f"{directory}: got a folder with several splits of datasets, expected one. Give a split: "
                f"{' '.join(splits)}"
            )
        state = read_json(Path(directory, "state.json")) if "dataset_info.json" in names else None
        if state is not None and "_data_files" in state:
            # other files in the folder may be caches that datasets made from the same documents
            files += [Path(directory, file["filename"]) for file in state["_data_files"]]
            folders.clear()
            continue
        candidates = [
            Path(directory, name) for name in names if name.endswith(tuple(suffixes)) and name[0] != "."
        ]
        files += [path for path in candidates if not _is_preprocess_output(path)]
    return sorted(files)


def _is_link_loop(directory: str, name: str) -> bool:
    """Return whether a folder is a link to one of its own parents, whose files are listed already."""
    path = os.path.join(directory, name)
    if not os.path.islink(path):
        return False
    target = os.path.realpath(path)
    return os.path.commonpath([target, os.path.realpath(directory)]) == target


def _is_preprocess_output(path: Path) -> bool:
    """Return whether a file is the sidecar of a dataset, or the rejects file of the job that wrote one."""
    if path.name.endswith(REJECTS_SUFFIX):  # <prefix>.rejects.jsonl beside <prefix>_<key>_document.idx
        job = glob.escape(path.name.removesuffix(REJECTS_SUFFIX))
        return any(path.parent.glob(f"{job}_*_document.idx"))
    return path.suffix == ".json" and path.with_suffix(".idx").is_file()
