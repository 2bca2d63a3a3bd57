"""Downstream scores, compared with lm-eval's `hf` model on the same weights, and local tasks."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax

from megatron.checkpoint.convert.formats import read_any
from megatron.checkpoint.model_weights import Weights
from megatron.evaluation import harness_tasks
from megatron.evaluation.harness import find_mismatch, harness_model, score_task
from megatron.evaluation.harness_tasks import open_tasks
from megatron.evaluation.reader import Reader, Scoring
from megatron.generation.sampling import Sampling
from megatron.kernels.rotary import rotary_at_positions
from tests.evaluation.conftest import ALONE, build_diffusion
from tests.evaluation.test_answer_scores import RIGHT

# tasks whose data are in SCALING_DATA
TASKS = ["arc_easy", "boolq", "copa", "hellaswag", "piqa", "race", "winogrande", "sciq", "lambada_openai"]


@pytest.fixture(scope="module")
def stories(stories_folder: Path) -> Weights:
    return read_any(stories_folder)


@pytest.fixture(scope="module")
def hf_model(stories_folder: Path) -> Any:
    """Load the exported checkpoint as lm-eval's `hf` model, with float64 log-softmax as here."""
    pytest.importorskip("accelerate", reason="lm-eval's hf model requires accelerate")
    from lm_eval.models.huggingface import HFLM

    options = {"batch_size": 16, "device": "cpu", "dtype": "float32", "softmax_dtype": "float64"}
    return HFLM(pretrained=str(stories_folder), **options)


@pytest.fixture
def exact_angles(hf_model: Any, monkeypatch: pytest.MonkeyPatch, stories: Weights) -> None:
    """Give the reference model exact rotary angles, so that only the scoring is compared. transformers
    computes angles in float32, which costs up to 1e-4 nats per token at position 500."""

    def angles(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rotary_at_positions(position_ids, stories.config)

    monkeypatch.setattr(hf_model.model.model.rotary_emb, "forward", angles)


def compare(name: str, limit: int, stories: Weights, hf_model: Any, task_folder: Path) -> int:
    """Score a task with both models and compare; return the number of truncated requests."""
    from lm_eval.evaluator import evaluate

    reader = Reader(stories, Scoring(batch_size=16), ALONE)
    tasks = open_tasks([name], task_folder)
    options = {"limit": limit, "num_fewshot": None, "samples": True}
    ours = score_task(harness_model(reader), tasks[name].load(), **options)
    theirs = evaluate(lm=hf_model, task_dict=tasks[name].load(), limit=limit, bootstrap_iters=0)
    a, b = ours["samples"][name], theirs["samples"][name]
    assert len(a) == len(b) == min(limit, ours["n-samples"][name]["original"])
    for first, second in zip(a, b, strict=True):
        assert first["arguments"] == second["arguments"]
        our_values, their_values = (
            np.array([response for (response,) in sample["resps"]]) for sample in (first, second)
        )
        # relative 1e-6: a float32 sum of over a thousand nats is not exact to 1e-4
        assert our_values[:, 0] == pytest.approx(their_values[:, 0], abs=1e-4, rel=1e-6)
        assert (our_values[:, 1] == their_values[:, 1]).all()
        if name in RIGHT:
            at = RIGHT[name](first["doc"])
            n_bits, p = -their_values[at, 0] / np.log(2), softmax(their_values[:, 0].astype(float))[at]
            n_bytes = len(first["arguments"][at][1].encode())
            assert first["bits_per_byte"] == pytest.approx(n_bits / n_bytes, rel=1e-5)
            assert first.get("choice_probability", p) == pytest.approx(p, abs=1e-4)
    for metric, value in theirs["results"][name].items():
        if metric.startswith("acc") and not isinstance(value, str):
            assert ours["results"][name][metric] == value
    return reader.n_truncated


@pytest.mark.parametrize("name", [name for name in TASKS if name != "hellaswag"])
def test_a_task_has_lm_evals_scores(name: str, stories: Weights, hf_model: Any, task_folder: Path) -> None:
    compare(name, 8, stories, hf_model, task_folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_lm_evals_scores_over_200_documents(
    name: str, stories: Weights, hf_model: Any, exact_angles: None, task_folder: Path
) -> None:
    n_truncated = compare(name, 200, stories, hf_model, task_folder)
    assert (n_truncated > 0) == (name in ("arc_easy", "boolq", "race", "sciq"))


def test_rolling_scores_and_generated_texts_are_those_of_lm_eval(stories: Weights, hf_model: Any) -> None:
    """Rolling windows over a text longer than the model's length, and greedy text up to a stop word."""
    from lm_eval.api.instance import Instance

    model = harness_model(Reader(stories, Scoring(batch_size=2), ALONE))
    text = "Once upon a time, there was a dog. " * 60
    texts = [text, "Tom and Sue went to the park.", ""]
    rolling = [Instance("loglikelihood_rolling", {}, (prompt,), 0) for prompt in texts[:2]]
    expected = hf_model.loglikelihood_rolling(rolling, disable_tqdm=True)
    assert model.loglikelihood_rolling(rolling) == pytest.approx(expected, abs=1e-3)
    options = {"until": ["."], "max_gen_toks": 40, "do_sample": False}
    instances = [
        Instance("generate_until", {}, (prompt, dict(options)), 0)
        for prompt in ("Once upon a time", "One day, Tom")
    ]
    generated = model.generate_until(instances)
    assert generated[0] == ", there was a little girl named Lily"
    # lm-eval decodes the new tokens alone, which loses the space before the first word
    expected = [text.lstrip() for text in hf_model.generate_until(instances, disable_tqdm=True)]
    assert [text.lstrip() for text in generated] == expected


@pytest.fixture(scope="module")
def diffusion(stories: Weights) -> Weights:
    return build_diffusion(stories)


@pytest.mark.parametrize("how", [{}, {"method": "ar"}, {"only_generate": True}, {"only_mc_nll": True}])
def test_diffusion_is_scored_with_every_method(
    how: dict[str, Any], diffusion: Weights, task_folder: Path
) -> None:
    """An untrained model has a loss of about log 640 nats per token with every method."""
    reader = Reader(diffusion, Scoring(num_mc=4, **how), ALONE)
    name = "lambada_openai" if not how.get("only_mc_nll") else "copa"
    task, model = open_tasks([name], task_folder)[name].load(), harness_model(reader)
    result = score_task(model, task, limit=3, num_fewshot=None, samples=True)
    metrics = result["results"][name]
    assert metrics["acc,none"] in (0, 1 / 3, 2 / 3, 1)
    if name == "lambada_openai":
        assert ("perplexity,none" in metrics) == (not how.get("only_generate"))
    assert ("bits_per_byte,none" in metrics) == (not how.get("only_generate"))
    if not how.get("only_generate"):
        for sample in result["samples"][name]:
            for (_, answer), ((log_p, _),) in zip(sample["arguments"], sample["resps"], strict=True):
                n = len(model._encode_pair("a", answer)[1])
                assert log_p == pytest.approx(-n * np.log(640), rel=0.1)


def test_scorings_that_do_not_apply_to_a_task_or_model_are_refused(
    diffusion: Weights, stories: Weights, task_folder: Path
) -> None:
    for how in ({"method": "mc"}, {"only_generate": True}, {"only_mc_nll": True}):
        with pytest.raises(ValueError, match="for masked diffusion"):
            Reader(stories, Scoring(**how), ALONE)
    for how, name, sentence in (
        ({"only_generate": True}, "copa", "score it without --only-generate"),
        ({"only_mc_nll": True}, "lambada_openai", "score it without --only-mc-nll"),
    ):
        loaded = open_tasks([name], task_folder)[name].load()
        assert sentence in str(find_mismatch(loaded, Scoring(**how)))
        assert find_mismatch(loaded, Scoring()) is None


def test_unknown_tasks_and_a_missing_folder_are_named(
    tmp_path: Path, task_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval.tasks

    # without lm-eval's own tasks, whose files take long to list
    few = partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", few)
    for names, folder, error, sentence in (
        (["copa", "copa"], task_folder, ValueError, "got copa twice"),
        ([], task_folder, ValueError, "got no task"),
        (["hellaswga"], task_folder, ValueError, "lm-eval does not have; did you mean hellaswag"),
        (["copa"], tmp_path / "none", FileNotFoundError, "--include-path: got no folder"),
    ):
        with pytest.raises(error, match=sentence):
            open_tasks(names, folder)


def test_an_unreachable_hub_is_contacted_once_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, lm-eval and datasets retry for half a minute each and print every attempt."""
    monkeypatch.setattr(harness_tasks, "find_hub_error", lambda: "hub.example: no route to it")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("lm_eval.tasks.TaskManager", _Unreachable)
    tasks = open_tasks(["copa"], None)
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    sentence = "^copa: cannot load its data .hub.example: no route to it.. Give --include-path."
    with pytest.raises(ValueError, match=sentence):
        tasks["copa"].load()


class _Unreachable:
    """lm-eval's TaskManager with an unreachable hub."""

    all_tasks = ("copa",)

    def __init__(self, **options: Any) -> None:
        pass

    def load(self, names: list[str]) -> dict[str, Any]:
        raise ConnectionError(f"Couldn't reach the data of {names}")


def test_text_is_generated_up_to_the_first_stop_word(stories: Weights) -> None:
    """The ids of stories260K that begin and end a text are both 1."""
    reader, greedy = Reader(stories, Scoring(batch_size=1), ALONE), Sampling(temperature=0)
    assert (reader.begin_id, reader.end_id) == (1, 1)
    assert harness_model(reader)._encode_pair("Once upon a", " time")[0][0] == 1
    whole, short = (
        reader.continue_texts(["Once upon a time"], max_new_tokens=30, until=until, sampling=greedy)[0]
        for until in ([], ["girl", " little"])
    )
    assert whole.startswith(", there was a little girl named Lily.") and short == ", there was a"
    with pytest.raises(ValueError, match="512 new tokens leave no room"):
        reader.continue_texts(["a"], max_new_tokens=512, until=[], sampling=greedy)
