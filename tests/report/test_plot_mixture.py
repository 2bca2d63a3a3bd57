"""The weights of mixtures in a study's report."""

import json
import runpy
from pathlib import Path

import pytest

from megatron.report import report
from megatron.report.figures.plot_mixture import mixture_figure
from megatron.report.study_data import read_study

synthetic = runpy.run_path(str(Path(__file__).with_name("synthetic_study.py")))


@pytest.fixture
def study(tmp_path) -> Path:
    return synthetic["write_study"](tmp_path / "a_study")


def append_weights(study: Path, run: str, weights: list[dict[str, float]]) -> None:
    with (study / "runs" / run / "metrics.jsonl").open("a") as file:
        for step, shares in enumerate(weights, 1):
            line = {"kind": "train", "step": step, "tokens": 10 * step, "loss": 3.0, "weights": shares}
            file.write(json.dumps(line) + "\n")


def test_a_study_without_mixtures_has_no_such_figure(study) -> None:
    assert mixture_figure(read_study(study)) is None


def test_the_figure_shows_the_weights_of_each_run_as_they_were_logged(study) -> None:
    first, second = sorted(path.name for path in (study / "runs").iterdir())[:2]
    append_weights(study, first, [{"C": 0.5, "Go": 0.5, "none": 0.0}] * 3)
    moving = [{"C": 0.5, "Go": 0.5, "none": 0.0}, {"C": 0.3, "Go": 0.7, "none": 0.0},
              {"C": 0.2, "Go": 0.8, "none": 0.0}]  # fmt: skip
    append_weights(study, second, moving)
    append_weights(study, second, [])
    figure = mixture_figure(read_study(study))
    assert figure is not None
    lines = {tuple(trace["meta"]): trace for trace in figure.data}
    assert set(lines) == {(f"domain:{d}", f"run:{r}") for d in ("C", "Go") for r in (first, second)}
    assert lines["domain:Go", f"run:{second}"]["x"] == [10, 20, 30]
    assert lines["domain:Go", f"run:{second}"]["y"] == [0.5, 0.7, 0.8]
    assert lines["domain:Go", f"run:{first}"]["y"] == [0.5, 0.5, 0.5]
    assert figure.title in (
        f"In {second} the weight of {name} from {ends}"
        for name, ends in (("Go rises", "50% to 80%"), ("C falls", "50% to 20%"))
    )
    assert "1 domain with smaller changes" in figure.caption
    page = report.render_page(read_study(study))
    assert figure.title in page
    colours = report.make_colours(read_study(study))["light"]
    assert {"domain0", "domain1"} <= set(colours)
    assert "domain2" not in colours
