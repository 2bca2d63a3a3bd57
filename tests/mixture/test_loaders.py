"""A mixture behind the contracts of others: Hugging Face datasets, torchtitan's dataloader."""

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
from megatron.mixture.catalog import Catalog
from megatron.mixture.client import FILLING, Chunk, MixtureDataset, windows_of
from megatron.mixture.documents import DocumentChunks
from megatron.mixture.hugging_face import hugging_face
from megatron.mixture.source import MixtureSamples
from megatron.mixture.spec import prepare
from megatron.mixture.titan import TitanLoader

SIZE = 64


def opened(mixture: Path, group: int = 0, n_groups: int = 1) -> MixtureDataset:
    return MixtureDataset(partial(DocumentChunks, mixture, chunk_size=SIZE), group, n_groups)


def plain(mixture: Path, n_chunks: int, group: int = 0, n_groups: int = 1) -> list[tuple[int, str]]:
    chunks = islice(opened(mixture, group, n_groups), n_chunks)
    return [(chunk.number, text) for chunk in chunks for text in chunk.documents]


def rows_of(rows: object) -> list[tuple[int, str]]:
    return [(row["chunk"], row["text"]) for row in rows]


def test_an_iterable_of_hugging_face_has_the_documents_of_the_chunks(mixture) -> None:
    rows = hugging_face(opened(mixture))
    assert isinstance(rows, torch.utils.data.IterableDataset)
    assert rows_of(rows.take(3 * SIZE)) == plain(mixture, 3)
    first = next(iter(rows))
    kind = ("C", "Go", "Python")[int(first["text"].removeprefix("document ")) % 3]
    assert first["domain"] == kind
    longer = rows.map(lambda row: {"n": len(row["text"])}).filter(lambda row: row["domain"] == "Go")
    assert all(row["n"] == len(row["text"]) for row in longer.take(20))
    halves = [rows_of(hugging_face(opened(mixture, group, 2)).take(2 * SIZE)) for group in (0, 1)]
    assert sorted(halves[0] + halves[1]) == sorted(plain(mixture, 4))
    loader = DataLoader(rows.take(2 * SIZE), batch_size=16)
    assert [text for batch in loader for text in batch["text"]] == [text for _, text in plain(mixture, 2)]


@pytest.mark.slow
def test_workers_of_a_loader_do_not_change_the_order_of_hugging_faces_rows(mixture) -> None:
    rows = hugging_face(opened(mixture)).take(SIZE + 10)
    loader = DataLoader(rows, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    assert rows_of(loader) == plain(mixture, 2)[: SIZE + 10]


@pytest.mark.parametrize("n", [5, SIZE - 1, SIZE, SIZE + 1])
def test_hugging_faces_state_is_a_place_to_go_on_from(mixture, n) -> None:
    rows = hugging_face(opened(mixture)).map(lambda row: row)
    assert rows_of(islice(rows, n)) == plain(mixture, 3)[:n]
    state = json.loads(json.dumps(rows.state_dict()))
    again = hugging_face(opened(mixture)).map(lambda row: row)
    again.load_state_dict(state)
    assert rows_of(islice(again, SIZE)) == plain(mixture, 3)[n : n + SIZE]


def test_hugging_faces_state_goes_to_another_number_of_groups_at_the_end_of_a_chunk(mixture) -> None:
    rows = hugging_face(opened(mixture, 1, 2))
    list(islice(rows, SIZE))
    again = hugging_face(opened(mixture))
    again.load_state_dict(rows.state_dict())
    assert rows_of(islice(again, SIZE)) == plain(mixture, 3)[2 * SIZE :]
    rows = hugging_face(opened(mixture, 1, 2))
    list(islice(rows, SIZE + 1))
    again.load_state_dict(rows.state_dict())
    with pytest.raises(ValueError, match="saved inside a chunk by 2 groups, 1 go on"):
        next(iter(again))


def test_windows_of_a_chunk_hold_every_token_once_as_a_target(mixture) -> None:
    chunk = Chunk(0, "x", [1, 0, 1], ["abc", "", "defghijk"])

    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    windows, domains = windows_of(chunk, seq_len=4, eod=0, encode=encode)
    stream = [*encode("abc"), 0, 0, *encode("defghijk"), 0]  # 14: 13 targets
    assert windows.shape == (4, 5)
    assert windows[:, :-1].ravel().tolist() == [*stream, 0, 0]
    assert windows[:, 1:].ravel().tolist() == [*stream[1:], 0, 0, 0]
    assert domains.ravel().tolist() == [1, 1, 1, 0] + [1] * 9 + [FILLING] * 3
    ids, of = windows_of(Chunk(0, "x", [3, 2], [[5, 6, 7], [8, 9]]), seq_len=2, eod=4)
    assert ids.tolist() == [[5, 6, 7], [7, 8, 9]]
    assert of.tolist() == [[3, 3], [2, 2]]
    assert windows_of(Chunk(0, "x", [], []), 4, 0)[0].shape == (0, 5)


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Two pairs of documents of two domains."""
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
    prepare(path)
    return path


def global_batches(loaders: list[TitanLoader], n: int, learn: bool = True) -> list[torch.Tensor]:
    """Steps of all ranks together, told what they lost."""
    found = []
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
        found.append(torch.cat([torch.cat([i["input"], labels[:, -1:]], 1) for i, labels in parts]))
    return found


def on(prepared: Path, n_ranks: int) -> list[TitanLoader]:
    return [TitanLoader(prepared, 16, 8 // n_ranks, rank, n_ranks, seed=3) for rank in range(n_ranks)]


def test_torchtitans_batches_are_the_mixtures_on_any_number_of_ranks(prepared) -> None:
    alone = global_batches(on(prepared, 1), 12)
    samples = MixtureSamples(prepared, 16, 8, seed=3)
    assert np.array_equal(alone[0].numpy(), samples.take(np.arange(8)))
    for n_ranks in (2, 4):
        for whole, parts in zip(alone, global_batches(on(prepared, n_ranks), 12), strict=True):
            assert torch.equal(whole, parts)
    accumulating = TitanLoader(prepared, 16, 2, 0, 2, global_batch_size=8, seed=3)
    (first, _), (second, _) = islice(accumulating, 2)
    assert torch.equal(torch.cat([first["input"], second["input"]]), alone[0][[0, 1, 4, 5], :-1])


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (2, 1)])
def test_a_checkpoint_of_dcp_goes_on_with_another_data_parallel_size(
    prepared, tmp_path, before, after
) -> None:
    whole = global_batches(on(prepared, 1), 12)
    first = on(prepared, before)
    assert all(isinstance(loader, Stateful) for loader in first)
    global_batches(first, 7)
    assert len({loader.state_dict()["mixture"] for loader in first}) == 1
    dcp.save({"dataloader": first[0]}, checkpoint_id=tmp_path / "saved", no_dist=True)
    again = on(prepared, after)
    for loader in again:
        dcp.load({"dataloader": loader}, checkpoint_id=tmp_path / "saved", no_dist=True)
    rest = global_batches(again, 5)
    assert all(torch.equal(a, b) for a, b in zip(whole[7:], rest, strict=True))
    assert again[0].samples.weights_at(11) != again[0].samples.weights_at(7)  # they followed the losses


def test_positions_count_from_the_begin_of_each_document_or_of_the_window(tmp_path) -> None:
    lengths = [5, 1, 40, 16, 3, 0, 7, 30, 2, 25]
    with IndexedWriter(tmp_path / "one", np.dtype(np.uint16), {}) as writer:
        for document, n in enumerate(lengths):  # a token: its document and its place in it
            writer.add_document(np.arange(n) + 100 * document)
    with Catalog(tmp_path / "c.duckdb", n_threads=1) as catalog:
        catalog.register("one", [str(tmp_path / "one")], (), quiet=True)
    (tmp_path / "m.yaml").write_text("catalog: c.duckdb\nshuffle: false\n")
    prepare(tmp_path / "m.yaml")
    inputs, _ = next(iter(TitanLoader(tmp_path / "m.yaml", 16, 8, 0, 1)))
    stream = [(document, place) for document, n in enumerate(lengths) for place in range(n)]
    for window in range(8):
        own = stream[window * 16 : window * 16 + 16]
        expected = [place - own[0][1] if document == own[0][0] else place for document, place in own]
        assert inputs["positions"][window].tolist() == expected
        assert inputs["input"][window].tolist() == [100 * document + place for document, place in own]


def test_torchtitans_loader_ends_with_the_mixture_and_refuses_what_does_not_fit(prepared) -> None:
    text = prepared.read_text()
    prepared.write_text(text[: text.index("adaptive")] + "dry: stop\n")
    prepare(prepared)
    batches = [*on(prepared, 1)[0]]
    assert all(len(labels) == 8 for _, labels in batches)
    n = len(batches)
    windows = MixtureSamples(prepared, 16, 8, seed=3).streams[0].n_windows
    assert n == windows // 6  # of eight windows of a step six are of one
    loader = on(prepared, 1)[0]
    loader.load_state_dict({})
    assert loader.next_sample == 0
    state = loader.state_dict()
    for other, sentence in (
        (partial(TitanLoader, prepared, 16, 4, 0, 1), "batch_size is 4, was 8"),
        (partial(TitanLoader, prepared, 32, 8, 0, 1), "seq_len is 32, was 16"),
    ):
        with pytest.raises(ValueError, match=sentence):
            other().load_state_dict(state)
    with pytest.raises(ValueError, match="is no multiple of 3 x 2"):
        TitanLoader(prepared, 16, 3, 0, 2, global_batch_size=8)
    with pytest.raises(ValueError, match="dp_rank 2 of 2"):
        TitanLoader(prepared, 16, 3, 2, 2)
