"""Runs with a NaN held-out loss: reported, never written as a number, and not done."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.io import replace_nonfinite, write_json
from megatron.plan.run_dir import METRICS, RESULT
from megatron.train.state import TrainState

SCRIPT = Path(__file__).with_name("pretrain_with_bad_held_out.py")


def read_strict(path: Path) -> list[Any]:
    """Return every line of a file as strict JSON, without NaN."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{path}: {word}")

    lines = path.read_text().splitlines() if path.name == METRICS else [path.read_text()]
    return [json.loads(line, parse_constant=refuse) for line in lines]


@pytest.mark.slow
def test_a_run_with_a_nan_held_out_loss_ends_before_it_saves(pretrain, words, tmp_path, monkeypatch) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv("BAD_SCORINGS", "2")
    words = [*words, f"logging.run_dir={run}", "checkpoint.chkpt_saving_iterations=6"]
    done = pretrain(words, script=SCRIPT)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "error: step 12: got a held-out loss of nan, expected a finite number. "
        "Lower optim.lr, or look for a damaged corpus; nothing was saved at this step."
    )
    assert len(list((run / "checkpoints").iterdir())) == 1 and not (run / RESULT).exists()
    kinds = [(line["kind"], line["step"]) for line in read_strict(run / METRICS)]
    assert ("validation", 6) in kinds and ("validation", 12) not in kinds
    monkeypatch.setenv("BAD_SCORINGS", "99")
    assert pretrain(words, script=SCRIPT).returncode == 0  # the same command again, from step 6
    assert read_strict(run / RESULT)[0]["loss"] > 0


def test_a_run_that_skips_continues_but_is_not_done_without_a_loss(
    pretrain, words, tmp_path, monkeypatch
) -> None:
    run = tmp_path / "run"
    words = [*words, f"logging.run_dir={run}", "evaluation.every_iterations=4", "misc.on_nonfinite=skip"]
    monkeypatch.setenv("BAD_SCORINGS", "1,3")
    done = pretrain(words, script=SCRIPT)
    assert done.returncode == 1 and "step 12: got a held-out loss of nan" in done.stderr.splitlines()[-1]
    assert "step 4: got a held-out loss of nan, expected a finite number" in done.stderr + done.stdout
    lines = [line for line in read_strict(run / METRICS) if line["kind"] == "validation"]
    assert [(line["step"], line["loss"] is None) for line in lines] == [(4, True), (8, False)]
    assert not (run / RESULT).exists()


def test_a_nan_loss_is_never_the_best() -> None:
    state = TrainState().after_validation(float("nan"))
    assert state.best_loss is None
    assert state.after_validation(2.0).after_validation(float("nan")).best_loss == 2.0


def test_json_of_a_run_has_no_nan(tmp_path: Path) -> None:
    content = {"a": 1.0, "b": {"c": [0.5, float("nan")]}, "d": float("-inf")}
    with pytest.raises(ValueError, match=r"x.json: got NaN or Inf in b.c.1, d, expected finite numbers"):
        write_json(tmp_path / "x.json", content)
    assert not list(tmp_path.iterdir())
    write_json(tmp_path / "x.json", replace_nonfinite(content))
    assert read_strict(tmp_path / "x.json")[0] == {"a": 1.0, "b": {"c": [0.5, None]}, "d": None}
