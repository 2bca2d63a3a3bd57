"""The law of loss curves: an independent sum, a synthetic truth, and the published curves."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from megatron.laws.curve_law import NAMES, Schedule, fit_curve_law

TRUTH = np.array([2.5, 0.5, 0.5, 500.0, 1.0, 0.5, 0.5])
STEPS = np.arange(1000, 20001, 100)
PEAK = 3e-4
SCHEDULES = {
    "constant": np.full(len(STEPS), PEAK),
    "cosine": PEAK * (0.55 + 0.45 * np.cos(np.pi * STEPS / 20000)),
    "wsd": np.where(STEPS < 16000, PEAK, PEAK * 0.1 ** ((STEPS - 16000) / 4000)),
}


def test_the_loss_is_the_sum_over_every_decrease_of_the_rate() -> None:
    at = Schedule.from_steps(STEPS, SCHEDULES["wsd"], warmup_steps=500)
    # 500 steps of warm-up count half; then the trapezoid of the rates
    assert at.area[0] == pytest.approx(750 * PEAK) and at.area[150] == pytest.approx(15750 * PEAK)
    L0, A, alpha, B, C, beta, gamma = TRUTH
    for i in (10, 170, len(STEPS) - 1):
        loss = L0 + A * at.area[i] ** -alpha
        for k in range(1, i + 1):
            drop, since = at.lr[k - 1] - at.lr[k], at.area[i] - at.area[k - 1]
            loss -= B * drop * (1 - (1 + C * at.lr[k] ** -gamma * since) ** -beta)
        assert at.loss(TRUTH)[i] == pytest.approx(loss, rel=1e-12)


def test_constant_and_cosine_curves_predict_a_decay() -> None:
    rng = np.random.default_rng(0)
    curves = []
    for name in ("constant", "cosine"):
        loss = Schedule.from_steps(STEPS, SCHEDULES[name]).loss(TRUTH)
        curves.append((STEPS, SCHEDULES[name], loss * np.exp(0.001 * rng.standard_normal(len(STEPS)))))
    law = fit_curve_law(curves)
    assert list(law.params) == list(NAMES) and law.residual < 0.004
    truth = Schedule.from_steps(STEPS, SCHEDULES["wsd"]).loss(TRUTH)
    assert np.abs(law.predict(STEPS, SCHEDULES["wsd"]) - truth).max() < 0.01


def test_curves_that_are_not_possible_are_refused() -> None:
    rates = SCHEDULES["constant"]
    for curve, sentence in (
        ((STEPS[::-1], rates, rates), "ascending"),
        ((STEPS, 0 * rates, rates), "lr: expected numbers above 0"),
        ((STEPS[:5], rates[:5], rates[:5]), "got 5 points, expected 20 or more"),
    ):
        with pytest.raises(ValueError, match=sentence):
            fit_curve_law([curve])


def test_published_decays_are_predicted_to_the_published_error(cli, laws: Path) -> None:
    """Luo et al., arXiv 2503.12811: a mean absolute error of 0.00142 at 100M."""
    folder = laws / "multipower"
    names = ("wsd_20000_24000", "wsdld_20000_24000")
    words = [folder / f"100M_{name}.csv" for name in ("constant_24000", "cosine_24000")]
    others = [folder / f"100M_{name}.csv" for name in names]
    lines = cli("curve", *words, "--predict", *others, "--warmup-steps", 2160).output.splitlines()
    assert all(float(line.rpartition(" ")[2]) < 0.00142 for line in lines[2:]) and len(lines) == 4


def test_an_unfinished_run_is_predicted_from_its_own_level(cli, tmp_path: Path) -> None:
    for name, lr in SCHEDULES.items():
        loss = Schedule.from_steps(STEPS, lr).loss(TRUTH) + (0.05 if name == "wsd" else 0.0)
        table = pd.DataFrame({"step": STEPS, "lr": lr, "loss": loss})
        table.loc[table["step"] > (10000 if name == "wsd" else 1e9), "loss"] = np.nan
        table.to_csv(tmp_path / f"{name}.csv", index=False)
    files = [tmp_path / f"{name}.csv" for name in SCHEDULES]
    line = cli("curve", *files[:2], "--predict", files[2]).output.splitlines()[-1]
    at_end = Schedule.from_steps(STEPS, SCHEDULES["wsd"]).loss(TRUTH)[-1] + 0.05
    assert "+0.0500 from the law" in line
    assert float(line.split("; ")[-1].split()[0]) == pytest.approx(at_end, abs=0.01)
    # the same of a run's folder, which logs no rates of the steps to come: those of the first curve
    run = tmp_path / "run"
    run.mkdir()
    done = pd.read_csv(files[2]).dropna().assign(kind="train")
    done.to_json(run / "metrics.jsonl", orient="records", lines=True)
    files = [files[2].with_name("planned.csv"), *files[:2]]
    table = pd.DataFrame({"step": STEPS, "lr": SCHEDULES["wsd"]})
    table.assign(loss=Schedule.from_steps(STEPS, table["lr"]).loss(TRUTH)).to_csv(files[0], index=False)
    again = cli("curve", *files, "--predict", run).output.splitlines()[-1]
    with (run / "metrics.jsonl").open("a") as file:  # of a stranger
        file.write('{"kind": "train", "step": 1}\n{"kind": "train", "step": 2, "lr": "x", "loss": 3}\n')
        file.write('{"kind": "train", "step": "x", "lr": 1, "loss": 3}\n')
    assert cli("curve", *files, "--predict", run).output.splitlines()[-1] == again
    assert again.startswith("run: loss") and f"at step {STEPS[-1]:.0f}" in again
    assert float(again.split("; ")[-1].split()[0]) == pytest.approx(at_end, abs=0.01)
    # a finished run has no steps to come, and other rates have others
    (run / "result.json").write_text("{}")
    assert f"at step {done['step'].max():.0f}" in cli("curve", *files, "--predict", run).output
    (run / "result.json").unlink()
    done.assign(lr=2 * done["lr"]).to_json(run / "metrics.jsonl", orient="records", lines=True)
    assert "other rates than the first curve" in cli("curve", *files, "--predict", run, status=1).error
