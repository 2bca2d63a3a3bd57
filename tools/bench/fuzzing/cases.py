"""Fuzz cases of files and words. Of several valid files one is mutated, all are read, and it is restored."""

import io
import json
import random
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzzing.harness import Files
from fuzzing.mutate import Mutator

Check = Callable[[bytes], bool]


@dataclass
class FileCase:
    """Valid files below `folder`.

    mutators   mutator of each file, by its path in the folder
    read_all   reads all files and raises the reader's errors
    seal       runs after each mutation, for example to update checksums
    """

    folder: Path
    mutators: Mapping[str, Mutator]
    read_all: Callable[[], Any]
    seal: Callable[[], None] | None = None
    n_inputs: int = 1
    valid: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.valid = {name: (self.folder / name).read_bytes() for name in self.mutators}
        self.read({})  # the valid files must be accepted, otherwise every mutation would be refused

    def make(self, rng: random.Random) -> Files:
        """Return one mutated file."""
        name = rng.choice(list(self.mutators))
        # One file only: if all were mutated, the first refusal would hide the readers of the others. Always
        # from the valid content, so that an input depends on its random numbers alone.
        return {name: self.mutators[name](rng, self.valid[name])}

    def passes(self, files: Files) -> int:
        """Return 1 if the mutated file is still of its container format."""
        return int(all(is_intact(name, content) for name, content in files.items()))

    def read(self, files: Files) -> Mapping[str, int] | None:
        """Write the mutated file, read all files, and restore the valid file."""
        for name, content in files.items():
            (self.folder / name).write_bytes(content)
        try:
            if self.seal is not None:
                self.seal()
            return self.read_all()
        # also after an error: the next input must find valid files
        finally:
            for name in files:
                (self.folder / name).write_bytes(self.valid[name])


@dataclass
class WordCase:
    """Words of a command line or a text; `read_word` reads one."""

    words: tuple[str, ...]
    mutator: Mutator
    read_word: Callable[[str], Any]
    n_inputs: int = 1

    def make(self, rng: random.Random) -> Files:
        """Return a mutated word; one in twenty is unchanged."""
        word = rng.choice(self.words).encode("utf-8", "surrogatepass")
        # valid words show that the target still accepts something
        return {"word": word if rng.random() < 0.05 else self.mutator(rng, word)}

    def passes(self, files: Files) -> int:
        """Return 1: a word has no container format."""
        return 1

    def read(self, files: Files) -> Mapping[str, int] | None:
        """Read the word as from a command line, where bytes that are not UTF-8 become surrogates."""
        return self.read_word(files["word"].decode("utf-8", "surrogateescape"))


def is_intact(name: str, content: bytes) -> bool:
    """Return whether content is of the container format of the name's suffix."""
    try:
        # the suffix of ".metadata" is "metadata"; other suffixes are text, which must be valid UTF-8
        return bool(_CHECKS.get(name.rpartition(".")[2], _is_text)(content))
    except Exception:
        return False


def _is_text(content: bytes) -> bool:
    return content.decode() is not None


def _is_json(content: bytes) -> bool:
    return isinstance(json.loads(content), dict)


def _is_json_lines(content: bytes) -> bool:
    return all(isinstance(json.loads(line), dict) for line in content.split(b"\n") if line.strip())


def _is_yaml(content: bytes) -> bool:
    import yaml

    return isinstance(yaml.load(content, getattr(yaml, "CSafeLoader", yaml.SafeLoader)), dict)


def _is_safetensors(content: bytes) -> bool:
    size = int.from_bytes(content[:8], "little")
    return size <= len(content) - 8 and _is_json(content[8 : 8 + size])


def _is_gzip(content: bytes) -> bool:
    import gzip

    return gzip.decompress(content) is not None


def _is_zst(content: bytes) -> bool:
    # the magic number of a Zstandard frame, 0xFD2FB528 in little endian
    return content[:4] == b"\x28\xb5\x2f\xfd"


def _is_bz2(content: bytes) -> bool:
    import bz2

    return bz2.decompress(content) is not None


def _is_xz(content: bytes) -> bool:
    import lzma

    return lzma.decompress(content) is not None


def _is_parquet(content: bytes) -> bool:
    return content[:4] == content[-4:] == b"PAR1"


def _is_tar(content: bytes) -> bool:
    import tarfile

    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return archive.next() is not None


def _is_zip(content: bytes) -> bool:
    return zipfile.is_zipfile(io.BytesIO(content))


_CHECKS: dict[str, Check] = {
    "json": _is_json,
    "jsonl": _is_json_lines,
    "yaml": _is_yaml,
    # 9 bytes of magic, then version 1 as a little-endian int64
    "idx": lambda content: content[:17] == b"MMIDIDX\0\0\1\0\0\0\0\0\0\0",
    "safetensors": _is_safetensors,
    "gz": _is_gzip,
    "zst": _is_zst,
    "bz2": _is_bz2,
    "xz": _is_xz,
    "parquet": _is_parquet,
    "tar": _is_tar,
    "pt": _is_zip,
    # a pickle begins with PROTO (80) and ends with STOP (".")
    "metadata": lambda content: content[:1] == b"\x80" and content[-1:] == b".",
    # the header of llama2.c
    "bin": lambda content: len(content) >= 28,
}
