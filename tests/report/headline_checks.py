"""Checks of the sentences about runs, computed again from the table without any code of headlines.py."""

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import spearmanr
from scipy.stats import t as student

from megatron.report import summary
from megatron.report.study_data import Study
from megatron.study.run_row import RunRow
from tests.report.frontier_study import NUMBER, is_near, parse_number

AR, MD = "autoregressive", "masked_diffusion"
NAMES = {"autoregressive": AR, "masked diffusion": MD}


def select_finished(study: Study, objective: str | None = None) -> list[RunRow]:
    return [r for r in study.rows if r.status == "done" and objective in (None, r.objective)]


def is_higher(study: Study, low: RunRow, high: RunRow) -> bool | None:
    """Return whether log high - log low exceeds the scatter of seeds; None if that is unknown.

    All runs are scored on the same text, so its sampling error (loss_se) is not part of a difference.
    """
    errors = [seed_error(study, row.objective) for row in (low, high)]
    if None in errors:
        return None
    variances = [sigma**2 for sigma, _ in errors]
    dof = errors[0][1]
    if low.objective != high.objective:  # Welch and Satterthwaite
        dof = sum(variances) ** 2 / sum(v**2 / dof for v, (_, dof) in zip(variances, errors, strict=True))
    return bool(math.log(high.loss / low.loss) > student.ppf(0.975, dof) * math.sqrt(sum(variances)))


def seed_error(study: Study, objective: str) -> tuple[float, float] | None:
    """Return (standard deviation of log loss, degrees of freedom); None if unknown."""
    cells: dict[tuple, list[float]] = {}
    for row in select_finished(study, objective):
        cells.setdefault((row.n_params, row.train_tokens, row.unique_tokens), []).append(row.loss)
    groups = [np.log(v) for v in cells.values() if len(v) > 1]
    dof = sum(len(v) - 1 for v in groups)
    square = sum(((v - v.mean()) ** 2).sum() for v in groups)
    if dof and square > dof * 1e-24:  # beyond rounding
        return math.sqrt(square / dof), dof
    law = study.laws.get(objective)
    return (law.spread, law.noise["dof"]) if law is not None and law.spread > 0 else None


def select_level(study: Study, tokens: str) -> list[RunRow]:
    """Return the best run of each size at the largest budget with two sizes of one objective, by N."""
    for objective in (AR, MD):
        for D in sorted({r.train_tokens for r in select_finished(study, objective)}, reverse=True):
            best: dict[float, RunRow] = {}
            for row in select_finished(study, objective):
                if row.train_tokens == D:
                    lowest = best.setdefault(row.n_params, row)
                    best[row.n_params] = min(lowest, row, key=lambda r: r.loss)
            if len(best) > 1:
                assert is_near(tokens, D)
                return [best[N] for N in sorted(best)]
    raise AssertionError("no budget has two sizes")


def check_larger(study: Study, tokens: str, first: str, small: str, last: str, large: str) -> None:
    level = select_level(study, tokens)
    assert all(is_higher(study, b, a) for a, b in zip(level, level[1:], strict=False))
    assert level[-1].loss == min(r.loss for r in level)
    assert is_near(first, level[0].loss) and is_near(last, level[-1].loss)
    assert is_near(small, level[0].n_params) and is_near(large, level[-1].n_params)


def check_same(study: Study, tokens: str, n: str, loss: str) -> None:
    level = select_level(study, tokens)
    assert len(level) == int(n) and len({r.loss for r in level}) == 1 and is_near(loss, level[0].loss)


def check_tie(study: Study, tokens: str, n: str, low: str, high: str, noise: str) -> None:
    losses = sorted(select_level(study, tokens), key=lambda r: r.loss)
    assert len(losses) == int(n) and is_near(low, losses[0].loss) and is_near(high, losses[-1].loss)
    assert is_higher(study, losses[0], losses[-1]) is False
    assert losses[-1].loss - losses[0].loss <= parse_number(noise) * 1.06


def check_lowest(study: Study, tokens: str, best: str, low: str, worst: str, high: str, tied: str) -> None:
    level = select_level(study, tokens)
    ordered = sorted(level, key=lambda r: r.loss)
    assert is_near(low, ordered[0].loss) and is_near(high, ordered[-1].loss)
    assert any(is_near(best, r.n_params) for r in level if r.loss == ordered[0].loss)
    assert any(is_near(worst, r.n_params) for r in level if r.loss == ordered[-1].loss)
    verdicts = [is_higher(study, ordered[0], row) for row in ordered[1:]]
    if "unknown" in tied:
        assert set(verdicts) == {None}
        return
    assert verdicts[-1]
    named = [] if not tied else re.findall(r"[\d.]+[kMBT]?", tied.partition(": ")[2])
    close = sorted(r.n_params for r in ordered[1:] if is_higher(study, ordered[0], r) is False)
    assert len(named) == len(close) and all(map(is_near, named, close))
    assert not all(is_higher(study, b, a) for a, b in zip(level, level[1:], strict=False))


def lowest_up_to(study: Study, objective: str, C: float) -> RunRow:
    rows = [r for r in select_finished(study, objective) if r.train_flops <= C]
    return min(rows, key=lambda r: (r.loss, r.train_flops))


def find_ends(study: Study, name: str, start: str, end: str) -> tuple[RunRow, RunRow]:
    rows = select_finished(study, NAMES[name])
    first = lowest_up_to(study, NAMES[name], min(r.train_flops for r in rows))
    last = lowest_up_to(study, NAMES[name], math.inf)
    assert is_near(start, first.train_flops) and is_near(end, last.train_flops)
    return first, last


def check_envelope(
    study: Study, start: str, end: str, name: str, high: str, low: str, per_decade: str
) -> None:
    first, last = find_ends(study, name, start, end)
    assert is_near(high, first.loss) and is_near(low, last.loss) and last.loss < first.loss
    assert is_higher(study, last, first) is not False
    decades = math.log10(last.train_flops / first.train_flops)
    assert bool(per_decade) == (decades >= 1)
    if per_decade:
        assert is_near(re.findall(r"[\d.]+", per_decade)[0], (first.loss - last.loss) / decades)


def check_flat_envelope(study: Study, start: str, end: str, name: str, high: str, low: str) -> None:
    first, last = find_ends(study, name, start, end)
    assert is_near(high, first.loss) and is_near(low, last.loss) and is_higher(study, last, first) is False


def check_cheapest(study: Study, name: str, loss: str, flops: str) -> None:
    rows = select_finished(study, NAMES[name])
    cheapest = min(rows, key=lambda r: (r.train_flops, r.loss))
    assert is_near(loss, cheapest.loss) and is_near(flops, cheapest.train_flops)
    assert all(r.loss >= cheapest.loss for r in rows)


def find_pairs(study: Study) -> list[tuple[RunRow, RunRow]]:
    by_cell: dict[tuple, dict[str, RunRow]] = {}
    for row in select_finished(study):
        key = (row.n_params, row.train_tokens, row.unique_tokens, row.seed)
        by_cell.setdefault(key, {})[row.objective] = row
    return [(pair[AR], pair[MD]) for pair in by_cell.values() if len(pair) == 2]


def check_gap(study: Study, low: str, high: str | None) -> None:
    pairs = find_pairs(study)
    gaps = [b.loss - a.loss for a, b in pairs]
    assert is_near(low, min(gaps)) and is_near(high or low, max(gaps))
    assert min(gaps) > 0 and all(is_higher(study, a, b) is not False for a, b in pairs)


def check_mixed_gap(study: Study, low: str, high: str | None, clear: str, n: str) -> None:
    pairs = find_pairs(study)
    gaps = [b.loss - a.loss for a, b in pairs]
    assert is_near(low, min(gaps)) and is_near(high or low, max(gaps)) and int(n) == len(pairs)
    beyond = 0
    for a, b in pairs:
        low_row, high_row = sorted((a, b), key=lambda r: r.loss)
        verdict = is_higher(study, low_row, high_row)
        beyond += high_row.loss > low_row.loss if verdict is None else verdict
    assert int(clear) == beyond


def group_lines(study: Study, name: str) -> list[list[RunRow]]:
    lines: dict[tuple, dict[float, RunRow]] = {}
    for row in select_finished(study, NAMES[name.lower()]):
        line = lines.setdefault((row.n_params, row.unique_tokens), {})
        line[row.epochs] = min(line.get(row.epochs, row), row, key=lambda r: r.loss)
    return [[line[e] for e in sorted(line)] for line in lines.values() if len(line) > 1]


def is_above(study: Study, low: RunRow, high: RunRow) -> bool:
    verdict = is_higher(study, low, high)
    return high.loss > low.loss if verdict is None else verdict


def check_turns(study: Study, name: str, n: str, of: str, earliest: str) -> None:
    lines = group_lines(study, name)
    turned = [
        min(line, key=lambda r: r.loss).epochs
        for line in lines
        if is_above(study, min(line, key=lambda r: r.loss), line[-1])
    ]
    assert (int(n), int(of)) == (len(turned), len(lines)) and is_near(earliest, min(turned))


def check_still_falls(study: Study, name: str, low: str, high: str | None) -> None:
    lines = group_lines(study, name)
    assert all(is_above(study, line[-1], line[-2]) for line in lines)
    ends = [line[-1].epochs for line in lines]
    assert is_near(low, min(ends)) and is_near(high or low, max(ends))


def check_no_turn(study: Study, name: str, low: str, high: str | None, falling: str, of: str) -> None:
    lines = group_lines(study, name)
    assert not any(is_above(study, min(line, key=lambda r: r.loss), line[-1]) for line in lines)
    count = sum(is_above(study, line[-1], line[-2]) for line in lines)
    assert (int(falling), int(of)) == (count, len(lines)) and count < len(lines)


def compute_residuals(study: Study) -> tuple[list[RunRow], np.ndarray]:
    rows = select_finished(study, AR)
    predicted = np.array([float(study.law.loss(r.n_params, r.train_tokens)) for r in rows])
    return rows, 100 * (np.array([r.loss for r in rows]) / predicted - 1)


def check_off(study: Study, name: str, median: str, n: str, worst: str) -> None:
    rows = select_finished(study, AR)
    predicted = np.array([float(study.law.loss(r.n_params, r.train_tokens)) for r in rows])
    off = np.abs(100 * (predicted / np.array([r.loss for r in rows]) - 1))
    assert int(n) == len(rows) and abs(parse_number(median) - np.median(off)) <= 0.0501
    assert abs(parse_number(worst) - off.max()) <= 0.0501
    assert_name(study, name)


def assert_name(study: Study, name: str) -> None:
    law = study.law
    sound = law.identified is not False and law.lack_of_fit.get("passes", True)
    assert sound == (name.lower() == "the law")


def check_residuals(study: Study, spread: str, trend: str) -> None:
    rows, left = compute_residuals(study)
    assert abs(parse_number(spread) - left.std()) <= 0.00501
    if trend.startswith("no clear trend"):
        return
    way, size, letter = re.fullmatch(r"(rise|fall) by ([\d.]+) % for each tenfold ([NDC])", trend).groups()
    columns = {"N": lambda r: r.n_params, "D": lambda r: r.train_tokens}
    columns["C"] = lambda r: r.n_params * r.train_tokens
    x = np.log10([columns[letter](r) for r in rows])
    slope = np.polyfit(x, left, 1)[0]
    assert (slope > 0) == (way == "rise") and abs(abs(slope) - float(size)) <= 0.00501
    # permutation test: a random shuffle must rarely have a slope this large
    shuffled = np.random.default_rng(0)
    beyond = np.mean([abs(np.polyfit(x, shuffled.permutation(left), 1)[0]) >= abs(slope) for _ in range(200)])
    assert beyond <= 0.1


def check_size_law(study: Study, name: str, rest: str) -> None:
    assert_name(study, name)
    rows, law = select_finished(study, AR), study.law
    N, D = ([r.number(key) for r in rows] for key in ("n_params", "train_tokens"))
    end = float(law.loss(max(N), max(D)))
    for times, what, by in re.findall(
        r"([\d.,]+) times the (\w+) change (?:the loss|it) by (-?[\d.]+) nats", rest
    ):
        ratio, start = (
            (max(N) / min(N), (min(N), max(D)))
            if what == "parameters"
            else (max(D) / min(D), (max(N), min(D)))
        )
        assert is_near(times, ratio) and abs(float(by) - (end - float(law.loss(*start)))) <= 0.00501


def check_unsound(study: Study, name: str, *rest: str) -> None:
    assert_name(study, name)
    assert name.lower() != "the law"


def check_power(study: Study, exponent: str, ends: str) -> None:
    assert_name(study, "the law")
    assert is_near(exponent, study.law.derived["a_exponent"])


def check_identified(study: Study, n: str, of: str) -> None:
    assert study.law.identified is False
    assert int(of) == len(study.law.params) and int(n) == int(of) - len(set(study.law.not_identified))


def check_isoflop(study: Study, flops: str, beyond: str, N: str) -> None:
    rows = select_finished(study)
    sizes = [r.n_params for r in rows if is_near(flops, r.train_flops, 0.15)]
    assert (
        bool(beyond) == (not min(sizes) < parse_number(N) < max(sizes))
        or is_near(N, min(sizes))
        or is_near(N, max(sizes))
    )


def check_scores(study: Study, title: str) -> None:
    by_run = {r.run: r.loss for r in select_finished(study)}
    pairs = [(by_run[s["run"]], s["score"]) for s in study.scores if s["run"] in by_run]
    L, y = np.array(pairs).T
    rank = spearmanr(L, y).statistic if len(set(L)) > 1 and len(set(y)) > 1 else math.nan
    if "quiz follows the loss" in title:
        assert rank < 0
    assert "does not vary" not in title or len(set(L)) == 1 or len(set(y)) == 1


def check_noise_unknown(study: Study) -> None:
    assert not any(score.get("se") for score in study.scores)


def check_nothing(study: Study, *rest: str) -> None:
    pass


LAW = r"([Tt]he law|[Aa] law that these runs do not identify|[Aa] law that fails its lack-of-fit test)"
LOSS = r"(?:autoregressive |masked diffusion )?held-out loss"
SENTENCES: dict[str, Callable[..., None]] = {
    "Scores over compute; their noise is not known": check_noise_unknown,
    rf"Larger is better: after {NUMBER} tokens the {LOSS} falls with every size, from {NUMBER} \((.*?)\) to "
    rf"{NUMBER} \((.*?)\)": check_larger,
    rf"After {NUMBER} tokens all (\d+) sizes have the same {LOSS}, {NUMBER}": check_same,
    rf"After {NUMBER} tokens no size is clearly better: the {LOSS} of (\d+) sizes is between {NUMBER} and "
    rf"{NUMBER}, within its noise of {NUMBER}": check_tie,
    rf"After {NUMBER} tokens the (\S+) model has the lowest {LOSS}, {NUMBER}, the (\S+) model the highest, "
    rf"{NUMBER}((?:; .*)?)": check_lowest,
    r"(\d+) runs? so far, and no two sizes to compare yet": lambda study, n: _check_no_level(study),
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
    r"In the bootstrap, the constants \w+ and \w+ are the most correlated: -?[\d.]+": check_nothing,
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


def _check_no_level(study: Study) -> None:
    with pytest.raises(AssertionError, match="no budget"):
        select_level(study, "0")


def check_title(study: Study, key: str, title: str) -> str:
    """Check the sentence in a title and return its pattern."""
    if key == "downstream":
        check_scores(study, title)
        return "downstream"
    sentences = EPOCHS if key == "epochs" and not title.startswith("Up to") else SENTENCES
    used = ""
    for sentence in title.split("; ") if sentences is EPOCHS else [title]:
        for pattern, check in sentences.items():
            match = re.fullmatch(pattern, sentence)
            if match:
                check(study, *match.groups())
                used = pattern
                break
        else:
            raise AssertionError(f"{key}: no checker matches the sentence '{sentence}'")
    return used


def check_summary(study: Study) -> None:
    """Check the sentences before the figures."""
    done = select_finished(study, AR) or select_finished(study)
    text = summary.describe_best_run(study)
    if not done:
        assert text == ""
        return
    lowest = min(done, key=lambda r: r.loss)
    match = re.match(rf"The lowest {LOSS}, {NUMBER}.*? is that of (\S+) parameters on (\S+) tokens\.", text)
    assert float(match[1]) == pytest.approx(lowest.loss, abs=5.01e-4)
    assert is_near(match[2], lowest.n_params) and is_near(match[3], lowest.train_tokens)
    assert ("autoregressive" in match[0]) == (
        len({r.objective for r in study.rows}) > 1 and done[0].objective == AR
    )
    close = sum(is_higher(study, lowest, r) is False for r in done if r is not lowest)
    tied = re.search(r"The losses of (\d+) other runs?", text)
    assert (int(tied[1]) if tied else 0) == close
    trained = summary.describe_training(study)
    assert trained.startswith(f"{len(select_finished(study)):,} transformer")
    for n, name, sizes, word, budgets in re.findall(
        r"(\d+) (autoregressive|masked diffusion) \((\d+) sizes?( by|,) (\d+) token budgets?\)", trained
    ):
        rows = select_finished(study, NAMES[name])
        cells = {(r.n_params, r.train_tokens) for r in rows}
        assert (int(n), int(sizes)) == (len(rows), len({r.n_params for r in rows}))
        assert (word == " by") == (len(cells) == int(sizes) * int(budgets))
