"""Tests of tools/evaluate_downstream.py from the command line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.checkpoint.convert.formats import read_any
from megatron.checkpoint.model_weights import save_weights
from tests.evaluation.conftest import build_diffusion
from tests.rank_processes import run_tool, start_ranks, stop_ranks
from tests.tool_modules import Cli, CliResult

Typed = Callable[..., CliResult]


@pytest.fixture(scope="module")
def stories(stories_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Native checkpoints of stories260K and of an untrained diffusion model."""
    folder, weights = tmp_path_factory.mktemp("models"), read_any(stories_folder)
    save_weights(weights, folder / "stories")
    save_weights(build_diffusion(weights), folder / "diffusion")
    return folder


@pytest.fixture
def typed(cli: Cli, task_folder: Path, tmp_path: Path) -> Typed:
    """A function that scores in this process or on several gloo ranks, and returns the result of rank 0."""

    def run_program(*words: object, n_ranks: int = 1, status: int = 0) -> CliResult:
        words = (*words, "--include-path", task_folder, "--device", "cpu")
        if n_ranks == 1:
            return cli("evaluate", *words, status=status)
        argv = list(map(str, words))
        ranks = start_ranks(
            run_tool, "evaluate_downstream.py", argv, n_ranks=n_ranks, folder=tmp_path / "logs"
        )
        try:
            result = [rank.wait() for rank in ranks][0]
        finally:
            stop_ranks(ranks)
        assert result.status == status, result.error
        return result

    return run_program


def read_metrics(folder: Path) -> dict[str, dict[str, float]]:
    """Return the metrics of each task, without names and counts."""
    results = json.loads((folder / "results.json").read_text())["results"]
    return {name: {k: v for k, v in values.items() if "," in k} for name, values in results.items()}


@pytest.mark.slow  # tests/evaluation/test_likelihood.py has the fast form
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("model", "how"), [("stories", ()), ("diffusion", ("--num-mc", 3)), ("diffusion", ("--only-generate",))]
)
def test_two_ranks_give_the_figures_of_one(
    typed: Typed, stories: Path, tmp_path: Path, model: str, how: tuple[object, ...]
) -> None:
    tasks = {"stories": "copa"}.get(model, "lambada_openai")
    words = (stories / model, "--tasks", tasks, "--limit", 7, "--batch-size", 4, *how)
    metrics = []
    for n_ranks in (1, 2):
        out = tmp_path / str(n_ranks)
        typed(*words, "--out", out, "--log-samples", n_ranks=n_ranks)
        metrics.append(read_metrics(out)[tasks])
        samples = json.loads((out / f"{tasks}.json").read_text())["samples"]
        assert len(samples[tasks]) == 7
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-6)


@pytest.mark.slow
def test_finished_tasks_are_not_scored_again(typed: Typed, stories: Path) -> None:
    words = (stories / "stories", "--limit", 5, "--num-fewshot", 1)
    folder = stories / "stories.scores" / "downstream" / "ar-1shot-first5"
    typed(*words, "--tasks", "copa")
    mtime_ns = (folder / "copa.json").stat().st_mtime_ns
    more = typed(*words, "--tasks", "copa,sciq")
    assert "scored before: copa\n" in more.output and "|sciq" in more.output and "±" in more.output
    assert (folder / "copa.json").stat().st_mtime_ns == mtime_ns
    whole = json.loads((folder / "results.json").read_text())
    assert whole["n-samples"]["sciq"] == {"original": 1000, "effective": 5}
    assert whole["n-shot"] == {"copa": 1, "sciq": 1}
    other = typed(*words, "--tasks", "copa", "--seed", 1)
    assert "scored before" not in other.output
    written = sorted(path.name for path in folder.iterdir() if path.is_file())
    assert written == ["copa.json", "results.json", "sciq.json"]


def test_contexts_longer_than_the_model_are_counted_and_reported(typed: Typed, stories: Path) -> None:
    done = typed(stories / "stories", "--tasks", "race", "--limit", 2)
    assert "race: 8 requests exceed the model's 512 positions" in done.error
    folder = stories / "stories.scores" / "downstream" / "ar-first2"
    assert json.loads((folder / "results.json").read_text())["n-cut"] == {"race": 8}


@pytest.mark.slow
def test_bad_input_is_reported_in_one_line(typed: Typed, stories: Path, tmp_path: Path) -> None:
    model = stories / "stories"
    for words, sentence in (
        ((tmp_path, "--tasks", "copa"), "got no checkpoint in it or its subfolders"),
        ((model, "--tasks", "copa", "--only-mc-nll"), "the model is autoregressive. Omit them."),
        ((stories, "--tasks", "copa", "--out", tmp_path), "--out: got 2 models for the one folder"),
    ):
        error = typed(*words, status=1).error
        assert error.count("\n") == 1 and error.startswith("error: ") and sentence in error
    typed(model, status=2)
    typed(model, "--tasks", "copa", "--batch-size", 0, status=2)
    typed(model, "--tasks", "copa", "--only-mc-nll", "--only-generate", status=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_tasks_of_the_other_kind_are_skipped_and_named(typed: Typed, stories: Path, tmp_path: Path) -> None:
    words = (stories / "diffusion", "--limit", 2, "--num-mc", 1, "--out", tmp_path / "out")
    for option, other, scored in (("--only-mc-nll", "lambada_openai", "copa"),
                                  ("--only-generate", "copa", "lambada_openai")):  # fmt: skip
        done = typed(*words, "--tasks", f"{other},{scored}", option)
        assert f"skipped {other}: " in done.error and f"|{scored}" in done.output
        results = json.loads((tmp_path / "out" / "results.json").read_text())
        assert list(results["config"]["skipped"]) == [other] and list(results["results"]) == [scored]
    none = typed(*words[:-1], tmp_path / "none", "--tasks", "copa,piqa", "--only-generate", status=1)
    assert "error: --tasks: all tasks are skipped (copa: " in none.error
    assert "piqa: needs log-likelihoods" in none.error and not (tmp_path / "none").exists()
