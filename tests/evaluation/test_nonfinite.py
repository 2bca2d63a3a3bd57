"""Models whose weights are NaN or Inf: every tool ends with an error and writes no figure."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpoint.convert import read_any
from megatron.checkpoint.weights import Weights, save_weights
from megatron.evaluation.downstream import Asked, _json, evaluate_downstream
from megatron.evaluation.generate import generate
from megatron.evaluation.generate_diffusion import generate_diffusion
from megatron.evaluation.harness import _drop_unmeasured, harness_model
from megatron.evaluation.nonfinite import NonFiniteError, check_log_p
from megatron.evaluation.reader import Reader, Scoring
from megatron.evaluation.sampling import Sampling
from megatron.evaluation.scores import models_of
from megatron.model.gpt import Gpt
from megatron.parallel.world import World
from tests.conftest import build_tiny

ALONE = World(0, 1, 0, torch.device("cpu"))


def spoiled(value: float) -> Gpt:
    """The tiny model with one weight of its first block that is no number."""
    model = build_tiny(40)
    model.blocks[0].state_dict()[next(iter(model.blocks[0].state_dict()))].view(-1)[0] = value
    return model


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_text_is_generated_from_logits_that_are_no_numbers(value: float, temperature: float) -> None:
    how, model = Sampling(temperature=temperature), spoiled(value)
    with pytest.raises(NonFiniteError, match="the model's logits: got NaN or Inf, expected finite numbers"):
        generate(model, [[1, 2, 3]], max_new_tokens=4, how=how)
    with pytest.raises(NonFiniteError, match="the model's logits: got NaN or Inf, expected finite numbers"):
        generate_diffusion(model, [[1, 2, 3]], n_new_tokens=4, n_steps=2, how=how)


@pytest.fixture
def broken(scaling_data: Path, tmp_path: Path) -> Path:
    """The stories model, one of whose weights is NaN."""
    folder = scaling_data / "stories260K"
    weights = read_any(folder / "stories260K.bin", tokenizer=str(folder / "tok512.bin"))
    state = {name: value.clone() for name, value in weights.state.items()}
    state["embedding.weight"][300, 0] = float("nan")  # of a single token: not every request meets it
    told = {"config": weights.config, "objective": weights.objective, "tokenizer": weights.tokenizer}
    save_weights(Weights(state=state, seq_len=weights.seq_len, **told), tmp_path / "broken")
    return tmp_path / "broken"


@pytest.mark.parametrize("task", ["copa", "lambada_openai"])
def test_a_task_with_a_request_that_has_no_log_likelihood_is_not_scored(
    broken: Path, scaling_data: Path, task: str
) -> None:
    asked = Asked(tasks=(task,), data=scaling_data / "downstream", limit=4)
    with pytest.raises(
        NonFiniteError, match=rf"^{task}, document \d+, request \d+: got a log-likelihood of nan"
    ):
        evaluate_downstream(models_of([broken])[0], asked, Scoring(), ALONE)
    assert not list(broken.parent.rglob(f"{task}*.json*"))
    assert not list(broken.parent.rglob("results.json"))


def test_a_rolling_request_is_named_by_its_own_number(broken: Path) -> None:
    """Its windows are more than the requests."""
    lm = harness_model(Reader(read_any(broken), Scoring(), ALONE))
    lm.reader.likelihoods = lambda requests, *more, **words: check_log_p(  # type: ignore[method-assign]
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

    text = _json(
        {"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": (float("-inf"),)}, "e": np.float64("nan")}
    )
    assert json.loads(text, parse_constant=refuse) == {
        "a": None,
        "b": [None, 1.5],
        "c": {"d": [None]},
        "e": None,
    }


def test_metrics_that_are_no_numbers_go_and_errors_of_one_document_are_lm_evals_na() -> None:
    metrics = {
        "acc,none": 0.5, "acc_stderr,none": float("nan"), "perplexity,none": float("nan"),
        "perplexity_stderr,none": 1.0, "word,none": float("inf"), "alias": "x",
    }  # fmt: skip
    _drop_unmeasured(metrics)
    assert metrics == {"acc,none": 0.5, "acc_stderr,none": "N/A", "alias": "x"}
