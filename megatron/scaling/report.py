"""The report of a study: one HTML page that opens with no network."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from megatron.run_dir import write_whole
from megatron.scaling import (
    frontier_words,
    headlines,
    page_answer,
    plot_fit,
    plot_frontier,
    plot_isoflop,
    plot_law,
    plot_mixture,
    plot_repeat,
    plot_runs,
    plot_verdict,
    summary,
    verdict,
    wording,
)  # fmt: skip
from megatron.scaling.difference_words import differences_section
from megatron.scaling.isoflop import budgets
from megatron.scaling.law import Law
from megatron.scaling.markup import paragraph, prose, raised
from megatron.scaling.palette import palette
from megatron.scaling.plot import Chip, Figure
from megatron.scaling.study import AUTOREGRESSIVE, Study, read_study
from megatron.scaling.table import STUDY, Row

WORD = ' class="word"'
DASH_ARRAY = {"solid": "", "dash": "5 3", "dot": "1 3"}
GREEK = {"alpha": "α", "beta": "β", "gamma": "γ"}


def write_report(study_dir: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a study, whole or not at all, to `out` (default: `<study_dir>/report.html`).

    Raises FileNotFoundError if there is no such study.
    """
    study = read_study(study_dir)
    path = Path(out or study.folder / "report.html")
    text = page(study)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    return path


def page(study: Study) -> str:
    """The whole page as text."""
    figures = figures_of(study)
    leading = [figure for figure in figures if figure.key == "blind"]
    return html_page(
        kicker="Scaling study",
        title=summary.title(study),
        opening=_summary(study, "".join(map(_figure, leading))),
        leading=leading,
        figures=[figure for figure in figures if figure not in leading],
        colours=colours_of(study),
        sections=[_care(study), differences_section(study), _table(study), _again(study)],
        footer="Losses are in nats per token. ",
    )


def html_page(
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
    """A page that opens with no network. `opening` and `sections`: markup before and after the figures.

    `leading`: figures whose markup is in `opening`.
    """
    return Template(part("page.html")).substitute(
        kicker=escape(kicker),
        title=escape(title),
        colours=colour_rules(colours),
        style=part("page.css"),
        opening=opening,
        sections="\n".join([_figure_section(figures), *sections]),
        footer=f"{footer}Drawn with plotly.js, which is inside this file.",
        figures=data_of([*leading, *figures], colours),
        plotly=plotly_js(),
        script=part("page.js"),
    )


def colours_of(study: Study) -> dict[str, dict[str, str]]:
    """A colour for every size and every budget, of tokens or of FLOPs, in both themes."""
    parabolas = plot_isoflop.isoflop_of(study)
    slices = [row["C"] for row in frontier_words.frontier_points(study)]
    n_slices = len(budgets(np.array(slices))) if slices else 0
    n_budgets = len({point["D"] for point in plot_law.law_points(study)})
    n_budgets = max(n_budgets, len(parabolas.parabolas) if parabolas else 0)
    n_domains = len(plot_mixture.domains_shown(plot_mixture.weights_over_time(study)))
    return palette(len(study.sizes()), n_budgets, n_domains, n_slices)


def figures_of(study: Study) -> list[Figure]:
    """The figures that this study has enough for, in the page's order."""
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


def data_of(figures: Sequence[Figure], colours: dict[str, dict[str, str]]) -> str:
    """Figures and palette as page.js wants them: JSON that may stand inside a script element."""
    drawn = [{"key": f.key, "data": f.data, "layout": f.layout, "height_px": f.height_px} for f in figures]
    return _json({"figures": drawn, "palette": colours})


def plotly_js() -> str:
    """plotly.js for a script element. The only use of plotly: a figure is data, and a page draws it."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs().replace("</script", r"<\/script")


def part(name: str) -> str:
    """One file of the page: its frame, style or script."""
    return (resources.files("megatron.scaling") / "page" / name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON that may stand inside a script element. Not-a-number, which JSON has not, becomes null."""
    text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    if isinstance(value, float):  # numpy's float64 is one
        return float(value) if value - value == 0 else None
    return value


def colour_rules(colours: dict[str, dict[str, str]]) -> str:
    """The palette as CSS variables: light, and dark on dark screens; paper is light."""
    extra = {"light": {"page": "#f6f7f9", "care": "#c77700"}, "dark": {"page": "#0f1218", "care": "#e5a13a"}}
    rules = {
        theme: ":root{" + "".join(f"--{key}:{value};" for key, value in (named | extra[theme]).items()) + "}"
        for theme, named in colours.items()
    }
    return f"{rules['light']}\n@media screen and (prefers-color-scheme: dark){{{rules['dark']}}}"


def _summary(study: Study, blind_figure: str = "") -> str:
    """All before the figures: the blind check, the answer, what was trained, the laws, doubts first.

    Where the frontier is the answer, parametric laws and doubts about them come last.
    """
    blind = page_answer.blind_section(study, blind_figure)
    answer = page_answer.answer_section(study)
    trained = paragraph(
        " ".join(filter(None, (summary.trained(study), summary.text_used(study), summary.best(study))))
    )
    doubts = "".join(paragraph(line, "care") for line in summary.doubts(study))
    laws = list(study.laws.values()) or ([study.law] if study.law is not None else [])
    forms = "".join(map(_law, laws)) + paragraph(summary.optima(study))
    if answer:
        return (
            f"{blind}{answer}<h2>What was trained</h2>{trained}{_tiles(study)}"
            f"<h2>Parametric forms</h2>{doubts}{forms}"
        )
    return f"{doubts}{blind}{'<h2>What was trained</h2>' if blind else ''}{trained}{forms}\n{_tiles(study)}"


def _law(law: Law) -> str:
    """A law in one line, and its constants with their intervals."""
    interval = law.interval or {}
    rows = []
    for name, value in law.params.items():
        inside = wording.interval((interval.get("params") or {}).get(name), wording.constant)
        ends = f" ({inside})" if inside else ""
        shown = "not identified" if name in law.not_identified else wording.constant(value)
        rows.append(f"<div><dt>{GREEK.get(name, escape(name))}</dt><dd>{shown}{ends}</dd></div>")
    words = f"{wording.plural(law.n_runs, 'run')}"
    if interval.get("n_bootstrap"):
        percent = f"{100 * interval.get('level', 0.95):.0f} %"
        words += f"; in brackets {percent} confidence intervals, {escape(interval.get('method', ''))}"
    of = wording.OBJECTIVES.get((law.filter or {}).get("objective", ""), "")
    formula = verdict.symbolic(law) if law.identified is False else law.formula()
    sound = verdict.is_sound(law)
    warning = "" if sound else f"This is {verdict.law_words(law)}: do not quote it. "
    return (
        f'<div class="law{"" if sound else " unsound"}"><span class="formula">{raised(formula)}</span>'
        f"<dl>{''.join(rows)}</dl><p>{warning}Held-out loss of the {of} models, N parameters, D tokens. "
        f"Fitted on {words}. {prose(verdict.fit_words(law))}</p></div>"
    )


def _tiles(study: Study) -> str:
    """Four numbers that say how far the study got."""
    done = study.done()
    tiles = [(f"{len(done)} of {len(study.rows)}", "runs finished")]
    scored = study.done(AUTOREGRESSIVE) or done
    if scored:
        row = min(scored, key=lambda row: row["loss"])
        tiles.append(
            (
                wording.loss(row["loss"]),
                f"lowest {headlines.loss_name(study, row)}, nats per token "
                f"({study.size_name(row['n_params'])})",
            )
        )
    tiles += _law_tiles(study)
    if done:
        spent = sum(row["train_flops"] or 0 for row in done)
        seconds = sum(row["wall_s"] or 0 for row in done)
        branched = any(row.get("trunk") not in (None, "", row["run"]) for row in done)
        what = "trained, shared steps counted in each run" if branched else "spent on training"
        tiles.append((f"{wording.exponent(spent)} FLOPs", f"{what}, {wording.duration(seconds)} in all"))
    return (
        '<ul class="tiles">'
        + "".join(f"<li><b>{raised(a)}</b><span>{escape(b)}</span></li>" for a, b in tiles)
        + "</ul>"
    )


def _law_tiles(study: Study) -> list[tuple[str, str]]:
    """The growth of the compute-optimal size, by the frontier, else by a sound law; or that there is none."""
    law = study.law
    if frontier_words.is_answer(study):
        frontier = study.compute_law
        value, ends = frontier.params["size_exponent"], frontier.interval("size_exponent")
    elif study.compute_law is not None and (law is None or not verdict.is_sound(law)):
        return [("no law", "but a frontier that these runs do not identify")]
    elif law is None:
        return []
    elif not verdict.is_sound(law):
        return [("no law", f"but {verdict.law_words(law)}")]
    elif law.derived.get("a_exponent") is None:
        return []
    else:
        value, ends = law.derived["a_exponent"], ((law.interval or {}).get("derived") or {}).get("a_exponent")
    inside = wording.interval(ends, "{:.2f}".format)
    return [(f"N ∝ C^{value:.2f}", f"compute-optimal size{f' ({inside})' if inside else ''}")]


def _figure_section(figures: Sequence[Figure]) -> str:
    if not figures:
        return "<h2>Figures</h2><p>There is nothing to draw yet: no run has logged a loss.</p>"
    return "<h2>Figures</h2>" + "".join(_figure(figure) for figure in figures)


def _figure(figure: Figure) -> str:
    chips = "".join(chip_button(chip) for chip in figure.chips)
    return (
        f'<figure id="figure-{figure.key}"><h3>{prose(figure.title)}</h3>'
        f'<div class="chips" role="group" aria-label="Show or hide">{chips}</div>'
        f'<div class="plot" id="plot-{figure.key}" role="group" aria-label="{escape(figure.alt)}" '
        f'style="min-height:{figure.height_px}px"></div>'
        f"<figcaption>{prose(figure.caption)}</figcaption>"
        f"<details><summary>This figure in words</summary><p>{prose(figure.alt)}</p></details></figure>"
    )


def chip_button(chip: Chip) -> str:
    """A legend entry: a line or a dot in its colour, its name; pressing it hides what it names."""
    stroke = f"var(--{chip.colour[1:]})"
    if chip.dash == "point":
        mark = f'<circle cx="11" cy="5" r="3.5" fill="none" stroke="{stroke}" stroke-width="1.5"/>'
    else:
        dashes = DASH_ARRAY.get(chip.dash, "")
        mark = f'<path d="M1 5h20" stroke="{stroke}" stroke-width="3" stroke-dasharray="{dashes}"/>'
    return (
        f'<button type="button" data-key="{escape(chip.key)}" aria-pressed="true">'
        f'<svg viewBox="0 0 22 10" aria-hidden="true">{mark}</svg>{escape(chip.label)}</button>'
    )


def _care(study: Study) -> str:
    cautions = summary.cautions(study)
    if not cautions:
        return ""
    return (
        '<h2>Read with care</h2><ul class="care">'
        + "".join(f"<li>{prose(line)}</li>" for line in cautions)
        + "</ul>"
    )


def _table(study: Study) -> str:
    """Every run, done or not; what is amiss with one stands in a line below it."""
    heads = ("run", "size", "N", "D", "epochs", "FLOPs", "held-out loss", "time", "status")
    head = "".join(f'<th scope="col"{WORD if name == "size" else ""}>{name}</th>' for name in heads)
    body = "".join(_table_row(study, row, len(heads)) for row in study.rows)
    return (
        '<h2>Runs</h2><p class="small">N: parameters, tied embedding once. D: training tokens. '
        "FLOPs: every matrix product, forward and backward. Loss: nats per token ± standard error.</p>"
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of runs"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _table_row(study: Study, row: Row, n_columns: int) -> str:
    colour = f"size{study.sizes().index(row['n_params'])}" if row["n_params"] else "muted"
    numbers = (
        wording.count(row["n_params"], 3),
        wording.count(row["train_tokens"], 3),
        wording.NOT_KNOWN if row["epochs"] is None else wording.digits(row["epochs"], 2),
        wording.exponent(row["train_flops"]),
        wording.loss(row["loss"], row["loss_se"]),
        wording.duration(row["wall_s"]),
    )
    cells = "".join(f"<td>{number}</td>" for number in numbers)
    note = f"<span>{escape(row['note'])}</span>" if row["note"] else ""
    return (
        f'<tr><th scope="row"><i class="swatch" style="background:var(--{colour})"></i>'
        f"{escape(row['run'])}</th>"
        f'<td class="word">{escape(str(row["size"] or wording.NOT_KNOWN))}</td>{cells}'
        f'<td><span class="status {row["status"]}">{row["status"]}</span>'
        f"{' held out' if row.get('held_out') else ''}</td></tr>"
    ) + (f'<tr class="note"><td colspan="{n_columns}">{note}</td></tr>' if note else "")


def _again(study: Study) -> str:
    """How to make all this again, and what it was made with."""
    folder = escape(str(study.folder))
    study_file = f"{folder}/{STUDY}" if (study.folder / STUDY).is_file() else "STUDY.yaml"
    fits = [
        f"python tools/fit_law.py {folder}/table.csv --objective {objective} --form {law.form} "
        f"--out {folder}/{'law' if law is study.law else f'law_{objective}'}.json"
        for objective, law in study.laws.items()
    ]
    commands = (
        f"python tools/sweep.py {study_file}  # trains what is missing",
        f"python tools/collect.py {folder}",
        *(fits or [f"python tools/fit_law.py {folder}/table.csv --out {folder}/law.json"]),
        f"python tools/make_report.py {folder}",
    )
    facts = [
        (name, _different(result.get(key) for result in study.results))
        for name, key in (("hardware", "hardware"), ("torch", "torch"), ("code (git)", "git"))
    ]
    seeds = _different(row["seed"] for row in study.done())
    facts += [("seeds", seeds), ("sequence length", _different(row["seq_len"] for row in study.done()))]
    if study.law is not None and (study.law.table or {}).get("sha256"):
        facts.append(("table fitted, sha256", study.law.table["sha256"]))
    listed = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts if value)
    code = "\n".join(commands)
    return f'<h2>How to make it again</h2><pre><code>{code}</code></pre><dl class="facts">{listed}</dl>'


def _different(values: Iterable[Any]) -> str:
    """The different values, once each, as they come."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))
