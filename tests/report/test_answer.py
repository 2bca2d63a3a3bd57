"""The first screen: the verdict, its check, the scale of the study, and what changes its meaning."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from megatron.report.answer import Answer, make_answer
from megatron.report.study_data import Study, read_study
from megatron.study.format import format_count
from tests.report.frontier_study import (
    BUDGETS,
    LAW,
    REJECTED,
    RUNS,
    fit_runs,
    make_forecast,
    make_runs,
    make_study,
    size_at,
)
from tests.report.synthetic_study import TRUTH

LAST = BUDGETS[-1]


def answer_with(**changes: Any) -> Answer:
    """Answer from the runs and their frontier."""
    return make_answer(make_study(**{"runs": RUNS, "frontier": LAW} | changes))


def train_run(runs: pd.DataFrame, C: float) -> pd.DataFrame:
    """Return the runs with one more at C FLOPs, which no law is fitted on."""
    more = runs.iloc[[-1]].assign(run="more", identity="more", train_flops=C, held_out=1.0)
    return pd.concat([runs, more], ignore_index=True)


def test_the_verdict_is_the_optimum_of_the_law_at_the_next_budget() -> None:
    verdict = answer_with().verdict
    N, low, high = size_at(LAW, 4 * LAST)
    at = LAW.optimum(4 * LAST)
    assert verdict == (
        f"At 1.3e13 FLOPs train {format_count(N)} parameters ({format_count(low)} to {format_count(high)}) "
        f"on {format_count(at.D)} tokens; expect {at.loss:.2f} nats per token "
        f"({at.predictive[0]:.2f} to {at.predictive[1]:.2f})."
    )


def test_the_next_budget_is_one_that_was_not_trained() -> None:
    for trained, expected in ((1.0, 4.0), (2.0, 4.0), (4.0, 10.0), (9.0, 10.0)):
        optima = answer_with(runs=train_run(RUNS, trained * LAST)).optima
        assert optima["C"].tolist() == pytest.approx([LAST, 4 * LAST, 10 * LAST])
        assert optima.loc[optima["is_next"], "times"].tolist() == pytest.approx([expected])


def test_bits_per_byte_are_beside_nats() -> None:
    bits = LAW.optimum(4 * LAST).loss / math.log(2) / 4.0
    answer = answer_with(corpus={"bytes_per_token": 4.0})
    assert f", {bits:.2f} bits per byte." in answer.verdict
    assert f"1 nat per token = {1 / math.log(2) / 4:.3g} bits per byte" in answer.scale


def test_the_scale_names_runs_sizes_tokens_context_and_vocabulary() -> None:
    results = [{"config": {"model": {"n_tokens": 50257}}}]
    scale = answer_with(results=results).scale
    sizes, tokens = RUNS["n_params"], RUNS["train_tokens"]
    assert scale == (
        f"25 runs finished; {format_count(sizes.min())} to {format_count(sizes.max())} parameters; "
        f"{format_count(tokens.min())} to {format_count(tokens.max())} training tokens; "
        "256 tokens of context; vocabulary 50,257."
    )


def test_the_check_gives_the_error_of_an_unseen_run() -> None:
    forecast = make_forecast(LAW)
    for error, where in ((0.002, "inside"), (-0.3, "outside"), (0.3, "outside")):
        answer = answer_with(forecasts=forecast.assign(observed=forecast["predicted"] * (1 + error)))
        assert answer.check == (
            "Checked: one unseen run at 4 times the largest fitted budget was predicted to "
            f"{100 * abs(error):.1f} %, {where} its 95 % interval."
        )
        assert any("outside its interval" in line for line in answer.warnings) == (where == "outside")


def test_several_checks_are_one_sentence_and_late_forecasts_do_not_count() -> None:
    late = make_forecast(LAW, 2.0, name="late", is_late=True, observed=9.0)
    pair = [make_forecast(LAW, times) for times in (2.0, 4.0)]
    pair = [at.assign(observed=at["predicted"] * (1 + e)) for at, e in zip(pair, (0.01, 0.002), strict=True)]
    answer = answer_with(forecasts=pd.concat([*pair, late], ignore_index=True))
    assert answer.check.startswith(
        "Checked: 2 unseen runs at 2 to 4 times the largest fitted budget were predicted to 0.2 to 1.0 %"
    )
    assert "Not an unseen run: late began before its forecast was stored." in answer.warnings


def test_without_a_measured_forecast_the_answer_is_not_checked() -> None:
    waiting = answer_with(forecasts=make_forecast(LAW))
    assert waiting.check == "Not checked yet: 1 forecast without a finished run."
    assert answer_with().check == "Not checked by an unseen run."


def test_what_changes_the_meaning_of_the_frontier_is_beside_the_verdict() -> None:
    misfit = "The form of the frontier is off by 2.1 %, which its intervals include."
    smaller = make_runs(shift=0.3)
    outside = replace(fit_runs(smaller), not_identified={})
    for change, sentence in (
        ({"frontier": replace(LAW, lack_of_fit=REJECTED)}, misfit),
        ({"frontier": replace(LAW, warnings=["rows are grouped"])}, "rows are grouped"),
        ({"runs": train_run(RUNS, 20 * LAST)}, "fit the law again"),
        ({"runs": smaller, "frontier": outside}, "outside those trained"),
    ):
        assert any(sentence in line for line in answer_with(**change).warnings)


def test_an_unidentified_frontier_gives_no_size_and_the_runs_to_add() -> None:
    law = replace(LAW, not_identified={"log_size": "The best N is outside.", "alpha": "at the edge"})
    answer = answer_with(frontier=law)
    best = RUNS.loc[RUNS["loss"].idxmin()]
    assert answer.optima is None
    assert answer.verdict == (
        "No answer yet: these runs do not identify the law. Lowest loss so far: "
        f"{best['loss']:.3f} nats per token, by {format_count(best['n_params'])} parameters on "
        f"{format_count(best['train_tokens'])} tokens."
    )
    assert answer.todo.startswith("To do: add sizes") and "add to each budget a size smaller" in answer.todo


def test_an_unfinished_study_states_what_to_do() -> None:
    for n_done, verdict, todo in (
        (25, "No answer yet: no law is fitted.", "To do: fit runs"),
        (5, "No answer yet: no law is fitted.", "To do: train 20 more runs"),
        (0, "No answer yet: 0 of 25 runs finished.", "To do: train 25 more runs"),
    ):
        runs = RUNS.assign(status=["done"] * n_done + ["missing"] * (25 - n_done))
        answer = answer_with(runs=runs, frontier=None)
        assert answer.verdict.startswith(verdict) and answer.todo.startswith(todo)
    empty = answer_with(runs=RUNS.iloc[:0], frontier=None)
    assert empty.verdict == "No answer yet: 0 of 0 runs finished."


def test_a_table_of_another_program_is_a_study(tmp_path: Path) -> None:
    RUNS[["n_params", "train_tokens", "loss"]].to_csv(tmp_path / "table.csv", index=False)
    study = read_study(tmp_path)
    assert len(study.finished) == len(RUNS)
    assert make_answer(study).scale.startswith(f"{len(RUNS)} runs finished; ")


def test_without_a_frontier_a_sound_law_answers(study: Study) -> None:
    C = 4 * 6 * 5_046_528 * 4_718_592  # four times the largest run
    alpha, beta = TRUTH["alpha"], TRUTH["beta"]
    G = (alpha * TRUTH["A"] / (beta * TRUTH["B"])) ** (1 / (alpha + beta))  # Hoffmann et al., eq. 4
    N = G * (C / 6) ** (beta / (alpha + beta))
    answer, budget = make_answer(study), f"{C:.1e}".replace("+", "")
    assert answer.verdict.startswith(f"At {budget} FLOPs train {format_count(N)} parameters (")
    assert "15 runs are few: the intervals of A and B are wide." in answer.warnings
    assert any("repeated tokens as new" in line for line in answer.warnings)


@pytest.mark.parametrize("change", [{"identified": False}, {"lack_of_fit": REJECTED}, {"replicates": {}}])
def test_an_unsound_law_does_not_answer(study: Study, change) -> None:
    law = replace(study.law, **change)
    answer = make_answer(replace(study, laws={"autoregressive": law}))
    assert answer.verdict.startswith("No answer yet: ") and answer.optima is None
    assert answer.todo.startswith("To do: choose runs to add with `scaling plan --budget ")


def test_a_law_that_lacks_finished_runs_is_to_be_fitted_again(study: Study) -> None:
    some = list(study.main_runs["run"])[:-2]
    law = replace(study.law, runs=some)
    warnings = make_answer(replace(study, laws={"autoregressive": law})).warnings
    assert "The law lacks 2 finished runs: fit it again." in warnings


def test_a_measured_crossing_is_the_verdict_of_a_study_without_law(crossing: Study) -> None:
    study = replace(crossing)
    answer = make_answer(study)
    assert answer.verdict == (
        "Masked diffusion did not pass autoregression on 8.19k, 16.4k, 32.8k and 65.5k unique tokens."
    )
    assert answer.check == "Not checked yet: 2 forecasts without a finished run."
    at = replace(study.crossings[-1], C=3e12, interval=(2.5e12, None))
    vars(study)["crossings"] = [*study.crossings[:-1], at]
    assert make_answer(study).verdict == (
        f"On 65.5k unique tokens masked diffusion passes autoregression at 3.0e12 FLOPs; best losses "
        f"{at.second.loss:.2f} and {at.first.loss:.2f} nats per token."
    )


def test_an_optimum_that_overflows_gives_no_answer() -> None:
    law = replace(LAW, params=LAW.params | {"size_exponent": 500.0})
    assert answer_with(frontier=law).optima is None
