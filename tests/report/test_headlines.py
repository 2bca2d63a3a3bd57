"""Every generated sentence about runs is true of the table: random and adversarial studies.

Each title must match one of the sentences of headline_checks.py, which computes again what it states.
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.laws.fit import fit_law
from megatron.report import report
from megatron.report.study_data import NO_CURVE, LossCurve, Study
from megatron.study.run_row import RunRow
from tests.report.headline_checks import (
    AR,
    EPOCHS,
    MD,
    SENTENCES,
    check_cheapest,
    check_envelope,
    check_flat_envelope,
    check_gap,
    check_larger,
    check_lowest,
    check_mixed_gap,
    check_no_turn,
    check_same,
    check_still_falls,
    check_summary,
    check_tie,
    check_title,
    check_turns,
)

N_STUDIES = 40


def make_row(i: int, **values: object) -> RunRow:
    N, D = values["n_params"], values["train_tokens"]
    row = RunRow(
        run=f"run{i}", identity=str(i), status="done", objective=AR, size="s", seed=0,
        n_non_embedding=N, unique_tokens=D, epochs=1.0, train_flops=6.0 * N * D,
        seq_len=256, loss_se=0.02, n_tokens_scored=50_000, wall_s=10.0,
    )  # fmt: skip
    return replace(row, **values)


def make_study(rows: list[RunRow], rng: np.random.Generator, with_law: bool = True) -> Study:
    curves = {}
    for row in rows:
        has = row.status == "done"
        at = np.array([1.0, 2.0]) * row.train_tokens / 2
        curves[row.run] = LossCurve(at, np.full(2, row.loss), at, np.full(2, row.loss)) if has else NO_CURVE
    law = None
    done = [row for row in rows if row.status == "done" and row.objective == AR]
    if with_law and done:
        N, D, L = (
            np.array([row.number(name) for row in done]) for name in ("n_params", "train_tokens", "loss")
        )
        try:
            law = replace(fit_law(N, D, L, n_bootstrap=12, seed=0), filter={"objective": AR})
        except ValueError:
            law = None
    corpus = {"unigram_entropy_nats": float(rng.uniform(3, 6))} if rng.random() < 0.5 else {}
    scores = []
    if rng.random() < 0.4:
        noise = rng.choice([0.0, 0.5])
        for row in done:
            score = 1 / (1 + math.exp(min(row.loss, 50) - 3)) + noise * rng.normal()
            scores.append({"run": row.run, "task": "quiz", "score": score, "kind": "accuracy"})
    return Study(
        Path("random"), rows, curves, law, corpus, laws={} if law is None else {AR: law}, scores=scores
    )


def true_loss(N: float, D: float) -> float:
    return 1.9 + 120 / N**0.33 + 900 / D**0.42


def random_rows(rng: np.random.Generator) -> list[RunRow]:
    """Return a grid of sizes, budgets, seeds, objectives and repeated text, with one of several defects."""
    kind = rng.choice(
        ["clean", "noisy", "bent", "equal", "diverged", "reversed", "one size", "one run", "few"]
    )
    sizes = sorted(
        rng.choice([14_000, 41_000, 160_000, 163_000, 837_000, 5_000_000], rng.integers(2, 6), False)
    )
    all_budgets = [65_536, 262_144, 300_000, 1_048_576, 4_000_000]
    budgets = sorted(rng.choice(all_budgets, rng.integers(1, 5), False))
    seeds = list(range(rng.choice([1, 1, 2, 3])))
    se = rng.choice([None, 0.0, 0.003, 0.05, 0.3])
    scatter = rng.choice([0.0, 0.003, 0.05])
    both, repeats = rng.random() < 0.5, rng.random() < 0.3
    if kind == "one size":
        sizes = sizes[:1]
    rows = []
    for N in map(int, sizes):
        for D in map(int, budgets):
            for seed in seeds:
                for objective in (AR, MD) if both else (AR,):
                    L = true_loss(N, D) + (rng.choice([0.5, 0.01, -0.2]) if objective == MD else 0.0)
                    L *= math.exp(scatter * rng.normal())
                    if kind == "bent":
                        L = 4 + 0.3 * abs(math.log(N / 2e5)) + rng.normal() * 0.02
                    if kind == "noisy":
                        L = 4 + 0.1 * rng.normal()
                    if kind == "equal":
                        L = 4.25
                    if kind == "reversed":
                        L = 3 + 0.2 * math.log(N * D / 1e9)
                    if kind == "diverged" and rng.random() < 0.3:
                        L = float(rng.choice([11.0, 700.0]))
                    L = max(L, 0.5)
                    unique = min(D, 65_536) if repeats else D
                    rows.append(
                        make_row(
                            len(rows), n_params=N, train_tokens=D, seed=seed, objective=objective, loss=L,
                            loss_se=None if se is None else float(se), unique_tokens=unique,
                            epochs=D / unique,
                        )
                    )  # fmt: skip
    if kind in ("one run", "few"):
        rows = rows[: 1 if kind == "one run" else rng.integers(1, 4)]
    return [
        replace(row, status=str(rng.choice(["failed", "missing", "running"])), loss=None)
        if rng.random() < 0.05
        else row
        for row in rows
    ]


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 12)) for seed in range(N_STUDIES)]
)
def test_every_headline_of_a_random_study_is_true_of_its_table(seed: int) -> None:
    rng = np.random.default_rng(seed)
    study = make_study(random_rows(rng), rng, with_law=seed % 2 == 0)
    for figure in report.make_figures(study):
        check_title(study, figure.key, figure.title)
        assert figure.alt.startswith(figure.title.rstrip(".")), figure.key
        assert "nan" not in (figure.title + figure.caption + figure.alt).lower().split()
    check_summary(study)
    report.render_summary(study)  # must not raise


def test_the_random_studies_reach_every_sentence_about_runs() -> None:
    checks = {check_larger, check_same, check_tie, check_lowest, check_envelope, check_flat_envelope,
              check_cheapest, check_gap, check_mixed_gap, check_turns, check_still_falls,
              check_no_turn}  # fmt: skip
    missing = set(checks)
    for seed in range(1000, 1400):
        rng = np.random.default_rng(seed)
        study = make_study(random_rows(rng), rng, with_law=False)
        used = {check_title(study, figure.key, figure.title) for figure in report.make_figures(study)}
        missing -= {(SENTENCES | EPOCHS).get(pattern) for pattern in used}
        if not missing:
            break
    assert not missing, {check.__name__ for check in missing}


def test_a_larger_size_that_is_not_the_best_is_not_called_better() -> None:
    losses = {160_000: 4.87, 260_000: 4.73, 390_000: 4.85, 740_000: 4.79, 1_300_000: 4.76}
    rows = [
        make_row(i, n_params=N, train_tokens=10**6, loss=L, loss_se=0.01)
        for i, (N, L) in enumerate(losses.items())
    ]
    study = make_study(rows, np.random.default_rng(0), with_law=False)
    title = report.make_figures(study)[0].title
    assert title == (
        "After 1.0M tokens the 260k model has the lowest held-out loss, 4.73, "
        "the 160k model the highest, 4.87; their noise is unknown"
    )
    # two seeds of one cell: log 4.55 and log 4.91 have a standard deviation of 0.054
    rows += [
        make_row(5 + i, n_params=260_000, train_tokens=2**17, loss=L, seed=i)
        for i, L in enumerate((4.55, 4.91))
    ]
    title = report.make_figures(make_study(rows, np.random.default_rng(0), with_law=False))[0].title
    margin = 2 * math.sqrt(4.73 * 4.87) * math.sinh(12.706 * math.log(4.91 / 4.55) / 2)
    assert title == (
        "After 1.0M tokens no size is clearly better: the held-out loss of 5 sizes is between 4.73 and 4.87, "
        f"within its noise of {margin:.1f}"
    )
