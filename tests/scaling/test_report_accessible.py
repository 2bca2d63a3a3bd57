"""The page by the rules of WCAG 2.1 that a program can check, on its markup and its colours."""

import itertools
import re
import runpy
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron.scaling.palette import palette
from megatron.scaling.report import page
from megatron.scaling.study import read_study

synthetic = runpy.run_path(str(Path(__file__).with_name("synthetic_study.py")))
VOID = {"meta", "link", "br", "hr", "img", "input", "path", "circle"}


class Elements(HTMLParser):
    """Every element as (name, attributes, own and inner text, names of the elements around it)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[dict] = []
        self.open: list[dict] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        element = {"tag": tag, "told": dict(attrs), "text": "", "in": [one["tag"] for one in self.open]}
        self.found.append(element)
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
    found = Elements(page(read_study(synthetic["write_study"](tmp_path_factory.mktemp("study")))))
    assert not found.open  # 4.1.1: every element is closed
    return found.found


def of(elements: list[dict], *tags: str) -> list[dict]:
    return [one for one in elements if one["tag"] in tags]


def test_the_page_has_a_language_a_title_one_main_heading_and_lets_readers_zoom(elements) -> None:
    assert of(elements, "html")[0]["told"]["lang"] == "en"  # 3.1.1
    assert of(elements, "title")[0]["text"].strip()  # 2.4.2
    assert len(of(elements, "h1")) == 1 and len(of(elements, "main")) == 1
    views = [one["told"]["content"] for one in of(elements, "meta") if one["told"].get("name") == "viewport"]
    assert views and not re.search("user-scalable=no|maximum-scale", views[0])  # 1.4.4


def test_headings_go_down_one_level_at_a_time(elements) -> None:  # 1.3.1
    levels = [int(one["tag"][1]) for one in of(elements, "h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_everything_that_can_be_pressed_or_is_a_region_has_a_name(elements) -> None:  # 4.1.2
    for one in of(elements, "button", "a", "summary"):
        assert one["text"].strip() or one["told"].get("aria-label"), one
    for one in elements:
        if one["told"].get("role") in ("group", "region", "img"):
            assert one["told"].get("aria-label"), one
        if one["tag"] == "svg":
            assert one["told"].get("aria-hidden") == "true" or one["told"].get("aria-label"), one
    pressed = [one["told"].get("aria-pressed") for one in of(elements, "button") if "data-key" in one["told"]]
    assert pressed and set(pressed) == {"true"}


def test_every_figure_has_its_words_beside_it(elements) -> None:  # 1.1.1
    figures = [one for one in of(elements, "figure")]
    words = [one for one in of(elements, "details") if "figure" in one["in"]]
    assert len(figures) == len(words) > 5
    assert all(len(one["text"]) > 60 for one in words)


def test_names_are_unique_and_what_scrolls_can_be_reached_by_keyboard(elements) -> None:  # 4.1.1, 2.1.1
    ids = Counter(one["told"]["id"] for one in elements if "id" in one["told"])
    assert max(ids.values()) == 1
    scrolled = [one for one in elements if "scroll" in (one["told"].get("class") or "").split()]
    assert scrolled and all(one["told"].get("tabindex") == "0" for one in scrolled)
    assert all(int(one["told"]["tabindex"]) <= 0 for one in elements if "tabindex" in one["told"])


def test_cells_that_head_a_row_or_a_column_say_which(elements) -> None:  # 1.3.1
    heads = of(elements, "th")
    assert heads and all(one["told"].get("scope") in ("row", "col") for one in heads)


def luminance(colour: str) -> float:
    """WCAG 2.1, relative luminance of #rrggbb."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_black_on_white_has_the_contrast_that_the_rules_name() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("n", [2, 5, 9])
def test_words_and_lines_stand_out_from_their_paper(theme: str, n: int) -> None:
    colours = palette(n, n)[theme]
    for name in ("ink", "muted", "accent"):
        assert contrast(colours[name], colours["paper"]) >= 4.5, name  # 1.4.3
    for name, colour in colours.items():
        if name.startswith(("size", "budget")):
            assert contrast(colour, colours["paper"]) >= 3, (name, colour)  # 1.4.11
