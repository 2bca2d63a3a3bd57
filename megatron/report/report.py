"""Report of a study: one self-contained HTML page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.io import replace_nonfinite, write_atomic
from megatron.laws.isoflop import split_budgets
from megatron.report import frontier_text, page_content, summary
from megatron.report.difference_text import list_differences
from megatron.report.figures import (
    plot_downstream,
    plot_fit,
    plot_frontier,
    plot_isoflop,
    plot_law,
    plot_measured,
    plot_mixture,
    plot_repeat,
    plot_runs,
    plot_verdict,
)
from megatron.report.figures.plot import Figure, make_template, read_plotly_js
from megatron.report.palette import make_palette
from megatron.report.study_data import Study, read_study
from megatron.report.templating import render_template
from megatron.study.tariff import Tariff


def write_report(study_dir: str | Path, out: str | Path | None = None, tariff: Tariff | None = None) -> Path:
    """Write the page of a study atomically to `out` (default: `<study_dir>/report.html`).

    tariff   price and power of a device, for the cost on the page; default: power limits of listed GPUs

    Raises FileNotFoundError if there is no such study.
    """
    study = read_study(study_dir)
    path = Path(out or study.folder / "report.html")
    text = render_page(study, tariff)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)
    return path


def render_page(study: Study, tariff: Tariff | None = None) -> str:
    """Return the whole page as HTML; the tariff is that of `write_report`."""
    figures = make_figures(study)
    # the blind figure belongs to the blind check at the top of the page
    leading = [figure for figure in figures if figure.key == "blind"]
    others = [figure for figure in figures if figure not in leading]
    return render_template(
        "study.html",
        kicker="Scaling study",
        title=summary.format_study_title(study),
        leading=leading,
        differences=list_differences(study),
        **page_content.collect_summary(study),
        **page_content.collect_sections(study, tariff),
        **collect_figures(others, make_colours(study), leading),
    )


def render_summary(study: Study) -> str:
    """Return the part of the page before the figures as HTML, without the blind figure."""
    return render_template("summary.html", leading=[], **page_content.collect_summary(study))


def render_figure_page(
    kicker: str, title: str, opening: str, figures: Sequence[Figure], colours: dict[str, dict[str, str]]
) -> str:
    """Return a page with one paragraph, `opening`, and figures."""
    content = collect_figures(figures, colours)
    return render_template("page.html", kicker=kicker, title=title, opening=opening, **content)


def collect_figures(
    figures: Sequence[Figure], colours: dict[str, dict[str, str]], leading: Sequence[Figure] = ()
) -> dict[str, Any]:
    """Return the content of page.html for figures in its middle and, drawn by other templates, `leading`."""
    charts = [
        {"key": figure.key, "data": figure.data, "layout": figure.layout} for figure in (*leading, *figures)
    ]
    payload = {"figures": charts, "template": make_template(), "palette": colours}
    return {
        "figures": figures,
        # JSON lacks NaN and Inf, which become null
        "payload": replace_nonfinite(payload),
        "plotly_js": read_plotly_js(),
    }


def make_colours(study: Study) -> dict[str, dict[str, str]]:
    """Return the colours of all sizes, budgets (tokens or FLOPs) and domains, in both themes."""
    parabolas = plot_isoflop.fit_study_isoflop(study)
    slices = [row.C for row in frontier_text.select_frontier_points(study)]
    n_slices = len(split_budgets(np.array(slices))) if slices else 0
    n_budgets = len({point.D for point in plot_law.select_law_points(study)})
    # budgets of tokens and parabolas of FLOPs share the colours budget0.., so the larger number counts
    n_budgets = max(n_budgets, len(parabolas.parabolas) if parabolas else 0)
    n_budgets = max(n_budgets, len(plot_measured.list_texts(study)))
    n_domains = len(plot_mixture.select_domains(plot_mixture.read_weights(study)))
    return make_palette(len(study.sizes()), n_budgets, n_domains, n_slices)


def make_figures(study: Study) -> list[Figure]:
    """Return the figures that this study has data for, in the page's order."""
    makers = (
        plot_frontier.blind_figure,
        plot_frontier.slices_figure,
        plot_frontier.frontier_figure,
        plot_runs.curves_figure,
        plot_runs.compute_figure,
        plot_isoflop.isoflop_figure,
        plot_verdict.misfit_figure,
        plot_verdict.intervals_figure,
        plot_law.prediction_figure,
        plot_fit.held_out_figure,
        plot_fit.residual_figure,
        plot_law.size_figure,
        plot_isoflop.contour_figure,
        plot_law.optimum_figure,
        plot_fit.pairs_figure,
        plot_repeat.epochs_figure,
        plot_runs.objectives_figure,
        plot_measured.measured_figure,
        plot_repeat.crossover_figure,
        plot_downstream.score_compute_figure,
        plot_repeat.downstream_figure,
        plot_mixture.mixture_figure,
    )
    return [figure for figure in (make(study) for make in makers) if figure is not None]
