"""Text that is available offline: Python's standard library and the sources of installed packages."""

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PYTHON = "python"
# Packages of requirements.txt that every training run and every fit imports, so every machine
# for studies has them. With the standard library they have 50 MB within the limits below, twice
# what the longest study on two cores reads. Larger packages are mostly generated code (plotly)
# or near copies (transformers).
PACKAGES = ("torch", "numpy", "scipy")
LOCAL_SOURCES = (PYTHON, *PACKAGES)
# Longer files are mostly tables and generated code; a few of them would make the mean loss of
# held-out text depend on the draw. Shorter files are empty __init__.py or a licence line.
MIN_BYTES, MAX_BYTES = 256, 65_536
TEST_FOLDERS = {"test", "tests", "idle_test"}  # some distributions of Python omit these


@dataclass(frozen=True)
class LocalText:
    """Documents as (source, text) in a fixed order, and the number of skipped files by source."""

    documents: Iterable[tuple[str, str]]
    skipped: dict[str, int]
    missing: dict[str, str]  # source -> why it has no text


def read_local_text(sources: Sequence[str] = LOCAL_SOURCES) -> LocalText:
    """Read the .py files of `sources`: "python" is the standard library, others are packages.

    Documents are sorted by bytes 8 to 31 of their sha256: a pseudorandom order, equal on all
    machines with the same versions, and independent of the first 8 bytes, which decide whether a
    document is held out. Equal texts count for the first source. A source without any text is in
    `missing`.
    """
    entries: dict[bytes, tuple[str, str]] = {}  # digest -> (source, text)
    skipped: dict[str, int] = {}
    missing: dict[str, str] = {}
    for source in sources:
        n_before, n_files = len(entries), 0
        for path in _iter_standard_library() if source == PYTHON else _iter_package_files(source):
            n_files += 1
            if (text := _read_source_file(path)) is not None:
                entries.setdefault(hashlib.sha256(text.encode()).digest(), (source, text))
        n_documents = len(entries) - n_before
        skipped[source] = n_files - n_documents
        if not n_documents:
            missing[source] = "no usable Python file" if installed_version(source) else "not installed"
    # bytes 0 to 7 select the side of the split
    documents = [entries[digest] for digest in sorted(entries, key=lambda digest: digest[8:])]
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
    names = [f"{name} {installed_version(name)}" for name in sources if name != PYTHON]
    parts = []
    if PYTHON in sources:
        parts.append(f"the standard library of Python {installed_version(PYTHON)}")
    if names:
        *first, last = names
        listed = f"{', '.join(first)} and {last}" if first else last
        parts.append(f"the sources of {listed}")
    return " and ".join(parts)


def _read_source_file(path: Path) -> str | None:
    """Return the text of a file within the limits, None for any other."""
    try:
        # is_file: a folder may have the name x.py, and a pipe would block
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        raw = path.read_bytes()
        # stripped: a file of line ends is as empty as a file without bytes
        return raw.decode() if len(raw.strip()) >= MIN_BYTES else None
    except (OSError, ValueError):  # ValueError: not UTF-8, or a name with a NUL byte
        return None


def _iter_standard_library() -> Iterator[Path]:
    """Yield the modules that every Python of this version has.

    Not among them: tests, build settings and site-packages.
    """
    root = Path(sysconfig.get_path("stdlib"))
    for entry in root.iterdir() if root.is_dir() else ():
        if entry.name.removesuffix(".py") in sys.stdlib_module_names:
            for path in entry.rglob("*.py") if entry.is_dir() else [entry]:
                if path.suffix == ".py" and not TEST_FOLDERS & set(path.relative_to(root).parts[:-1]):
                    yield path


def _iter_package_files(name: str) -> Iterator[Path]:
    """Yield the .py files of an installed package, by the list of files that its installer wrote."""
    try:
        files = metadata.files(name) or ()
    except metadata.PackageNotFoundError:
        return
    for file in files:
        # the list may name scripts outside the package by absolute paths or by ../../../bin
        if file.suffix == ".py" and not file.is_absolute() and ".." not in file.parts:
            yield Path(str(file.locate()))
