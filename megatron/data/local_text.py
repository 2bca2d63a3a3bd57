"""Text of a machine without a network: Python's standard library and the sources of installed packages."""

import base64
import csv
import hashlib
import json
import os
import platform
import stat
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

PYTHON = "python"
# The packages of requirements.txt that every training run and every fit import: where a study can run, these
# are installed. With the standard library they hold 50 MB within the limits below, twice what the longest
# study on two cores reads. Larger packages are mostly generated (plotly) or near copies (transformers).
PACKAGES = ("torch", "numpy", "scipy")
LOCAL = (PYTHON, *PACKAGES)
# Longer files are mostly tables and generated code, and a few of them would make the mean loss of a held-out
# text depend on which were drawn; shorter ones are empty __init__.py or a licence line.
MIN_BYTES, MAX_BYTES = 256, 65_536
REASONS = ("too_large", "too_small", "not_utf8", "unreadable", "unverified", "copies")
TEST_FOLDERS = {"test", "tests", "idle_test"}  # some distributions of Python leave these out


@dataclass(frozen=True)
class LocalText:
    """Documents as (source, text) in a fixed order, and what was left out by source."""

    documents: list[tuple[str, str]]
    skipped: dict[str, dict[str, int]]  # source -> one of REASONS -> files
    missing: dict[str, str]  # source -> why it gives no text


@dataclass
class _Reader:
    """Reads files once, counts those that are left out, and keeps the first of equal texts."""

    entries: list[tuple[bytes, str, str]] = field(default_factory=list)
    digests: set[bytes] = field(default_factory=set)

    def read(self, source: str, path: Path, recorded: str | None, skipped: dict[str, int]) -> None:
        raw, reason = _read_file(path, recorded)
        if reason:
            skipped[reason] += 1
            return
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            skipped["not_utf8"] += 1
            return
        digest = hashlib.sha256(raw).digest()
        if digest in self.digests:
            skipped["copies"] += 1
            return
        self.digests.add(digest)
        self.entries.append((digest[8:], source, text))  # the first 8 bytes decide which side of the split


def read_local_text(sources: Sequence[str] = LOCAL) -> LocalText:
    """Read the .py files of `sources`: "python" is the standard library, others are installed packages.

    The order is that of bytes 8 to 31 of each text's sha256: random for a reader, the same on all machines
    with the same versions, and independent of the first 8 bytes, which decide whether a document is held
    out. Equal texts count for the first source. A file of a package is read only if it has the sha256 that
    the installer recorded. What cannot be read is counted, and a source without any text is in `missing`.
    """
    reader = _Reader()
    skipped: dict[str, dict[str, int]] = {}
    missing: dict[str, str] = {}
    for source in sources:
        counts = dict.fromkeys(REASONS, 0)
        n_before = len(reader.entries)
        try:
            for path, recorded in _standard_library() if source == PYTHON else _package_files(source):
                reader.read(source, path, recorded, counts)
        except LookupError as error:
            missing[source] = str(error.args[0])
            continue
        skipped[source] = counts
        if len(reader.entries) == n_before:
            n_files = sum(counts.values())
            missing[source] = (
                f"none of its {n_files:,} Python files can be used" if n_files else "no Python file"
            )
    documents = [(source, text) for _, source, text in sorted(reader.entries)]
    return LocalText(documents, skipped, missing)


def installed_version(source: str) -> str | None:
    """The version of a package or of Python, None where there is none."""
    if source == PYTHON:
        return platform.python_version()
    try:
        return metadata.version(source)
    except (metadata.PackageNotFoundError, KeyError):  # KeyError: metadata without a version
        return None


def describe_sources(sources: Sequence[str]) -> str:
    """'the standard library of Python 3.11.7 and the sources of torch 2.13.0 and numpy 2.4.6'."""
    parts = [f"the standard library of Python {installed_version(PYTHON)}"] if PYTHON in sources else []
    names = [f"{name} {installed_version(name)}" for name in sources if name != PYTHON]
    if names:
        last = names[-1]
        parts.append("the sources of " + (f"{', '.join(names[:-1])} and {last}" if names[1:] else last))
    return " and ".join(parts)


def _read_file(path: Path, recorded: str | None) -> tuple[bytes, str]:
    """The bytes and "", or b"" and why the file is left out. `recorded`: its sha256 as a RECORD has it."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a folder named x.py, a pipe that would block
            return b"", "unreadable"
        if status.st_size > MAX_BYTES:
            return b"", "too_large"
        raw = path.read_bytes()
    except (OSError, ValueError):  # ValueError: a name with a NUL byte
        return b"", "unreadable"
    if len(raw.strip()) < MIN_BYTES:
        return b"", "too_small"
    if recorded is not None:
        digest = base64.urlsafe_b64encode(hashlib.sha256(raw).digest()).rstrip(b"=").decode()
        if digest != recorded:
            return b"", "unverified"
    return raw, ""


def _standard_library() -> Iterator[tuple[Path, None]]:
    """Modules that every Python of this version has: no tests, no build settings, no site-packages."""
    root = sysconfig.get_path("stdlib")
    if not os.path.isdir(root):
        raise LookupError(f"{root} is not a folder of sources")
    for place, folders, names in os.walk(root):  # links to folders are not followed, so no loop is entered
        if place == root:
            folders[:] = [name for name in folders if name in sys.stdlib_module_names]
            names = [name for name in names if name.removesuffix(".py") in sys.stdlib_module_names]
        folders[:] = [name for name in folders if name not in TEST_FOLDERS]
        yield from ((Path(place, name), None) for name in names if name.endswith(".py"))


def _package_files(name: str) -> Iterator[tuple[Path, str]]:
    """The .py files of an installed wheel with their recorded sha256, "" where none is recorded.

    LookupError for a package that is not installed, is installed in place, or has no list of files.
    """
    try:
        package = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise LookupError("not installed") from None
    if installed_version(name) is None:
        raise LookupError("its metadata have no version")
    try:
        origin = json.loads(package.read_text("direct_url.json") or "{}")
        files = package.files
    except (OSError, ValueError, csv.Error) as error:
        raise LookupError(f"its metadata cannot be read: {error}") from error
    directory = origin.get("dir_info") if isinstance(origin, dict) else None
    if isinstance(directory, dict) and directory.get("editable"):
        raise LookupError("an editable install, whose files are not those of a release")
    if files is None:
        raise LookupError("installed without a list of its files (RECORD)")
    for file in files:
        if file.suffix == ".py" and not file.is_absolute() and ".." not in file.parts:
            is_sha256 = file.hash is not None and file.hash.mode == "sha256"
            yield Path(str(package.locate_file(file))), file.hash.value if is_sha256 else ""
