"""The argument that launchers add: --local_rank=N."""

import os
from pathlib import Path

import pytest

from tests.tool_modules import load_tool

FORMS = (
    ["--local_rank=1"],
    ["--local-rank=1"],
    ["--local_rank", "1"],
    ["--local-rank", "1"],
    ["--local_rank=-1"],
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove a launcher's variables; LOCAL_RANK is restored after the test."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
@pytest.mark.parametrize("tool", ["pretrain", "validate", "evaluate_downstream"])
def test_every_tool_that_takes_ranks_accepts_it_in_any_place(root: Path, environment, tool, form) -> None:
    arguments = {
        "pretrain": ["run.yaml", "optim.lr=1"],
        "validate": ["a", "b", "--data", "c"],
        "evaluate_downstream": ["a", "b", "--tasks", "piqa"],
    }[tool]
    parser = load_tool(root / "tools" / f"{tool}.py").build_parser()
    expected = parser.parse_args(arguments)
    for place in range(len(arguments) + 1):
        if arguments[place - 1] not in ("--data", "--tasks"):  # keep an option and its value together
            assert parser.parse_args([*arguments[:place], *form, *arguments[place:]]) == expected
    assert "LOCAL_RANK" not in os.environ


def test_the_option_sets_a_missing_local_rank(root: Path, environment) -> None:
    parser = load_tool(root / "tools" / "pretrain.py").build_parser()
    environment.setenv("RANK", "5")
    parser.parse_args(["--local_rank=1", "run.yaml"])
    assert os.environ["LOCAL_RANK"] == "1"
    parser.parse_args(["--local_rank=3", "run.yaml"])
    assert os.environ["LOCAL_RANK"] == "1", "the variable counts where both are given"


@pytest.mark.parametrize(
    "words", [["--local_rank"], ["--local_rank=x"], ["--local_rank=-2"], ["--local_rank="]]
)
def test_a_value_that_is_not_a_number_is_a_usage_error(root: Path, environment, capsys, words) -> None:
    parser = load_tool(root / "tools" / "pretrain.py").build_parser()
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(["run.yaml", *words])
    assert stopped.value.code == 2
    assert "argument --local_rank: got" in capsys.readouterr().err
    with pytest.raises(SystemExit):  # a tool that runs as a single process
        load_tool(root / "tools" / "model_sizes.py").build_parser().parse_args(["--local_rank=0"])
