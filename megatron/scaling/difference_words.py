"""Differences and noise floors in words: for the terminal and for the page of a study."""

from collections.abc import Sequence
from html import escape

from megatron.scaling import wording
from megatron.scaling.differences import Difference, NoiseFloor, compare_best, compare_repeated, noise_floors
from megatron.scaling.study import Study

MOST_ROWS = 12  # of one table of the page
HEADS = ("A", "B", "seeds", "loss A", "loss B", "A - B (nats)", "A - B (%)", "A is")


def floor_words(objective: str, floor: NoiseFloor) -> str:
    """The noise floor in one sentence."""
    name = wording.OBJECTIVES.get(objective, objective)
    inside = wording.interval(floor.interval, lambda end: wording.digits(100 * end, 2))
    dof = wording.plural(round(floor.dof), "degree") + " of freedom"
    if floor.source == "seeds":
        start = f"Noise floor: {name} runs that differ in their seed alone scatter by"
        source = f"{wording.plural(floor.n_runs, 'run')} of {wording.plural(floor.n_cells, 'cell')}"
    else:
        start = f"Noise floor: no cell has several seeds; {name} runs scatter around the law by"
        source = wording.plural(floor.n_runs, "run")
    text = (
        ""
        if floor.text_se is None
        else "; the error of a loss over samples of the held-out text, "
        f"{wording.digits(floor.text_se, 2)} nats, is shared by runs scored on one text and "
        "no part of their difference"
    )
    return (
        f"{start} {wording.digits(100 * floor.sigma, 2)} % of the loss ({100 * floor.level:g} %: {inside}; "
        f"{dof}, {source}){text}."
    )


def verdict_words(found: Difference) -> str:
    """A difference in one sentence, which claims no more than its verdict."""
    nats, percent = abs(found.difference), 100 * abs(found.relative)
    side = "lower" if found.difference < 0 else "higher"
    size = f"{wording.digits(nats, 2)} nats ({wording.digits(percent, 2)} %)"
    if found.interval is None:
        return f"Not decided: {found.a} has the {side} held-out loss by {size}. {found.reason}"
    inside = wording.interval(found.interval, lambda end: wording.digits(end, 2))
    corrected = f", corrected for {found.n_comparisons} comparisons" if found.n_comparisons > 1 else ""
    basis = (
        f"{100 * found.level:g} % interval of the difference {inside} nats, Student's t with "
        f"{wording.digits(found.dof, 2)} degrees of freedom{corrected}"
    )
    if found.text_se is not None:
        basis += f"; the paired error over documents, {wording.digits(found.text_se, 2)} nats, is in it"
    if found.verdict == "undecided":
        need = found.n_seeds_to_decide
        more = f" About {need} seeds of each would decide a difference of this size." if need else ""
        return f"Undecided: {found.a} is {side} by {size}, within the noise ({basis}).{more}"
    return f"{found.a} is {found.verdict} than {found.b}: its held-out loss is {side} by {size} ({basis})."


def cells_of_row(found: Difference) -> tuple[str, ...]:
    """A difference as the columns of HEADS."""
    nats = wording.digits(found.difference, 2)
    percent = wording.digits(100 * found.relative, 2)
    if found.interval is not None and found.relative_interval is not None:
        nats = wording.with_interval(found.difference, found.interval, lambda end: wording.digits(end, 2))
        ends = [100 * end for end in found.relative_interval]
        percent = wording.with_interval(100 * found.relative, ends, lambda end: wording.digits(end, 2))
    seeds = f"{found.n_a}, {found.n_b}"
    losses = (wording.loss(found.loss_a), wording.loss(found.loss_b))
    return (found.a, found.b, seeds, *losses, nats, percent, found.verdict)


def text_table(differences: Sequence[Difference]) -> str:
    """For a terminal: columns padded to their widest cell."""
    rows = [HEADS, *map(cells_of_row, differences)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def differences_section(study: Study) -> str:
    """The part "Differences" of the page; empty where the study has no noise floor or nothing to compare."""
    rows = study.done()
    floors = noise_floors(rows, study.laws)
    repeated = [one for one in compare_repeated(rows, laws=study.laws) if one.interval]
    best = [
        one
        for group in compare_best(rows, laws=study.laws)
        for one in group[:MOST_ROWS]
        if one.interval
    ]  # fmt: skip
    if not floors or not (repeated or best):
        return ""
    words = "".join(
        f'<p class="small">{escape(floor_words(name, floor))}</p>' for name, floor in floors.items()
    )
    tables = ""
    for title, differences in (
        ("Cells of several seeds, mean losses, corrected for the number of pairs", repeated),
        ("The lowest loss at each compute against the others, corrected for all pairs of that compute", best),
    ):
        if differences:
            more = len(differences) - MOST_ROWS
            left = f" ({more} more: tools/compare_runs.py)" if more > 0 else ""
            tables += f'<p class="small">{escape(title)}{left}.</p>' + _table(differences[:MOST_ROWS], title)
    return f"<h2>Differences</h2>{words}{tables}"


def _table(differences: Sequence[Difference], title: str) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in HEADS)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in map(cells_of_row, differences)
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
