"""Text that is available offline: Python's standard library and the sources of installed packages."""

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
# Packages of requirements.txt that every training run and every fit imports, so every machine for studies has
# them. With the standard library they have 50 MB within the limits below, twice what the longest study on two
# cores reads. Larger packages are mostly generated code (plotly) or near copies (transformers).
PACKAGES = ("torch", "numpy", "scipy")
LOCAL_SOURCES = (PYTHON, *PACKAGES)
# Longer files are mostly tables and generated code; a few of them would make the mean loss of held-out text
# depend on the draw. Shorter files are empty __init__.py or a licence line.
MIN_BYTES, MAX_BYTES = 256, 65_536
REASONS = ("too_large", "too_small", "not_utf8", "unreadable", "unverified", "copies")
TEST_FOLDERS = {"test", "tests", "idle_test"}  # some distributions of Python omit these


@dataclass(frozen=True)
class LocalText:
    """Documents as (source, text) in a fixed order, and skipped files by source."""

    documents: list[tuple[str, str]]
    skipped: dict[str, dict[str, int]]  # source -> one of REASONS -> files
    missing: dict[str, str]  # source -> why it has no text


@dataclass
class _SourceReader:
    """Collect the texts of files, count skipped files, and keep the first of equal texts."""

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
        self.entries.append((digest[8:], source, text))  # sort key: bytes 0 to 7 select the side of the split


def read_local_text(sources: Sequence[str] = LOCAL_SOURCES) -> LocalText:
    """Read the .py files of `sources`: "python" is the standard library, others are installed packages.

    Documents are sorted by bytes 8 to 31 of their sha256: a pseudorandom order, equal on all machines with
    the same versions, and independent of the first 8 bytes, which decide whether a document is held out.
    Equal texts count for the first source. A file of a package is read only if it has the sha256 that the
    installer recorded. Unreadable files are counted, and a source without any text is in `missing`.
    """
    reader = _SourceReader()
    skipped: dict[str, dict[str, int]] = {}
    missing: dict[str, str] = {}
    for source in sources:
        counts = dict.fromkeys(REASONS, 0)
        n_before = len(reader.entries)
        try:
            for path, recorded in (
                _iter_standard_library() if source == PYTHON else _iter_package_files(source)
            ):
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
    # files were read in the order of the file system; this sort makes the order the same on all machines
    documents = [(source, text) for _, source, text in sorted(reader.entries)]
    return LocalText(documents, skipped, missing)


def installed_version(source: str) -> str | None:
    """Return the version of a package or of Python, None if it is not installed."""
    if source == PYTHON:
        return platform.python_version()
    try:
        return metadata.version(source)
    except (metadata.PackageNotFoundError, KeyError):  # KeyError: metadata without a version
        return None


def describe_sources(sources: Sequence[str]) -> str:
    """Describe sources: 'the standard library of Python 3.11.7 and the sources of torch 2.13.0'."""
    parts = [f"the standard library of Python {installed_version(PYTHON)}"] if PYTHON in sources else []
    names = [f"{name} {installed_version(name)}" for name in sources if name != PYTHON]
    if names:
        last = names[-1]
        parts.append("the sources of " + (f"{', '.join(names[:-1])} and {last}" if names[1:] else last))
    return " and ".join(parts)


def _read_file(path: Path, recorded: str | None) -> tuple[bytes, str]:
    """Return the bytes and "", or b"" and a reason to skip the file. `recorded`: sha256 as in RECORD."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a folder named x.py, a pipe that would block
            return b"", "unreadable"
        if status.st_size > MAX_BYTES:
            return b"", "too_large"
        raw = path.read_bytes()
    except (OSError, ValueError):  # ValueError: a name with a NUL byte
        return b"", "unreadable"
    # stripped: a file of line ends is as empty as a file without bytes
    if len(raw.strip()) < MIN_BYTES:
        return b"", "too_small"
    if recorded is not None:
        # RECORD has URL-safe base64 without the padding "=" (PEP 376, PEP 427)
        digest = base64.urlsafe_b64encode(hashlib.sha256(raw).digest()).rstrip(b"=").decode()
        if digest != recorded:
            return b"", "unverified"
    return raw, ""


def _iter_standard_library() -> Iterator[tuple[Path, None]]:
    """Yield the modules that every Python of this version has: no tests, build settings or site-packages."""
    root = sysconfig.get_path("stdlib")
    if not os.path.isdir(root):
        raise LookupError(f"{root} is not a folder of sources")
    for place, folders, names in os.walk(root):  # os.walk does not follow links, so there are no loops
        if place == root:
            # in place: os.walk descends into what remains in this list. The root also has site-packages and
            # build folders.
            folders[:] = [name for name in folders if name in sys.stdlib_module_names]
            names = [name for name in names if name.removesuffix(".py") in sys.stdlib_module_names]
        folders[:] = [name for name in folders if name not in TEST_FOLDERS]
        yield from ((Path(place, name), None) for name in names if name.endswith(".py"))


def _iter_package_files(name: str) -> Iterator[tuple[Path, str]]:
    """Yield the .py files of an installed wheel with their recorded sha256, "" if none is recorded.

    Raises LookupError for a package that is not installed, is an editable install, or has no list of files.
    """
    try:
        package = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise LookupError("not installed") from None
    if installed_version(name) is None:
        raise LookupError("its metadata has no version")
    try:
        origin = json.loads(package.read_text("direct_url.json") or "{}")
        files = package.files
    except (OSError, ValueError, csv.Error) as error:
        raise LookupError(f"its metadata cannot be read: {error}") from error
    directory = origin.get("dir_info") if isinstance(origin, dict) else None
    if isinstance(directory, dict) and directory.get("editable"):
        raise LookupError("an editable install, whose files are not from a release")
    if files is None:
        raise LookupError("installed without a list of its files (RECORD)")
    for file in files:
        # RECORD may name scripts outside the package by absolute paths or by ../../../bin
        if file.suffix == ".py" and not file.is_absolute() and ".." not in file.parts:
            sha256 = file.hash.value if file.hash is not None and file.hash.mode == "sha256" else ""
            yield Path(str(package.locate_file(file))), sha256
