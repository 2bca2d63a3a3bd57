"""Text of laws for the terminal: formula, constants with intervals, noise and tests; comparison of forms."""

from collections.abc import Sequence

import numpy as np

from megatron.laws.fitting.noise import Trend
from megatron.laws.holdout import FormComparison, format_held_out
from megatron.laws.law import Law


def summarise_law(law: Law) -> str:
    """Format the law in one line, then each constant with its interval, then the warnings."""
    lines = [f"{law.formula()}  ({law.n_runs} runs)"]
    if law.identified is False:
        names = ", ".join(name for name in law.params if name in law.not_identified)
        lines.append(
            f"  NOT IDENTIFIED by these runs: {names or 'the design'}. Do not quote these constants."
        )
    intervals = {**law.interval.get("params", {}), **law.interval.get("derived", {})}
    for name, value in {**law.params, **law.derived}.items():
        low, high = intervals.get(name, (None, None))
        mark = "  not identified" if name in law.not_identified else ""
        interval = "" if low is None else f"  95 % [{low:.4g}, {high:.4g}]"
        lines.append(f"  {name:<10} {value:.5g}{interval}{mark}")
    if law.text_error:
        # All runs share the sampling error of the text, so
        # their scatter does not contain it.
        lines.append(
            f"  text: all losses share an error of {law.text_error['loss_se']:.2g} nats, which no interval "
            "contains"
        )
    if law.noise:
        lines.append(
            f"  noise of one run: {100 * law.spread:.2g} % of the loss, "
            f"{law.noise['dof']:.0f} degrees of freedom"
        )
        lines += _describe_trend(law)
    if law.lack_of_fit:
        tested = law.lack_of_fit
        verdict = "agrees with them" if tested["passes"] else "DOES NOT FIT them"
        lines.append(
            f"  repeated runs differ by {100 * tested['noise']:.2g} %; the form {verdict} "
            f"(lack of fit: F = {tested['statistic']:.3g}, p = {tested['p_value']:.2g}, "
            f"misfit {100 * tested['misfit']:.2g} %)"
        )
    if law.extrapolation:
        lines.append(
            f"  beyond C = {law.extrapolation['compute']:.3g} FLOPs: "
            f"{100 * law.extrapolation['growth']:.2g} % more deviation for each factor of e in compute"
        )
    lines += format_held_out(law.held_out)
    return "\n".join(lines + [f"  warning: {warning}" for warning in law.warnings])


def _describe_trend(law: Law) -> list[str]:
    """Return a line on how the scatter of runs changes with compute; none if it is constant."""
    trend = law.noise.get("trend")
    if not trend:
        return []
    # at both ends of x = log(N D), beyond which the
    # scatter is constant (noise.Trend)
    sigma, _ = Trend(**trend).evaluate(np.array([trend["low"], trend["high"]]))
    return [
        f"    it changes with compute: {100 * sigma[0]:.2g} % at the smallest N D, "
        f"{100 * sigma[1]:.2g} % at the largest (p = {trend['p_value']:.2g})"
    ]


def format_comparisons(results: Sequence[FormComparison], n_held_out: int) -> str:
    """Format the errors of forms on held-out runs, one line for each."""
    lines = [f"{'form':<18}{'constants':>9}  {f'{n_held_out} held out':>12}"]
    for result in results:
        if result.refused:
            lines.append(f"{result.form:<18}{result.refused}")
        else:
            lines.append(f"{result.form:<18}{result.n_constants:>9}  {100 * result.rms:>10.2f} %")
    return "\n".join(lines)
