"""Text that is available offline: Python's standard library and the sources of installed packages."""

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from itertools import chain
from pathlib import Path

# Packages of requirements.txt that every training
# run and every fit imports, so every machine
# for studies has them. With the standard library
# they have 50 MB within the limits below, twice
# what the longest study on two cores reads. Larger
# packages are mostly generated code (plotly)
# or near copies (transformers).
PACKAGES = ("torch", "numpy", "scipy")
# Longer files are mostly tables and generated
# code; a few of them would make the mean
# loss of held-out text depend on the draw.
# Shorter files are empty __init__.py or a licence line.
MIN_BYTES, MAX_BYTES = 256, 65_536
TEST_FOLDERS = {"test", "tests", "idle_test"}  # some distributions of Python omit these


def read_local_text() -> list[str]:
    """Return the .py files of Python's standard library and of PACKAGES, without copies.

    The order follows bytes 8 to 31 of their sha256: pseudorandom,
    equal on all machines with the same versions, and independent
    of the first 8 bytes, which decide whether a document is held out.
    """
    texts: dict[bytes, str] = {}
    for path in chain(_iter_standard_library(), *map(_iter_package_files, PACKAGES)):
        if (text := _read_source_file(path)) is not None:
            texts[hashlib.sha256(text.encode()).digest()] = text
    return [texts[digest] for digest in sorted(texts, key=lambda digest: digest[8:])]


def describe_local_text() -> str:
    """Describe the sources by their versions: 'Python 3.11.7's library, torch 2.13.0, numpy 2.4.1'."""
    names = [f"{name} {metadata.version(name)}" for name in PACKAGES]
    return ", ".join([f"Python {platform.python_version()}'s library", *names])


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
    for file in metadata.files(name) or ():
        # the list may name scripts outside the
        # package by absolute paths or by ../../../bin
        if file.suffix == ".py" and not file.is_absolute() and ".." not in file.parts:
            yield Path(str(file.locate()))
