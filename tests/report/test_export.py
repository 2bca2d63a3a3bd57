"""Figures as files for papers. Rendering needs a browser; the sheets are tested without one."""

import re
import runpy
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.report.export import BROWSERS, export_figures, legend_height_px, render_sheet
from megatron.report.figures.plot import Chip
from megatron.report.palette import INK
from megatron.report.report import make_colours, make_figures
from megatron.report.study_data import Study, read_study

synthetic = runpy.run_path(str(Path(__file__).with_name("synthetic_study.py")))


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Study:
    return read_study(synthetic["write_study"](tmp_path_factory.mktemp("study")))


def test_a_sheet_is_as_large_as_its_figure_and_legend_and_loads_nothing(study: Study) -> None:
    figure = make_figures(study)[0]
    text = render_sheet(figure, make_colours(study), 640)
    high = figure.height_px + legend_height_px(figure, 640)
    assert f"@page{{size:640px {high}px" in text
    assert text.count("<button") == len(figure.chips) > 0
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="', text)


def test_more_words_in_a_legend_take_more_lines(study: Study) -> None:
    figure = make_figures(study)[0]
    few, many = (replace(figure, chips=[Chip("k", "a label", INK)] * n) for n in (2, 40))
    assert (
        legend_height_px(replace(figure, chips=[]), 640)
        == 0
        < legend_height_px(few, 640)
        < legend_height_px(many, 640)
    )


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="no browser is installed")
def test_a_figure_becomes_a_png_of_twice_its_size_and_a_pdf_of_one_sheet(
    study: Study, tmp_path: Path
) -> None:
    figure = next(candidate for candidate in make_figures(study) if candidate.key == "size")
    written = export_figures([figure], make_colours(study), tmp_path / "figures")
    assert [path.name for path in written] == ["size.png", "size.pdf"]
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["size.pdf", "size.png"]
    png, pdf = (path.read_bytes() for path in written)
    high = figure.height_px + legend_height_px(figure, 640)
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", png[16:24]) == (1280, 2 * high)
    assert len(png) > 20_000  # an empty sheet has a few kB
    assert pdf.startswith(b"%PDF") and len(re.findall(rb"/Type ?/Page\b", pdf)) == 1


def test_without_a_browser_the_error_names_the_fix(study: Study, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="Install chromium, or omit --figures"):
        export_figures(make_figures(study)[:1], make_colours(study), tmp_path / "figures")
    assert not (tmp_path / "figures").exists()
