"""A mixture as a Hugging Face dataset, and as a dataloader of torchtitan."""

import json
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader

from megatron.data.indexed_writer import IndexedWriter
from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.document_chunks import DocumentChunks
from megatron.mixture.serve.client import PADDING, Chunk, MixtureDataset, pack_windows
from megatron.mixture.serve.hugging_face import hugging_face
from megatron.mixture.source import MixtureSamples
from megatron.mixture.spec import prepare_mixture
from megatron.mixture.titan import TitanLoader

SIZE = 64


def open_dataset(mixture: Path, group: int = 0, n_groups: int = 1) -> MixtureDataset:
    return MixtureDataset(partial(DocumentChunks, mixture, chunk_size=SIZE), group, n_groups)


def list_texts(mixture: Path, n_chunks: int, group: int = 0, n_groups: int = 1) -> list[tuple[int, str]]:
    chunks = islice(open_dataset(mixture, group, n_groups), n_chunks)
    return [(chunk.number, text) for chunk in chunks for text in chunk.documents]


def list_rows(rows: object) -> list[tuple[int, str]]:
    return [(row["chunk"], row["text"]) for row in rows]


def test_a_hugging_face_dataset_has_the_documents_of_the_chunks(mixture) -> None:
    rows = hugging_face(open_dataset(mixture))
    assert isinstance(rows, torch.utils.data.IterableDataset)
    assert list_rows(rows.take(3 * SIZE)) == list_texts(mixture, 3)
    first = next(iter(rows))
    kind = ("C", "Go", "Python")[int(first["text"].removeprefix("document ")) % 3]
    assert first["domain"] == kind
    longer = rows.map(lambda row: {"n": len(row["text"])}).filter(lambda row: row["domain"] == "Go")
    assert all(row["n"] == len(row["text"]) for row in longer.take(20))
    halves = [list_rows(hugging_face(open_dataset(mixture, group, 2)).take(2 * SIZE)) for group in (0, 1)]
    assert sorted(halves[0] + halves[1]) == sorted(list_texts(mixture, 4))
    loader = DataLoader(rows.take(2 * SIZE), batch_size=16)
    assert [text for batch in loader for text in batch["text"]] == [
        text for _, text in list_texts(mixture, 2)
    ]


@pytest.mark.slow
def test_loader_workers_do_not_change_the_order_of_hugging_face_rows(mixture) -> None:
    rows = hugging_face(open_dataset(mixture)).take(SIZE + 10)
    loader = DataLoader(rows, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    assert list_rows(loader) == list_texts(mixture, 2)[: SIZE + 10]


@pytest.mark.parametrize("n", [5, SIZE - 1, SIZE, SIZE + 1])
def test_a_hugging_face_state_resumes_at_its_row(mixture, n) -> None:
    rows = hugging_face(open_dataset(mixture)).map(lambda row: row)
    assert list_rows(islice(rows, n)) == list_texts(mixture, 3)[:n]
    state = json.loads(json.dumps(rows.state_dict()))
    again = hugging_face(open_dataset(mixture)).map(lambda row: row)
    again.load_state_dict(state)
    assert list_rows(islice(again, SIZE)) == list_texts(mixture, 3)[n : n + SIZE]


def test_a_hugging_face_state_resumes_on_another_number_of_groups_at_the_end_of_a_chunk(mixture) -> None:
    rows = hugging_face(open_dataset(mixture, 1, 2))
    list(islice(rows, SIZE))
    again = hugging_face(open_dataset(mixture))
    again.load_state_dict(rows.state_dict())
    assert list_rows(islice(again, SIZE)) == list_texts(mixture, 3)[2 * SIZE :]
    rows = hugging_face(open_dataset(mixture, 1, 2))
    list(islice(rows, SIZE + 1))
    again.load_state_dict(rows.state_dict())
    with pytest.raises(ValueError, match="saved inside a chunk by 2 groups, got 1 groups"):
        next(iter(again))


def test_windows_of_a_chunk_hold_every_token_once_as_a_target(mixture) -> None:
    chunk = Chunk(0, "x", [1, 0, 1], ["abc", "", "defghijk"])

    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    windows, domains = pack_windows(chunk, seq_len=4, eod=0, encode=encode)
    stream = [*encode("abc"), 0, 0, *encode("defghijk"), 0]  # 14: 13 targets
    assert windows.shape == (4, 5)
    assert windows[:, :-1].ravel().tolist() == [*stream, 0, 0]
    assert windows[:, 1:].ravel().tolist() == [*stream[1:], 0, 0, 0]
    assert domains.ravel().tolist() == [1, 1, 1, 0] + [1] * 9 + [PADDING] * 3
    ids, of = pack_windows(Chunk(0, "x", [3, 2], [[5, 6, 7], [8, 9]]), seq_len=2, eod=4)
    assert ids.tolist() == [[5, 6, 7], [7, 8, 9]]
    assert of.tolist() == [[3, 3], [2, 2]]
    assert pack_windows(Chunk(0, "x", [], []), 4, 0)[0].shape == (0, 5)


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Return a mixture of two .bin/.idx datasets, one for each domain."""
    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        with IndexedWriter(tmp_path / name, np.dtype(np.uint16), {}) as writer:
            for _ in range(60):
                writer.add_document(rng.integers(0, 1000, int(rng.integers(20, 90))))
    with Catalog(tmp_path / "c.duckdb", n_threads=1) as catalog:
        for name in ("one", "two"):
            catalog.register(name, [str(tmp_path / name)], (), quiet=True)
    path = tmp_path / "pairs.yaml"
    path.write_text(
        "catalog: c.duckdb\nby: [corpus]\nweights: {one: 3, two: 1}\n"
        "adaptive: {rule: loss, every_steps: 2, delay_steps: 3}\n"
    )
    prepare_mixture(path)
    return path


def read_global_batches(loaders: list[TitanLoader], n: int, learn: bool = True) -> list[torch.Tensor]:
    """Return the batches of steps of all ranks, whose losses are reported."""
    batches = []
    readers = [iter(loader) for loader in loaders]
    for _ in range(n):
        step = loaders[0].next_sample // loaders[0].samples.batch_size
        parts = [next(reader) for reader in readers]
        for (inputs, labels), loader in zip(parts, loaders, strict=True):
            assert set(inputs) == {"input", "positions"}
            assert inputs["input"].shape == labels.shape == (loader.batch_size, 16)
            assert inputs["positions"].shape == inputs["input"].shape
            assert torch.equal(inputs["input"][:, 1:], labels[:, :-1])
            if learn and step % 2 == 0:
                loader.samples.observe(step, np.array([1.0 + step, 2.0]) * 10, np.array([10.0, 10.0]))
        batches.append(torch.cat([torch.cat([i["input"], labels[:, -1:]], 1) for i, labels in parts]))
    return batches


def make_loaders(prepared: Path, n_ranks: int) -> list[TitanLoader]:
    return [TitanLoader(prepared, 16, 8 // n_ranks, rank, n_ranks, seed=3) for rank in range(n_ranks)]


def test_torchtitan_batches_are_the_samples_of_the_mixture_on_any_number_of_ranks(prepared) -> None:
    alone = read_global_batches(make_loaders(prepared, 1), 12)
    samples = MixtureSamples(prepared, 16, 8, seed=3)
    assert np.array_equal(alone[0].numpy(), samples.take(np.arange(8)))
    for n_ranks in (2, 4):
        for whole, parts in zip(alone, read_global_batches(make_loaders(prepared, n_ranks), 12), strict=True):
            assert torch.equal(whole, parts)
    accumulating = TitanLoader(prepared, 16, 2, 0, 2, global_batch_size=8, seed=3)
    (first, _), (second, _) = islice(accumulating, 2)
    assert torch.equal(torch.cat([first["input"], second["input"]]), alone[0][[0, 1, 4, 5], :-1])


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (2, 1)])
def test_a_dcp_checkpoint_resumes_on_another_data_parallel_size(prepared, tmp_path, before, after) -> None:
    whole = read_global_batches(make_loaders(prepared, 1), 12)
    first = make_loaders(prepared, before)
    assert all(isinstance(loader, Stateful) for loader in first)
    read_global_batches(first, 7)
    assert len({loader.state_dict()["mixture"] for loader in first}) == 1
    dcp.save({"dataloader": first[0]}, checkpoint_id=tmp_path / "saved", no_dist=True)
    again = make_loaders(prepared, after)
    for loader in again:
        dcp.load({"dataloader": loader}, checkpoint_id=tmp_path / "saved", no_dist=True)
    rest = read_global_batches(again, 5)
    assert all(torch.equal(a, b) for a, b in zip(whole[7:], rest, strict=True))
    assert again[0].samples.weights_at(11) != again[0].samples.weights_at(7)  # follow the losses


def test_positions_count_from_the_start_of_each_document_or_of_the_window(tmp_path) -> None:
    lengths = [5, 1, 40, 16, 3, 0, 7, 30, 2, 25]
    with IndexedWriter(tmp_path / "one", np.dtype(np.uint16), {}) as writer:
        for document, n in enumerate(lengths):  # token = document and position
            writer.add_document(np.arange(n) + 100 * document)
    with Catalog(tmp_path / "c.duckdb", n_threads=1) as catalog:
        catalog.register("one", [str(tmp_path / "one")], (), quiet=True)
    (tmp_path / "m.yaml").write_text("catalog: c.duckdb\nshuffle: false\n")
    prepare_mixture(tmp_path / "m.yaml")
    inputs, _ = next(iter(TitanLoader(tmp_path / "m.yaml", 16, 8, 0, 1)))
    stream = [(document, place) for document, n in enumerate(lengths) for place in range(n)]
    for window in range(8):
        expected_tokens = stream[window * 16 : window * 16 + 16]
        expected = [
            place - expected_tokens[0][1] if document == expected_tokens[0][0] else place
            for document, place in expected_tokens
        ]
        assert inputs["positions"][window].tolist() == expected
        assert inputs["input"][window].tolist() == [
            100 * document + place for document, place in expected_tokens
        ]


def test_the_torchtitan_loader_ends_with_the_mixture_and_refuses_other_sizes(prepared) -> None:
    text = prepared.read_text()
    prepared.write_text(text[: text.index("adaptive")] + "dry: stop\n")
    prepare_mixture(prepared)
    batches = [*make_loaders(prepared, 1)[0]]
    assert all(len(labels) == 8 for _, labels in batches)
    n = len(batches)
    windows = MixtureSamples(prepared, 16, 8, seed=3).streams[0].n_windows
    assert n == windows // 6  # six of the eight windows of a step are from this domain
    loader = make_loaders(prepared, 1)[0]
    loader.load_state_dict({})
    assert loader.next_sample == 0
    state = loader.state_dict()
    for other, sentence in (
        (partial(TitanLoader, prepared, 16, 4, 0, 1), "batch_size: got 4, expected the saved 8"),
        (partial(TitanLoader, prepared, 32, 8, 0, 1), "seq_len: got 32, expected the saved 16"),
    ):
        with pytest.raises(ValueError, match=sentence):
            other().load_state_dict(state)
    with pytest.raises(ValueError, match="got 8, expected a multiple of 3 x 2"):
        TitanLoader(prepared, 16, 3, 0, 2, global_batch_size=8)
    with pytest.raises(ValueError, match="dp_rank: got 2 of 2"):
        TitanLoader(prepared, 16, 3, 2, 2)
