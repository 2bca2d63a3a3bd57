"""Models with NaN or Inf weights: every tool ends with an error and writes no result."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.checkpoint.convert.formats import read_any
from megatron.checkpoint.model_weights import Weights, save_weights
from megatron.evaluation.downstream_tasks import DownstreamRequest, _dump_json, evaluate_downstream
from megatron.evaluation.harness import _drop_unmeasured, harness_model
from megatron.evaluation.reader import Reader, Scoring
from megatron.evaluation.scored_models import find_models
from megatron.generation.generate import generate
from megatron.generation.generate_diffusion import generate_diffusion
from megatron.generation.nonfinite_scores import NonFiniteError, check_log_p
from megatron.generation.sampling import Sampling
from megatron.model.transformer import Gpt
from tests.conftest import build_tiny
from tests.evaluation.conftest import ALONE


def make_non_finite(value: float) -> Gpt:
    """Return the tiny model with one weight of its first block set to `value`."""
    model = build_tiny(40)
    model.blocks[0].state_dict()[next(iter(model.blocks[0].state_dict()))].view(-1)[0] = value
    return model


@pytest.mark.parametrize(("value", "temperature"), [(float("nan"), 0.0), (float("inf"), 1.0)])
def test_no_text_is_generated_from_logits_that_are_nan_or_inf(value: float, temperature: float) -> None:
    how, model = Sampling(temperature=temperature), make_non_finite(value)
    sentence = "the model's logits: got NaN or Inf, expected finite numbers"
    with pytest.raises(NonFiniteError, match=sentence):
        generate(model, [[1, 2, 3]], max_new_tokens=4, sampling=how)
    with pytest.raises(NonFiniteError, match=sentence):
        generate_diffusion(model, [[1, 2, 3]], n_new_tokens=4, n_steps=2, sampling=how)


@pytest.fixture
def broken(stories_folder: Path, tmp_path: Path) -> Path:
    """Save the stories model with one NaN weight."""
    weights = read_any(stories_folder)
    state = {name: value.clone() for name, value in weights.state.items()}
    state["embedding.weight"][300, 0] = float("nan")  # embedding of one token, which not all requests contain
    fields = {"config": weights.config, "objective": weights.objective, "tokenizer": weights.tokenizer}
    save_weights(Weights(state=state, seq_len=weights.seq_len, **fields), tmp_path / "broken")
    return tmp_path / "broken"


@pytest.mark.parametrize("task", ["copa", "lambada_openai"])
def test_a_task_with_a_request_without_score_has_none(broken: Path, task_folder: Path, task: str) -> None:
    request = DownstreamRequest(tasks=(task,), include_path=task_folder, limit=4)
    with pytest.raises(
        NonFiniteError, match=rf"^{task}, document \d+, request \d+: got a log-likelihood of nan"
    ):
        evaluate_downstream(find_models([broken])[0], request, Scoring(), ALONE)
    assert not list(broken.parent.rglob(f"{task}*.json*"))
    assert not list(broken.parent.rglob("results.json"))


def test_the_error_of_a_rolling_request_names_the_request_and_not_the_window(broken: Path) -> None:
    """There are more windows than requests."""
    lm = harness_model(Reader(read_any(broken), Scoring(), ALONE))
    lm.reader.compute_likelihoods = lambda requests, *more, **words: check_log_p(  # type: ignore[method-assign]
        np.where(np.arange(len(requests)) == len(requests) - 1, np.nan, 0.0)
    )
    requests = [
        SimpleNamespace(args=("Once upon a time. " * n,), task_name="texts", doc_id=i, idx=0)
        for i, n in enumerate((300, 1))
    ]
    with pytest.raises(NonFiniteError, match="^texts, document 1, request 0: "):
        lm.loglikelihood_rolling(requests)


def test_results_are_json_without_nan() -> None:
    def refuse(word: str) -> Any:
        raise AssertionError(word)

    nan, inf = float("nan"), float("inf")
    text = _dump_json({"a": nan, "b": [inf, 1.5], "c": {"d": (-inf,)}, "e": np.float64(nan)})
    expected = {"a": None, "b": [None, 1.5], "c": {"d": [None]}, "e": None}
    assert json.loads(text, parse_constant=refuse) == expected
    metrics = {
        "acc,none": 0.5, "acc_stderr,none": nan, "perplexity,none": nan, "perplexity_stderr,none": 1.0,
        "word,none": inf, "alias": "x",
    }  # fmt: skip
    _drop_unmeasured(metrics)  # the standard error of one document is N/A
    assert metrics == {"acc,none": 0.5, "acc_stderr,none": "N/A", "alias": "x"}
