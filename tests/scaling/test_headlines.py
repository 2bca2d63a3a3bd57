"""Every generated sentence about runs is true of the table: random and adversarial studies, checked anew.

Each title must match one of the sentences below, and what it states is computed again from the rows, by code
that shares nothing with headlines.py.
"""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr
from scipy.stats import t as student

from megatron.scaling import report, summary
from megatron.scaling.fit import fit_law
from megatron.scaling.study import NO_CURVE, Curve, Study
from megatron.scaling.table import COLUMNS

AR, MD = "autoregressive", "masked_diffusion"
NAMES = {"autoregressive": AR, "masked diffusion": MD}
NUMBER = r"(-?[\d.,]+(?:e-?\d+)?[kMBT]?)"
UNIT = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
N_STUDIES = 40


def number(text: str) -> float:
    text = text.replace(",", "").rstrip(".")
    return float(text[:-1]) * UNIT[text[-1]] if text[-1] in UNIT else float(text)


def near(text: str, value: float, relative: float = 0.051) -> bool:
    """Whether a number as written is this one: two significant digits, or two decimals."""
    return abs(number(text) - value) <= max(relative * abs(value), 0.00501)


# ---------------------------------------------------------------------------------------------- studies


def row_of(i: int, **values: object) -> dict:
    N, D = values["n_params"], values["train_tokens"]
    row = dict.fromkeys(COLUMNS) | {
        "run": f"run{i}", "identity": str(i), "status": "done", "objective": AR, "size": "s", "seed": 0,
        "n_non_embedding": N, "unique_tokens": D, "epochs": 1.0, "train_flops": 6.0 * N * D,
        "seq_len": 256, "loss_se": 0.02, "n_tokens_scored": 50_000, "wall_s": 10.0, "note": "",
    }  # fmt: skip
    return row | values


def study_of(rows: list[dict], rng: np.random.Generator, with_law: bool = True) -> Study:
    curves = {}
    for row in rows:
        has = row["status"] == "done"
        at = np.array([1.0, 2.0]) * row["train_tokens"] / 2
        curves[row["run"]] = (
            Curve(at, np.full(2, row["loss"]), at, np.full(2, row["loss"])) if has else NO_CURVE
        )
    law = None
    done = [row for row in rows if row["status"] == "done" and row["objective"] == AR]
    if with_law and done:
        N, D, L = (np.array([row[name] for row in done]) for name in ("n_params", "train_tokens", "loss"))
        try:
            law = replace(fit_law(N, D, L, n_bootstrap=12, seed=0), filter={"objective": AR})
        except ValueError:
            law = None
    corpus = {"unigram_entropy_nats": float(rng.uniform(3, 6))} if rng.random() < 0.5 else {}
    scores = []
    if rng.random() < 0.4:
        noise = rng.choice([0.0, 0.5])
        for row in done:
            score = 1 / (1 + math.exp(min(row["loss"], 50) - 3)) + noise * rng.normal()
            scores.append({"run": row["run"], "task": "quiz", "score": score, "kind": "accuracy"})
    return Study(
        Path("random"), rows, curves, law, corpus, laws={} if law is None else {AR: law}, scores=scores
    )


def surface(N: float, D: float) -> float:
    return 1.9 + 120 / N**0.33 + 900 / D**0.42


def random_rows(rng: np.random.Generator) -> list[dict]:
    """A grid of sizes, budgets, seeds, objectives, repeated text, with one of many things gone wrong."""
    kind = rng.choice(
        ["clean", "noisy", "bent", "equal", "diverged", "reversed", "one size", "one run", "few"]
    )
    sizes = sorted(
        rng.choice([14_000, 41_000, 160_000, 163_000, 837_000, 5_000_000], rng.integers(2, 6), False)
    )
    known = [65_536, 262_144, 300_000, 1_048_576, 4_000_000]
    budgets = sorted(rng.choice(known, rng.integers(1, 5), False))
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
                    L = surface(N, D) + (rng.choice([0.5, 0.01, -0.2]) if objective == MD else 0.0)
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
                        row_of(
                            len(rows), n_params=N, train_tokens=D, seed=seed, objective=objective, loss=L,
                            loss_se=None if se is None else float(se), unique_tokens=unique,
                            epochs=D / unique,
                        )
                    )  # fmt: skip
    if kind in ("one run", "few"):
        rows = rows[: 1 if kind == "one run" else rng.integers(1, 4)]
    for row in rows:
        if rng.random() < 0.05:
            row |= {"status": str(rng.choice(["failed", "missing", "running"])), "loss": None}
    return rows


# --------------------------------------------------------------------------------------------- checkers


def finished(study: Study, objective: str | None = None) -> list[dict]:
    return [r for r in study.rows if r["status"] == "done" and objective in (None, r["objective"])]


def differ(study: Study, low: dict, high: dict) -> bool | None:
    """Whether log high - log low exceeds the scatter of seeds; None where that is not known.

    All runs are scored on one text, whose error (loss_se) is no part of a difference.
    """
    errors = [seed_error(study, row["objective"]) for row in (low, high)]
    if None in errors:
        return None
    variances = [sigma**2 for sigma, _ in errors]
    dof = errors[0][1]
    if low["objective"] != high["objective"]:  # Welch and Satterthwaite
        dof = sum(variances) ** 2 / sum(v**2 / dof for v, (_, dof) in zip(variances, errors, strict=True))
    return bool(math.log(high["loss"] / low["loss"]) > student.ppf(0.975, dof) * math.sqrt(sum(variances)))


def seed_error(study: Study, objective: str) -> tuple[float, float] | None:
    """(standard deviation of log loss, degrees of freedom)."""
    cells: dict[tuple, list[float]] = {}
    for row in finished(study, objective):
        cells.setdefault((row["n_params"], row["train_tokens"], row["unique_tokens"]), []).append(row["loss"])
    groups = [np.log(v) for v in cells.values() if len(v) > 1]
    dof = sum(len(v) - 1 for v in groups)
    square = sum(((v - v.mean()) ** 2).sum() for v in groups)
    if dof and square > dof * 1e-24:  # beyond rounding
        return math.sqrt(square / dof), dof
    law = study.laws.get(objective)
    return (law.spread, law.noise["dof"]) if law is not None and law.spread > 0 else None


def level_of(study: Study, tokens: str) -> list[dict]:
    """The best run of each size at the largest budget of one objective with two sizes; rising N."""
    for objective in (AR, MD):
        for D in sorted({r["train_tokens"] for r in finished(study, objective)}, reverse=True):
            best: dict[int, dict] = {}
            for row in finished(study, objective):
                if row["train_tokens"] == D:
                    kept = best.setdefault(row["n_params"], row)
                    best[row["n_params"]] = min(kept, row, key=lambda r: r["loss"])
            if len(best) > 1:
                assert near(tokens, D)
                return [best[N] for N in sorted(best)]
    raise AssertionError("no budget has two sizes")


def check_larger(study: Study, tokens: str, first: str, small: str, last: str, large: str) -> None:
    level = level_of(study, tokens)
    assert all(differ(study, b, a) for a, b in zip(level, level[1:], strict=False))
    assert level[-1]["loss"] == min(r["loss"] for r in level)
    assert near(first, level[0]["loss"]) and near(last, level[-1]["loss"])
    assert near(small, level[0]["n_params"]) and near(large, level[-1]["n_params"])


def check_same(study: Study, tokens: str, n: str, loss: str) -> None:
    level = level_of(study, tokens)
    assert len(level) == int(n) and len({r["loss"] for r in level}) == 1 and near(loss, level[0]["loss"])


def check_tie(study: Study, tokens: str, n: str, low: str, high: str, noise: str) -> None:
    losses = sorted(level_of(study, tokens), key=lambda r: r["loss"])
    assert len(losses) == int(n) and near(low, losses[0]["loss"]) and near(high, losses[-1]["loss"])
    assert differ(study, losses[0], losses[-1]) is False
    assert losses[-1]["loss"] - losses[0]["loss"] <= number(noise) * 1.06


def check_lowest(study: Study, tokens: str, best: str, low: str, worst: str, high: str, tied: str) -> None:
    level = level_of(study, tokens)
    ordered = sorted(level, key=lambda r: r["loss"])
    assert near(low, ordered[0]["loss"]) and near(high, ordered[-1]["loss"])
    assert any(near(best, r["n_params"]) for r in level if r["loss"] == ordered[0]["loss"])
    assert any(near(worst, r["n_params"]) for r in level if r["loss"] == ordered[-1]["loss"])
    verdicts = [differ(study, ordered[0], row) for row in ordered[1:]]
    if "not known" in tied:
        assert set(verdicts) == {None}
        return
    assert verdicts[-1]
    named = [] if not tied else re.findall(r"[\d.]+[kMBT]?", tied.partition(": ")[2])
    close = sorted(r["n_params"] for r in ordered[1:] if differ(study, ordered[0], r) is False)
    assert len(named) == len(close) and all(map(near, named, close))
    assert not all(differ(study, b, a) for a, b in zip(level, level[1:], strict=False))


def lowest_up_to(study: Study, objective: str, C: float) -> dict:
    rows = [r for r in finished(study, objective) if r["train_flops"] <= C]
    return min(rows, key=lambda r: (r["loss"], r["train_flops"]))


def ends_of(study: Study, name: str, start: str, end: str) -> tuple[dict, dict]:
    rows = finished(study, NAMES[name])
    first = lowest_up_to(study, NAMES[name], min(r["train_flops"] for r in rows))
    last = lowest_up_to(study, NAMES[name], math.inf)
    assert near(start, first["train_flops"]) and near(end, last["train_flops"])
    return first, last


def check_envelope(study: Study, start: str, end: str, name: str, high: str, low: str, each: str) -> None:
    first, last = ends_of(study, name, start, end)
    assert near(high, first["loss"]) and near(low, last["loss"]) and last["loss"] < first["loss"]
    assert differ(study, last, first) is not False
    decades = math.log10(last["train_flops"] / first["train_flops"])
    assert bool(each) == (decades >= 1)
    if each:
        assert near(re.findall(r"[\d.]+", each)[0], (first["loss"] - last["loss"]) / decades)


def check_flat_envelope(study: Study, start: str, end: str, name: str, high: str, low: str) -> None:
    first, last = ends_of(study, name, start, end)
    assert near(high, first["loss"]) and near(low, last["loss"]) and differ(study, last, first) is False


def check_cheapest(study: Study, name: str, loss: str, flops: str) -> None:
    rows = finished(study, NAMES[name])
    cheapest = min(rows, key=lambda r: (r["train_flops"], r["loss"]))
    assert near(loss, cheapest["loss"]) and near(flops, cheapest["train_flops"])
    assert all(r["loss"] >= cheapest["loss"] for r in rows)


def pairs_of(study: Study) -> list[tuple[dict, dict]]:
    found: dict[tuple, dict] = {}
    for row in finished(study):
        key = (row["n_params"], row["train_tokens"], row["unique_tokens"], row["seed"])
        found.setdefault(key, {})[row["objective"]] = row
    return [(pair[AR], pair[MD]) for pair in found.values() if len(pair) == 2]


def check_gap(study: Study, low: str, high: str | None) -> None:
    pairs = pairs_of(study)
    gaps = [b["loss"] - a["loss"] for a, b in pairs]
    assert near(low, min(gaps)) and near(high or low, max(gaps))
    assert min(gaps) > 0 and all(differ(study, a, b) is not False for a, b in pairs)


def check_mixed_gap(study: Study, low: str, high: str | None, clear: str, n: str) -> None:
    pairs = pairs_of(study)
    gaps = [b["loss"] - a["loss"] for a, b in pairs]
    assert near(low, min(gaps)) and near(high or low, max(gaps)) and int(n) == len(pairs)
    beyond = 0
    for a, b in pairs:
        low_row, high_row = sorted((a, b), key=lambda r: r["loss"])
        verdict = differ(study, low_row, high_row)
        beyond += high_row["loss"] > low_row["loss"] if verdict is None else verdict
    assert int(clear) == beyond


def lines_of(study: Study, name: str) -> list[list[dict]]:
    lines: dict[tuple, dict[float, dict]] = {}
    for row in finished(study, NAMES[name.lower()]):
        line = lines.setdefault((row["n_params"], row["unique_tokens"]), {})
        line[row["epochs"]] = min(line.get(row["epochs"], row), row, key=lambda r: r["loss"])
    return [[line[e] for e in sorted(line)] for line in lines.values() if len(line) > 1]


def above(study: Study, low: dict, high: dict) -> bool:
    verdict = differ(study, low, high)
    return high["loss"] > low["loss"] if verdict is None else verdict


def check_turns(study: Study, name: str, n: str, of: str, earliest: str) -> None:
    lines = lines_of(study, name)
    turned = [
        min(line, key=lambda r: r["loss"])["epochs"]
        for line in lines
        if above(study, min(line, key=lambda r: r["loss"]), line[-1])
    ]
    assert (int(n), int(of)) == (len(turned), len(lines)) and near(earliest, min(turned))


def check_still_falls(study: Study, name: str, low: str, high: str | None) -> None:
    lines = lines_of(study, name)
    assert all(above(study, line[-1], line[-2]) for line in lines)
    ends = [line[-1]["epochs"] for line in lines]
    assert near(low, min(ends)) and near(high or low, max(ends))


def check_no_turn(study: Study, name: str, low: str, high: str | None, falling: str, of: str) -> None:
    lines = lines_of(study, name)
    assert not any(above(study, min(line, key=lambda r: r["loss"]), line[-1]) for line in lines)
    count = sum(above(study, line[-1], line[-2]) for line in lines)
    assert (int(falling), int(of)) == (count, len(lines)) and count < len(lines)


def residuals(study: Study) -> tuple[list[dict], np.ndarray]:
    rows = finished(study, AR)
    said = np.array([float(study.law.loss(r["n_params"], r["train_tokens"])) for r in rows])
    return rows, 100 * (np.array([r["loss"] for r in rows]) / said - 1)


def check_off(study: Study, name: str, median: str, n: str, worst: str) -> None:
    rows = finished(study, AR)
    said = np.array([float(study.law.loss(r["n_params"], r["train_tokens"])) for r in rows])
    off = np.abs(100 * (said / np.array([r["loss"] for r in rows]) - 1))
    assert int(n) == len(rows) and abs(number(median) - np.median(off)) <= 0.0501
    assert abs(number(worst) - off.max()) <= 0.0501
    assert_name(study, name)


def assert_name(study: Study, name: str) -> None:
    law = study.law
    sound = law.identified is not False and law.lack_of_fit.get("passes", True)
    assert sound == (name.lower() == "the law")


def check_residuals(study: Study, spread: str, trend: str) -> None:
    rows, left = residuals(study)
    assert abs(number(spread) - left.std()) <= 0.00501
    if trend.startswith("no clear trend"):
        return
    way, size, letter = re.fullmatch(r"(rise|fall) by ([\d.]+) % for each tenfold ([NDC])", trend).groups()
    x = np.log10(
        [
            {"N": r["n_params"], "D": r["train_tokens"], "C": r["n_params"] * r["train_tokens"]}[letter]
            for r in rows
        ]
    )
    slope = np.polyfit(x, left, 1)[0]
    assert (slope > 0) == (way == "rise") and abs(abs(slope) - float(size)) <= 0.00501
    # an exact test without normality: no clear trend may come of a shuffle as often as one in twenty
    shuffled = np.random.default_rng(0)
    beyond = np.mean([abs(np.polyfit(x, shuffled.permutation(left), 1)[0]) >= abs(slope) for _ in range(200)])
    assert beyond <= 0.1


def check_size_law(study: Study, name: str, rest: str) -> None:
    assert_name(study, name)
    rows, law = finished(study, AR), study.law
    N, D = ([r[key] for r in rows] for key in ("n_params", "train_tokens"))
    end = float(law.loss(max(N), max(D)))
    for times, what, by in re.findall(
        r"([\d.,]+) times the (\w+) change (?:the loss|it) by (-?[\d.]+) nats", rest
    ):
        ratio, start = (
            (max(N) / min(N), (min(N), max(D)))
            if what == "parameters"
            else (max(D) / min(D), (max(N), min(D)))
        )
        assert near(times, ratio) and abs(float(by) - (end - float(law.loss(*start)))) <= 0.00501


def check_unsound(study: Study, name: str, *rest: str) -> None:
    assert_name(study, name)
    assert name.lower() != "the law"


def check_power(study: Study, exponent: str, ends: str) -> None:
    assert_name(study, "the law")
    assert near(exponent, study.law.derived["a_exponent"])


def check_identified(study: Study, n: str, of: str) -> None:
    assert study.law.identified is False
    assert int(of) == len(study.law.params) and int(n) == int(of) - len(set(study.law.not_identified))


def check_isoflop(study: Study, flops: str, beyond: str, N: str) -> None:
    rows = finished(study)
    sizes = [r["n_params"] for r in rows if near(flops, r["train_flops"], 0.15)]
    assert (
        bool(beyond) == (not min(sizes) < number(N) < max(sizes))
        or near(N, min(sizes))
        or near(N, max(sizes))
    )


def check_scores(study: Study, title: str) -> None:
    by_run = {r["run"]: r["loss"] for r in finished(study)}
    pairs = [(by_run[s["run"]], s["score"]) for s in study.scores if s["run"] in by_run]
    L, y = np.array(pairs).T
    rank = spearmanr(L, y).statistic if len(set(L)) > 1 and len(set(y)) > 1 else math.nan
    if "quiz follows the loss" in title:
        assert rank < 0
    assert "does not vary" not in title or len(set(L)) == 1 or len(set(y)) == 1


def check_nothing(study: Study, *rest: str) -> None:
    pass


LAW = r"([Tt]he law|[Aa] law that these runs do not identify|[Aa] law that fails its lack-of-fit test)"
LOSS = r"(?:autoregressive |masked diffusion )?held-out loss"
SENTENCES: dict[str, Callable[..., None]] = {
    rf"Larger is better: after {NUMBER} tokens the {LOSS} falls with every size, from {NUMBER} \((.*?)\) to "
    rf"{NUMBER} \((.*?)\)": check_larger,
    rf"After {NUMBER} tokens all (\d+) sizes have the same {LOSS}, {NUMBER}": check_same,
    rf"After {NUMBER} tokens no size is clearly better: the {LOSS} of (\d+) sizes is between {NUMBER} and "
    rf"{NUMBER}, within its noise of {NUMBER}": check_tie,
    rf"After {NUMBER} tokens the (\S+) model has the lowest {LOSS}, {NUMBER}, the (\S+) model the highest, "
    rf"{NUMBER}((?:; .*)?)": check_lowest,
    r"(\d+) runs? so far, and no two sizes to compare yet": lambda study, n: _no_level(study),
    rf"From {NUMBER} to {NUMBER} FLOPs the lowest (.*?) loss falls from {NUMBER} to {NUMBER}"
    r"(, [\d.]+ nats for each tenfold of compute)?": check_envelope,
    rf"From {NUMBER} to {NUMBER} FLOPs the lowest (.*?) loss does not fall by more than the noise: from "
    rf"{NUMBER} to {NUMBER}": check_flat_envelope,
    rf"No (.*?) run beats the cheapest, {NUMBER} at {NUMBER} FLOPs": check_cheapest,
    r"Held-out loss against training compute": check_nothing,
    rf"At equal tokens the masked-diffusion bound is {NUMBER}(?: to {NUMBER})? nats above the autoregressive "
    "loss": check_gap,
    rf"Masked-diffusion bound minus autoregressive loss at equal tokens: {NUMBER}(?: to {NUMBER})? nats, "
    r"beyond the noise in (\d+) of (\d+) pairs?": check_mixed_gap,
    rf"{LAW} is off by {NUMBER} % in the median of its own (\d+) runs?, by {NUMBER} % at worst": check_off,
    rf"Residuals: a spread of {NUMBER} %, (.*)": check_residuals,
    rf"By {LAW} (.*)": check_size_law,
    rf"One size and budget, by {LAW}": check_nothing,
    rf"Over these sizes and tokens {LAW} goes from {NUMBER} down to {NUMBER} nats per token": check_nothing,
    rf"No compute-optimal size follows from {LAW} \((\d+) runs\)": check_unsound,
    r"The compute-optimal N grows as C to the power ([\d.]+)( \(.*\))?": check_power,
    r"Of the bootstrap's constants \w+ and \w+ are the most correlated: -?[\d.]+": check_nothing,
    r"These runs identify (\d+) of the (\d+) constants of the law": check_identified,
    rf"At {NUMBER} FLOPs the parabola's minimum is (beyond the sizes tried, )?at {NUMBER} "
    "parameters": check_isoflop,
    r"By isoFLOP curves N\* (?:grows|falls) as C to the power .*": check_nothing,
    r"IsoFLOP curves leave open whether N\* grows with C: power .*": check_nothing,
    r"Up to [\d.]+ epochs": check_nothing,
    r"Repeated runs differ by .*": check_nothing,
}  # fmt: skip
EPOCHS: dict[str, Callable[..., None]] = {
    rf"(.*?): (\d+) of (\d+) lines? turn up, the earliest after {NUMBER} epochs": check_turns,
    rf"(.*?): the loss still falls at {NUMBER}(?: to {NUMBER})? epochs in every line": check_still_falls,
    rf"(.*?): to {NUMBER}(?: to {NUMBER})? epochs no line clearly turns up, and (\d+) of (\d+) clearly fall "
    "to their end": check_no_turn,
}  # fmt: skip


def _no_level(study: Study) -> None:
    with pytest.raises(AssertionError, match="no budget"):
        level_of(study, "0")


def check_title(study: Study, key: str, title: str) -> str:
    """Check the sentence that a title is; which one it was."""
    if key == "downstream":
        check_scores(study, title)
        return "downstream"
    known = EPOCHS if key == "epochs" and not title.startswith("Up to") else SENTENCES
    used = ""
    for sentence in title.split("; ") if known is EPOCHS else [title]:
        for pattern, check in known.items():
            match = re.fullmatch(pattern, sentence)
            if match:
                check(study, *match.groups())
                used = pattern
                break
        else:
            raise AssertionError(f"{key}: no checker knows the sentence '{sentence}'")
    return used


def check_summary(study: Study) -> None:
    """The sentences before the figures."""
    done = finished(study, AR) or finished(study)
    text = summary.best(study)
    if not done:
        assert text == ""
        return
    lowest = min(done, key=lambda r: r["loss"])
    found = re.match(rf"The lowest {LOSS}, {NUMBER}.*? is that of (\S+) parameters on (\S+) tokens\.", text)
    assert float(found[1]) == pytest.approx(lowest["loss"], abs=5.01e-4)
    assert near(found[2], lowest["n_params"]) and near(found[3], lowest["train_tokens"])
    assert ("autoregressive" in found[0]) == (
        len({r["objective"] for r in study.rows}) > 1 and done[0]["objective"] == AR
    )
    close = sum(differ(study, lowest, r) is False for r in done if r is not lowest)
    said = re.search(r"The losses of (\d+) other runs?", text)
    assert (int(said[1]) if said else 0) == close
    trained = summary.trained(study)
    assert trained.startswith(f"{len(finished(study)):,} transformer")
    for n, name, sizes, word, budgets in re.findall(
        r"(\d+) (autoregressive|masked diffusion) \((\d+) sizes?( by|,) (\d+) token budgets?\)", trained
    ):
        rows = finished(study, NAMES[name])
        cells = {(r["n_params"], r["train_tokens"]) for r in rows}
        assert (int(n), int(sizes)) == (len(rows), len({r["n_params"] for r in rows}))
        assert (word == " by") == (len(cells) == int(sizes) * int(budgets))


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 12)) for seed in range(N_STUDIES)]
)
def test_every_headline_of_a_random_study_is_true_of_its_table(seed: int) -> None:
    rng = np.random.default_rng(seed)
    study = study_of(random_rows(rng), rng, with_law=seed % 2 == 0)
    for figure in report.figures_of(study):
        check_title(study, figure.key, figure.title)
        assert figure.alt.startswith(figure.title.rstrip(".")), figure.key
        assert "nan" not in (figure.title + figure.caption + figure.alt).lower().split()
    check_summary(study)
    report._summary(study), report._tiles(study)  # and nothing breaks around them


def test_the_random_studies_reach_every_sentence_about_runs() -> None:
    checks = {check_larger, check_same, check_tie, check_lowest, check_envelope, check_flat_envelope,
              check_cheapest, check_gap, check_mixed_gap, check_turns, check_still_falls,
              check_no_turn}  # fmt: skip
    missing = set(checks)
    for seed in range(1000, 1400):
        rng = np.random.default_rng(seed)
        study = study_of(random_rows(rng), rng, with_law=False)
        used = {check_title(study, figure.key, figure.title) for figure in report.figures_of(study)}
        missing -= {(SENTENCES | EPOCHS).get(pattern) for pattern in used}
        if not missing:
            break
    assert not missing, {check.__name__ for check in missing}


def test_the_page_that_said_larger_is_better_of_the_worse_of_two_now_names_the_lowest() -> None:
    losses = {160_000: 4.87, 260_000: 4.73, 390_000: 4.85, 740_000: 4.79, 1_300_000: 4.76}
    rows = [
        row_of(i, n_params=N, train_tokens=10**6, loss=L, loss_se=0.01)
        for i, (N, L) in enumerate(losses.items())
    ]
    study = study_of(rows, np.random.default_rng(0), with_law=False)
    title = report.figures_of(study)[0].title
    assert title == (
        "After 1.0M tokens the 260k model has the lowest held-out loss, 4.73, "
        "the 160k model the highest, 4.87; how noisy they are is not known"
    )
    # other seeds of one cell: 4.55 and 4.91 are 0.054 around their mean in log
    rows += [
        row_of(5 + i, n_params=260_000, train_tokens=2**17, loss=L, seed=i)
        for i, L in enumerate((4.55, 4.91))
    ]
    title = report.figures_of(study_of(rows, np.random.default_rng(0), with_law=False))[0].title
    margin = 2 * math.sqrt(4.73 * 4.87) * math.sinh(12.706 * math.log(4.91 / 4.55) / 2)
    assert title == (
        "After 1.0M tokens no size is clearly better: the held-out loss of 5 sizes is between 4.73 and 4.87, "
        f"within its noise of {margin:.1f}"
    )
