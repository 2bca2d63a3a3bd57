"""Arrays in a file: computed once, mapped by every process, and the same as those in memory."""

import gc
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_writer import IndexedWriter
from megatron.mixture import shared_arrays
from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.document_chunks import DocumentChunks
from megatron.mixture.shared_arrays import open_shared_arrays
from megatron.mixture.source import DomainStream, MixtureSamples
from megatron.mixture.spec import prepare_mixture
from tests.mixture.conftest import write_lines
from tests.mixture.test_open_files import Pairs

LAYOUT = {"a": ("<i4", 5), "b": ("<i8", 300_000), "c": ("u1", 0)}


def fill(arrays: dict[str, np.ndarray]) -> None:
    arrays["a"][:], arrays["b"][:] = range(5), np.arange(300_000) ** 2


def refuse(_: dict[str, np.ndarray]) -> None:
    raise AssertionError("the file is not computed again")


@pytest.fixture
def always_shared(monkeypatch) -> None:
    monkeypatch.setattr(shared_arrays, "SHARED_BYTES", 1)


def test_the_first_process_computes_and_the_others_map(tmp_path) -> None:
    path = tmp_path / "m" / "a.bin"
    first, second = open_shared_arrays(path, LAYOUT, fill), open_shared_arrays(path, LAYOUT, refuse)
    for arrays in (first, second):
        assert arrays["a"].tolist() == [0, 1, 2, 3, 4]
        assert arrays["b"][-1] == 299_999**2
        assert len(arrays["c"]) == 0
        assert not arrays["b"].flags.writeable
    # a file of another size comes from another program
    path.write_bytes(b"x")
    assert open_shared_arrays(path, LAYOUT, fill)["b"][3] == 9
    assert [name.name for name in path.parent.iterdir() if not name.name.endswith(".lock")] == ["a.bin"]


def test_a_computation_that_fails_leaves_no_file(tmp_path) -> None:
    with pytest.raises(AssertionError):
        open_shared_arrays(tmp_path / "a.bin", LAYOUT, refuse)
    assert list(tmp_path.glob("*.bin*")) in ([], [tmp_path / "a.bin.lock"])


def test_a_folder_that_cannot_be_written_and_small_arrays_are_computed_in_memory(tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("")
    arrays = open_shared_arrays(tmp_path / "file" / "a.bin", LAYOUT, fill)
    assert arrays["b"][2] == 4
    assert "each process keeps the arrays in its memory" in caplog.text
    open_shared_arrays(tmp_path / "small.bin", {"a": ("<i4", 5)}, lambda arrays: None)
    assert not (tmp_path / "small.bin").exists()


def test_processes_that_open_at_once_compute_the_arrays_once(tmp_path) -> None:
    program = (
        "import sys, pathlib, numpy\nfrom megatron.mixture.shared_arrays import open_shared_arrays\n"
        "def fill(arrays):\n    arrays['b'][:] = 7\n    print('computed')\n"
        "arrays = open_shared_arrays(pathlib.Path(sys.argv[1]), {'b': ('<i8', 10**6)}, fill)\n"
        "assert arrays['b'].sum() == 7 * 10**6"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, tmp_path / "a.bin"], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert sorted(outputs) == ["", "", "computed\n"]


def test_documents_are_the_same_with_shared_locations_and_stale_ones_are_deleted(
    mixture, always_shared
) -> None:
    folder = mixture.with_suffix(".mixture")
    with DocumentChunks(mixture, chunk_size=100) as source:
        shared = source.read(0, 8).column("text").to_pylist()
    (file,) = folder.glob("documents-*.bin")
    shared_arrays.SHARED_BYTES = 1 << 40
    with DocumentChunks(mixture, chunk_size=100) as source:
        assert source.read(0, 8).column("text").to_pylist() == shared
    shared_arrays.SHARED_BYTES = 1
    write_lines(mixture.with_name("c.jsonl"), 90)
    with Catalog(mixture.with_name("catalog"), n_threads=1) as catalog:
        properties = catalog.get_corpus("code").properties
        catalog.register("code", [str(mixture.with_name("c.jsonl"))], properties, quiet=True)
    with DocumentChunks(mixture, chunk_size=100) as source:
        source.read(0, 8)
    (other,) = folder.glob("documents-*.bin")
    assert other != file


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    for name in ("one", "two"):
        with IndexedWriter(tmp_path / name, np.dtype(np.int32), {}) as writer:
            for n in rng.integers(0, 50, 400):
                writer.add_document(rng.integers(0, 1000, n))
    with Catalog(tmp_path / "c", n_threads=1) as catalog:
        for name in ("one", "two"):
            catalog.register(name, [str(tmp_path / name)], (), quiet=True)
    path = tmp_path / "m.yaml"
    path.write_text("catalog: c\nby: [corpus]\nweights: {one: 1, two: 3}\n")
    prepare_mixture(path)
    return path


def test_samples_are_the_same_with_shared_spans_and_orders(prepared, always_shared) -> None:
    shared = MixtureSamples(prepared, 32, 4, seed=3).take(np.arange(3000))
    folder = prepared.with_suffix(".mixture")
    assert len(list(folder.glob("spans-*.bin"))) == 1
    orders = sorted(path.name.rpartition("-")[2] for path in folder.glob("order-*.bin"))
    assert len(orders) == 4  # two epochs of two domains, and several that have passed are deleted
    again = MixtureSamples(prepared, 32, 4, seed=3)
    again.streams[0]._fill_block_ends = again.streams[1]._fill_block_ends = refuse
    assert np.array_equal(again.take(np.arange(2900, 3000)), shared[2900:])
    shared_arrays.SHARED_BYTES = 1 << 40
    assert np.array_equal(MixtureSamples(prepared, 32, 4, seed=3).take(np.arange(3000)), shared)


def test_a_stream_of_shared_arrays_keeps_a_quarter_byte_per_document(tmp_path) -> None:
    n = 400_000
    layout = {"file": ("u1", n), "begin": ("<i8", n), "length": ("<i4", n)}

    def fill_spans(arrays: dict[str, np.ndarray]) -> None:
        arrays["begin"][:], arrays["length"][:] = np.arange(n) * 300, 300

    arrays = open_shared_arrays(tmp_path / "a.bin", layout, fill_spans)
    gc.collect()
    tracemalloc.start()
    try:
        stream = DomainStream(
            "x", [Pairs()], np.empty((0, 3), np.int64), 2048, 0, True, None, arrays, 300 * n
        )
        assert tracemalloc.get_traced_memory()[0] / n < 0.05
        for epoch in range(4):
            stream._load_block_ends(epoch)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] / n < 0.5  # two epochs of 1/8 byte
    finally:
        tracemalloc.stop()
