"""First part of a report page as HTML: the blind check, then what to train at the next budgets."""

from html import escape

from megatron.laws.compute_law import Optimum
from megatron.report import blind_text, frontier_text
from megatron.report.markup import render_paragraph, render_prose
from megatron.report.study_data import Study
from megatron.study.format import format_count, format_exponent, format_interval, format_plural


def render_blind(study: Study, figure: str) -> str:
    """Return a box with predicted and measured loss, and the figure (HTML); empty without a blind check."""
    if study.blind is None:
        return ""
    style = " warning" if blind_text.is_warning(study.blind) else ""
    return (
        f'<h2>Blind check</h2><div class="law answer{style}">'
        f"{render_paragraph(blind_text.format_blind_lead(study.blind), 'lead')}"
        f"{render_paragraph(blind_text.describe_record(study))}</div>{figure}"
    )


def render_answer(study: Study) -> str:
    """Return the best N, D and loss at the next budgets as text and table (HTML); empty without an answer."""
    answers = frontier_text.list_answers(study)
    if not answers:
        return ""
    law = study.compute_law
    # the lead is the answer at NEXT_FACTOR; the last one if that optimum overflows
    chosen = next((at for times, at in answers if times == frontier_text.NEXT_FACTOR), answers[-1][1])
    cautions = "".join(render_paragraph(line, "care") for line in frontier_text.list_frontier_cautions(study))
    heads = ("compute", "parameters, N*", "tokens, D*", "loss, L*")
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "".join(_render_answer_row(times, at) for times, at in answers)
    fitted = f"{format_plural(law.n_runs, 'run')} of {format_plural(law.n_budgets, 'budget')}"
    note = (
        f"In brackets 95 % intervals: confidence of N* and D*, predictive (nats per token) "
        f"for the measured loss of one new run. Fitted on {fitted} from {format_exponent(law.C[0])} to "
        f"{format_exponent(law.C[1])} FLOPs."
    )
    if law.lack_of_fit.get("passes", False):
        note += f" Its form {frontier_text.describe_frontier_misfit(law)}."
    return (
        f"<h2>What to train next</h2>{cautions}"
        f"{render_paragraph(frontier_text.describe_optimum(chosen), 'lead')}"
        '<div class="scroll" tabindex="0" role="region" aria-label="Best sizes by compute">'
        f'<table class="answers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f"{render_paragraph(note, 'small')}"
    )


def _render_answer_row(times: float, at: Optimum) -> str:
    beyond = "largest fitted" if times == 1 else f"{times:g} times the largest"
    cells = (
        (format_count(at.N), format_interval(at.N_interval, format_count)),
        (format_count(at.D), format_interval(at.D_interval, format_count)),
        (f"{at.loss:.2f}", format_interval(at.predictive, "{:.2f}".format)),
    )
    row = "".join(
        f"<td>{value}<span>{f'({inside})' if inside else 'interval unknown'}</span></td>"
        for value, inside in cells
    )
    flops = render_prose(format_exponent(at.C))
    return f'<tr><th scope="row">{flops}&nbsp;FLOPs<span>{beyond}</span></th>{row}</tr>'
