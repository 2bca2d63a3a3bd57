"""Weights that follow a model over chunks: found off the way, kept on disk, the same whatever happens."""

import errno
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.mixture.adaptive import Log, NotYetError
from megatron.mixture.distributor import Distributor
from megatron.mixture.documents import DocumentChunks
from megatron.mixture.journal import RULE, RULE_EVERY, Journal, Learner
from megatron.mixture.remote import Connection, LossReports, RemoteChunks
from megatron.mixture.service import Desk

EVERY, DELAY, SIZE = 4, 6, 32
NAMES = ("a", "b")


class Counting:
    """Weights that tell how often and from what they were found."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []
        self.wait_s, self.wrong = 0.0, False

    def observe(self, n: int, nats: np.ndarray, counts: np.ndarray) -> np.ndarray:
        time.sleep(self.wait_s)
        self.seen.append((n, float(nats.sum() / counts.sum())))
        first = np.nan if self.wrong else 1 + len(self.seen)
        return np.array([first, 1.0]) / (first + 1)

    def as_dict(self) -> dict[str, object]:
        return {"seen": self.seen}

    def restore(self, told: dict[str, list[list[float]]]) -> None:
        self.seen = [(int(n), loss) for n, loss in told["seen"]]


def learner(path: Path, rule: Counting | None = None, every: int = EVERY) -> Learner:
    weights = Log(np.array([0.5, 0.5]), DELAY)
    mixture = Distributor([500, 700], NAMES, weights, SIZE, seed=1)
    return Learner(path, {"log_of": "x"}, rule or Counting(), mixture, every, DELAY)


def losses(chunk: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array([3.0 + chunk, 20.0]), np.array([2.0, 10.0])


def told(one: Learner) -> list[tuple[int, list[float]]]:
    return [(begin, weights.tolist()) for begin, weights in one.weights.entries]


def test_weights_take_effect_at_a_chunk_that_follows_from_the_report_alone(tmp_path) -> None:
    logs = []
    for order in ((0, 2, 4), (4, 2, 0), (2, 4, 0)):  # groups are in time, or not
        one = learner(tmp_path / f"{order}.jsonl", every=2)
        with pytest.raises(ValueError, match="chunk 6 is reported, and nobody can have read it"):
            one.report(6, *losses(6))
        for chunk in order:
            assert one.report(chunk, *losses(chunk))
        assert one.settle(60)
        logs.append(told(one))
        one.close()
    assert logs[0] == logs[1] == logs[2]
    assert [begin for begin, _ in logs[0]] == [0, DELAY, 2 + DELAY, 4 + DELAY]
    assert logs[0][1][1] == pytest.approx([2 / 3, 1 / 3])


def test_only_the_first_report_of_a_chunk_that_counts_is_taken(tmp_path) -> None:
    one = learner(tmp_path / "run.jsonl")
    assert not one.report(1, *losses(1))  # no weights follow from it
    assert one.report(0, *losses(0))
    assert not one.report(0, *losses(7))
    assert one.settle(60)
    assert not one.report(0, *losses(7))
    rule = one.rule
    assert isinstance(rule, Counting)
    ((n, mean),) = rule.seen
    assert n == SIZE
    assert mean == pytest.approx((1.5 + 2.0) / 2)  # nats a token, over as many documents of each
    one.close()


def test_a_report_that_comes_while_the_first_is_learnt_from_is_not_taken(tmp_path) -> None:
    rule, learning = Counting(), threading.Event()
    observe = rule.observe
    rule.observe = lambda *words: observe(*words) if learning.wait(60) else None

    class Compared(int):
        """A chunk's number whose comparison takes so long that the first report can be learnt from."""

        def __lt__(self, other: int) -> bool:
            answer = int(self) < other
            learning.set()
            time.sleep(0.5)
            return answer

    one = learner(tmp_path / "run.jsonl", rule)
    assert one.report(0, *losses(0))
    assert not one.report(Compared(0), *losses(7))
    assert one.settle(60)
    one.close()
    kinds = [sorted(json.loads(line)) for line in (tmp_path / "run.jsonl").read_text().splitlines()[1:]]
    assert kinds == [["chunk", "nats", "tokens"], ["begin", "chunk", "known_to", "weights"]]


def test_a_log_is_taken_up_where_it_was_left_with_what_was_reported_last(tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    whole = learner(tmp_path / "whole.jsonl")
    n = RULE_EVERY + 7
    for chunk in range(0, n * EVERY, EVERY):
        whole.report(chunk, *losses(chunk))
        assert whole.settle(60)
    expected, lines = told(whole), (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    whole.close()
    assert (tmp_path / f"whole.jsonl{RULE}").is_file()
    for kept in (len(lines), len(lines) - 1, len(lines) - 2):  # all; no weights yet; no report yet
        path.write_bytes(b"".join(lines[:kept]) + b'{"chunk": 12')  # and a line that was being written
        (tmp_path / f"run.jsonl{RULE}").write_bytes((tmp_path / f"whole.jsonl{RULE}").read_bytes())
        again = learner(path)
        rule = again.rule
        assert isinstance(rule, Counting)
        if kept == len(lines) - 2:
            assert again.report((n - 1) * EVERY, *losses((n - 1) * EVERY))
        assert again.settle(60)
        assert told(again) == expected
        assert len(rule.seen) == n
        again.close()
        assert path.read_bytes() == b"".join(lines)


def test_one_process_keeps_a_log_and_for_the_same_documents(tmp_path) -> None:
    one = learner(tmp_path / "run.jsonl")
    with pytest.raises(ValueError, match="another process keeps this log"):
        learner(tmp_path / "run.jsonl")
    one.close()
    weights = Log(np.array([0.5, 0.5]), DELAY)
    mixture = Distributor([500, 700], NAMES, weights, SIZE, seed=1)
    with pytest.raises(ValueError, match="is the log of other documents or settings"):
        Learner(tmp_path / "run.jsonl", {"log_of": "y"}, Counting(), mixture, EVERY, DELAY)
    (tmp_path / "run.jsonl").write_text("nonsense\n")
    with pytest.raises(ValueError, match="run.jsonl:1: is no JSON"):
        learner(tmp_path / "run.jsonl")


def test_a_rule_that_fails_is_an_error_and_not_a_silence(tmp_path) -> None:
    rule = Counting()
    rule.wrong = True
    one = learner(tmp_path / "run.jsonl", rule)
    one.report(0, *losses(0))
    with pytest.raises(ValueError, match="no weights could be found from chunk 0"):
        one.settle(60)
    with pytest.raises(ValueError, match="no weights could be found"):
        one.report(4, *losses(4))
    one.close()


@pytest.mark.parametrize(
    ("nats", "tokens", "sentence"),
    [
        ([1.0], [1.0], "wanted a number for each of 2"),
        ([1.0, np.nan], [1.0, 1.0], "finite"),
        ([1.0, np.inf], [1.0, 1.0], "finite"),
        ([1.0, 1.0], [1.0, -1.0], "finite numbers, and some tokens"),
        ([0.0, 0.0], [0.0, 0.0], "some tokens above 0"),
        ([0.0, 1.0], [1.0, 1.0], "nats are above 0"),
        ([1.0, 1.0], [1.0, 0.0], "0 where there are none"),
    ],
)
def test_what_are_no_losses_of_a_chunk_is_refused(tmp_path, nats, tokens, sentence) -> None:
    one = learner(tmp_path / "run.jsonl")
    with pytest.raises(ValueError, match=sentence):
        one.report(0, np.array(nats), np.array(tokens))
    one.close()
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 1


@pytest.fixture
def follows(mixture: Path) -> Path:
    mixture.write_text(mixture.read_text() + "adaptive: {rule: loss, every_steps: 2, delay_steps: 4}\n")
    return mixture


def loss_of(chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """A model that finds C hard, and Go harder later."""
    tokens = np.array([10.0, 10.0, 10.0])
    return np.array([8.0, 1.0 + chunk / 4, 1.0]) * tokens, tokens


def read_all(source: DocumentChunks | RemoteChunks, first: int, n: int) -> list[object]:
    """Chunks as one group reads them, with what it loses on each."""
    found = []
    for chunk in range(first, first + n):
        found.append(source.read(chunk, 1))
        source.report(chunk, *loss_of(chunk))
    return found


@pytest.fixture
def local(follows: Path) -> Iterator[Callable[[str], DocumentChunks]]:
    opened: list[DocumentChunks] = []

    def begin(run: str) -> DocumentChunks:
        opened.append(DocumentChunks(follows, run=run))
        return opened[-1]

    yield begin
    for one in opened:
        one.close()


def test_a_run_that_is_closed_leaves_the_documents_to_the_others(follows) -> None:
    with DocumentChunks(follows, run=None) as shared:
        tables = []
        for name in ("one", "two"):
            with shared.of_run(name) as run:
                tables.append(run.read(0, 1))
        assert tables[0].equals(tables[1])


def test_chunks_follow_the_losses_and_nobody_can_run_ahead_of_them(local) -> None:
    source = local("one")
    tables = read_all(source, 0, 12)
    shares = np.array([np.bincount(table.column("domain"), minlength=3) / 512 for table in tables])
    assert shares[:4] == pytest.approx(np.tile([1 / 6, 2 / 6, 3 / 6], (4, 1)), abs=2 / 512)
    # of prior times loss: 8 / 6, 2 / 6, 3 / 6 of chunk 0, from chunk 4 on
    assert shares[4] == pytest.approx(np.array([8, 2, 3]) / 13, abs=2 / 512)
    assert shares[11, 1] > shares[4, 1]
    with pytest.raises(NotYetError, match="weights of chunk 16 are not known yet, only those before 16"):
        source.read(12, 5)
    again = local("two")
    assert all(a.equals(b) for a, b in zip(tables, read_all(again, 0, 12), strict=True))


def test_a_killed_server_goes_on_with_the_weights_that_clients_have_seen(follows, local, start) -> None:
    undisturbed = local("undisturbed")
    tables = read_all(undisturbed, 0, 24)
    assert undisturbed.settle(60)  # its log, too, is whole before the two are compared
    server, location = start(follows, "--port", 0)
    remote = RemoteChunks(Connection(location), "code", run="killed")
    found = read_all(remote, 0, 9)
    for first, n in ((9, 6), (15, 9)):
        server.send_signal(signal.SIGKILL)
        server.wait(timeout=240)
        server, _ = start(follows, "--port", location.rpartition(":")[2])
        found += read_all(remote, first, n)
    assert all(a.equals(b) for a, b in zip(tables, found, strict=True))
    assert len(remote.read(27, 1)) == 512  # of the losses on chunk 22, once they are learnt from
    assert remote.connection.ask("status")["runs"] == {"code/killed": 28}
    # what was given before is given again
    assert remote.read(3, 1).equals(tables[3])
    logs = [(follows.with_suffix(".mixture") / "logs" / f"{run}.jsonl").read_text().splitlines()
            for run in ("undisturbed", "killed")]  # fmt: skip
    kept = [[json.loads(line)["weights"] for line in one if '"weights"' in line] for one in logs]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("n_groups", [1, 2, 4])
def test_groups_that_report_with_any_timing_get_the_chunks_of_one(follows, local, start, n_groups) -> None:
    tables = read_all(local("alone"), 0, 16)
    _, location = start(follows, "--port", 0)
    found: dict[int, object] = {}
    failed: list[BaseException] = []

    def group(number: int) -> None:
        rng = np.random.default_rng(number)
        try:
            source = RemoteChunks(Connection(location), "code", run=f"on{n_groups}")
            reports = LossReports(source)
            for chunk in range(number, 16, n_groups):
                time.sleep(float(rng.uniform(0, 0.1)))
                found[chunk] = source.read(chunk, 1)
                reports.report(chunk, *loss_of(chunk))
            reports.close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=group, args=(k,)) for k in range(n_groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert not failed
    assert all(found[chunk].equals(table) for chunk, table in enumerate(tables))


def test_a_request_does_not_wait_for_a_fit(follows) -> None:
    desk = Desk({"code": DocumentChunks(follows, run=None)})
    source = desk._of_run({"mixture": "code"})
    assert source.learner is not None
    fitting = threading.Event()
    observe = source.learner.rule.observe

    def slow(*words: object) -> np.ndarray:
        assert fitting.wait(60)
        return observe(*words)

    source.learner.rule.observe = slow
    names = {"mixture": "code", "identity": source.identity}
    report = {**names, "chunk": 0, "nats": [1.0] * 3, "tokens": [1] * 3}
    assert desk.act("report", json.dumps(report).encode(), "a") == {"taken": True}
    ticket = {**names, "first": 0, "n": 4}

    def n_rows(asked: dict[str, object]) -> int:
        return sum(map(len, desk.chunks(json.dumps(asked).encode(), "a")))

    assert n_rows(ticket) == 4 * 512  # while the fit is under way
    with pytest.raises(NotYetError):
        n_rows(ticket | {"first": 4, "n": 1})
    fitting.set()
    assert source.settle(60)
    assert n_rows(ticket | {"first": 4, "n": 1}) == 512
    with pytest.raises(ValueError, match="letters, digits"):
        desk.act("report", json.dumps(report | {"run": "../x"}).encode(), "a")
    source.close()


@pytest.mark.parametrize("has_flock", [True, False])
def test_a_log_is_kept_by_one_process_with_or_without_locks_of_the_file_system(
    tmp_path, monkeypatch, has_flock
) -> None:
    if not has_flock:

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        monkeypatch.setattr(fcntl, "flock", refuse)
    first = learner(tmp_path / "log.jsonl")
    with pytest.raises(ValueError, match="log.jsonl: .*process.* keeps this log"):
        learner(tmp_path / "log.jsonl")
    first.close()
    learner(tmp_path / "log.jsonl").close()
    assert not list(tmp_path.glob("*.owner*"))


class FullDisk:
    """A file whose disk is full after some bytes: a part of a line is written, then an error."""

    def __init__(self, file: object, free_bytes: int) -> None:
        self.file, self.free_bytes, self.can_truncate = file, free_bytes, True

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)

    def write(self, content: bytes) -> int:
        n = min(len(content), self.free_bytes)
        if n == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.free_bytes -= n
        return self.file.write(content[:n])

    def truncate(self, n: int) -> int:
        if not self.can_truncate:
            raise OSError(errno.EIO, "Input/output error")
        return self.file.truncate(n)


@pytest.mark.parametrize("can_truncate", [True, False])
def test_a_full_disk_tears_no_line_and_is_forgotten_when_there_is_space(tmp_path, can_truncate) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(path, {"log_of": "x"})
    journal.add({"chunk": 0})
    before = path.read_bytes()
    disk = FullDisk(journal._file, 5)
    disk.can_truncate = can_truncate
    journal._file = disk
    for _ in range(2):
        with pytest.raises(OSError, match=r"(No space left on device|Input/output error): .*run.jsonl"):
            journal.add({"chunk": 1})
        if can_truncate:
            assert path.read_bytes() == before
    disk.can_truncate, disk.free_bytes = True, 10**6
    journal.add({"chunk": 2})
    journal.close()
    assert path.read_bytes() == before + b'{"chunk": 2}\n'
    again = Journal(path, {"log_of": "x"})
    assert again.lines == [{"log_of": "x"}, {"chunk": 0}, {"chunk": 2}]
    again.close()


def test_weights_that_met_a_full_disk_are_those_of_an_empty_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("megatron.mixture.journal.DISK_WAIT_S", 0.05)
    expected = learner(tmp_path / "expected.jsonl")
    one = learner(tmp_path / "run.jsonl")
    for chunk in (0, EVERY, 2 * EVERY):
        expected.report(chunk, *losses(chunk))
        assert expected.settle(60)
    assert one.report(0, *losses(0))
    assert one.settle(60)
    disk = FullDisk(one.journal._file, 0)
    report = json.dumps(
        {"chunk": EVERY, "nats": losses(EVERY)[0].tolist(), "tokens": losses(EVERY)[1].tolist()}
    )
    one.journal._file = disk
    with pytest.raises(OSError, match="No space left"):
        one.report(EVERY, *losses(EVERY))
    disk.free_bytes = len(report) + 1 + 7  # the report fits, the weights that follow from it do not
    assert one.report(EVERY, *losses(EVERY))
    assert not one.settle(0.3)
    assert not one._failed
    assert json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])["chunk"] == EVERY
    disk.free_bytes = 10**6  # space is back: nobody restarts anything
    assert one.settle(60)
    assert one.report(2 * EVERY, *losses(2 * EVERY))
    assert one.settle(60)
    assert told(one) == told(expected)
    assert len(one.rule.seen) == 3  # each report was observed once
    one.close()
    expected.close()
    assert (tmp_path / "run.jsonl").read_bytes() == (tmp_path / "expected.jsonl").read_bytes()


def test_a_learner_closed_on_a_full_disk_learns_when_it_is_opened_again(tmp_path) -> None:
    one = learner(tmp_path / "run.jsonl")
    one.journal._file = FullDisk(one.journal._file, 10**6)
    one.report(0, *losses(0))
    assert one.settle(60)
    one.report(EVERY, *losses(EVERY))
    assert one.settle(60)
    expected = told(one)
    one.close()
    lines = (tmp_path / "run.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "run.jsonl").write_bytes(b"".join(lines[:4]))
    again = learner(tmp_path / "run.jsonl")
    assert again.settle(60)
    assert told(again) == expected
    again.close()


def test_a_server_whose_disk_was_full_goes_on_when_there_is_space(follows, start, local) -> None:
    resource = pytest.importorskip("resource")
    expected = read_all(local("whole"), 0, 12)
    server, location = start(follows, "--port", 0)
    remote = RemoteChunks(Connection(location, patience_s=2), "code", run="full")
    found = read_all(remote, 0, 4)
    log = follows.with_suffix(".mixture") / "logs" / "full.jsonl"
    for _ in range(200):
        if log.read_text().count('"weights"') == 2:
            break
        time.sleep(0.05)
    n = log.stat().st_size
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (n + 20, resource.RLIM_INFINITY))
    found.append(remote.read(4, 1))
    with pytest.raises(ConnectionError, match="disk is full"):
        remote.report(4, *loss_of(4))
    assert log.stat().st_size == n
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    remote.connection.patience_s = 60
    assert remote.report(4, *loss_of(4))
    found += read_all(remote, 5, 7)
    assert all(a.equals(b) for a, b in zip(expected, found, strict=True))
