"""Tests of tools/bench/compare.py and smoke.py: ratio, direction, noise, machines, exit statuses."""

import ast
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.tool_modules import load_tool

ROOT = Path(__file__).resolve().parents[2]
# files without a parser are parts of a bench
BENCHES = {
    path.stem: path
    for path in sorted((ROOT / "tools" / "bench").glob("*.py"))
    if "\ndef build_parser(" in path.read_text(encoding="utf-8")
}
RUNNERS = {"compare", "smoke", "gpu_bundle"}  # they run benches elsewhere and measure nothing themselves
# operations and differences of logits: no commit is faster
COUNTS = {"trace_ops", "architectures"}
BASE, HEAD = "a" * 40, "b" * 40


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    return load_tool(BENCHES["compare"])


def make_result(commit: str, value: float, **changed: Any) -> dict[str, Any]:
    return {
        "bench": "train", "cell": "float32", "value": value, "unit": "tokens/s", "better": "higher",
        "repeats": [], "commit": commit, "dirty": False, "machine": {"cpu": "A", "cores": 2},
        "versions": {"python": "3.11.7", "torch": "2.13.0"}, "time": 1.0, **changed,
    }  # fmt: skip


def write_results(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run_compare(compare: ModuleType, path: Path, *words: str) -> int:
    return compare.main(["--base", BASE[:7], "--head", HEAD[:7], "--history", str(path), *words])


def test_a_loss_above_the_stated_one_fails_in_either_direction(
    compare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faster = {"better": "lower", "unit": "s", "cell": "seconds"}
    path = write_results(
        tmp_path / "h.jsonl",
        make_result(BASE, 100.0), make_result(HEAD, 85.0),
        make_result(BASE, 10.0, **faster), make_result(HEAD, 8.0, **faster),
    )  # fmt: skip
    assert run_compare(compare, path) == 1
    out = capsys.readouterr().out
    # 85 of 100 tokens/s is a loss of 15 %; 8 s instead of 10 s is a gain of 10 / 8
    assert " 0.850 unknown LOSS" in out and " 1.250 unknown gain" in out
    assert "2 cells compared, 0 not; 1 with a loss above 10%, 0 with one within the noise" in out
    assert run_compare(compare, path, "--loss", "20%") == 0
    assert run_compare(compare, path, "--loss", "0.2") == 0


def test_a_loss_within_the_noise_is_reported_and_is_no_failure(
    compare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noisy = [make_result(BASE, v) for v in (70, 100, 140)] + [make_result(HEAD, v) for v in (60, 85, 125)]
    assert run_compare(compare, write_results(tmp_path / "noisy.jsonl", *noisy)) == 0
    assert "loss within noise" in capsys.readouterr().out
    # the same medians, with 1 % of spread
    quiet = [make_result(BASE, v) for v in (99, 100, 101)] + [make_result(HEAD, v) for v in (84, 85, 86)]
    assert run_compare(compare, write_results(tmp_path / "quiet.jsonl", *quiet)) == 1
    # one result a commit: the spread of its repetitions counts
    single = [make_result(BASE, 100, repeats=[70, 100, 140]), make_result(HEAD, 85, repeats=[60, 85, 125])]
    assert run_compare(compare, write_results(tmp_path / "single.jsonl", *single)) == 0


def test_the_noise_is_that_of_welchs_t_test(compare: ModuleType) -> None:
    from scipy.stats import ttest_ind

    base, head = [10.0, 11.0, 12.5, 10.4], [9.1, 9.9, 9.5]
    ratio, noise = compare.compare_samples(base, head, "higher")
    assert ratio == pytest.approx(9.5 / 10.7)
    logs = [[math.log(x) for x in side] for side in (base, head)]
    p = ttest_ind(*logs, equal_var=False).confidence_interval(0.90)
    # a one-sided 95 % bound is an end of the two-sided 90 % interval
    assert noise == pytest.approx((p.high - p.low) / 2)


@pytest.mark.parametrize(
    ("base", "head", "better", "ratio"),
    [
        ([0.0], [0.0], "lower", 1.0),
        ([0.0], [3.0], "lower", 0.0),
        ([3.0], [0.0], "lower", math.inf),
        ([2.0], [3.0], "higher", 1.5),
        ([2.0], [3.0], "lower", 2 / 3),
    ],
)
def test_ratios_of_counts_that_may_be_zero(
    compare: ModuleType, base: list[float], head: list[float], better: str, ratio: float
) -> None:
    assert compare.compare_samples(base, head, better) == (pytest.approx(ratio), None)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"machine": {"cpu": "B", "cores": 2}}, "other machine"),
        ({"versions": {"python": "3.11.7", "torch": "2.12.0"}}, "other versions"),
        ({"unit": "s"}, "other unit"),
        ({"cell": "bfloat16"}, "no result of the head"),
    ],
)
def test_results_of_other_machines_versions_and_cells_are_not_compared(
    compare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict, reason: str
) -> None:
    records = [make_result(BASE, 100.0), make_result(HEAD, 10.0, **changed)]
    path = write_results(tmp_path / "h.jsonl", *records)
    assert run_compare(compare, path) == 2
    captured = capsys.readouterr()
    assert f"not compared: train float32: {reason}" in captured.out and "on one machine" in captured.err
    # beside a cell that can be compared, it is marked and does not fail
    write_results(path, *records, make_result(BASE, 1.0, cell="c"), make_result(HEAD, 1.0, cell="c"))
    assert run_compare(compare, path) == 0
    assert reason in capsys.readouterr().out


def test_modified_files_are_another_version(compare: ModuleType, tmp_path: Path) -> None:
    path = write_results(
        tmp_path / "h.jsonl",
        make_result(BASE, 100.0), make_result(HEAD, 100.0), make_result(HEAD, 10.0, dirty=True),
    )  # fmt: skip
    words = ["--base", BASE[:7], "--history", str(path)]
    assert compare.main([*words, "--head", HEAD[:7]]) == 0
    assert compare.main([*words, "--head", f"{HEAD[:7]}+"]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--base", "no-such-commit"], "got commit 'no-such-commit', expected one"),
        (["--base", ""], "got commit ''"),
        (["--base", HEAD[:7]], "as base and head, expected two commits"),
        (["--base", "HEAD"], "no results of"),
        (["--base", BASE[:7], "--no-history"], "no history"),
        (["--base", BASE[:7], "--run", "--benches", "nothing"], "--benches: got nothing"),
    ],
)
def test_wrong_use_is_status_2(
    compare: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHES["compare"].parent))
    path = write_results(tmp_path / "h.jsonl", make_result(BASE, 1.0), make_result(HEAD, 1.0))
    if "HEAD" in words and not (ROOT / ".git").exists():
        pytest.skip("this is not a git checkout")
    assert compare.main(["--history", str(path), "--head", HEAD[:7], *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("word", ["x", "100%", "-1%", "nan", "2"])
def test_a_loss_is_a_share(compare: ModuleType, word: str) -> None:
    with pytest.raises(SystemExit) as ended:
        compare.main(["--base", "a", f"--loss={word}"])
    assert ended.value.code == 2


@pytest.mark.parametrize("name", sorted(BENCHES.keys() - RUNNERS - COUNTS))
def test_every_bench_stores_its_results(name: str) -> None:
    text = BENCHES[name].read_text(encoding="utf-8")
    tree = ast.parse(text)
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    stored = [call.args for call in calls if call.func.id == "record_result"]
    assert stored, "no call of record_result"
    assert all(isinstance(args[1], ast.Constant) and args[1].value == name for args in stored)
    assert any(call.func.id == "add_history_options" for call in calls) or '"--history"' in text


def test_the_reduced_form_has_every_cpu_bench_and_arguments_that_parse(tmp_path: Path) -> None:
    smoke = load_tool(BENCHES["smoke"])
    assert set(smoke.REDUCED) == BENCHES.keys() - RUNNERS - COUNTS - {"gpu"}
    for name, line in smoke.REDUCED.items():
        words = line.format(**smoke.find_folders(tmp_path)).split()
        load_tool(BENCHES[name]).build_parser().parse_args([*words, "--history", "h.jsonl"])


# appended to megatron/laws/fit.py: every fit takes 0.2 s of CPU more
SLOWER_FIT = """
import time

fit_law_at_speed = fit_law


def fit_law(*args, **options):
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    return fit_law_at_speed(*args, **options)
"""


@pytest.mark.slow
def test_both_commits_are_measured_in_turns_with_their_own_code(tmp_path: Path) -> None:
    folder = tmp_path / "clone"
    cloned = subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], timeout=60)
    if cloned.returncode:
        pytest.skip("this is not a git checkout")
    # the files under test, also before they are committed
    shutil.copytree(ROOT / "tools" / "bench", folder / "tools" / "bench", dirs_exist_ok=True)
    shutil.copy(ROOT / "megatron" / "bench_history.py", folder / "megatron")
    for helper in (ROOT / "megatron").glob("_csrc*.so"):
        shutil.copy(helper, folder / "megatron")
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for text in ("", SLOWER_FIT):
        with (folder / "megatron" / "laws" / "fit.py").open("a") as file:
            file.write(text)
        subprocess.run([*git, "add", "-A"], check=True, timeout=30)
        subprocess.run([*git, "commit", "-qm", "Step", "--allow-empty"], check=True, timeout=30)
    command = [sys.executable, "tools/bench/compare.py", "--base", "HEAD~1", "--run", "--rounds", "2"]
    command += ["--benches", "fit", "--history", str(tmp_path / "h.jsonl")]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stdout + done.stderr
    losses = [line for line in done.stdout.splitlines() if line.endswith("LOSS")]
    assert any(line.startswith("fit plain, 240 runs: fit ") for line in losses), done.stdout
    commits = [json.loads(line)["commit"] for line in (tmp_path / "h.jsonl").read_text().splitlines()]
    turns = [commit for commit, before in zip(commits, ["", *commits], strict=False) if commit != before]
    assert len(turns) == 4 and len(set(turns)) == 2
    listed = subprocess.run([*git, "worktree", "list"], capture_output=True, text=True, timeout=30)
    assert len(listed.stdout.splitlines()) == 1


def test_a_command_is_stopped_with_its_children_at_the_limit(tmp_path: Path) -> None:
    smoke = load_tool(BENCHES["smoke"])
    code = "import subprocess, sys; subprocess.run(['sleep', '60'])"
    outcome = smoke.run_limited([sys.executable, "-c", code], tmp_path, {}, 1.0)
    assert outcome.skipped == "stopped at the time limit" and outcome.seconds < 30
    outcome = smoke.run_limited([sys.executable, "-c", "raise SystemExit('broken')"], tmp_path, {}, 30)
    assert outcome.error == "exit status 1: broken"


def test_reduced_benches_without_any_result_are_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    smoke = load_tool(BENCHES["smoke"])
    words = ["--benches", "extrapolate", "--history", str(tmp_path / "h.jsonl")]
    monkeypatch.setenv("SCALING_LAWS", str(tmp_path / "absent"))
    assert smoke.main(words) == 1
    out = capsys.readouterr().out
    assert "absent: no published runs; set SCALING_LAWS" in out and "0 new results" in out


def test_reduced_benches_store_results_that_can_be_compared(tmp_path: Path, compare: ModuleType) -> None:
    history = tmp_path / "h.jsonl"
    command = [sys.executable, str(BENCHES["smoke"]), "--benches", "coverage", "--history", str(history)]
    for commit in (BASE, HEAD):
        done = subprocess.run(
            command, env=os.environ | {"BENCH_COMMIT": commit}, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0 and "7 new results" in done.stdout, done.stdout + done.stderr
    # the simulations have seeds: no difference
    assert run_compare(compare, history, "--loss", "0%") == 0
