"""Report of a study: one self-contained HTML page, and its figures as files."""

import base64
import gzip
import re
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megatron.io import replace_nonfinite, write_atomic, write_atomic_bytes, write_json
from megatron.report import plot_compare, plot_frontier, plot_runs, tables
from megatron.report.answer import Answer, make_answer
from megatron.report.plot import Figure, make_template, read_plotly_js
from megatron.report.study_data import Study, read_study
from megatron.study.price import Tariff

MAX_IN_SIGHT, MAX_FIGURES = 4, 8
FORMATS = ("png", "pdf", "svg")
WIDTH_PX, SCALE = 640, 2  # width of exported figures, and pixels of a PNG per px
MAKERS = (
    plot_frontier.isoflop_figure,
    plot_compare.objectives_figure,
    plot_frontier.frontier_figure,
    plot_compare.crossover_figure,
    plot_runs.epochs_figure,
    plot_compare.scores_figure,
    plot_compare.downstream_figure,
    plot_compare.answer_figure,
    plot_runs.mixture_figure,
    plot_runs.context_figure,
    plot_runs.compute_figure,
    plot_runs.curves_figure,
    plot_runs.size_figure,
    plot_runs.residual_figure,
)


def write_report(study_dir: str | Path, out: str | Path | None = None, tariff: Tariff | None = None) -> Path:
    """Write the page of a study atomically to `out` (default: `<study_dir>/report.html`).

    tariff  price and power of a device, for the cost on the page; default:
            power limits of listed GPUs

    Raises FileNotFoundError if there is no such study.
    """
    study = read_study(study_dir)
    path = Path(out or study.folder / "report.html")
    text = render_page(study, tariff)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)
    return path


def make_figures(study: Study) -> list[Figure]:
    """Return the figures that this study has data for, in the page's order."""
    return [figure for figure in (make(study) for make in MAKERS) if figure is not None]


def render_page(study: Study, tariff: Tariff | None = None) -> str:
    """Return the whole page as HTML; `tariff` is as in `write_report`."""
    answer = make_answer(study)
    # False before True: results first, in the page's order
    figures = sorted(make_figures(study), key=lambda figure: figure.is_diagnostic)
    n_results = sum(not figure.is_diagnostic for figure in figures)
    n_in_sight = min(n_results, MAX_IN_SIGHT)
    n_more = max(len(figures) - MAX_FIGURES, 0)
    return render_template(
        kicker="Scaling study",
        title=study.title,
        answer=answer,
        figures=figures[:n_in_sight],
        folded=figures[n_in_sight:MAX_FIGURES],
        n_more=n_more,
        results=tables.list_results(study, answer.optima),
        laws=tables.list_laws(study),
        differences=tables.list_differences(study),
        reading=study.reading,
        runs=tables.tabulate_runs(study),
        notes=study.warnings,
        facts=tables.list_facts(study, tariff),
        commands=tables.list_commands(study),
        **embed_figures(figures[:MAX_FIGURES]),
    )


def render_figure_page(kicker: str, title: str, verdict: str, figures: Sequence[Figure]) -> str:
    """Return a page with a sentence and figures."""
    parts = (
        "folded",
        "n_more",
        "results",
        "laws",
        "differences",
        "runs",
        "notes",
        "facts",
        "commands",
        "reading",
    )
    content = dict.fromkeys(parts, ()) | embed_figures(figures)
    content |= {"kicker": kicker, "title": title, "answer": Answer(verdict), "figures": figures}
    return render_template(**content)


def embed_figures(figures: Sequence[Figure]) -> dict[str, Any]:
    """Return the figures and plotly.js as the template embeds them."""
    payload = {"figures": [figure.content for figure in figures], "template": make_template()}
    # JSON lacks NaN and Inf, which become null
    return {"payload": replace_nonfinite(payload), "plotly_js": compress_plotly()}


@cache
def compress_plotly() -> str:
    """Return plotly.js as base64 of gzip, 1.9 MB instead of 4.8.

    The browser decompresses it.
    """
    # no time stamp: equal input gives an equal page
    return base64.b64encode(gzip.compress(read_plotly_js().encode(), mtime=0)).decode()


def render_template(**content: Any) -> str:
    """Return page.html with its content. All text is escaped.

    A name that is missing raises an error.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined  # slow import

    environment = Environment(
        loader=PackageLoader("megatron.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["units"] = join_units
    # tojson escapes <, > and &, because "</script>" or "<!--" would end or change
    # a script element
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.get_template("page.html").render(content)


def join_units(text: str) -> str:
    """Return text with non-breaking spaces before a unit and around ±."""
    return re.sub(r" (?=%|FLOPs|±)|(?<=±) ", "\xa0", text)


def export_figures(figures: Sequence[Figure], folder: Path, command: str) -> list[Path]:
    """Write <folder>/<key>.png, .pdf, .svg and .json of every figure, each atomically, and return the paths.

    command  the command line that makes the files, stored in the .json

    Raises FileNotFoundError without kaleido or a browser.
    """
    written = []
    with tempfile.TemporaryDirectory(prefix="figures-") as name:
        drafts = draw_files(figures, Path(name))
        folder.mkdir(parents=True, exist_ok=True)
        for draft in drafts:
            write_atomic_bytes(folder / draft.name, draft.read_bytes())
            written.append(folder / draft.name)
    for figure in figures:
        path = folder / f"{figure.key}.json"
        texts = {"title": figure.title, "caption": figure.caption, "command": command}
        write_json(path, replace_nonfinite(texts | {"traces": figure.content["data"]}))
        written.append(path)
    return written


def draw_files(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """Draw each figure in each of FORMATS to <folder>/<key>.<format> with one browser, on white."""
    try:
        import kaleido
        from choreographer.browsers.chromium import ChromeNotFoundError
    except ImportError as error:
        raise FileNotFoundError(
            "--figures: got no package kaleido. Install it with pip install kaleido, or omit --figures."
        ) from error
    sheets = []
    for figure in figures:
        chart = type(figure.chart)(figure.chart).update_layout(width=WIDTH_PX, paper_bgcolor="#fff")
        for kind in FORMATS:
            options = {"format": kind, "scale": SCALE}
            sheets.append({"fig": chart, "path": folder / f"{figure.key}.{kind}", "opts": options})
    try:
        # mathjax would be downloaded
        errors = kaleido.write_fig_from_object_sync(sheets, kopts={"mathjax": False, "timeout": 120.0})
    except ChromeNotFoundError as error:
        raise FileNotFoundError(
            "--figures: got no browser, expected chromium. Install chromium, or omit --figures."
        ) from error
    paths = [sheet["path"] for sheet in sheets]
    missing = [path.name for path in paths if not path.is_file() or not path.stat().st_size]
    if missing:
        reason = str(next(iter(errors or ()), "no reason")).splitlines()[0]
        raise OSError(f"{missing[0]}: got no output from the browser ({reason}). Check that chromium starts.")
    return paths
