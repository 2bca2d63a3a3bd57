"""Each figure of a report as PNG and PDF, drawn by a browser without a window: what a paper wants.

The page's own script draws one figure on a sheet of just its size; the browser prints it. Nothing is fetched.
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

from megatron.run_dir import written_whole
from megatron.scaling.plot import Figure
from megatron.scaling.report import chip_button, colour_rules, data_of, part, plotly_js

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FORMATS = ("png", "pdf")
WIDTH_PX = 640
LIMIT_S = 120.0
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
SHEET = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>$title</title>
<style>@page{size:${width}px ${height}px;margin:0}html,body{margin:0;background:#fff;color:#000}
body{font-family:system-ui,sans-serif}figure{margin:0}.modebar{display:none}
#plot-$key{width:${width}px;height:${drawn}px}
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
    """Write <folder>/<key>.png and .pdf of every figure, each whole or not at all. The paths.

    Raises FileNotFoundError without a browser, OSError where it draws nothing.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise FileNotFoundError(
            f"figures as files are drawn by a browser, and none of {', '.join(BROWSERS)} is installed; "
            "install chromium, or leave --figures out"
        )
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with tempfile.TemporaryDirectory(prefix="figures-") as name:
        scratch = Path(name)
        for figure in figures:
            page = scratch / f"{figure.key}.html"
            page.write_text(sheet(figure, colours, width_px), encoding="utf-8")
            for kind in FORMATS:
                made = scratch / f"{figure.key}.{kind}"
                _draw(browser, page, made, width_px, figure.height_px + legend_px(figure, width_px), scratch)
                out = folder / made.name
                with written_whole(out) as partial:
                    shutil.copyfile(made, partial)
                written.append(out)
    return written


def sheet(figure: Figure, colours: dict[str, dict[str, str]], width_px: int) -> str:
    """A page with nothing but the figure, and no larger."""
    legend = legend_px(figure, width_px)
    return SHEET.substitute(
        title=figure.key,
        key=figure.key,
        width=width_px,
        height=figure.height_px + legend,
        drawn=figure.height_px,
        legend=legend,
        chips="".join(chip_button(chip) for chip in figure.chips),
        colours=colour_rules(colours),
        figures=data_of([figure], colours),
        plotly=plotly_js(),
        script=part("page.js").replace('drawAll("light", 640)', "undefined"),
    )


def legend_px(figure: Figure, width_px: int) -> int:
    """How high the legend is: so many lines as its words fill, at about 7 px a letter and 44 px a mark."""
    if not figure.chips:
        return 0
    filled = sum(44 + 7 * len(chip.label) for chip in figure.chips)
    return 8 + 22 * math.ceil(1.15 * filled / width_px)


def _draw(browser: str, page: Path, made: Path, width_px: int, height_px: int, scratch: Path) -> None:
    """Let the browser draw the page into a file. A browser that hangs is ended with its helpers."""
    how = f"--screenshot={made}" if made.suffix == ".png" else f"--print-to-pdf={made}"
    command = [
        browser,
        *FLAGS,
        f"--user-data-dir={scratch / 'profile'}",
        f"--window-size={width_px},{height_px}",
        how,
        page.as_uri(),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not made.is_file() or not made.stat().st_size:
        raise OSError(
            f"{made.name}: {browser} drew nothing in {LIMIT_S:.0f} s; does it start here by itself?"
        )
