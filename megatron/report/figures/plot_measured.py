"""Figure of the measured crossover: the selected losses of both objectives over compute, by unique text."""

from megatron.laws.measured_crossover import MeasuredCrossover, Setting, list_selected
from megatron.report.figures.plot import (
    DASH,
    LOSS_UNIT,
    SYMBOL,
    Chip,
    Figure,
    Trace,
    format_flops_tick,
    linear_axis,
    log_axis,
    make_chart,
    scatter_trace,
)
from megatron.report.palette import INK, MUTED
from megatron.report.study_data import AUTOREGRESSIVE, MASKED_DIFFUSION, Study
from megatron.study.format import OBJECTIVE_NAMES, format_count, format_exponent, join_list
from megatron.study.measured import collect_settings, measure_study


def list_texts(study: Study) -> list[float]:
    """Return the amounts of unique text with tested runs of both objectives."""
    settings = collect_settings(study.rows)
    return sorted(U for U, at in settings.items() if AUTOREGRESSIVE in at and MASKED_DIFFUSION in at)


def measured_figure(study: Study) -> Figure | None:
    """Return the losses of the settings selected at each compute; None without a text to compare on."""
    texts = list_texts(study)
    if not texts:
        return None
    settings = collect_settings(study.rows)
    crossovers, _ = measure_study(study.rows)
    data: list[Trace] = []
    shown_C: list[float] = []
    shown_loss: list[float] = []
    for i, at in enumerate(crossovers):
        colour = f"var(--budget{i})"
        for objective in (AUTOREGRESSIVE, MASKED_DIFFUSION):
            chosen = list_selected(settings[at.U][objective])
            data.append(_selected_trace(chosen, objective, at.U, colour))
            shown_C += [setting.C for setting in chosen]
            shown_loss += [float(setting.reported.mean()) for setting in chosen]
        if at.C is not None:
            data.append(_crossing_trace(at))
    layout = {
        "xaxis": log_axis("training compute (FLOPs)", shown_C, format_flops_tick),
        "yaxis": linear_axis(f"test loss ({LOSS_UNIT})", min(shown_loss), max(shown_loss)),
    }
    title = describe_measured(crossovers)
    is_fresh = all(best.is_fresh for at in crossovers for best in (at.first, at.second))
    seeds = "fresh seeds, which took no part in the selection" if is_fresh else "the seeds that selected it"
    caption = (
        f"At each compute the setting of the least validation loss so far; its mean test loss over {seeds}. "
        "The masked-diffusion loss is an upper bound, so the true crossing is at no more compute. Crosses: "
        "C_crit, with its 95 % confidence by the noise of fresh seeds."
    )
    chips = [
        Chip(f"text:{at.U}", f"{format_count(at.U, 3)} unique", f"var(--budget{i})")
        for i, at in enumerate(crossovers)
    ]
    chips += [
        Chip(f"objective:{o}", OBJECTIVE_NAMES[o], MUTED, DASH[o]) for o in (AUTOREGRESSIVE, MASKED_DIFFUSION)
    ]
    return Figure("measured", title, caption, f"{title}.", make_chart(data, layout), chips)


def _selected_trace(chosen: list[Setting], objective: str, U: float, colour: str) -> Trace:
    return scatter_trace(
        [setting.C for setting in chosen],
        [float(setting.reported.mean()) for setting in chosen],
        "lines+markers",
        meta=[f"text:{U}", f"objective:{objective}"],
        line={"color": colour, "width": 2, "dash": DASH[objective], "shape": "hv"},
        marker={"color": colour, "size": 8, "symbol": SYMBOL[objective]},
        customdata=[f"{setting.name}<br>{len(setting.reported)} seeds" for setting in chosen],
        hovertemplate="%{customdata}<br>test %{y:.4f}<extra></extra>",
    )


def _crossing_trace(at: MeasuredCrossover) -> Trace:
    """Return a cross at C_crit and the best loss of autoregression, with its interval as a bar."""
    assert at.C is not None, "the caller checks"
    low, high = at.interval or (None, None)
    y = at.first.loss
    error = None
    if low is not None and high is not None:
        ends = {"array": [high - at.C], "arrayminus": [at.C - low]}
        error = {"type": "data", "symmetric": False, "color": MUTED} | ends
    return scatter_trace(
        [at.C], [y], "markers", meta=[f"text:{at.U}"], error_x=error,
        marker={"color": INK, "size": 10, "symbol": "x-thin", "line": {"color": INK, "width": 2}},
        hovertemplate="%{x:.2s} FLOPs<extra>C_crit</extra>",
    )  # fmt: skip


def describe_measured(crossovers: list[MeasuredCrossover]) -> str:
    """State where the objectives were measured to cross, and where not."""
    crossed = [at for at in crossovers if at.C is not None]
    words = [f"{format_exponent(at.C)} FLOPs with {format_count(at.U, 3)} unique tokens" for at in crossed]
    rest = [format_count(at.U, 3) for at in crossovers if at.C is None]
    if not crossed:
        return f"No crossing of the objectives was measured with {join_list(rest)} unique tokens"
    title = f"Masked diffusion is measured to pass autoregression at {join_list(words)}"
    return f"{title}; not with {join_list(rest)}" if rest else title
