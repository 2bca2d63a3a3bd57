"""Sentences and tables about differences and noise floors, for the terminal and the page of a study."""

from collections.abc import Sequence

from megatron.study.differences import LEVEL, Difference, NoiseFloor
from megatron.study.format import (
    OBJECTIVE_NAMES,
    format_digits,
    format_interval,
    format_loss,
    format_plural,
    format_with_interval,
)

MAX_ROWS = 12  # in one table of the page
HEADS = ("A", "B", "seeds", "loss A", "loss B", "A - B (nats)", "A - B (%)", "A is")


def describe_floor(objective: str, floor: NoiseFloor) -> str:
    """Return the noise floor in one sentence."""
    name = OBJECTIVE_NAMES.get(objective, objective)
    inside = format_interval(floor.interval, lambda end: format_digits(100 * end, 2))
    dof = format_plural(round(floor.dof), "degree") + " of freedom"
    if floor.source == "seeds":
        start = f"Noise floor: {name} runs that differ in their seed alone scatter by"
        source = f"{format_plural(floor.n_runs, 'run')} of {format_plural(floor.n_cells, 'cell')}"
    else:
        start = f"Noise floor: no cell has several seeds; {name} runs scatter around the law by"
        source = format_plural(floor.n_runs, "run")
    text = (
        ""
        if floor.text_se is None
        else "; the error of a loss over samples of the held-out text, "
        f"{format_digits(floor.text_se, 2)} nats, is shared by runs scored on one text and "
        "no part of their difference"
    )
    return (
        f"{start} {format_digits(100 * floor.sigma, 2)} % of the loss ({100 * LEVEL:g} %: {inside}; "
        f"{dof}, {source}){text}."
    )


def describe_difference(difference: Difference) -> str:
    """Return a difference in one sentence that claims no more than its verdict."""
    nats, percent = abs(difference.difference), 100 * abs(difference.relative)
    side = "lower" if difference.difference < 0 else "higher"
    size = f"{format_digits(nats, 2)} nats ({format_digits(percent, 2)} %)"
    if difference.interval is None:
        return f"Not decided: {difference.a} has the {side} held-out loss by {size}. {difference.reason}"
    assert difference.dof is not None, "interval and dof are set together"
    inside = format_interval(difference.interval, lambda end: format_digits(end, 2))
    corrected = (
        f", corrected for {difference.n_comparisons} comparisons" if difference.n_comparisons > 1 else ""
    )
    basis = (
        f"{100 * LEVEL:g} % interval of the difference {inside} nats, Student's t with "
        f"{format_digits(difference.dof, 2)} degrees of freedom{corrected}"
    )
    if difference.text_se is not None:
        basis += f"; the paired error over documents, {format_digits(difference.text_se, 2)} nats, is in it"
    if difference.verdict == "undecided":
        return f"Undecided: {difference.a} is {side} by {size}, within the noise ({basis})."
    pair = f"{difference.a} is {difference.verdict} than {difference.b}"
    return f"{pair}: its held-out loss is {side} by {size} ({basis})."


def format_cells(difference: Difference) -> tuple[str, ...]:
    """Return a difference as the columns of HEADS."""
    nats = format_digits(difference.difference, 2)
    percent = format_digits(100 * difference.relative, 2)
    if difference.interval is not None and difference.relative_interval is not None:
        nats = format_with_interval(
            difference.difference, difference.interval, lambda end: format_digits(end, 2)
        )
        ends = [100 * end for end in difference.relative_interval]
        percent = format_with_interval(100 * difference.relative, ends, lambda end: format_digits(end, 2))
    seeds = f"{difference.n_a}, {difference.n_b}"
    losses = (format_loss(difference.loss_a), format_loss(difference.loss_b))
    return (difference.a, difference.b, seeds, *losses, nats, percent, difference.verdict)


def format_text_table(differences: Sequence[Difference]) -> str:
    """Return a table for a terminal, with columns padded to their widest cell."""
    rows = [HEADS, *map(format_cells, differences)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
