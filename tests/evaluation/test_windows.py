"""Windows, compared with lm-eval's rolling log-likelihood and the sliding window of transformers."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from megatron.checkpoint.convert.formats import read_any
from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter
from megatron.evaluation.corpus_loss import (
    CorpusScorer,
    select_windows,
)
from megatron.evaluation.corpus_tokenizer import resolve_text_ids
from megatron.evaluation.held_out import HeldOutScoring, score_held_out
from megatron.evaluation.scored_models import find_models
from megatron.evaluation.windows import (
    TextIds,
    count_scored_tokens,
    iter_document_windows,
    iter_strided_windows,
    read_window,
)
from megatron.model.transformer import Gpt
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.parallel.world import World
from megatron.tokenizer.kinds import load_tokenizer_by_name

ALONE = World(0, 1, 0, torch.device("cpu"))
EOD = 39
TEXT = TextIds(prefix_id=38, eod_id=EOD)
LENGTHS = (7, 1, 12, 3, 20, 0, 16)  # of documents, without the end-of-document id that all but the last have


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedTokens:
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, np.dtype(np.uint16), {"tokenizer": {"n_tokens": 40, "eod_id": EOD}}) as writer:
        for i, length in enumerate(LENGTHS):
            ids = rng.integers(0, 38, length)
            writer.add_document(ids if i == len(LENGTHS) - 1 else np.append(ids, EOD))
    return IndexedTokens(prefix)


def documents_of(corpus: IndexedTokens) -> list[list[int]]:
    documents = [corpus.get_document(i).tolist() for i in range(len(LENGTHS))]
    return [ids[:-1] if ids and ids[-1] == EOD else ids for ids in documents]


@pytest.mark.parametrize("n_read", [2, 5, 9, 100])
def test_windows_of_a_document_are_those_of_lm_evals_rolling_log_likelihood(
    corpus: IndexedTokens, n_read: int
) -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    expected = [
        (list(context), list(scored))
        for ids in documents_of(corpus)
        for context, scored in map(
            make_disjoint_window, get_rolling_token_windows(ids, TEXT.prefix_id, n_read - 1, context_len=1)
        )
        if ids
    ]
    windows = list(iter_document_windows(corpus, n_read, n_read - 1, TEXT))
    ids_read = [read_window(corpus, window).tolist() for window in windows]
    pairs = [(ids[: w.n_context], ids[w.n_context :]) for w, ids in zip(windows, ids_read, strict=True)]
    assert pairs == expected and [w.number for w in windows] == list(range(len(windows)))
    assert count_scored_tokens(corpus, windows).tolist() == list(LENGTHS)


def test_scored_tokens_are_counted_per_document_for_all_windows(corpus: IndexedTokens) -> None:
    for windows in (
        list(iter_strided_windows(corpus, 8, 3)),
        list(iter_document_windows(corpus, 6, 2, TEXT)),
    ):
        for n in (1, 2, 5, len(windows)):
            places = np.concatenate([np.arange(w.scored, w.end) for w in windows[:n]])
            of = np.searchsorted(np.cumsum(corpus.document_tokens), places, side="right")
            np.testing.assert_array_equal(
                count_scored_tokens(corpus, windows[:n]), np.bincount(of, minlength=len(LENGTHS))
            )


@pytest.mark.parametrize("stride", [8, 3])
def test_a_document_alone_is_predicted_from_its_own_tokens(
    tiny: Gpt, corpus: IndexedTokens, stride: int
) -> None:
    expected = []
    for ids in documents_of(corpus):
        whole, nats, done = [TEXT.prefix_id, *ids], 0.0, 1
        while done < len(whole):
            end = min(max(9, done + stride), len(whole)) if done > 1 else min(9, len(whole))
            seen = torch.tensor([whole[max(0, end - 9) : end - 1]])
            log_p = tiny(seen, causal=True)[0].double().log_softmax(-1)
            nats -= sum(float(log_p[i - end, whole[i]]) for i in range(done, end))
            done = end
        expected.append(nats)
    loss = CorpusScorer(
        tiny,
        corpus,
        select_windows(corpus, True, 8, stride, None, TEXT),
        batch_size=3,
        world=ALONE,
        eod_id=EOD,
    ).score_autoregressive()
    assert loss.nats == pytest.approx(expected, rel=1e-5) and loss.tokens.tolist() == list(LENGTHS)
    assert loss.eod_nats == 0


def test_a_diffusion_model_sees_the_context_of_a_document_under_every_mask(
    tiny: Gpt, corpus: IndexedTokens
) -> None:
    objective = MaskedDiffusion(40, 1e-3, 3)
    bound, left = np.zeros(len(LENGTHS)), np.zeros(len(LENGTHS))
    documents = np.repeat(np.arange(len(LENGTHS)), [-(-n // 7) for n in LENGTHS])
    windows = list(iter_document_windows(corpus, 8, 7, TEXT))
    for document, window in zip(documents, windows, strict=True):
        ids = read_window(corpus, window)
        n = window.n_context
        for draw in range(3):
            task = objective.corrupt(np.append(ids[n:], 0)[None], np.array([window.number]), draw)
            log_p = tiny(torch.cat([torch.from_numpy(ids[None, :n]), task.inputs], 1), causal=False)[0, n:]
            log_p = log_p.double().log_softmax(-1)[task.positions, task.targets]
            bound[document] -= float((log_p * task.scale).sum()) / 3
        for i in range(n, len(ids)):
            inputs = torch.from_numpy(np.where(np.arange(len(ids)) < i, ids, 40))[None]
            left[document] -= float(tiny(inputs, causal=False)[0, i].double().log_softmax(-1)[ids[i]])
    options: dict[str, Any] = {"batch_size": 5, "world": ALONE, "eod_id": EOD}
    selected = select_windows(corpus, False, 8, None, None, TEXT)
    bounded = CorpusScorer(tiny, corpus, selected, **options).score_bound(objective, 3)
    assert bounded.nats == pytest.approx(bound, rel=1e-5)
    exact = CorpusScorer(tiny, corpus, selected, **options).score_left_to_right()
    assert exact.nats == pytest.approx(left, rel=1e-5)


def test_bits_per_byte_exclude_the_nats_of_end_of_document_tokens(tiny: Gpt, corpus: IndexedTokens) -> None:
    tokens = corpus.tokens[: corpus.n_tokens].astype(np.int64)
    windows = select_windows(corpus, True, 100, None, None, None)
    whole = CorpusScorer(tiny, corpus, windows, EOD, batch_size=1, world=ALONE).score_autoregressive()
    log_p = tiny(torch.from_numpy(tokens[None, :-1]), causal=True)[0].double().log_softmax(-1)
    nats = -log_p[torch.arange(len(tokens) - 1), torch.from_numpy(tokens[1:])].numpy()
    assert whole.eod_nats == pytest.approx(nats[tokens[1:] == EOD].sum(), rel=1e-5)
    windows = select_windows(corpus, False, 8, None, None, None)
    objective, options = MaskedDiffusion(40, 1e-3, 0), {"batch_size": 64, "world": ALONE}
    draws = CorpusScorer(tiny, corpus, windows, EOD, **options).score_bound(objective, 50)
    without = CorpusScorer(tiny, corpus, windows, **options).score_bound(objective, 50)
    assert 0 < draws.eod_nats < draws.nats.sum() and without.eod_nats == 0
    assert draws.nats == pytest.approx(without.nats)


@pytest.fixture(scope="module")
def stories(stories_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Write texts longer and shorter than the window of the stories model."""
    output, name = tmp_path_factory.mktemp("stories"), str(stories_folder)
    tokenizer = load_tokenizer_by_name(name)
    once = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    words = np.random.default_rng(0).permutation(
        once.split() * 40
    )  # random order, because lm-eval confuses equal windows
    texts = [" ".join(words), "One day, Tim found a caf\u00e9.", "The dog was happy \u2014 very happy!", once]
    about = {"name": name} | {key: getattr(tokenizer, key) for key in ("sha256", "n_tokens", "eod_id")}
    with IndexedWriter(output / "texts", np.dtype(np.uint16), {"tokenizer": about}) as writer:
        for ids in tokenizer.encode_batch(texts):
            writer.add_document(np.array([*ids, tokenizer.eod_id]))
    return {"hf": stories_folder, "data": str(output / "texts"), "texts": texts, "tokenizer": name}


def test_documents_alone_have_lm_evals_rolling_log_likelihoods_and_bits_per_byte(
    stories: dict[str, Any],
) -> None:
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
    requests = [
        Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
        for text in stories["texts"]
    ]
    log_p = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    scoring = HeldOutScoring(data=stories["data"], windows="document", seq_len=seq_len, per_document=True)
    result, path, _ = score_held_out(
        find_models([stories["hf"]])[0], scoring, ALONE, tokenizer=stories["tokenizer"]
    )
    documents = pd.read_parquet(path.with_suffix(".documents.parquet"))
    assert documents["tokens"][0] > seq_len  # several windows
    assert documents["nats"].to_list() == pytest.approx([-value for value in log_p], rel=1e-5, abs=1e-3)
    pairs = [(value, len(text.encode())) for value, text in zip(log_p, stories["texts"], strict=True)]
    assert result["n_bytes"] == sum(n for _, n in pairs)
    assert result["bits_per_byte"] == pytest.approx(bits_per_byte(pairs), rel=1e-5)
    assert "without end-of-document tokens" in result["bits_per_byte_of"]


def test_windows_across_documents_have_the_nats_of_transformers_and_bits_of_text_only(
    stories: dict[str, Any],
) -> None:
    """The sliding window of the transformers documentation, over the concatenated documents."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(stories["hf"]).eval()
    corpus = IndexedTokens(stories["data"])
    ids = torch.from_numpy(corpus.tokens[: corpus.n_tokens].astype(np.int64))[None]
    length, stride, before = 128, 32, 0
    nats = torch.zeros(ids.shape[1], dtype=torch.float64)
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + length + 1, ids.shape[1])
        with torch.no_grad():
            log_p = model(ids[:, begin : end - 1]).logits[0].double().log_softmax(-1)
        scored = torch.arange(max(before, begin + 1), end)
        nats[scored] = -log_p[scored - begin - 1, ids[0, scored]]
        before = end
        if end == ids.shape[1]:
            break
    eod = corpus.sidecar["tokenizer"]["eod_id"]
    scoring = HeldOutScoring(data=stories["data"], seq_len=length, stride=stride)
    result, _, _ = score_held_out(find_models([stories["hf"]])[0], scoring, ALONE)
    tokenizer = load_tokenizer_by_name(stories["tokenizer"])
    n_bytes = sum(len(text.encode()) for text in stories["texts"])
    first = len(tokenizer.decode(corpus.get_document(0)[:-1].tolist()).encode()) - len(
        tokenizer.decode(corpus.get_document(0)[1:-1].tolist()).encode()
    )
    assert result["n_bytes"] == n_bytes - first and result["n_eod"] == len(stories["texts"])
    text_nats = float(nats[1:][ids[0, 1:] != eod].sum())
    assert result["loss"] == pytest.approx(float(nats.sum()) / (ids.shape[1] - 1), rel=2e-3)
    assert result["bits_per_byte"] == pytest.approx(text_nats / math.log(2) / result["n_bytes"], rel=2e-3)


def test_documents_alone_need_an_end_of_document_id(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "bare", np.dtype(np.uint16), {}) as writer:
        writer.add_document(np.array([1, 2, 3]))
    with IndexedWriter(tmp_path / "ends", np.dtype(np.uint16), {}) as writer:
        for _ in range(2):
            writer.add_document(np.array([3]))
    bare = IndexedTokens(tmp_path / "bare")
    with pytest.raises(
        ValueError, match="--windows document: got no end-of-document id for .*bare, expected"
    ):
        resolve_text_ids(bare, None, None)
    with pytest.raises(ValueError, match="got no document with text"):
        list(iter_document_windows(IndexedTokens(tmp_path / "ends"), 9, 8, TextIds(0, 3)))
