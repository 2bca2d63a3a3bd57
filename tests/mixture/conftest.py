"""Small corpora with properties, and a catalog of them."""

import gzip
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.mixture.catalog import Catalog
from megatron.mixture.properties import read_properties
from megatron.mixture.registration import RegistrationResult

LANGUAGES = ("C", "Go", "Python")
PROPERTIES = ("meta.language AS language category", "meta.stars AS stars integer")


def write_lines(path: Path, n: int, first: int = 0) -> None:
    """Write documents first, first + 1, ...: languages in rotation, and as many stars as their number."""
    with path.open("w") as file:
        for i in range(first, first + n):
            meta = {"language": LANGUAGES[i % 3], "stars": i}
            file.write(json.dumps({"text": f"document {i}", "meta": meta}) + "\n")


def write_files(folder: Path, n_files: int, n_documents: int) -> list[Path]:
    """Write files 0.jsonl, 1.jsonl, ... of consecutive documents; return their paths."""
    paths = [folder / f"{i}.jsonl" for i in range(n_files)]
    for i, path in enumerate(paths):
        write_lines(path, n_documents, first=n_documents * i)
    return paths


def write_tar(path: Path, samples: list[tuple[str, dict[str, bytes]]]) -> None:
    with tarfile.open(path, "w") as archive:
        for key, members in samples:
            for extension, content in members.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


def register(
    catalog: Path | str, inputs: Sequence[Path | str], properties: Sequence[str] = PROPERTIES, **options: Any
) -> RegistrationResult:
    """Register inputs as the corpus `code` of a catalog."""
    with Catalog(catalog, n_threads=1) as opened:
        words = [str(path) for path in inputs]
        return opened.register("code", words, read_properties(properties), quiet=True, **options)


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    """Return a catalog with the corpus `code`: two files of 30 and 20 documents."""
    write_lines(tmp_path / "one.jsonl", 30)
    write_lines(tmp_path / "two.jsonl", 20, first=30)
    register(tmp_path / "catalog", [tmp_path / "one.jsonl", tmp_path / "two.jsonl"])
    return tmp_path / "catalog"


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """Return a mixture of 3,000 documents in a plain and a compressed file; Python : Go : C = 3 : 2 : 1."""
    write_lines(tmp_path / "a.jsonl", 1500)
    write_lines(tmp_path / "b.jsonl", 1500, first=1500)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "b.jsonl").read_bytes()))
    register(tmp_path / "catalog", [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"])
    path = tmp_path / "code.yaml"
    path.write_text("catalog: catalog\nby: [language]\nweights: {Python: 3, Go: 2, C: 1}\ncount: documents\n")
    return path


Start = Callable[..., tuple[subprocess.Popen[str], str]]


@pytest.fixture
def start(root: Path) -> Iterator[Start]:
    """Return a function that starts a server of a folder, and returns its process and location."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: object) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, str(root / "tools" / "mixtures.py"), "serve", *map(str, words)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on "), line
        return process, f"grpc+tcp://{line.split()[-1]}"

    yield begin
    for process in started:
        process.kill()
        process.wait(timeout=240)
