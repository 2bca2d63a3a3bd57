"""Export of report figures as PNG and PDF for papers, rendered by a headless browser.

The page's script draws one figure on a sheet of its size, and the browser prints the sheet. Nothing is
downloaded.
"""

import math
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from string import Template

from megatron.io import atomic_path
from megatron.report.figures.plot import Figure, read_plotly_js
from megatron.report.report import encode_figures, read_part, render_chip, render_colours

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FORMATS = ("png", "pdf")
WIDTH_PX = 640
TIMEOUT_S = 120.0
# Nothing may depend on the network, the user's profile or the theme of the desktop: no host resolves, the
# profile is temporary, the colour scheme 1 is light. Virtual time (ms) fast-forwards the timers of the page.
# The scale factor gives a PNG 2 pixels per CSS px.
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=20000",
    "--blink-settings=preferredColorScheme=1",
    "--force-device-scale-factor=2",
    "--no-pdf-header-footer",
)
# The page has the size of the sheet and no margin, so that the PDF is one page without a border.
SHEET = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>$title</title>
<style>@page{size:${width}px ${height}px;margin:0}html,body{margin:0;background:#fff;color:#000}
body{font-family:system-ui,sans-serif}figure{margin:0}.modebar{display:none}
#plot-$key{width:${width}px;height:${plot}px}
.chips{box-sizing:border-box;height:${legend}px;padding:6px 8px 0;overflow:hidden}
.chips button{border:0;background:none;font:12px system-ui,sans-serif;padding:2px 6px;color:#000}
.chips svg{width:22px;height:10px;margin-right:4px}
$colours</style>
</head><body><figure id="figure-$key"><div class="chips">$chips</div><div id="plot-$key"></div></figure>
<script type="application/json" id="figures">$figures</script>
<script>$plotly</script><script>$script</script></body></html>
""")


def export_figures(
    figures: Sequence[Figure], colours: dict[str, dict[str, str]], folder: Path, width_px: int = WIDTH_PX
) -> list[Path]:
    """Write <folder>/<key>.png and .pdf of every figure, each atomically, and return the paths.

    Raises FileNotFoundError without a browser, and OSError if the browser produces no file.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise FileNotFoundError(
            f"--figures: got no browser, expected one of {', '.join(BROWSERS)} in PATH. "
            "Install chromium, or omit --figures."
        )
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with tempfile.TemporaryDirectory(prefix="figures-") as name:
        scratch = Path(name)
        for figure in figures:
            page = scratch / f"{figure.key}.html"
            page.write_text(render_sheet(figure, colours, width_px), encoding="utf-8")
            for kind in FORMATS:
                scratch_file = scratch / f"{figure.key}.{kind}"
                _run_browser(
                    browser,
                    page,
                    scratch_file,
                    width_px,
                    figure.height_px + legend_height_px(figure, width_px),
                    scratch,
                )
                out = folder / scratch_file.name
                # rendered to scratch and then renamed, so that an interrupted export leaves no partial file
                with atomic_path(out) as partial:
                    shutil.copyfile(scratch_file, partial)
                written.append(out)
    return written


def render_sheet(figure: Figure, colours: dict[str, dict[str, str]], width_px: int) -> str:
    """Return a page that contains only the figure and has its size."""
    legend = legend_height_px(figure, width_px)
    return SHEET.substitute(
        title=figure.key,
        key=figure.key,
        width=width_px,
        height=figure.height_px + legend,
        plot=figure.height_px,
        legend=legend,
        chips="".join(render_chip(chip) for chip in figure.chips),
        colours=render_colours(colours),
        figures=encode_figures([figure], colours),
        plotly=read_plotly_js(),
        # the replaced call is the print handler of page.js, which would fix the width to that of a report
        script=read_part("page.js").replace('drawAll("light", 640)', "undefined"),
    )


def legend_height_px(figure: Figure, width_px: int) -> int:
    """Return the height of the legend in px, at about 7 px per letter and 44 px per mark."""
    if not figure.chips:
        return 0
    # Example: 8 entries of 10 letters are 8 (44 + 70) = 912 px. At a width of 640 px that is ceil(1.15 x 912
    # / 640) = 2 lines, 52 px.
    filled = sum(44 + 7 * len(chip.label) for chip in figure.chips)
    # 1.15: words wrap at the end of a line, so lines are not filled completely
    return 8 + 22 * math.ceil(1.15 * filled / width_px)


def _run_browser(
    browser: str, page: Path, target: Path, width_px: int, height_px: int, scratch: Path
) -> None:
    """Render the page into a file. A browser that exceeds TIMEOUT_S is killed with its helper processes."""
    how = f"--screenshot={target}" if target.suffix == ".png" else f"--print-to-pdf={target}"
    command = [
        browser,
        *FLAGS,
        # a profile in use by another browser would make this one hand the page over to it and exit
        f"--user-data-dir={scratch / 'profile'}",
        f"--window-size={width_px},{height_px}",
        how,
        page.as_uri(),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    # the browser is the leader of its session, so one killpg also ends its helper processes
    try:
        process.wait(TIMEOUT_S)
    # the file may be complete although the browser hangs at its exit
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    # only the file counts, not the browser's exit status
    if not target.is_file() or not target.stat().st_size:
        raise OSError(
            f"{target.name}: got no output from {browser} in {TIMEOUT_S:.0f} s, expected a file. Check that "
            "the browser starts on this machine."
        )
