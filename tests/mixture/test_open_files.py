"""Many files and large columns: neither open files nor memory grow with the corpus."""

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter
from megatron.mixture.catalog import catalog as catalog_module
from megatron.mixture.catalog import parquet, records
from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.properties import read_properties
from megatron.mixture.document_chunks import DocumentChunks
from megatron.mixture.lru_cache import LruCache
from megatron.mixture.source import DomainStream
from megatron.mixture.spans import SpanFiles
from megatron.mixture.spec import prepare_mixture

N_FILES = 1100
READ_ALL = """
import json, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from megatron.mixture.document_chunks import DocumentChunks
from megatron.mixture.source import MixtureSamples
folder = Path(sys.argv[1])
with DocumentChunks(folder / "m.yaml", chunk_size=100) as source:
    documents = source.read(0, 50).column(1).to_pylist()
told = {"documents": documents}
if len(sys.argv) > 2:
    samples = MixtureSamples(folder / "m.yaml", 4, 10, 0)
    told["tokens"] = samples.take(__import__("numpy").arange(samples.samples_per_epoch)).tolist()
print(json.dumps(told))
"""


def read_all(folder: Path, *words: str) -> dict[str, list]:
    """Return all documents, read by a process that may open 256 files."""
    words = (sys.executable, "-c", READ_ALL, str(folder), *words)
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_a_thousand_small_files_are_registered_in_few_statements_and_read_with_few_open(
    tmp_path, monkeypatch
) -> None:
    folder = tmp_path / "lines"
    folder.mkdir()
    for i in range(N_FILES):
        end = "" if i % 3 else "\n"
        (folder / f"{i:05}.jsonl").write_text(json.dumps({"text": f"text {i}"}) + "\n\n" * (i % 2) + end)
    n_statements = 0

    def counted(*words: object) -> object:
        nonlocal n_statements
        n_statements += 1
        return rows(*words)

    rows = catalog_module.fetch_rows
    monkeypatch.setattr(catalog_module, "fetch_rows", counted)
    monkeypatch.setattr(records, "fetch_rows", counted)
    with Catalog(tmp_path / "c", n_threads=1) as catalog:
        done = catalog.register("l", [str(folder)], (), quiet=True)
    assert (done.n_files, done.n_documents, done.n_broken) == (N_FILES, N_FILES, 0)
    assert n_statements < 50  # one file at a time takes 14 statements per file
    (tmp_path / "m.yaml").write_text("catalog: c\ncount: documents\ndry: stop\n")
    assert sorted(read_all(tmp_path)["documents"]) == sorted(f"text {i}" for i in range(N_FILES))


def test_a_broken_line_of_one_of_many_small_files_is_located_and_the_others_stay(tmp_path) -> None:
    for i in range(5):
        lines = [{"text": f"{i} {k}", "n": k if (i, k) != (3, 1) else "x"} for k in range(4 if i != 2 else 0)]
        (tmp_path / f"{i}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with Catalog(tmp_path / "c", n_threads=1) as catalog:
        properties = read_properties(["n AS n integer"])
        done = catalog.register("l", [str(tmp_path / "*.jsonl")], properties, quiet=True)
        assert (done.n_files, done.n_documents, done.n_broken) == (5, 15, 1)
        assert catalog.list_broken("l") == [(str(tmp_path / "3.jsonl"), 2, "'n' is no integer")]
    (tmp_path / "m.yaml").write_text("catalog: c\ncount: documents\ndry: stop\nshuffle: false\n")
    with DocumentChunks(tmp_path / "m.yaml") as source:
        texts = source.read(0, 1).column("text").to_pylist()
    assert texts == [f"{i} {k}" for i in (0, 1, 3, 4) for k in range(4) if (i, k) != (3, 1)]


def test_hundreds_of_indexed_datasets_are_read_and_trained_on_with_few_open(tmp_path) -> None:
    folder, whole = tmp_path / "pairs", []
    folder.mkdir()
    for i in range(300):
        with IndexedWriter(folder / f"{i:03}", np.dtype(np.uint16), {}) as writer:
            writer.add_document(np.arange(5) + 5 * i)
        whole += list(range(5 * i, 5 * i + 5))
    with Catalog(tmp_path / "c", n_threads=1) as catalog:
        catalog.register("p", [str(folder)], (), quiet=True)
    (tmp_path / "m.yaml").write_text("catalog: c\ndry: stop\nshuffle: false\ncount: documents\n")
    prepare_mixture(tmp_path / "m.yaml")
    output = read_all(tmp_path, "train")
    assert [token for document in output["documents"] for token in document] == whole
    assert [token for window in output["tokens"] for token in window[:4]] == whole[
        : 4 * len(output["tokens"])
    ]
    assert len(output["tokens"]) == (len(whole) - 1) // 4


def test_open_files_are_bounded_and_a_truncated_file_is_an_error(tmp_path) -> None:
    paths = [tmp_path / str(i) for i in range(20)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]) * 100)
    files, before = SpanFiles(4), len(os.listdir("/proc/self/fd"))
    for path in paths:
        files.add(path)

    def read(path, begin: int, size: int) -> bytes:
        return bytes(files.read(path, np.array([begin]), np.array([size])))

    for _ in range(3):
        for i, path in enumerate(paths):
            assert read(path, 10 + i, 5) == bytes([i]) * 5
            assert len(os.listdir("/proc/self/fd")) <= before + 4
    os.truncate(paths[3], 50)
    with pytest.raises(ValueError, match=r"/3: got another size or modification time"):
        read(paths[3], 10, 5)
    for begin, size in ((-1, 2), (0, 1 << 60), (1 << 60, 1), (0, -1), (99, 2)):
        with pytest.raises(ValueError, match="/0: got a span outside of its 100 bytes"):
            read(paths[0], begin, size)
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_cache_evicts_the_least_recently_used_values() -> None:
    dropped: list[str] = []
    recent = LruCache(10, dropped.append)
    for key, weight in (("a", 4), ("b", 4), ("a", 4), ("c", 4)):
        assert recent.get(key, lambda key=key, weight=weight: (key, weight)) == key
    assert dropped == ["b"]
    assert recent.get("d", lambda: ("d", 50)) == "d"
    assert dropped == ["b", "a", "c"]
    recent.clear()
    assert dropped == ["b", "a", "c", "d"]


def write_parquet_mixture(folder: Path, texts: pyarrow.Array, rows: int, key: str = "text") -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"n": range(len(texts)), "text": texts}), folder / "t.parquet",
                                row_group_size=rows)  # fmt: skip
    with Catalog(folder / "c", n_threads=1) as catalog:
        catalog.register("l", [str(folder / "t.parquet")], (), text_key=key, quiet=True)
    (folder / "m.yaml").write_text("catalog: c\ncount: documents\ndry: stop\n")
    return folder / "m.yaml"


@pytest.mark.parametrize("largest", [1, 3000, 1 << 28])
@pytest.mark.parametrize(
    "kind",
    [pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())],
    ids=str,
)
def test_parquet_texts_are_the_same_for_any_type_and_size_of_row_groups(
    tmp_path, monkeypatch, largest, kind
) -> None:
    monkeypatch.setattr(parquet, "MAX_CACHED_GROUP_BYTES", largest)
    monkeypatch.setattr(parquet, "BATCH_ROWS", 7)
    texts = [None if i % 10 == 3 else f"text {i} " * (i % 9) for i in range(300)]
    mixture = write_parquet_mixture(
        tmp_path, pyarrow.array(texts, pyarrow.string()).cast(kind), 37, key="Text"
    )
    with DocumentChunks(mixture, chunk_size=50) as source:
        result = source.read(0, 10).column("text").to_pylist()
    assert sorted(result) == sorted(text for text in texts if text is not None)


def test_parquet_row_groups_are_cached_up_to_a_number_of_bytes(tmp_path, monkeypatch) -> None:
    texts = pyarrow.array([os.urandom(500).hex() for _ in range(4000)])  # 4 MB in 40 row groups
    mixture = write_parquet_mixture(tmp_path, texts, 100)
    monkeypatch.setattr("megatron.mixture.document_chunks.GROUP_CACHE_BYTES", 400_000)
    with DocumentChunks(mixture, chunk_size=1) as source:
        groups = source._shared.groups
        for chunk in range(200):
            source.read(chunk, 1)
            assert groups._weight <= 400_000
        assert 2 <= len(groups._values) <= 4


def test_a_damaged_row_group_is_an_error_that_names_the_file(tmp_path) -> None:
    mixture = write_parquet_mixture(tmp_path, pyarrow.array([os.urandom(50).hex() for _ in range(400)]), 100)
    path = tmp_path / "t.parquet"
    source, status = DocumentChunks(mixture, chunk_size=400), path.stat()
    content = bytearray(path.read_bytes())
    content[4 : len(content) // 2] = b"\xff" * (len(content) // 2 - 4)
    path.write_bytes(content)
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    with pytest.raises(ValueError, match=r"t\.parquet: row group 0 cannot be read"):
        source.read(0, 1)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"t\.parquet: has changed since it was registered"):
        source.read(0, 1)


class Pairs:
    """Dataset of documents of 300 tokens, without a file."""

    def document_spans(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return documents * 300, np.full(len(documents), 300, np.int32)


def test_a_domain_takes_sixteen_bytes_per_document_for_any_number_of_epochs() -> None:
    n = 300_000
    tracemalloc.start()
    try:
        stream = DomainStream("x", [Pairs()], np.array([[0, 0, n]]), 2048, 0, True)
        built = tracemalloc.get_traced_memory()[0]
        for epoch in range(5):
            stream._load_block_ends(epoch)
            assert (tracemalloc.get_traced_memory()[0] - built) / n < 0.5
        assert built / n < 16.5
        assert (tracemalloc.get_traced_memory()[1]) / n < 80
    finally:
        tracemalloc.stop()


def test_windows_of_a_domain_are_its_concatenated_documents_in_the_order_of_the_epoch(tmp_path) -> None:
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(0, 40, 500), [3000], np.zeros(200, int), rng.integers(0, 9, 300)])
    with IndexedWriter(tmp_path / "p", np.dtype(np.int32), {}) as writer:
        for n in lengths:
            writer.add_document(rng.integers(0, 10**6, n))
    pair, n = IndexedTokens(tmp_path / "p"), len(lengths)
    stream = DomainStream("x", [pair], np.array([[0, 0, n]]), 31, 5, True)
    for epoch in range(3):
        order = stream.compute_document_order(epoch, 0, n)
        assert sorted(order.tolist()) == list(range(n))
        whole = np.concatenate([pair.get_document(i) for i in order.tolist()])
        rows = np.empty((stream.n_windows, 32), dtype=np.int64)
        numbers = rng.permutation(stream.n_windows)
        stream.copy_windows(numbers + epoch * stream.n_windows, [rows[i] for i in numbers])
        for window, row in enumerate(rows):
            assert row.tolist() == whole[window * 31 : window * 31 + 32].tolist()
