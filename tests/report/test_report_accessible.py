"""Rules of WCAG 2.1 that a program can check, on the markup and colours of the page."""

import itertools
import re
import runpy
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron.report.palette import make_palette
from megatron.report.report import render_page
from megatron.report.study_data import read_study

synthetic = runpy.run_path(str(Path(__file__).with_name("synthetic_study.py")))
VOID = {"meta", "link", "br", "hr", "img", "input", "path", "circle"}


class Elements(HTMLParser):
    """Parser of all elements: name, attributes, text with inner elements, names of outer elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.all: list[dict] = []
        self.open: list[dict] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        element = {
            "tag": tag,
            "attributes": dict(attrs),
            "text": "",
            "in": [outer["tag"] for outer in self.open],
        }
        self.all.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1]["tag"] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element["text"] += data


@pytest.fixture(scope="module")
def elements(tmp_path_factory) -> list[dict]:
    parser = Elements(render_page(read_study(synthetic["write_study"](tmp_path_factory.mktemp("study")))))
    assert not parser.open  # 4.1.1: every element is closed
    return parser.all


def select_tags(elements: list[dict], *tags: str) -> list[dict]:
    return [element for element in elements if element["tag"] in tags]


def test_the_page_has_a_language_a_title_one_main_heading_and_lets_readers_zoom(elements) -> None:
    assert select_tags(elements, "html")[0]["attributes"]["lang"] == "en"  # 3.1.1
    assert select_tags(elements, "title")[0]["text"].strip()  # 2.4.2
    assert len(select_tags(elements, "h1")) == 1 and len(select_tags(elements, "main")) == 1
    views = [
        element["attributes"]["content"]
        for element in select_tags(elements, "meta")
        if element["attributes"].get("name") == "viewport"
    ]
    assert views and not re.search("user-scalable=no|maximum-scale", views[0])  # 1.4.4


def test_headings_go_down_one_level_at_a_time(elements) -> None:  # 1.3.1
    levels = [int(heading["tag"][1]) for heading in select_tags(elements, "h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_every_control_and_region_has_a_name(elements) -> None:  # 4.1.2
    for element in select_tags(elements, "button", "a", "summary"):
        assert element["text"].strip() or element["attributes"].get("aria-label"), element
    for element in elements:
        if element["attributes"].get("role") in ("group", "region", "img"):
            assert element["attributes"].get("aria-label"), element
        if element["tag"] == "svg":
            assert element["attributes"].get("aria-hidden") == "true" or element["attributes"].get(
                "aria-label"
            ), element
    pressed = [
        element["attributes"].get("aria-pressed")
        for element in select_tags(elements, "button")
        if "data-key" in element["attributes"]
    ]
    assert pressed and set(pressed) == {"true"}


def test_every_figure_has_a_text_description(elements) -> None:  # 1.1.1
    figures = [element for element in select_tags(elements, "figure")]
    words = [element for element in select_tags(elements, "details") if "figure" in element["in"]]
    assert len(figures) == len(words) > 5
    assert all(len(element["text"]) > 60 for element in words)


def test_ids_are_unique_and_scrollable_regions_can_be_reached_by_keyboard(elements) -> None:  # 4.1.1, 2.1.1
    ids = Counter(element["attributes"]["id"] for element in elements if "id" in element["attributes"])
    assert max(ids.values()) == 1
    scrolled = [
        element for element in elements if "scroll" in (element["attributes"].get("class") or "").split()
    ]
    assert scrolled and all(element["attributes"].get("tabindex") == "0" for element in scrolled)
    assert all(
        int(element["attributes"]["tabindex"]) <= 0
        for element in elements
        if "tabindex" in element["attributes"]
    )


def test_header_cells_have_a_scope(elements) -> None:  # 1.3.1
    heads = select_tags(elements, "th")
    assert heads and all(element["attributes"].get("scope") in ("row", "col") for element in heads)


def luminance(colour: str) -> float:
    """Return the relative luminance of #rrggbb by WCAG 2.1."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_black_on_white_has_the_contrast_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("n", [2, 5, 9])
def test_text_and_lines_contrast_with_their_background(theme: str, n: int) -> None:
    colours = make_palette(n, n)[theme]
    for name in ("ink", "muted", "accent"):
        assert contrast(colours[name], colours["paper"]) >= 4.5, name  # 1.4.3
    for name, colour in colours.items():
        if name.startswith(("size", "budget")):
            assert contrast(colour, colours["paper"]) >= 3, (name, colour)  # 1.4.11
