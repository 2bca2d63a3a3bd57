"""Files of a dataset by its name, and its sidecar: the only module that tells kinds of datasets apart.

A dataset is <uri>.bin/.idx with the sidecar <uri>.json; or a list of such
datasets as parts, <uri>.parts.json with the index <uri>.parts.idx
(megatron/data/parts.py); or the three files at a URL, which are read from a
local cache (megatron/data/remote.py). Nothing here requires numpy.
"""

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.io import is_url, read_json

PARTS_SUFFIX = ".parts.json"
PARTS_INDEX_SUFFIX = ".parts.idx"
# header of Megatron's format MMIDIDX, version 1
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
# "<": little endian without padding, 34 bytes: magic,
# version, dtype code, sequences, documents + 1
HEADER = struct.Struct("<9sQBQQ")
# codes of Megatron's indexed_dataset; 6 and 7 are float types, which are not tokens
DTYPE_NAMES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
HINT = "Delete the dataset and run tools/preprocess_data_many_cores.py again"
HOW = "expected the prefix of a .bin/.idx dataset, as tools/preprocess_data_many_cores.py writes it"


# section of a sidecar: type of its fields: names. null is a missing value.
FIELDS: dict[str, dict[type, str]] = {
    "": {
        int: "documents tokens empty_documents longest_document rejected_lines rejected_files",
        bool: "append_eod special_text",
        str: "dtype json_key job",
        dict: "tokenizer sha256 part subset_of",
        list: "sources merged_from parts",
    },
    "parts": {int: "documents tokens mtime_ns", str: "path sidecar_sha256", dict: "sha256"},
    "tokenizer": {int: "n_tokens eod_id", str: "name sha256 eod_token eod_from"},
    # block_bytes: size of the blocks of the hashes (megatron/data/block_hash.py)
    "sha256": {int: "block_bytes", str: "bin idx parts"},
}
# type: what an error calls it, and its test
KINDS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    # JSON does not separate counts from other
    # numbers: 1.0, true, -1 and 10^30 are rejected
    int: ("a whole number", lambda x: type(x) is int and 0 <= x < 1 << 63),
    bool: ("true or false", lambda x: isinstance(x, bool)),
    str: ("a string", lambda x: isinstance(x, str)),
    dict: ("an object", lambda x: isinstance(x, dict)),
    list: ("a list of objects", lambda x: isinstance(x, list) and all(isinstance(i, dict) for i in x)),
}


@dataclass(frozen=True)
class DatasetFiles:
    """Files of a dataset on this machine; they may be missing."""

    uri: str
    index: Path
    sidecar: Path
    has_parts: bool = False  # the sidecar lists them
    remote: Any = None  # the .bin of a URL, a remote.RemoteFile

    @property
    def data(self) -> Path:
        """The .bin of a dataset without parts; for a URL, the first access downloads it."""
        if self.remote is None:
            return Path(f"{self.uri}.bin")
        from megatron.data.remote import cached_copy

        return cached_copy(self.remote)

    @property
    def location(self) -> str:
        """A name for comparisons: the URL, or the absolute path of the .bin without links."""
        return self.uri if self.remote is not None else str(Path(f"{self.uri}.bin").resolve())

    def exists(self) -> bool:
        """Return whether the dataset has its index and its tokens."""
        has_data = self.has_parts or self.remote is not None or Path(f"{self.uri}.bin").is_file()
        return has_data and self.index.is_file()

    def count_bytes(self) -> int:
        """Return the bytes of all tokens, from the size of the .bin or from the list of parts."""
        if self.has_parts:
            return count_tokens(self.uri) * count_token_bytes(read_header(self.index)[0])
        return int(self.data.stat().st_size if self.remote is None else self.remote.size)

    def version(self) -> Any:
        """Return a JSON value that changes with the files."""
        if self.remote is not None:
            return [self.remote.url, self.remote.size, self.remote.version]
        path = self.sidecar if self.has_parts else self.data
        return [[path.name, path.stat().st_size, path.stat().st_mtime_ns]]


def locate_dataset(uri: str | Path) -> DatasetFiles:
    """Return the files of a dataset. Of a URL the index and the sidecar are downloaded.

    A list of parts precedes a .bin and an .idx of the same
    prefix, which no program here writes beside it.
    Raises RemoteError for a URL without a dataset.
    """
    prefix = str(uri)
    if is_url(prefix):
        from megatron.data.remote import locate_remote  # a local path needs no fsspec

        index, sidecar, data = locate_remote(prefix)
        return DatasetFiles(prefix, index, sidecar, remote=data)
    parts = Path(f"{prefix}{PARTS_SUFFIX}")
    if parts.is_file():
        return DatasetFiles(prefix, Path(f"{prefix}{PARTS_INDEX_SUFFIX}"), parts, has_parts=True)
    return DatasetFiles(prefix, Path(f"{prefix}.idx"), Path(f"{prefix}.json"))


def strip_suffix(name: str | Path) -> str:
    """Return the prefix for the name of a file of a dataset; other names stay as they are.

    A name with such a suffix is always a file:
    give `c4.bin.bin` for the prefix `c4.bin`.
    """
    prefix, suffixes = str(name), (PARTS_SUFFIX, PARTS_INDEX_SUFFIX, ".bin", ".idx")
    return next((prefix.removesuffix(suffix) for suffix in suffixes if prefix.endswith(suffix)), prefix)


def find_prefix(name: str, folder: Path) -> str | None:
    """Return the prefix of an existing dataset, also of one in `folder`; else None."""
    names = [name] if is_url(name) else [name, os.path.join(folder, name)]
    return next((prefix for prefix in names if locate_dataset(prefix).exists()), None)


def load_sidecar(uri: str | Path) -> dict[str, Any] | None:
    """Return the sidecar of a dataset as `read_sidecar` does; None if it has none."""
    return read_sidecar(uri) if locate_dataset(uri).sidecar.is_file() else None


def read_sidecar(uri: str | Path) -> dict[str, Any]:
    """Read the sidecar of a dataset and check the types of its known fields.

    Raises FileNotFoundError if it is missing, ValueError for invalid content.
    """
    path = locate_dataset(uri).sidecar
    content = read_json(path)
    if content is None:
        raise FileNotFoundError(f"{uri}.json: no such file, {HOW}")
    _check_fields(path, "", "", content)
    for section in ("tokenizer", "sha256"):
        _check_fields(path, section, f"{section}.", content.get(section) or {})
    for number, part in enumerate(content.get("parts") or []):
        _check_fields(path, "parts", f"parts[{number}].", part)
        _check_fields(path, "sha256", f"parts[{number}].sha256.", part.get("sha256") or {})
    return content


def _check_fields(path: Path, section: str, where: str, content: dict[str, Any]) -> None:
    for kind, names in FIELDS[section].items():
        expected, is_valid = KINDS[kind]
        for name in names.split():
            # unknown and missing keys are accepted:
            # other versions have fewer or more
            if (value := content.get(name)) is not None and not is_valid(value):
                raise ValueError(
                    f"{path}: {where}{name}: got {str(value)[:40]!r}, expected {expected}. "
                    "Preprocess the corpus again, or delete this file if another program wrote it."
                )


def count_token_bytes(dtype: str) -> int:
    """Return the bytes of a token: "uint16" has 16 bits, 2 bytes."""
    return int(dtype.removeprefix("u").removeprefix("int")) // 8


def read_header(index: Path) -> tuple[str, int, int]:
    """Read (dtype, sequences, documents) of an index, and check its size against them."""
    size = index.stat().st_size
    with index.open("rb") as file:
        head = file.read(HEADER.size).ljust(HEADER.size, b"\0")  # a shorter file is refused below
    magic, version, code, n, m = HEADER.unpack(head)
    if magic != MAGIC or version != VERSION or code not in DTYPE_NAMES:
        raise ValueError(
            f"{index}: got {magic!r}, version {version} with dtype code {code}, expected {MAGIC!r}, version "
            f"{VERSION} with integer tokens. {HINT}."
        )
    expected = HEADER.size + 12 * n + 8 * m  # int32 length and int64 position per sequence, int64 boundaries
    if size < expected or m < 1:
        raise ValueError(f"{index}: got {size:,} bytes, expected {expected:,} as in its header. {HINT}.")
    return DTYPE_NAMES[code], n, m - 1


def count_tokens(uri: str | Path) -> int:
    """Return the number of tokens of a dataset, from its sidecar, which suffices for a plan, or its files.

    Raises FileNotFoundError for a missing file, ValueError for an index of
    another format, and for a list of parts without the number.
    """
    files, sidecar = locate_dataset(uri), load_sidecar(uri) or {}
    if sidecar.get("tokens") is not None:
        return int(sidecar["tokens"])
    if files.has_parts:
        raise ValueError(f"{files.sidecar}: tokens is missing. Write it with merge_datasets.py --parts.")
    if not files.index.is_file():
        raise FileNotFoundError(f"{uri}.idx: no such file, {HOW}")
    token_bytes = count_token_bytes(read_header(files.index)[0])
    return files.count_bytes() // token_bytes


@dataclass(frozen=True)
class EodUse:
    """End of the documents of a dataset: the token `eod_id`, or None for no token."""

    eod_id: int | None

    def __str__(self) -> str:
        return "no end-of-document token" if self.eod_id is None else f"end-of-document id {self.eod_id}"


def parse_eod_use(sidecar: dict[str, Any] | None) -> EodUse | None:
    """Return how the documents of a dataset end; None if its sidecar does not record it."""
    sidecar = sidecar or {}
    appended, tokenizer = sidecar.get("append_eod"), sidecar.get("tokenizer") or {}
    # false and missing differ: false records that documents have no end token
    if appended is False:
        return EodUse(None)
    eod_id = tokenizer.get("eod_id")
    return EodUse(eod_id) if appended and eod_id is not None else None
