"""The page in a browser without a network. Skipped without Chromium."""

import json
import os
import re
import shutil
import signal
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from megatron.report.report import render_page
from tests.report.frontier_study import LAW, RUNS, make_forecast, make_study

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-extensions", "--disable-sync", "--enable-logging=stderr",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000", "--dump-dom",
)  # fmt: skip
LIMIT_S = 300
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)} is installed"),
    pytest.mark.slow,
]


def visit_page(page: Path, folder: Path, theme: str) -> tuple[str, str]:
    """Open a page from file:// with every host unreachable. Return its DOM and the log."""
    profile = f"--user-data-dir={folder / 'profile'}"
    colours = f"--blink-settings=preferredColorScheme={int(theme == 'light')}"
    command = [BROWSER, *FLAGS, profile, "--window-size=1400,1000", colours, page.as_uri()]
    out, err = folder / "dom.html", folder / "log.txt"
    with out.open("wb") as dom, err.open("wb") as log:
        browser = subprocess.Popen(command, stdout=dom, stderr=log, start_new_session=True)
        try:
            browser.wait(LIMIT_S)
        finally:
            if browser.poll() is None:
                os.killpg(browser.pid, signal.SIGKILL)  # includes its helper processes
                browser.wait()
    return out.read_text(errors="replace"), err.read_text(errors="replace")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    forecast = make_forecast(LAW, observed=2.9)
    path.write_text(render_page(make_study(RUNS, frontier=LAW, forecasts=forecast)))
    return path


def watch_page(
    page: Path, folder: Path, action: str, width: int, height: int, theme: str = "light"
) -> tuple[Any, str, str]:
    """Open the page in a frame of this size and, once it is drawn, run `action` on (root, report).

    Return what it reports, the DOM and the log.
    """
    script = f"""
    const frame = document.querySelector("iframe");
    const report = (value) => {{ document.body.dataset.result = JSON.stringify(value); }};
    const look = () => {{
      const root = frame.contentDocument?.documentElement;  // null before the frame starts loading
      if (!root?.dataset.drawn) return setTimeout(look, 100);
      {action}
    }};
    look();
    """
    style = f"width:{width}px;height:{height}px;border:0"
    frame = f'<iframe style="{style}" srcdoc="{escape(page.read_text())}"></iframe>'
    wrapper = folder / "frame.html"
    wrapper.write_text(f'<!doctype html><meta charset="utf-8"><body>{frame}<script>{script}</script></body>')
    dom, log = visit_page(wrapper, folder, theme)
    return json.loads(unescape(re.search(r'data-result="([^"]*)"', dom)[1])), dom, log


MEASURE = """
const box = (selector) => root.querySelector(selector).getBoundingClientRect();
const traces = [...root.querySelectorAll(".plot")].map((plot) => plot.querySelectorAll(".trace").length);
report({
  drawn: root.dataset.drawn, traces, wide: root.scrollWidth, width: root.clientWidth,
  check: box(".check").bottom, figure: box("#plot-isoflop").bottom, top: box("#plot-isoflop").top,
  colour: getComputedStyle(root.querySelector("body")).backgroundColor,
  text: root.querySelector("#plot-isoflop .xtitle").style.fill,
});
"""


def test_the_first_screen_is_the_answer_with_the_figure_beside_it(page: Path, tmp_path: Path) -> None:
    seen, dom, log = watch_page(page, tmp_path, MEASURE, 1280, 800)
    assert seen["drawn"] == "2" and seen["check"] < 800 and seen["figure"] < 800
    # isoFLOP: 5 budgets of line, runs and minimum, and the next one; frontier: 2 panels, 2 forecasts
    assert seen["traces"] == [17, 8]
    assert not [line for line in log.splitlines() if "CONSOLE" in line]
    assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?:[^"]*', dom)


def test_on_a_phone_the_answer_is_first_and_nothing_is_cut_off_in_either_theme(
    page: Path, tmp_path: Path
) -> None:
    light, dark = (watch_page(page, tmp_path, MEASURE, 390, 844, theme)[0] for theme in ("light", "dark"))
    assert light["wide"] <= light["width"] <= 390
    assert light["check"] < 844 and light["top"] < 844
    assert (light["colour"], dark["colour"]) == ("rgb(246, 247, 249)", "rgb(15, 18, 24)")
    assert (light["text"], dark["text"]) == ("rgb(29, 35, 48)", "rgb(232, 234, 240)")
