"""Adaptive weights over chunks: computed in the background, logged on disk, and reproducible."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.mixture.adaptive import NotReadyError, WeightLog
from megatron.mixture.distributor import Distributor
from megatron.mixture.document_chunks import DocumentChunks
from megatron.mixture.journal import RULE_SAVE_INTERVAL, RULE_SUFFIX, Journal, Learner
from megatron.mixture.serve.remote import Connection, LossReports, RemoteChunks
from megatron.mixture.serve.service import RequestHandler

EVERY, DELAY, SIZE = 4, 6, 32
NAMES = ("a", "b")


class Counting:
    """Rule whose weights depend on the number of observations."""

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

    def restore(self, state: dict[str, list[list[float]]]) -> None:
        self.seen = [(int(n), loss) for n, loss in state["seen"]]


def make_learner(path: Path, rule: Counting | None = None, every: int = EVERY) -> Learner:
    weights = WeightLog(np.array([0.5, 0.5]), DELAY)
    mixture = Distributor([500, 700], NAMES, weights, SIZE, seed=1)
    return Learner(path, {"log_of": "x"}, rule or Counting(), mixture, every, DELAY)


def make_losses(chunk: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array([3.0 + chunk, 20.0]), np.array([2.0, 10.0])


def list_entries(learner: Learner) -> list[tuple[int, list[float]]]:
    learner.weights.weights_at(0)  # reads the part of the log before the saved state
    return [(begin, weights.tolist()) for begin, weights in learner.weights.entries]


def test_weights_take_effect_at_a_chunk_that_depends_on_the_report_only(tmp_path) -> None:
    logs = []
    for order in ((0, 2, 4), (4, 2, 0), (2, 4, 0)):  # reports arrive in order, or not
        learner = make_learner(tmp_path / f"{order}.jsonl", every=2)
        with pytest.raises(ValueError, match="chunk 6: got a report before the chunk could be read"):
            learner.report(6, *make_losses(6))
        for chunk in order:
            assert learner.report(chunk, *make_losses(chunk))
        assert learner.settle(60)
        logs.append(list_entries(learner))
        learner.close()
    assert logs[0] == logs[1] == logs[2]
    assert [begin for begin, _ in logs[0]] == [0, DELAY, 2 + DELAY, 4 + DELAY]
    assert logs[0][1][1] == pytest.approx([2 / 3, 1 / 3])


def test_only_the_first_report_of_a_scheduled_chunk_is_accepted(tmp_path) -> None:
    learner = make_learner(tmp_path / "run.jsonl")
    assert not learner.report(1, *make_losses(1))  # no weights follow from it
    assert learner.report(0, *make_losses(0))
    assert not learner.report(0, *make_losses(7))
    assert learner.settle(60)
    assert not learner.report(0, *make_losses(7))
    rule = learner.rule
    assert isinstance(rule, Counting)
    ((n, mean),) = rule.seen
    assert n == SIZE
    assert mean == pytest.approx((1.5 + 2.0) / 2)  # mean of nats per token of both domains
    learner.close()


def test_a_second_report_during_the_fit_of_the_first_is_not_accepted(tmp_path) -> None:
    rule, learning = Counting(), threading.Event()
    observe = rule.observe
    rule.observe = lambda *words: observe(*words) if learning.wait(60) else None

    class Compared(int):
        """Chunk number whose comparison takes so long that the first report is processed meanwhile."""

        def __lt__(self, other: int) -> bool:
            answer = int(self) < other
            learning.set()
            time.sleep(0.5)
            return answer

    learner = make_learner(tmp_path / "run.jsonl", rule)
    assert learner.report(0, *make_losses(0))
    assert not learner.report(Compared(0), *make_losses(7))
    assert learner.settle(60)
    learner.close()
    kinds = [sorted(json.loads(line)) for line in (tmp_path / "run.jsonl").read_text().splitlines()[1:]]
    assert kinds == [["chunk", "nats", "tokens"], ["begin", "chunk", "known_to", "weights"]]


def test_a_log_resumes_at_its_end_with_the_latest_report(tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    whole = make_learner(tmp_path / "whole.jsonl")
    n = RULE_SAVE_INTERVAL + 7
    for chunk in range(0, n * EVERY, EVERY):
        whole.report(chunk, *make_losses(chunk))
        assert whole.settle(60)
    expected, lines = list_entries(whole), (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    whole.close()
    assert (tmp_path / f"whole.jsonl{RULE_SUFFIX}").is_file()
    for n_lines in (len(lines), len(lines) - 1, len(lines) - 2):  # all; no weights yet; no report yet
        path.write_bytes(b"".join(lines[:n_lines]) + b'{"chunk": 12')  # and an incomplete line
        (tmp_path / f"run.jsonl{RULE_SUFFIX}").write_bytes(
            (tmp_path / f"whole.jsonl{RULE_SUFFIX}").read_bytes()
        )
        again = make_learner(path)
        rule = again.rule
        assert isinstance(rule, Counting)
        if n_lines == len(lines) - 2:
            assert again.report((n - 1) * EVERY, *make_losses((n - 1) * EVERY))
        assert again.settle(60)
        assert list_entries(again) == expected
        assert len(rule.seen) == n
        again.close()
        assert path.read_bytes() == b"".join(lines)


def test_a_log_is_locked_by_one_process_and_bound_to_its_documents(tmp_path) -> None:
    learner = make_learner(tmp_path / "run.jsonl")
    with pytest.raises(ValueError, match="another process has locked this log"):
        make_learner(tmp_path / "run.jsonl")
    learner.close()
    weights = WeightLog(np.array([0.5, 0.5]), DELAY)
    mixture = Distributor([500, 700], NAMES, weights, SIZE, seed=1)
    with pytest.raises(ValueError, match="is the log of other documents or settings"):
        Learner(tmp_path / "run.jsonl", {"log_of": "y"}, Counting(), mixture, EVERY, DELAY)
    (tmp_path / "run.jsonl").write_text("nonsense\n")
    with pytest.raises(ValueError, match="run.jsonl:1: is not JSON"):
        make_learner(tmp_path / "run.jsonl")


def test_the_error_of_a_rule_is_raised_to_callers(tmp_path) -> None:
    rule = Counting()
    rule.wrong = True
    learner = make_learner(tmp_path / "run.jsonl", rule)
    learner.report(0, *make_losses(0))
    with pytest.raises(ValueError, match="no weights could be computed from chunk 0"):
        learner.settle(60)
    with pytest.raises(ValueError, match="no weights could be computed"):
        learner.report(4, *make_losses(4))
    learner.close()


@pytest.mark.parametrize(
    ("nats", "tokens", "sentence"),
    [
        ([1.0], [1.0], "expected a number for each of 2"),
        ([1.0, np.nan], [1.0, 1.0], "finite"),
        ([1.0, np.inf], [1.0, 1.0], "finite"),
        ([1.0, 1.0], [1.0, -1.0], "finite nats and tokens, and some tokens"),
        ([0.0, 0.0], [0.0, 0.0], "some tokens above 0"),
        ([0.0, 1.0], [1.0, 1.0], "nats above 0"),
        ([1.0, 1.0], [1.0, 0.0], "0 where there are none"),
    ],
)
def test_invalid_losses_of_a_chunk_are_refused(tmp_path, nats, tokens, sentence) -> None:
    learner = make_learner(tmp_path / "run.jsonl")
    with pytest.raises(ValueError, match=sentence):
        learner.report(0, np.array(nats), np.array(tokens))
    learner.close()
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 1


@pytest.fixture
def follows(mixture: Path) -> Path:
    mixture.write_text(mixture.read_text() + "adaptive: {rule: loss, every_steps: 2, delay_steps: 4}\n")
    return mixture


def make_loss(chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses of a model with a high loss on C, and a rising loss on Go."""
    tokens = np.array([10.0, 10.0, 10.0])
    return np.array([8.0, 1.0 + chunk / 4, 1.0]) * tokens, tokens


def read_all(source: DocumentChunks | RemoteChunks, first: int, n: int) -> list[object]:
    """Read chunks as one group does, and report the loss on each."""
    tables = []
    for chunk in range(first, first + n):
        tables.append(source.read(chunk, 1))
        source.report(chunk, *make_loss(chunk))
    return tables


@pytest.fixture
def local(follows: Path) -> Iterator[Callable[[str], DocumentChunks]]:
    opened: list[DocumentChunks] = []

    def begin(run: str) -> DocumentChunks:
        opened.append(DocumentChunks(follows, run=run))
        return opened[-1]

    yield begin
    for source in opened:
        source.close()


def test_closing_a_run_keeps_shared_documents_open(follows) -> None:
    with DocumentChunks(follows, run=None) as shared:
        tables = []
        for name in ("one", "two"):
            with shared.open_run(name) as run:
                tables.append(run.read(0, 1))
        assert tables[0].equals(tables[1])


def test_chunks_follow_the_losses_and_later_chunks_are_not_ready(local) -> None:
    source = local("one")
    tables = read_all(source, 0, 12)
    shares = np.array([np.bincount(table.column("domain"), minlength=3) / 512 for table in tables])
    assert shares[:4] == pytest.approx(np.tile([1 / 6, 2 / 6, 3 / 6], (4, 1)), abs=2 / 512)
    # prior times loss of chunk 0 is 8 / 6, 2 / 6, 3 / 6; it holds from chunk 4 on
    assert shares[4] == pytest.approx(np.array([8, 2, 3]) / 13, abs=2 / 512)
    assert shares[11, 1] > shares[4, 1]
    with pytest.raises(NotReadyError, match="weights of chunk 16 are not known yet, only those before 16"):
        source.read(12, 5)
    again = local("two")
    assert all(a.equals(b) for a, b in zip(tables, read_all(again, 0, 12), strict=True))


def test_a_killed_server_resumes_with_the_weights_that_clients_received(follows, local, start) -> None:
    undisturbed = local("undisturbed")
    tables = read_all(undisturbed, 0, 24)
    assert undisturbed.settle(60)  # its log must be complete before the comparison
    server, location = start(follows, "--port", 0)
    remote = RemoteChunks(Connection(location), "code", run="killed")
    received = read_all(remote, 0, 9)
    for first, n in ((9, 6), (15, 9)):
        server.send_signal(signal.SIGKILL)
        server.wait(timeout=240)
        server, _ = start(follows, "--port", location.rpartition(":")[2])
        received += read_all(remote, first, n)
    assert all(a.equals(b) for a, b in zip(tables, received, strict=True))
    assert len(remote.read(27, 1)) == 512  # weights from the losses on chunk 22, once they are processed
    assert remote.connection.request("status")["runs"] == {"code/killed": 28}
    # earlier chunks are returned again
    assert remote.read(3, 1).equals(tables[3])
    logs = [(follows.with_suffix(".mixture") / "logs" / f"{run}.jsonl").read_text().splitlines()
            for run in ("undisturbed", "killed")]  # fmt: skip
    weights = [[json.loads(line)["weights"] for line in lines if '"weights"' in line] for lines in logs]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("n_groups", [1, 2, 4])
def test_groups_that_report_at_any_time_get_the_chunks_of_one_group(follows, local, start, n_groups) -> None:
    tables = read_all(local("alone"), 0, 16)
    _, location = start(follows, "--port", 0)
    received: dict[int, object] = {}
    failed: list[BaseException] = []

    def group(number: int) -> None:
        rng = np.random.default_rng(number)
        try:
            source = RemoteChunks(Connection(location), "code", run=f"on{n_groups}")
            reports = LossReports(source)
            for chunk in range(number, 16, n_groups):
                time.sleep(float(rng.uniform(0, 0.1)))
                received[chunk] = source.read(chunk, 1)
                reports.report(chunk, *make_loss(chunk))
            reports.close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=group, args=(k,)) for k in range(n_groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert not failed
    assert all(received[chunk].equals(table) for chunk, table in enumerate(tables))


def test_a_request_does_not_wait_for_a_fit(follows) -> None:
    handler = RequestHandler({"code": DocumentChunks(follows, run=None)})
    source = handler._open_run({"mixture": "code"})
    assert source.learner is not None
    fitting = threading.Event()
    observe = source.learner.rule.observe

    def slow(*words: object) -> np.ndarray:
        assert fitting.wait(60)
        return observe(*words)

    source.learner.rule.observe = slow
    names = {"mixture": "code", "identity": source.identity}
    report = {**names, "chunk": 0, "nats": [1.0] * 3, "tokens": [1] * 3}
    assert handler.handle_action("report", json.dumps(report).encode(), "a") == {"taken": True}
    ticket = {**names, "first": 0, "n": 4}

    def n_rows(request: dict[str, object]) -> int:
        return sum(map(len, handler.stream_chunks(json.dumps(request).encode(), "a")))

    assert n_rows(ticket) == 4 * 512  # during the fit
    with pytest.raises(NotReadyError):
        n_rows(ticket | {"first": 4, "n": 1})
    fitting.set()
    assert source.settle(60)
    assert n_rows(ticket | {"first": 4, "n": 1}) == 512
    with pytest.raises(ValueError, match="letters, digits"):
        handler.handle_action("report", json.dumps(report | {"run": "../x"}).encode(), "a")
    source.close()


def test_a_log_is_locked_by_one_process(tmp_path) -> None:
    first = make_learner(tmp_path / "log.jsonl")
    with pytest.raises(ValueError, match="log.jsonl: another process has locked this log"):
        make_learner(tmp_path / "log.jsonl")
    first.close()
    make_learner(tmp_path / "log.jsonl").close()


def test_a_server_whose_disk_was_full_resumes_when_there_is_space(follows, start, local) -> None:
    resource = pytest.importorskip("resource")
    expected = read_all(local("whole"), 0, 12)
    server, location = start(follows, "--port", 0)
    remote = RemoteChunks(Connection(location, patience_s=2), "code", run="full")
    received = read_all(remote, 0, 4)
    log = follows.with_suffix(".mixture") / "logs" / "full.jsonl"
    for _ in range(200):
        if log.read_text().count('"weights"') == 2:
            break
        time.sleep(0.05)
    n = log.stat().st_size
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (n + 20, resource.RLIM_INFINITY))
    received.append(remote.read(4, 1))
    with pytest.raises(ConnectionError, match="disk is full"):
        remote.report(4, *make_loss(4))
    assert log.stat().st_size == n
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    remote.connection.patience_s = 60
    assert remote.report(4, *make_loss(4))
    received += read_all(remote, 5, 7)
    assert all(a.equals(b) for a, b in zip(expected, received, strict=True))


def test_a_new_log_is_synced_with_the_folder_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr("os.fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").resolve()))
    Journal(tmp_path / "run.jsonl", {"run": "main"}).close()
    assert synced == [tmp_path / "run.jsonl", tmp_path]
