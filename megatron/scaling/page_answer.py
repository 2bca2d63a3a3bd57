"""The first part of a report page as markup: the blind check, then what to train at the next budgets."""

from html import escape

from megatron.scaling import blind_words, frontier_words, wording
from megatron.scaling.compute_law import Optimum
from megatron.scaling.markup import paragraph, prose
from megatron.scaling.study import Study


def blind_section(study: Study, figure: str) -> str:
    """A box that says predicted against measured, and its figure (markup); empty without a blind check."""
    if study.blind is None:
        return ""
    style = " warning" if blind_words.is_warning(study.blind) else ""
    return (
        f'<h2>Blind check</h2><div class="law answer{style}">'
        f"{paragraph(blind_words.lead(study.blind), 'lead')}"
        f"{paragraph(blind_words.record(study))}</div>{figure}"
    )


def answer_section(study: Study) -> str:
    """The best N, D and the loss at the next budgets, in words and as a table; empty without an answer."""
    answers = frontier_words.answers(study)
    if not answers:
        return ""
    law = study.compute_law
    chosen = next((at for times, at in answers if times == frontier_words.NEXT), answers[-1][1])
    cautions = "".join(paragraph(line, "care") for line in frontier_words.cautions(study))
    heads = ("compute", "parameters, N*", "tokens, D*", "loss, L*")
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "".join(_answer_row(times, at) for times, at in answers)
    fitted = f"{wording.plural(law.n_runs, 'run')} of {wording.plural(law.n_budgets, 'budget')}"
    note = (
        f"In brackets 95 % intervals: confidence of N* and D*, predictive (nats per token) "
        f"for the measured loss of one new run. Fitted on {fitted} from {wording.exponent(law.C[0])} to "
        f"{wording.exponent(law.C[1])} FLOPs."
    )
    if law.lack_of_fit.get("passes", False):
        note += f" Its form {frontier_words.misfit_words(law)}."
    return (
        f"<h2>What to train next</h2>{cautions}{paragraph(frontier_words.sentence(chosen), 'lead')}"
        '<div class="scroll" tabindex="0" role="region" aria-label="Best sizes by compute">'
        f'<table class="answers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f"{paragraph(note, 'small')}"
    )


def _answer_row(times: float, at: Optimum) -> str:
    beyond = "largest fitted" if times == 1 else f"{times:g} times the largest"
    cells = (
        (wording.count(at.N), wording.interval(at.N_interval, wording.count)),
        (wording.count(at.D), wording.interval(at.D_interval, wording.count)),
        (f"{at.loss:.2f}", wording.interval(at.predictive, "{:.2f}".format)),
    )
    row = "".join(
        f"<td>{value}<span>{f'({inside})' if inside else 'interval not known'}</span></td>"
        for value, inside in cells
    )
    return (
        f'<tr><th scope="row">{prose(wording.exponent(at.C))}&nbsp;FLOPs<span>{beyond}</span></th>{row}</tr>'
    )
