"""Held-out losses of whole corpora, compared with loops over tokens, lm-eval and arithmetic."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from megatron.checkpoint.convert.formats import read_any
from megatron.data.indexed import IndexedTokens
from megatron.evaluation.corpus_loss import CorpusScorer, count_text_bytes, select_windows
from megatron.evaluation.corpus_tokenizer import resolve_text_ids
from megatron.evaluation.held_out import HeldOutScoring, score_held_out
from megatron.evaluation.scored_models import find_models
from megatron.evaluation.windows import TextIds, count_scored_tokens, iter_document_windows, read_window
from megatron.model.transformer import Gpt
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.tokenizer.kinds import NullTokenizer, load_tokenizer_by_name
from tests.datasets import write_dataset
from tests.evaluation.conftest import ALONE

EOD = 39
TEXT = TextIds(prefix_id=38, eod_id=EOD)
LENGTHS = (7, 1, 12, 3, 20, 0, 16)  # documents, without the end-of-document id that all but the last have


def write_documents(prefix: Path, *documents: list[int], **tokenizer: Any) -> IndexedTokens:
    write_dataset(prefix, documents, {"tokenizer": tokenizer})
    return IndexedTokens(prefix)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedTokens:
    """Write 65 tokens in 7 documents, of 40 ids."""
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(0, 38, n).tolist(), EOD] for n in LENGTHS]
    documents[-1].pop()
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    return write_documents(prefix, *documents, n_tokens=40, eod_id=EOD)


def documents_of(corpus: IndexedTokens) -> list[list[int]]:
    """Return the ids of each document without its end."""
    documents = [corpus.get_document(i).tolist() for i in range(len(LENGTHS))]
    return [ids[:-1] if ids and ids[-1] == EOD else ids for ids in documents]


def build_scorer(
    model: Gpt, corpus: IndexedTokens, causal: bool, text: TextIds | None = None, **options: Any
) -> CorpusScorer:
    windows = select_windows(
        corpus, causal, options.pop("seq_len", 8), options.pop("stride", None), options.pop("n", None), text
    )
    return CorpusScorer(model, corpus, windows, **{"batch_size": 5, "world": ALONE} | options)


def log_softmax(model: Gpt, ids: Any, causal: bool) -> torch.Tensor:
    tokens = torch.from_numpy(np.asarray(ids, dtype=np.int64))
    return model(tokens[None], causal=causal)[0].double().log_softmax(-1)


@pytest.mark.parametrize(("seq_len", "stride"), [(1, None), (4, None), (8, None), (8, 3), (99, None)])
def test_windows_of_documents_are_lm_evals_rolling_windows(
    corpus: IndexedTokens, seq_len: int, stride: int | None
) -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    n_context = seq_len - (stride or seq_len) + 1  # ids of a full window that are not scored
    expected = [
        (list(context), list(scored))
        for ids in documents_of(corpus)
        for context, scored in map(
            make_disjoint_window, get_rolling_token_windows(ids, TEXT.prefix_id, seq_len, n_context)
        )
        if ids
    ]
    windows = select_windows(corpus, True, seq_len, stride, None, TEXT)
    ids_read = [read_window(corpus, window).tolist() for window in windows]
    pairs = [(ids[: w.n_context], ids[w.n_context :]) for w, ids in zip(windows, ids_read, strict=True)]
    assert pairs == expected and [w.number for w in windows] == list(range(len(windows)))
    assert count_scored_tokens(corpus, windows).tolist() == list(LENGTHS)


@pytest.mark.parametrize("stride", [8, 5, 1])
def test_every_token_but_the_first_is_scored_once_with_the_documented_context(
    tiny: Gpt, corpus: IndexedTokens, stride: int
) -> None:
    """The context of a token in the first window is all tokens before it. In a later window it begins 8
    tokens before the end of the window. Windows end every `stride` tokens and at the end of the corpus."""
    n = corpus.n_tokens
    tokens, expected = corpus.tokens[:n], np.zeros(n)
    for i in range(1, n):
        end = min(n, 9 if i < 9 else 9 + math.ceil((i - 8) / stride) * stride)
        expected[i] = -float(log_softmax(tiny, tokens[max(0, end - 9) : i], True)[-1, int(tokens[i])])
    loss = build_scorer(tiny, corpus, True, stride=stride, eod_id=EOD).score_autoregressive()
    begins = np.cumsum([0, *corpus.document_tokens[:-1]])
    assert loss.nats == pytest.approx(np.add.reduceat(expected, begins), rel=1e-5)
    assert loss.tokens.tolist() == [7, 2, 13, 4, 21, 1, 16]
    assert loss.eod_nats == pytest.approx(expected[tokens == EOD].sum(), rel=1e-5)
    metrics = loss.metrics()
    assert metrics["loss"] == pytest.approx(expected.sum() / (n - 1), rel=1e-5)
    assert metrics["bits_per_token"] == pytest.approx(metrics["loss"] / math.log(2))
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    part = build_scorer(tiny, corpus, True, stride=stride, n=1).score_autoregressive()
    assert part.tokens.tolist() == [7, 1, 0, 0, 0, 0, 0]  # tokens 1 to 8
    assert part.nats[:1] == pytest.approx(loss.nats[:1], rel=1e-6)
    assert part.metrics()["n_documents"] == 2


@pytest.mark.parametrize("text", [None, TEXT], ids=["corpus", "document"])
def test_a_diffusion_model_is_scored_under_the_masks_of_validation_and_left_to_right(
    tiny: Gpt, corpus: IndexedTokens, text: TextIds | None
) -> None:
    """The expected values are computed per window and draw; the context of a window is never masked."""
    objective = MaskedDiffusion(40, 1e-3, 3)
    draws, (bound, left) = np.zeros(3), np.zeros((2, len(LENGTHS)))
    for window in select_windows(corpus, False, 8, None, None, text):
        ids, n = read_window(corpus, window), window.n_context
        places = np.arange(window.scored, window.end)
        documents = np.searchsorted(np.cumsum(corpus.document_tokens), places, side="right")
        for draw in range(3):
            task = objective.corrupt(np.append(ids[n:], 0)[None], np.array([window.number]), draw)
            log_p = log_softmax(tiny, [*ids[:n], *task.inputs[0].tolist()], False)[n:]
            nats = -(log_p[task.positions, task.targets] * task.scale).numpy()
            draws[draw] += nats.sum()
            np.add.at(bound, documents[task.positions.numpy()], nats / 3)
        for i in range(n, len(ids)):
            inputs = np.where(np.arange(len(ids)) < i, ids, 40)
            left[documents[i - n]] -= float(log_softmax(tiny, inputs, False)[i, ids[i]])
    n_scored = sum(LENGTHS) if text else corpus.n_tokens
    scored = build_scorer(tiny, corpus, False, text, eod_id=EOD).score_bound(objective, 3)
    assert scored.draws == pytest.approx(draws, rel=1e-5) and scored.nats == pytest.approx(bound, rel=1e-5)
    assert scored.metrics()["mc_se"] == pytest.approx(draws.std(ddof=1) / math.sqrt(3) / n_scored, rel=1e-4)
    assert (scored.eod_nats > 0) == (text is None) and scored.eod_nats < scored.nats.sum()
    exact = build_scorer(tiny, corpus, False, text, batch_size=7).score_left_to_right()
    assert exact.nats == pytest.approx(left, rel=1e-5) and exact.eod_nats == 0


def test_the_bytes_are_those_of_the_text_that_was_scored(corpus: IndexedTokens) -> None:
    """Texts are numbers separated by spaces. Id 40 ends documents, but none is in the corpus."""
    tokenizer, n = NullTokenizer(40), corpus.document_tokens
    words = [[str(token) for token in corpus.get_document(i)] for i in range(len(LENGTHS))]
    texts = [" ".join(text) for text in words]
    assert count_text_bytes(corpus, tokenizer, 0, n, 40, ALONE) == (sum(map(len, texts)), 0)
    first_two = len(" ".join(words[0][1:])) + len(texts[1])
    tokens = np.array([7, 2, 0, 0, 0, 0, 0])
    assert count_text_bytes(corpus, tokenizer, 1, tokens, 40, ALONE)[0] == first_two
    without = sum(len(" ".join(word for word in text if word != str(EOD))) for text in words)
    assert count_text_bytes(corpus, tokenizer, 0, n, EOD, ALONE) == (without, len(LENGTHS) - 1)


@pytest.fixture(scope="module")
def stories(stories_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Write texts longer and shorter than the window of the stories model."""
    output, name = tmp_path_factory.mktemp("stories"), str(stories_folder)
    tokenizer = load_tokenizer_by_name(name)
    once = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    # random order, because lm-eval confuses equal windows
    words = np.random.default_rng(0).permutation(once.split() * 40)
    texts = [" ".join(words), "One day, Tim found a caf\u00e9.", "The dog was happy \u2014 very happy!", once]
    about = {"name": name} | {key: getattr(tokenizer, key) for key in ("sha256", "n_tokens", "eod_id")}
    documents = [[*ids, tokenizer.eod_id] for ids in tokenizer.encode_batch(texts)]
    corpus = write_documents(output / "texts", *documents, **about)
    return {
        "hf": stories_folder, "data": str(output / "texts"), "texts": texts, "tokenizer": tokenizer,
        "corpus": corpus,
    }  # fmt: skip


def test_documents_alone_have_lm_evals_rolling_scores_and_bits_per_byte(stories: dict[str, Any]) -> None:
    pytest.importorskip("accelerate", reason="lm-eval's hf model requires accelerate")
    from lm_eval.api.instance import Instance
    from lm_eval.api.metrics import bits_per_byte
    from lm_eval.models.huggingface import HFLM

    seq_len = read_any(stories["hf"]).seq_len
    # else lm-eval adds the begin-of-text id twice and scores the second one
    theirs = HFLM(
        pretrained=str(stories["hf"]), batch_size=4, device="cpu", dtype="float32",
        softmax_dtype="float64", max_length=seq_len, add_bos_token=False,
    )  # fmt: skip
    requests = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in stories["texts"]]
    log_p = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    scoring = HeldOutScoring(data=stories["data"], windows="document", seq_len=seq_len, per_document=True)
    (model,) = find_models([stories["hf"]])
    result, path, _ = score_held_out(model, scoring, ALONE, tokenizer=stories["tokenizer"].name)
    documents = pd.read_parquet(path.with_suffix(".documents.parquet"))
    assert documents["tokens"][0] > seq_len  # several windows
    assert documents["nats"].to_list() == pytest.approx([-value for value in log_p], rel=1e-5, abs=1e-3)
    pairs = [(value, len(text.encode())) for value, text in zip(log_p, stories["texts"], strict=True)]
    assert result["n_bytes"] == sum(n for _, n in pairs)
    assert result["bits_per_byte"] == pytest.approx(bits_per_byte(pairs), rel=1e-5)
    assert "without end-of-document tokens" in result["bits_per_byte_of"]


def test_windows_across_documents_have_bits_of_text(stories: dict[str, Any]) -> None:
    corpus, tokenizer = stories["corpus"], stories["tokenizer"]
    net = read_any(stories["hf"]).build_model()
    options = {"seq_len": 128, "stride": 32}
    loss = build_scorer(net, corpus, True, eod_id=tokenizer.eod_id, **options).score_autoregressive()
    scoring = HeldOutScoring(data=stories["data"], **options)
    result, _, _ = score_held_out(find_models([stories["hf"]])[0], scoring, ALONE)
    whole, rest = (tokenizer.decode(corpus.get_document(0)[i:-1].tolist()) for i in (0, 1))
    n_first = len(whole.encode()) - len(rest.encode())  # the first id is not scored
    assert result["n_bytes"] == sum(len(text.encode()) for text in stories["texts"]) - n_first
    assert result["n_eod"] == len(stories["texts"])
    assert result["loss"] == pytest.approx(loss.metrics()["loss"], rel=1e-6)
    bits = (loss.nats.sum() - loss.eod_nats) / math.log(2)
    assert result["bits_per_byte"] == pytest.approx(bits / result["n_bytes"], rel=1e-6)


def test_losses_by_context_are_means_over_the_positions_of_all_windows(
    tiny: Gpt, corpus: IndexedTokens
) -> None:
    metrics = build_scorer(tiny, corpus, True).score_autoregressive().metrics()
    nats: dict[int, list[float]] = {}
    for start in range(0, len(corpus.tokens) - 1, 8):
        ids = corpus.tokens[start : start + 9].astype(np.int64)
        log_p = log_softmax(tiny, ids[:-1], True)
        for before, target in enumerate(ids[1:], 1):
            nats.setdefault(before.bit_length(), []).append(-float(log_p[before - 1, target]))
    expected = [[2 ** (k - 1), min(2**k - 1, 8), np.mean(values)] for k, values in nats.items()]
    np.testing.assert_allclose(metrics["loss_by_context"], expected, rtol=1e-5)


def test_windows_that_score_nothing_or_skip_tokens_are_refused(corpus: IndexedTokens, tmp_path: Path) -> None:
    for stride in (0, 9):
        with pytest.raises(ValueError, match=f"--stride: got {stride}, expected 1 to 8"):
            select_windows(corpus, True, 8, stride, None, None)
    bare = write_documents(tmp_path / "bare", [1, 2, 3])
    sentence = "--windows document: got no end-of-document id for .*bare, expected"
    with pytest.raises(ValueError, match=sentence):
        resolve_text_ids(bare, None, None)
    ends = write_documents(tmp_path / "ends", [3], [3])
    with pytest.raises(ValueError, match="got no document with text"):
        list(iter_document_windows(ends, 9, 8, TextIds(0, 3)))
