"""Mixture logs on a disk that is full: complete lines, and equal weights after it has space again."""

import errno
import json

import pytest

from megatron.mixture.journal import Journal
from tests.mixture.test_journal import EVERY, list_entries, make_learner, make_losses


class FullDisk:
    """File whose disk is full after some bytes: a part of a line is written, then an error is raised."""

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
def test_a_full_disk_leaves_complete_lines_and_writing_resumes_with_space(tmp_path, can_truncate) -> None:
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


def test_weights_after_a_full_disk_equal_those_without_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("megatron.mixture.journal.DISK_WAIT_S", 0.05)
    expected = make_learner(tmp_path / "expected.jsonl")
    learner = make_learner(tmp_path / "run.jsonl")
    for chunk in (0, EVERY, 2 * EVERY):
        expected.report(chunk, *make_losses(chunk))
        assert expected.settle(60)
    assert learner.report(0, *make_losses(0))
    assert learner.settle(60)
    disk = FullDisk(learner.journal._file, 0)
    report = json.dumps(
        {"chunk": EVERY, "nats": make_losses(EVERY)[0].tolist(), "tokens": make_losses(EVERY)[1].tolist()}
    )
    learner.journal._file = disk
    with pytest.raises(OSError, match="No space left"):
        learner.report(EVERY, *make_losses(EVERY))
    disk.free_bytes = len(report) + 1 + 7  # enough for the report, but not for its weights
    assert learner.report(EVERY, *make_losses(EVERY))
    assert not learner.settle(0.3)
    assert not learner._failure
    assert json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])["chunk"] == EVERY
    disk.free_bytes = 10**6  # there is space again, without a restart
    assert learner.settle(60)
    assert learner.report(2 * EVERY, *make_losses(2 * EVERY))
    assert learner.settle(60)
    assert list_entries(learner) == list_entries(expected)
    assert len(learner.rule.seen) == 3  # each report was observed once
    learner.close()
    expected.close()
    assert (tmp_path / "run.jsonl").read_bytes() == (tmp_path / "expected.jsonl").read_bytes()


def test_a_learner_closed_on_a_full_disk_processes_the_report_when_reopened(tmp_path) -> None:
    learner = make_learner(tmp_path / "run.jsonl")
    learner.journal._file = FullDisk(learner.journal._file, 10**6)
    learner.report(0, *make_losses(0))
    assert learner.settle(60)
    learner.report(EVERY, *make_losses(EVERY))
    assert learner.settle(60)
    expected = list_entries(learner)
    learner.close()
    lines = (tmp_path / "run.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "run.jsonl").write_bytes(b"".join(lines[:4]))
    again = make_learner(tmp_path / "run.jsonl")
    assert again.settle(60)
    assert list_entries(again) == expected
    again.close()
