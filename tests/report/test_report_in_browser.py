"""The page in a browser without a network. Skipped without Chromium."""

import os
import re
import runpy
import shutil
import signal
import struct
import subprocess
import zlib
from collections import Counter
from dataclasses import dataclass
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron.report.palette import make_palette
from megatron.report.report import write_report

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--enable-logging=stderr",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=20000",
    "--dump-dom",
)
LIMIT_S = 300
PHONE_PX = 360
N_TRACES = {
    "curves": 42,
    "compute": 44,
    "prediction": 16,
    "residuals": 45,  # 15 runs in 3 panels
    "size": 18,
    "contours": 16,  # 15 runs and the optimum; contour lines are not traces
    "optimum": 12,  # 6, and 3 published laws in 2 panels
    "pairs": 8,  # a cloud and a cross in 4 panels
    "epochs": 7,  # 5 sizes autoregressive, 2 diffusion
    "objectives": 4,
}

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)} is installed"
)
synthetic = runpy.run_path(str(Path(__file__).with_name("synthetic_study.py")))


@dataclass
class Visit:
    """Result of loading a page in a browser."""

    dom: str
    log: str
    screenshot: Path
    theme: str


def visit_page(
    page: Path, folder: Path, width: int = 1280, height: int = 6000, theme: str = "light"
) -> Visit:
    """Open a page from file:// with every host unreachable."""
    picture = folder / "page.png"
    command = [
        BROWSER,
        *FLAGS,
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},{height}",
        f"--screenshot={picture}",
        f"--blink-settings=preferredColorScheme={int(theme == 'light')}",
        page.as_uri(),
    ]
    out, err = folder / "dom.html", folder / "log.txt"
    with out.open("wb") as dom, err.open("wb") as log:
        browser = subprocess.Popen(command, stdout=dom, stderr=log, start_new_session=True)
        try:
            browser.wait(LIMIT_S)
        finally:
            if browser.poll() is None:
                os.killpg(browser.pid, signal.SIGKILL)  # includes its helper processes
                browser.wait()
    return Visit(out.read_text(errors="replace"), err.read_text(errors="replace"), picture, theme)


class Drawn(HTMLParser):
    """Parser that counts the traces with a non-empty path in each figure."""

    def __init__(self, dom: str) -> None:
        super().__init__()
        self.traces: dict[str, int] = {}
        self._figure, self._depth, self._trace = "", 0, False
        self.feed(dom)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "figure":
            self._figure = given["id"].removeprefix("figure-")
            self.traces[self._figure] = 0
        elif self._figure and "trace" in given.get("class", "").split():
            self._trace = True
        elif tag == "path" and self._trace and re.match(r"M\S+[LHVACZ]|M.*[LHVACZ]", given.get("d", "")):
            self.traces[self._figure] += 1
            self._trace = False

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag == "figure":
            self._figure = ""


def read_pixels(path: Path) -> list[bytes]:
    """Return the rows of an 8-bit RGB or RGBA PNG, unfiltered (PNG specification, chapter 9)."""
    data, at, packed = path.read_bytes(), 8, b""
    while at < len(data):
        (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, _, depth, colours = struct.unpack(">IIBB", body[:10])
        if kind == b"IDAT":
            packed += body
        at += 12 + length
    assert depth == 8 and colours in (2, 6)
    n = 3 if colours == 2 else 4
    raw, above, rows = zlib.decompress(packed), bytes(width * n), []
    for start in range(0, len(raw), width * n + 1):
        above = unfilter_row(raw[start], bytearray(raw[start + 1 : start + 1 + width * n]), above, n)
        rows.append(above)
    return rows


def unfilter_row(kind: int, row: bytearray, above: bytes, n: int) -> bytes:
    """Undo the filter of one row of a PNG."""
    for i in range(len(row)) if kind else ():
        left, up, corner = (row[i - n], above[i], above[i - n]) if i >= n else (0, above[i], 0)
        guess = left + up - corner
        nearest = min((left, up, corner), key=lambda value, guess=guess: abs(guess - value))
        row[i] = (row[i] + (0, left, up, (left + up) // 2, nearest)[kind]) & 255
    return bytes(row)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    return write_report(synthetic["write_study"](tmp_path_factory.mktemp("study")))


@pytest.fixture(scope="module", params=["light", "dark"])
def visited(request, page, tmp_path_factory) -> Visit:
    return visit_page(
        page, tmp_path_factory.mktemp(request.param), width=800, height=1600, theme=request.param
    )


def test_every_trace_of_every_figure_is_drawn(visited):
    assert f'data-drawn="{len(N_TRACES)}"' in visited.dom
    assert Drawn(visited.dom).traces == N_TRACES


def test_the_browser_logs_no_message_and_loads_nothing(visited):
    assert not [line for line in visited.log.splitlines() if "CONSOLE" in line]
    assert not re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="https?:[^"]*', visited.dom)


def test_the_colour_of_every_size_is_in_the_picture(visited):
    rows = read_pixels(visited.screenshot)
    n = len(rows[0]) // 800
    seen = Counter(row[i : i + 3] for row in rows for i in range(0, len(row), n))
    colours = make_palette(5, 3)[visited.theme]
    # the mark in the legend has 40 pixels, so more than 100 are in the figure
    assert all(seen[bytes.fromhex(colours[f"size{i}"][1:])] > 100 for i in range(5))


def test_the_page_follows_the_theme(page, tmp_path):
    for theme, paper in (("light", range(200, 256)), ("dark", range(60))):
        (tmp_path / theme).mkdir()
        visited = visit_page(page, tmp_path / theme, width=600, height=200, theme=theme)
        assert read_pixels(visited.screenshot)[0][0] in paper


def watch_page(page: Path, folder: Path, action: str) -> Visit:
    """Open the page in a frame as wide as a phone and, once it is drawn, run `action` on (root, report)."""
    script = f"""
    const frame = document.querySelector("iframe");
    const report = (text) => {{ document.body.dataset.result = text; }};
    const look = () => {{
      const root = frame.contentDocument?.documentElement;  // null before the frame starts loading
      if (!root?.dataset.drawn) return setTimeout(look, 100);
      {action}
    }};
    look();
    """
    style = f"width:{PHONE_PX}px;height:700px;border:0"
    frame = f'<iframe style="{style}" srcdoc="{escape(page.read_text())}"></iframe>'
    wrapper = folder / "phone.html"
    wrapper.write_text(f'<!doctype html><meta charset="utf-8"><body>{frame}<script>{script}</script></body>')
    return visit_page(wrapper, folder, height=800)


def test_nothing_is_wider_than_a_phone(page, tmp_path):
    seen = watch_page(page, tmp_path, "report(`${root.clientWidth} ${root.scrollWidth}`);")
    inside, needed = re.search(r'data-result="(\d+) (\d+)"', seen.dom).groups()
    assert int(needed) <= int(inside) <= PHONE_PX


def test_pressing_a_size_in_the_legend_hides_its_runs_and_shows_them_again(page, tmp_path):
    action = """
    const count = () => root.querySelectorAll("#plot-curves .trace").length;
    const chip = root.querySelector("#figure-curves .chips button");
    const before = count();
    chip.click();
    setTimeout(() => {
      const between = `${count()} ${chip.getAttribute("aria-pressed")}`;
      chip.click();
      setTimeout(() => report(`${before} ${between} ${count()}`), 500);
    }, 500);
    """
    seen = watch_page(page, tmp_path, action)
    assert (
        'data-result="42 36 false 42"' in seen.dom
    )  # the smallest size has 3 runs, each with a line and points
