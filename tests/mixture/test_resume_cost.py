"""A run resumes at chunk 10^6 in a time that does not grow with the chunks before it, at equal documents."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.mixture import seek
from megatron.mixture.adaptive import LossProportional, WeightLog
from megatron.mixture.chunk import Position
from megatron.mixture.distributor import ConstantWeights, Distributor
from megatron.mixture.journal import RULE_SUFFIX, Learner
from megatron.mixture.journal_follower import JournalFollower
from megatron.mixture.weights import WeightSchedule

FAR, SIZE, EVERY, DELAY = 10**6, 64, 10, 20
FIRST = np.array([0.5, 0.3, 0.15, 0.05])


def make_distributor(weights: object) -> Distributor:
    return Distributor([9_000, 5_000, 3_000, 1_000], ["a", "b", "c", "d"], weights, SIZE, seed=2)


def read_units(source: Distributor, chunk: int) -> list[list[int]]:
    units = source.schedule_chunks(chunk, 2)
    return [units.domain.tolist(), source.orders.lookup_units(units).tolist()]


STATIC = ConstantWeights(FIRST)
STEPS = WeightSchedule([0, 1000, 400_000], [FIRST, FIRST[::-1].copy(), FIRST])
LINEAR = WeightSchedule([0, 50_000, 900_000], [FIRST, FIRST[::-1].copy(), FIRST], linear=True)


@pytest.mark.parametrize(("weights", "most"), [(STATIC, 10), (STEPS, 30)])
def test_a_resumed_run_walks_a_few_chunks_and_gets_the_documents_of_the_whole_run(
    monkeypatch, weights, most
) -> None:
    whole, position = make_distributor(weights), Position.start(4)
    for _ in range(FAR // 2000):  # chunk by chunk, as a run that was never interrupted
        _, position = whole.schedule_from(position, 2000)
    expected = read_units(whole, FAR)
    walked: list[int] = []
    walk = seek.walk_counts
    monkeypatch.setattr(seek, "walk_counts", lambda *words: walked.append(words[4]) or walk(*words))
    resumed = make_distributor(weights)
    begin = time.process_time()
    assert read_units(resumed, FAR) == expected
    assert time.process_time() - begin < 1
    assert sum(walked) <= most
    # the state of a checkpoint: two numbers for each domain
    state = json.dumps(resumed.find_position(FAR).as_dict())
    assert len(state) < 60 * 4
    walked.clear()
    restored = make_distributor(weights)
    restored.restore(Position.from_dict(json.loads(state)))
    assert read_units(restored, FAR) == expected
    assert walked == []


def test_a_linear_schedule_is_computed_once_and_then_from_kept_positions() -> None:
    source = make_distributor(LINEAR)
    begin = time.process_time()
    first = source.find_position(FAR)
    once = time.process_time() - begin
    # 850,000 chunks with other weights each: about 0.2 us for each domain and chunk
    assert once < 10
    begin = time.process_time()
    for chunk in (FAR - 3, 899_999, 500_000, 60_000):
        source.find_position(chunk)
    assert time.process_time() - begin < max(1.0, once)
    assert len(source.positions._marks) + len(source.positions._recent) <= 272
    restored = make_distributor(LINEAR)
    restored.restore(Position.from_dict(json.loads(json.dumps(first.as_dict()))))
    begin = time.process_time()
    assert read_units(restored, FAR) == read_units(source, FAR)
    assert time.process_time() - begin < 1


@pytest.fixture(scope="module")
def log_path(tmp_path_factory) -> Path:
    """Write the log of a run of 10^6 chunks, as `Learner` writes it, without its syncs."""
    path = tmp_path_factory.mktemp("log") / "main.jsonl"
    last_begin = 0
    rule, log, rng = LossProportional(FIRST), WeightLog(FIRST, DELAY), np.random.default_rng(0)
    distributor = make_distributor(log)
    with path.open("w") as file:
        file.write(json.dumps({"of": "test", "every": EVERY, "delay": DELAY}) + "\n")
        for chunk in range(0, FAR, EVERY):
            nats, tokens = rng.uniform(1, 4, 4), np.ones(4)
            file.write(json.dumps({"chunk": chunk, "nats": nats.tolist(), "tokens": tokens.tolist()}) + "\n")
            if chunk == FAR - 50 * EVERY:  # the last state that was saved, before this chunk was observed
                saved = {
                    "next": chunk, "rule": rule.as_dict(),
                    "reports": [[chunk, nats.tolist(), tokens.tolist()]],
                    "position": distributor.find_position(chunk).as_dict(), "weights": log.as_dict(chunk),
                    "last_chunk": chunk - EVERY, "log_begin": last_begin,
                }  # fmt: skip
                path.with_name(path.name + RULE_SUFFIX).write_text(json.dumps(saved))
            counts = np.bincount(distributor.schedule_chunks(chunk, 1).domain, minlength=4).astype(float)
            counts = np.where(tokens > 0, counts, 0.0)
            weights = rule.observe((chunk + 1) * SIZE, nats * counts, counts)
            line = {"chunk": chunk, "begin": log.known_to, "weights": weights.tolist(),
                    "known_to": chunk + EVERY + DELAY}  # fmt: skip
            last_begin = file.tell()
            file.write(json.dumps(line) + "\n")
            log.append(line["begin"], weights, line["known_to"])
    expected = read_units(distributor, FAR)
    path.with_suffix(".expected").write_text(json.dumps(expected))
    return path


@pytest.mark.slow
def test_an_adaptive_run_resumes_at_a_million_chunks_from_its_log(log_path, monkeypatch) -> None:
    expected = json.loads(log_path.with_suffix(".expected").read_text())
    for opened in (
        lambda distributor: Learner(
            log_path, {"of": "test"}, LossProportional(FIRST), distributor, EVERY, DELAY
        ),
        lambda distributor: JournalFollower(
            log_path, {"of": "test", "every": EVERY, "delay": DELAY}, distributor
        ),
    ):
        walked: list[int] = []
        walk = seek.walk_counts
        monkeypatch.setattr(seek, "walk_counts", lambda *words: walked.append(words[4]) or walk(*words))  # noqa: B023
        distributor = make_distributor(WeightLog(FIRST, DELAY))
        begin = time.process_time()
        learner = opened(distributor)
        assert read_units(distributor, FAR) == expected
        seconds = time.process_time() - begin
        monkeypatch.undo()
        learner.close()
        # only the lines since the saved state are read, and only their chunks are computed
        assert seconds < 1
        assert sum(walked) <= 50 * EVERY + 2
        assert distributor.weights.load_earlier is not None
    # an earlier chunk is computed from the first one, once: the whole log is read
    position = distributor.find_position(5000)
    whole = make_distributor(WeightLog(FIRST, DELAY))
    for begin, weights in distributor.weights.entries[1:1000]:
        whole.weights.append(begin, weights, begin + EVERY)
    assert position.done.tolist() == whole.find_position(5000).done.tolist()
    state = log_path.with_name(log_path.name + RULE_SUFFIX).stat().st_size
    assert state < 3000  # bytes, besides 200 per line of the log
