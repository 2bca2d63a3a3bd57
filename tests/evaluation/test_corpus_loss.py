"""Held-out losses of whole corpora, compared with loops over tokens and with arithmetic."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter
from megatron.evaluation.corpus_loss import (
    CorpusScorer,
    count_text_bytes,
    select_windows,
)
from megatron.evaluation.windows import Window
from megatron.model.transformer import Gpt
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.parallel.world import World
from megatron.tokenizer.kinds import NullTokenizer

ALONE = World(0, 1, 0, torch.device("cpu"))
LENGTHS = (7, 1, 12, 3, 20)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedTokens:
    """Write a corpus of 43 tokens in 5 documents, of 40 ids."""
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, np.dtype(np.uint16), {"tokenizer": {"n_tokens": 40}}) as writer:
        for length in LENGTHS:
            writer.add_document(rng.integers(0, 40, length))
    return IndexedTokens(prefix)


def windows_of(
    corpus: IndexedTokens,
    causal: bool = False,
    stride: int | None = None,
    seq_len: int = 8,
    n: int | None = None,
) -> list[Window]:
    return select_windows(corpus, causal, seq_len, stride, n, None)


def nats_of(model: Gpt, context: np.ndarray, token: int) -> float:
    logits = model(torch.from_numpy(context.astype(np.int64))[None], causal=True)[0, -1]
    return -float(logits.double().log_softmax(-1)[token])


@pytest.mark.parametrize("stride", [8, 5, 1])
def test_every_token_but_the_first_is_scored_once_with_the_documented_context(
    tiny: Gpt, corpus: IndexedTokens, stride: int
) -> None:
    """The context of a token in the first window is all tokens before it. In a later window it begins 8
    tokens before the end of the window. Windows end every `stride` tokens and at the end of the corpus."""
    tokens = corpus.tokens[:43]
    expected = np.zeros(43)
    for i in range(1, 43):
        end = min(43, 9 if i < 9 else 9 + math.ceil((i - 8) / stride) * stride)
        expected[i] = nats_of(tiny, tokens[max(0, end - 9) : i], int(tokens[i]))
    loss = CorpusScorer(
        tiny, corpus, windows_of(corpus, True, stride), batch_size=3, world=ALONE
    ).score_autoregressive()
    begins = np.cumsum([0, *LENGTHS[:-1]])
    assert loss.nats == pytest.approx(np.add.reduceat(expected, begins), rel=1e-5)
    assert loss.tokens.tolist() == [6, 1, 12, 3, 20]
    metrics = loss.metrics()
    assert metrics["loss"] == pytest.approx(expected.sum() / 42, rel=1e-5)
    assert metrics["bits_per_token"] == pytest.approx(metrics["loss"] / math.log(2))
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))


def test_a_uniform_model_has_a_loss_of_log_rows_with_every_method(
    tiny_of: Callable[..., Gpt], corpus: IndexedTokens
) -> None:
    model = tiny_of(n_tokens=40)
    with torch.no_grad():
        model.embedding.weight.zero_()  # 48 equal rows
    exact = CorpusScorer(
        model, corpus, windows_of(corpus, True), batch_size=4, world=ALONE
    ).score_autoregressive()
    assert exact.metrics()["loss"] == pytest.approx(math.log(48))
    left = CorpusScorer(model, corpus, windows_of(corpus), batch_size=4, world=ALONE).score_left_to_right()
    assert left.nats == pytest.approx(math.log(48) * np.array(LENGTHS))
    rough = CorpusScorer(model, corpus, windows_of(corpus), batch_size=64, world=ALONE).score_bound(
        MaskedDiffusion(40, 1e-3, 0), 20
    )
    metrics = rough.metrics()
    assert metrics["loss"] == pytest.approx(
        math.log(48), rel=1e-6
    )  # all masks of a window have the same loss
    assert metrics["mc_se"] is not None and metrics["mc_se"] < 1e-7


def test_the_bound_uses_the_masks_of_validation_during_training(tiny: Gpt, corpus: IndexedTokens) -> None:
    """The expected value is computed per window and draw with the objective."""
    objective = MaskedDiffusion(40, 1e-3, 3)
    tokens = corpus.tokens[:43].astype(np.int64)
    draws, nats = np.zeros(3), np.zeros(43)
    for number in range(6):
        window = tokens[8 * number : 8 * number + 8]
        for draw in range(3):
            task = objective.corrupt(np.append(window, 0)[None], np.array([number]), draw)
            log_p = tiny(task.inputs, causal=False)[0].double().log_softmax(-1)
            for place, target, scale in zip(task.positions, task.targets, task.scale, strict=True):
                value = -float(log_p[place, target]) * float(scale)
                draws[draw] += value
                nats[8 * number + int(place)] += value / 3
    loss = CorpusScorer(tiny, corpus, windows_of(corpus), batch_size=5, world=ALONE).score_bound(objective, 3)
    assert loss.draws == pytest.approx(draws, rel=1e-5)
    assert loss.nats == pytest.approx(np.add.reduceat(nats, np.cumsum([0, *LENGTHS[:-1]])), rel=1e-5)
    assert loss.metrics()["mc_se"] == pytest.approx(draws.std(ddof=1) / math.sqrt(3) / 43, rel=1e-4)


def test_the_bound_of_a_short_corpus_is_its_mean_over_all_masks(tiny: Gpt, tmp_path: Path) -> None:
    """12 tokens, one window, 4,095 masks; a mask of l tokens has chance 1 / (12 C(12, l)), weight 12 / l."""
    tokens = np.random.default_rng(1).integers(0, 40, 12)
    with IndexedWriter(tmp_path / "short", np.dtype(np.uint16), {}) as writer:
        writer.add_document(tokens)
    masks = np.array(list(itertools.product([0, 1], repeat=12)), dtype=bool)[1:]
    exact = 0.0
    for hidden in np.array_split(masks, 16):
        log_p = tiny(torch.from_numpy(np.where(hidden, 40, tokens)), causal=False).double().log_softmax(-1)
        nats = -(log_p[:, torch.arange(12), torch.from_numpy(tokens)].numpy() * hidden).sum(axis=1)
        n_hidden = hidden.sum(axis=1)
        exact += (nats / (n_hidden * [math.comb(12, n) for n in n_hidden])).sum() / 12
    short = IndexedTokens(tmp_path / "short")
    scorer = CorpusScorer(tiny, short, windows_of(short, seq_len=32), batch_size=64, world=ALONE)
    loss = scorer.score_bound(MaskedDiffusion(40, 1e-3, 0), 256).metrics()
    assert loss["mc_se"] < 0.02 * exact
    assert loss["mc_interval"][0] < exact < loss["mc_interval"][1]


def test_left_to_right_a_token_is_predicted_only_from_those_before_it(
    tiny: Gpt, corpus: IndexedTokens
) -> None:
    tokens = corpus.tokens[:43].astype(np.int64)
    expected = np.zeros(43)
    for begin in range(0, 43, 8):
        window = tokens[begin : begin + 8]
        for i, token in enumerate(window):
            inputs = torch.from_numpy(np.where(np.arange(len(window)) < i, window, 40))[None]
            expected[begin + i] = -float(tiny(inputs, causal=False)[0, i].double().log_softmax(-1)[token])
    loss = CorpusScorer(tiny, corpus, windows_of(corpus), batch_size=7, world=ALONE).score_left_to_right()
    assert loss.nats == pytest.approx(np.add.reduceat(expected, np.cumsum([0, *LENGTHS[:-1]])), rel=1e-5)


def test_a_part_of_the_corpus_is_its_first_windows(tiny: Gpt, corpus: IndexedTokens) -> None:
    whole = CorpusScorer(
        tiny, corpus, windows_of(corpus, True), batch_size=4, world=ALONE
    ).score_autoregressive()
    part = CorpusScorer(
        tiny, corpus, windows_of(corpus, True, n=1), batch_size=4, world=ALONE
    ).score_autoregressive()
    assert part.tokens.tolist() == [6, 1, 1, 0, 0]  # tokens 1 to 8
    assert part.nats[:2] == pytest.approx(whole.nats[:2], rel=1e-6)
    assert part.metrics()["n_documents"] == 3


def test_the_bytes_are_those_of_the_text_that_was_scored(corpus: IndexedTokens) -> None:
    """Texts are numbers separated by spaces. Id 40 ends documents, but none is in the corpus."""
    tokenizer = NullTokenizer(40)
    texts = [" ".join(str(token) for token in corpus.get_document(i)) for i in range(5)]
    whole = count_text_bytes(corpus, tokenizer, 0, np.array(LENGTHS), 40, ALONE)
    assert whole == (sum(map(len, texts)), 0)
    first_two = [" ".join(texts[0].split()[1:]), texts[1]]
    assert count_text_bytes(corpus, tokenizer, 1, np.array([6, 1, 0, 0, 0]), 40, ALONE)[0] == sum(
        map(len, first_two)
    )
    n_ends = sum(token == 7 for i in range(5) for token in corpus.get_document(i))
    without = sum(len(" ".join(word for word in text.split() if word != "7")) for text in texts)
    assert count_text_bytes(corpus, tokenizer, 0, np.array(LENGTHS), 7, ALONE) == (without, n_ends)


def test_strides_that_skip_tokens_are_refused(tiny: Gpt, corpus: IndexedTokens) -> None:
    for stride in (0, 9):
        with pytest.raises(ValueError, match=f"--stride: got {stride}, expected 1 to 8"):
            windows_of(corpus, True, stride)
