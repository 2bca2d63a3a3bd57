"""Tests of tools/bench/fuzz.py: some mutated inputs for every target."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

N_INPUTS = 500


def run_fuzz(root: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "tools" / "bench" / "fuzz.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_no_target_ends_in_a_traceback_a_wrong_answer_a_hang_or_a_crash(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    pytest.importorskip("tensorboard")
    done = run_fuzz(root, "--inputs", N_INPUTS, "--seed", 3, "--out", tmp_path)
    errors = {str(path): path.read_text()[-400:] for path in tmp_path.glob("*/*-*/error.txt")}
    assert done.returncode == 0, (done.stdout[-4000:], done.stderr[-2000:], errors)
    header, *lines = done.stdout.splitlines()
    names = header.split()[1:-2]
    table = {re.split(r"  +", line)[0].strip(): line for line in lines}
    counts = {
        name: dict(zip(names, (int(n.replace(",", "")) for n in line[22:].split()), strict=False))
        for name, line in table.items()
    }
    assert counts["all"]["inputs"] > 0.97 * N_INPUTS  # shares are rounded
    assert (
        counts["all"]["passed"] > 0.7 * counts["all"]["inputs"]
    )  # most inputs are not refused at the first byte
    listed = set(run_fuzz(root, "--list").stdout.splitlines())
    assert listed == set(counts) - {"all"}
    assert counts["all"]["accepted"] > 0.1 * N_INPUTS and counts["all"]["refused"] > 0.1 * N_INPUTS


def test_a_failing_input_is_counted_and_stored(root: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from fuzzing.cases import WordCase\n"
        "from fuzzing.harness import FuzzTarget, Limits, WrongAnswerError, fuzz_target\n"
        "import os, time\n"
        "def read(word):\n"
        "    kind = len(word) % 6\n"
        "    if kind == 1: {}[word]\n"
        "    if kind == 2: raise WrongAnswerError(word)\n"
        "    if kind == 3: os.kill(os.getpid(), 11)\n"
        "    if kind == 4: int('x')\n"
        "    if kind == 5: time.sleep(60)\n"
        "class Case(WordCase):\n"
        "    def make(self, rng):\n"
        "        return {'word': b'a' * int(rng.number)}\n"
        "import fuzzing.harness as harness\n"
        "class Numbered:\n"
        "    def __init__(self, seed): self.number = seed.rpartition('/')[2]\n"
        "harness.random = type('random', (), {'Random': Numbered})\n"
        "target = FuzzTarget('e', 1, lambda folder: Case((), None, read))\n"
        "print(fuzz_target(target, 6, 0, Path(sys.argv[2]), Limits(None, 1.0)).counts)\n"
    )
    command = [sys.executable, "-c", code, str(root / "tools" / "bench"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert eval(done.stdout) == {
        "inputs": 6, "passed": 4, "accepted": 1, "refused": 0, "foreign": 1, "tracebacks": 1,
        "wrong": 1, "hangs": 1, "crashes": 1,
    }  # fmt: skip
    stored = {path.name: (path / "word").read_bytes() for path in (tmp_path / "e").iterdir()}
    assert stored == {
        "1-tracebacks": b"a", "2-wrong": b"aa", "3-crashes": b"aaa", "4-foreign": b"aaaa",
        "5-hangs": b"aaaaa",
    }  # fmt: skip
