"""Report of a study: one self-contained HTML page."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from megatron.io import write_atomic
from megatron.laws.isoflop import split_budgets
from megatron.laws.law import Law
from megatron.report import frontier_text, headlines, page_answer, summary, verdict
from megatron.report.difference_text import render_differences
from megatron.report.figures import (
    plot_fit,
    plot_frontier,
    plot_isoflop,
    plot_law,
    plot_mixture,
    plot_repeat,
    plot_runs,
    plot_verdict,
)
from megatron.report.figures.plot import Chip, Figure, make_template, read_plotly_js
from megatron.report.markup import render_paragraph, render_powers, render_prose
from megatron.report.palette import make_palette
from megatron.report.study_data import AUTOREGRESSIVE, Study, read_study
from megatron.study.format import (
    NOT_KNOWN,
    OBJECTIVE_NAMES,
    format_constant,
    format_count,
    format_digits,
    format_duration,
    format_exponent,
    format_interval,
    format_loss,
    format_plural,
)
from megatron.study.table import STUDY, Row

WORD = ' class="word"'
DASH_ARRAY = {"solid": "", "dash": "5 3", "dot": "1 3"}
GREEK = {"alpha": "α", "beta": "β", "gamma": "γ"}


def write_report(study_dir: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a study atomically to `out` (default: `<study_dir>/report.html`).

    Raises FileNotFoundError if there is no such study.
    """
    study = read_study(study_dir)
    path = Path(out or study.folder / "report.html")
    text = render_page(study)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)
    return path


def render_page(study: Study) -> str:
    """Return the whole page as HTML."""
    figures = make_figures(study)
    # the blind figure belongs to the blind check at the top of the page
    leading = [figure for figure in figures if figure.key == "blind"]
    return render_html(
        kicker="Scaling study",
        title=summary.format_study_title(study),
        opening=_render_summary(study, "".join(map(_render_figure, leading))),
        leading=leading,
        figures=[figure for figure in figures if figure not in leading],
        colours=make_colours(study),
        sections=[
            _render_cautions(study),
            render_differences(study),
            _render_table(study),
            _render_reproduction(study),
        ],
        footer="Losses are in nats per token. ",
    )


def render_html(
    *,
    kicker: str,
    title: str,
    opening: str,
    figures: Sequence[Figure],
    colours: dict[str, dict[str, str]],
    sections: Sequence[str] = (),
    leading: Sequence[Figure] = (),
    footer: str = "",
) -> str:
    """Return a self-contained page.

    opening, sections  HTML before and after the figures
    leading            figures whose HTML is in `opening`
    """
    return Template(read_part("page.html")).substitute(
        kicker=escape(kicker),
        title=escape(title),
        colours=render_colours(colours),
        style=read_part("page.css"),
        opening=opening,
        sections="\n".join([_render_figures(figures), *sections]),
        footer=f"{footer}Drawn with plotly.js, which is inside this file.",
        figures=encode_figures([*leading, *figures], colours),
        plotly=read_plotly_js(),
        script=read_part("page.js"),
    )


def make_colours(study: Study) -> dict[str, dict[str, str]]:
    """Return the colours of all sizes, budgets (tokens or FLOPs) and domains, in both themes."""
    parabolas = plot_isoflop.fit_study_isoflop(study)
    slices = [row["C"] for row in frontier_text.select_frontier_points(study)]
    n_slices = len(split_budgets(np.array(slices))) if slices else 0
    n_budgets = len({point["D"] for point in plot_law.select_law_points(study)})
    # budgets of tokens and parabolas of FLOPs share the colours budget0.., so the larger number counts
    n_budgets = max(n_budgets, len(parabolas.parabolas) if parabolas else 0)
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
        plot_fit.profile_figure,
        plot_repeat.epochs_figure,
        plot_runs.objectives_figure,
        plot_repeat.crossover_figure,
        plot_repeat.downstream_figure,
        plot_mixture.mixture_figure,
    )
    return [figure for figure in (make(study) for make in makers) if figure is not None]


def encode_figures(figures: Sequence[Figure], colours: dict[str, dict[str, str]]) -> str:
    """Return figures and palette as the JSON that page.js reads, escaped for a script element."""
    entries = [{"key": figure.key, "data": figure.data, "layout": figure.layout} for figure in figures]
    return _encode_json({"figures": entries, "template": make_template(), "palette": colours})


def read_part(name: str) -> str:
    """Return one file of the page: its HTML template, style or script."""
    return (resources.files("megatron.report") / "page" / name).read_text(encoding="utf-8")


def _encode_json(value: Any) -> str:
    """Return JSON escaped for a script element. NaN and Inf, which JSON lacks, become null."""
    text = json.dumps(_replace_non_finite(value), separators=(",", ":"), allow_nan=False)
    # "<" is escaped, because "</script>" or "<!--" would end or change the script element
    return text.replace("<", "\\u003c")


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_non_finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(part) for part in value]
    if isinstance(value, float):  # includes numpy.float64
        # x - x is 0 for finite x and NaN otherwise
        return float(value) if value - value == 0 else None
    return value


def render_colours(colours: dict[str, dict[str, str]]) -> str:
    """Return the palette as CSS variables: dark on screens with a dark theme, else light, also in print."""
    extra = {"light": {"page": "#f6f7f9", "care": "#c77700"}, "dark": {"page": "#0f1218", "care": "#e5a13a"}}
    rules = {
        theme: ":root{" + "".join(f"--{key}:{value};" for key, value in (named | extra[theme]).items()) + "}"
        for theme, named in colours.items()
    }
    return f"{rules['light']}\n@media screen and (prefers-color-scheme: dark){{{rules['dark']}}}"


def _render_summary(study: Study, blind_figure: str = "") -> str:
    """Return all HTML before the figures: caveats, the blind check, the answer, the runs, the laws.

    If the frontier has the answer, parametric laws and the caveats about them come last.
    """
    blind = page_answer.render_blind(study, blind_figure)
    answer = page_answer.render_answer(study)
    trained = render_paragraph(
        " ".join(
            filter(
                None,
                (
                    summary.describe_training(study),
                    summary.describe_text(study),
                    summary.describe_best_run(study),
                ),
            )
        )
    )
    doubts = "".join(render_paragraph(line, "care") for line in summary.list_doubts(study))
    laws = list(study.laws.values()) or ([study.law] if study.law is not None else [])
    forms = "".join(map(_render_law, laws)) + render_paragraph(summary.describe_optima(study))
    if answer:
        return (
            f"{blind}{answer}<h2>What was trained</h2>{trained}{_render_tiles(study)}"
            f"<h2>Parametric forms</h2>{doubts}{forms}"
        )
    heading = "<h2>What was trained</h2>" if blind else ""
    return f"{doubts}{blind}{heading}{trained}{forms}\n{_render_tiles(study)}"


def _render_law(law: Law) -> str:
    """Return a law's formula, and its constants with intervals."""
    interval = law.interval or {}
    rows = []
    for name, value in law.params.items():
        inside = format_interval((interval.get("params") or {}).get(name), format_constant)
        ends = f" ({inside})" if inside else ""
        shown = "not identified" if name in law.not_identified else format_constant(value)
        rows.append(f"<div><dt>{GREEK.get(name, escape(name))}</dt><dd>{shown}{ends}</dd></div>")
    words = f"{format_plural(law.n_runs, 'run')}"
    if interval.get("n_bootstrap"):
        percent = f"{100 * interval.get('level', 0.95):.0f} %"
        words += f"; in brackets {percent} confidence intervals, {escape(interval.get('method', ''))}"
    of = OBJECTIVE_NAMES.get((law.filter or {}).get("objective", ""), "")
    formula = verdict.format_symbolic(law) if law.identified is False else law.formula()
    sound = verdict.is_sound(law)
    warning = "" if sound else f"This is {verdict.name_law(law)}: do not quote it. "
    return (
        f'<div class="law{"" if sound else " unsound"}"><span class="formula">{render_powers(formula)}</span>'
        f"<dl>{''.join(rows)}</dl><p>{warning}Held-out loss of the {of} models, N parameters, D tokens. "
        f"Fitted on {words}. {render_prose(verdict.describe_fit(law))}</p></div>"
    )


def _render_tiles(study: Study) -> str:
    """Return four key numbers of the study."""
    done = study.finished_rows()
    tiles = [(f"{len(done)} of {len(study.rows)}", "runs finished")]
    scored = study.finished_rows(AUTOREGRESSIVE) or done
    if scored:
        row = min(scored, key=lambda row: row["loss"])
        tiles.append(
            (
                format_loss(row["loss"]),
                f"lowest {headlines.name_loss(study, row)}, nats per token "
                f"({study.size_name(row['n_params'])})",
            )
        )
    tiles += _make_law_tiles(study)
    if done:
        spent = sum(row["train_flops"] or 0 for row in done)
        seconds = sum(row["wall_s"] or 0 for row in done)
        # steps shared with a trunk are counted in each branch, so the sum exceeds the compute spent
        branched = any(row.get("trunk") not in (None, "", row["run"]) for row in done)
        what = "trained, shared steps counted in each run" if branched else "spent on training"
        tiles.append((f"{format_exponent(spent)} FLOPs", f"{what}, {format_duration(seconds)} in all"))
    return (
        '<ul class="tiles">'
        + "".join(f"<li><b>{render_powers(a)}</b><span>{escape(b)}</span></li>" for a, b in tiles)
        + "</ul>"
    )


def _make_law_tiles(study: Study) -> list[tuple[str, str]]:
    """Return a tile with the growth of the compute-optimal size, or one that states that it is unknown."""
    law = study.law
    if frontier_text.has_answer(study):
        frontier = study.compute_law
        value, ends = frontier.params["size_exponent"], frontier.interval("size_exponent")
    elif study.compute_law is not None and (law is None or not verdict.is_sound(law)):
        return [("no law", "but a frontier that these runs do not identify")]
    elif law is None:
        return []
    elif not verdict.is_sound(law):
        return [("no law", f"but {verdict.name_law(law)}")]
    elif law.derived.get("a_exponent") is None:
        return []
    else:
        value, ends = law.derived["a_exponent"], ((law.interval or {}).get("derived") or {}).get("a_exponent")
    inside = format_interval(ends, "{:.2f}".format)
    return [(f"N ∝ C^{value:.2f}", f"compute-optimal size{f' ({inside})' if inside else ''}")]


def _render_figures(figures: Sequence[Figure]) -> str:
    if not figures:
        return "<h2>Figures</h2><p>No figures yet: no run has logged a loss.</p>"
    return "<h2>Figures</h2>" + "".join(_render_figure(figure) for figure in figures)


def _render_figure(figure: Figure) -> str:
    chips = "".join(render_chip(chip) for chip in figure.chips)
    return (
        f'<figure id="figure-{figure.key}"><h3>{render_prose(figure.title)}</h3>'
        f'<div class="chips" role="group" aria-label="Show or hide">{chips}</div>'
        f'<div class="plot" id="plot-{figure.key}" role="group" aria-label="{escape(figure.alt)}" '
        f'style="min-height:{figure.height_px}px"></div>'
        f"<figcaption>{render_prose(figure.caption)}</figcaption>"
        "<details><summary>Description of this figure</summary>"
        f"<p>{render_prose(figure.alt)}</p></details></figure>"
    )


def render_chip(chip: Chip) -> str:
    """Return a legend entry: a button with a coloured line or dot and a label, which toggles its traces."""
    stroke = chip.colour
    if chip.dash == "point":
        mark = f'<circle cx="11" cy="5" r="3.5" fill="none" stroke="{stroke}" stroke-width="1.5"/>'
    else:
        dashes = DASH_ARRAY.get(chip.dash, "")
        mark = f'<path d="M1 5h20" stroke="{stroke}" stroke-width="3" stroke-dasharray="{dashes}"/>'
    return (
        f'<button type="button" data-key="{escape(chip.key)}" aria-pressed="true">'
        f'<svg viewBox="0 0 22 10" aria-hidden="true">{mark}</svg>{escape(chip.label)}</button>'
    )


def _render_cautions(study: Study) -> str:
    cautions = summary.list_cautions(study)
    if not cautions:
        return ""
    return (
        '<h2>Read with care</h2><ul class="care">'
        + "".join(f"<li>{render_prose(line)}</li>" for line in cautions)
        + "</ul>"
    )


def _render_table(study: Study) -> str:
    """Return the table of all runs, with a note below each run that has a problem."""
    heads = ("run", "size", "N", "D", "epochs", "FLOPs", "held-out loss", "time", "status")
    head = "".join(f'<th scope="col"{WORD if name == "size" else ""}>{name}</th>' for name in heads)
    body = "".join(_render_row(study, row, len(heads)) for row in study.rows)
    return (
        '<h2>Runs</h2><p class="small">N: parameters, tied embedding once. D: training tokens. '
        "FLOPs: every matrix product, forward and backward. Loss: nats per token ± standard error.</p>"
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of runs"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _render_row(study: Study, row: Row, n_columns: int) -> str:
    colour = f"size{study.sizes().index(row['n_params'])}" if row["n_params"] else "muted"
    numbers = (
        format_count(row["n_params"], 3),
        format_count(row["train_tokens"], 3),
        NOT_KNOWN if row["epochs"] is None else format_digits(row["epochs"], 2),
        format_exponent(row["train_flops"]),
        format_loss(row["loss"], row["loss_se"]),
        format_duration(row["wall_s"]),
    )
    cells = "".join(f"<td>{number}</td>" for number in numbers)
    note = f"<span>{escape(row['note'])}</span>" if row["note"] else ""
    return (
        f'<tr><th scope="row"><i class="swatch" style="background:var(--{colour})"></i>'
        f"{escape(row['run'])}</th>"
        f'<td class="word">{escape(str(row["size"] or NOT_KNOWN))}</td>{cells}'
        f'<td><span class="status {row["status"]}">{row["status"]}</span>'
        f"{' held out' if row.get('held_out') else ''}</td></tr>"
    ) + (f'<tr class="note"><td colspan="{n_columns}">{note}</td></tr>' if note else "")


def _render_reproduction(study: Study) -> str:
    """Return the commands that reproduce the study, and its software, hardware and seeds."""
    folder = escape(str(study.folder))
    study_file = f"{folder}/{STUDY}" if (study.folder / STUDY).is_file() else "STUDY.yaml"
    fits = [
        f"python tools/fit_law.py {folder}/table.csv --objective {objective} --form {law.form} "
        f"--out {folder}/{'law' if law is study.law else f'law_{objective}'}.json"
        for objective, law in study.laws.items()
    ]
    commands = (
        f"python tools/sweep.py {study_file}  # trains the missing runs",
        f"python tools/collect.py {folder}",
        *(fits or [f"python tools/fit_law.py {folder}/table.csv --out {folder}/law.json"]),
        f"python tools/make_report.py {folder}",
    )
    facts = [
        (name, _join_distinct(result.get(key) for result in study.results))
        for name, key in (("hardware", "hardware"), ("torch", "torch"), ("code (git)", "git"))
    ]
    seeds = _join_distinct(row["seed"] for row in study.finished_rows())
    facts += [
        ("seeds", seeds),
        ("sequence length", _join_distinct(row["seq_len"] for row in study.finished_rows())),
    ]
    if study.law is not None and (study.law.table or {}).get("sha256"):
        facts.append(("table fitted, sha256", study.law.table["sha256"]))
    listed = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts if value)
    code = "\n".join(commands)
    return (
        f'<h2>How to reproduce this study</h2><pre><code>{code}</code></pre><dl class="facts">{listed}</dl>'
    )


def _join_distinct(values: Iterable[Any]) -> str:
    """Return the distinct values, in order of their first occurrence."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))
