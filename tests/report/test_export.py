"""Figures as files for papers. Rendering needs a browser; the sheets are tested without one."""

import json
import re
import runpy
import shutil
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.report.export import export_figures, legend_height_px, list_data, make_sheet
from megatron.report.figures.plot import Chip
from megatron.report.palette import INK
from megatron.report.report import make_colours, make_figures
from megatron.report.study_data import Study, read_study

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
synthetic = runpy.run_path(str(Path(__file__).with_name("synthetic_study.py")))


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Study:
    return read_study(synthetic["write_study"](tmp_path_factory.mktemp("study")))


def test_a_sheet_is_as_large_as_its_figure_and_legend_and_has_the_colours_of_the_light_theme(
    study: Study,
) -> None:
    figure, colours = make_figures(study)[0], make_colours(study)["light"]
    sheet = make_sheet(figure, colours, 640)
    high = figure.height_px + legend_height_px(figure, 640)
    assert (sheet.layout.width, sheet.layout.height) == (640, high)
    legend = [trace for trace in sheet.data if trace.showlegend]
    assert [trace.name for trace in legend] == [chip.label for chip in figure.chips] and legend
    assert [trace.line.color for trace in legend[:5]] == [colours[f"size{i}"] for i in range(5)]
    assert len(sheet.data) - len(legend) == len(figure.data) and "var(--" not in sheet.to_json()


def test_more_words_in_a_legend_take_more_lines(study: Study) -> None:
    figure = make_figures(study)[0]
    few, many = (replace(figure, chips=[Chip("k", "a label", INK)] * n) for n in (2, 40))
    assert (
        legend_height_px(replace(figure, chips=[]), 640)
        == 0
        < legend_height_px(few, 640)
        < legend_height_px(many, 640)
    )


def test_the_data_of_a_figure_are_its_traces_with_the_names_of_their_legend_keys(study: Study) -> None:
    figure = next(candidate for candidate in make_figures(study) if candidate.key == "size")
    content = list_data(figure)
    points = [trace for trace in content["traces"] if trace["mode"] == "markers"]
    losses = sorted(trace["y"][0] for trace in points)
    assert losses == sorted(row.loss for row in study.finished_rows("autoregressive"))
    assert {key for trace in points for key in trace["meta"]} == set(content["legend"])
    assert all(trace["error_y"]["array"] == [pytest.approx(0.024)] for trace in points)  # two of 0.012
    assert content["title"] == figure.title and content["caption"] == figure.caption


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="no browser is installed")
def test_a_figure_becomes_a_png_of_twice_its_size_a_pdf_of_one_sheet_an_svg_and_its_data(
    study: Study, tmp_path: Path
) -> None:
    pytest.importorskip("kaleido")
    figure = next(candidate for candidate in make_figures(study) if candidate.key == "size")
    written = export_figures([figure], make_colours(study), tmp_path / "figures", "the command")
    assert [path.name for path in written] == ["size.png", "size.pdf", "size.svg", "size.json"]
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {path.name for path in written}
    png, pdf, svg = (path.read_bytes() for path in written[:3])
    high = figure.height_px + legend_height_px(figure, 640)
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", png[16:24]) == (1280, 2 * high)
    assert len(png) > 20_000  # an empty sheet has a few kB
    assert pdf.startswith(b"%PDF") and len(re.findall(rb"/Type ?/Page\b", pdf)) == 1
    assert b"/Subtype /Image" not in pdf and b"<image" not in svg  # vectors
    assert all(chip.label.encode() in svg for chip in figure.chips)
    content = json.loads(written[3].read_text())
    assert content["command"] == "the command" and len(content["traces"]) == len(figure.data)


def test_without_a_browser_the_error_names_the_fix(study: Study, tmp_path: Path, monkeypatch) -> None:
    chromium = pytest.importorskip("choreographer.browsers.chromium")
    # browsers are also looked for in fixed folders, so an empty PATH is not enough
    monkeypatch.setattr(chromium.Chromium, "find_browser", classmethod(lambda *_, **__: None))
    with pytest.raises(FileNotFoundError, match="Install chromium, or omit --figures"):
        export_figures(make_figures(study)[:1], make_colours(study), tmp_path / "figures", "")
    assert not (tmp_path / "figures").exists()


def test_without_kaleido_the_error_names_the_fix(study: Study, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(FileNotFoundError, match="pip install kaleido"):
        export_figures(make_figures(study)[:1], make_colours(study), tmp_path / "figures", "")
