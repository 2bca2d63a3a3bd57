"""Samples of chunks at the level of chunks, windows and tokens, compared with enumerations."""

from collections import Counter
from functools import partial
from itertools import islice

import numpy as np
import pytest
from torch.utils.data import DataLoader

from megatron.mixture.document_chunks import DocumentChunks
from megatron.mixture.serve.chunk_reader import ChunkReader, SampleStream, interleave_domains, iter_shares
from megatron.mixture.serve.client import Chunk, MixtureDataset

EOD = 0


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def encode_batch(texts: list[str]) -> list[list[int]]:
    return [encode(text) for text in texts]


def make_chunk(domains: list[int], lengths: list[int]) -> Chunk:
    """Return a chunk whose document i is `lengths[i]` times the id i + 1, followed by EOD."""
    documents = [[i + 1] * n + [EOD] for i, n in enumerate(lengths)]
    return Chunk(3, "identity", domains, documents)


@pytest.mark.parametrize("counts", [[1], [3, 2, 1], [1, 1, 1], [7, 100, 1], [13, 5, 5, 5, 1], [1, 999]])
def test_every_begin_has_the_shares_to_within_one(counts) -> None:
    counts, done = np.array(counts), np.zeros(len(counts), dtype=int)
    for turn, (slot, nth) in enumerate(islice(iter_shares(counts), 3 * int(counts.sum())), 1):
        assert nth == done[slot]
        done[slot] += 1
        exact = turn * counts / counts.sum()
        assert (done >= np.floor(exact)).all()
        assert (done <= np.ceil(exact)).all()


def test_a_window_has_the_shares_and_the_order_keeps_each_document_once() -> None:
    rng = np.random.default_rng(0)
    domains = np.repeat([4, 9, 2], [300, 150, 62])[rng.permutation(512)]
    order = interleave_domains(domains)
    assert sorted(order.tolist()) == list(range(512))
    for k in (4, 9, 2):
        assert (np.diff(order[domains[order] == k]) > 0).all()
        for begin in range(0, 512 - 128):
            n = int((domains[order[begin : begin + 128]] == k).sum())
            assert abs(n - 128 * (domains == k).mean()) < 2
    chunk = make_chunk(domains.tolist(), [1] * 512)
    samples = ChunkReader("window").read(chunk)
    assert [sample.domain for sample in samples] == domains[order].tolist()
    assert [sample.index for sample in samples] == list(range(512))
    assert [s.content for s in ChunkReader().read(chunk)] == chunk.documents


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("use_all", [True, False])
def test_sequences_have_one_domain_and_the_shares_of_the_documents(overlap, use_all) -> None:
    rng = np.random.default_rng(1)
    domains = np.repeat([0, 1, 2], [30, 20, 10])[rng.permutation(60)].tolist()
    chunk = make_chunk(domains, rng.integers(0, 30, 60).tolist())
    reader = ChunkReader("token", 16, EOD, overlap=overlap, use_all=use_all)
    samples = reader.read(chunk)
    streams = {k: [id for d, ids in zip(domains, chunk.documents, strict=True) if d == k for id in ids]
               for k in range(3)}  # fmt: skip
    step = 16 if overlap else 17
    expected = {
        k: [ids[i : i + 17] for i in range(0, len(ids) - 16, step)] for k, ids in streams.items()
    }  # fmt: skip
    got = {k: [s.content.tolist() for s in samples if s.domain == k] for k in range(3)}
    for k, sequences in got.items():
        assert sequences == expected[k][: len(sequences)]
    counts = Counter(sample.domain for sample in samples)
    if use_all:
        assert got == expected
        return
    assert any(counts[k] == len(expected[k]) for k in range(3))
    for n in range(1, len(samples) + 1):
        part = Counter(sample.domain for sample in samples[:n])
        assert all(
            abs(part[k] - n * share) < 1 for k, share in zip(range(3), (1 / 2, 1 / 3, 1 / 6), strict=True)
        )


def test_short_domains_are_repeated_or_left_empty() -> None:
    chunk = make_chunk([0, 0, 1], [40, 40, 2])
    samples = ChunkReader("token", 8, EOD).read(chunk)
    short = [sample.content.tolist() for sample in samples if sample.domain == 1]
    assert short == [[3, 3, 0] * 3]
    empty = ChunkReader("token", 8, EOD, at_least_one=False, use_all=True).read(chunk)
    assert {sample.domain for sample in empty} == {0}
    assert ChunkReader("token", 8, EOD).read(Chunk(0, "", [], [])) == []
    assert ChunkReader("window").read(Chunk(0, "", [], [])) == []


def test_invalid_options_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one of chunk, window, token"):
        ChunkReader("simple")
    with pytest.raises(ValueError, match="got no seq_len or eod"):
        ChunkReader("token", eod=0)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_stream_resumes_after_any_sample(mixture, prefetch) -> None:
    reader = ChunkReader("token", 24, EOD, encode_batch=encode_batch)
    open_source = partial(DocumentChunks, mixture, 0, 64)
    whole = list(islice(SampleStream(MixtureDataset(open_source, 1, 2), reader, prefetch), 120))
    assert [sample.number for sample in whole] == sorted(sample.number for sample in whole)
    last = [i for i, s in enumerate(whole[:-1]) if s.number != whole[i + 1].number][0]
    for stop in (1, last, last + 1, last + 2, 100):
        stream = SampleStream(MixtureDataset(open_source, 1, 2), reader, prefetch)
        list(islice(stream, stop))
        resumed = SampleStream(MixtureDataset(open_source, 1, 2), reader, prefetch)
        resumed.load_state_dict(stream.state_dict())
        for sample, expected in zip(resumed, whole[stop : stop + 5], strict=False):
            assert (sample.number, sample.index, sample.domain) == (
                expected.number, expected.index, expected.domain
            )  # fmt: skip
            assert np.array_equal(sample.content, expected.content)
    other = SampleStream(MixtureDataset(open_source, 0, 3), reader)
    with pytest.raises(ValueError, match="saved inside a chunk by 2 groups, got 3"):
        other.load_state_dict(stream.state_dict())


def test_worker_processes_read_and_encode_chunks_in_order(mixture) -> None:
    reader = ChunkReader("token", 24, EOD, encode)
    dataset = MixtureDataset(partial(DocumentChunks, mixture, 0, 64))
    alone = [reader.read(chunk) for chunk in islice(dataset, 4)]
    loader = DataLoader(dataset, batch_size=None, num_workers=2, collate_fn=reader.read)
    for samples, expected in zip(loader, alone, strict=False):
        assert [sample.content.tolist() for sample in samples] == [s.content.tolist() for s in expected]
    with pytest.raises(ValueError, match="expected none"):
        next(iter(DataLoader(SampleStream(dataset, reader), batch_size=None, num_workers=1)))
