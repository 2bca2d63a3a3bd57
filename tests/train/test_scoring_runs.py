"""tools/validate.py on trained runs, from the command line."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from megatron.data.indexed import IndexedTokens
from megatron.plan.run_dir import read_metrics
from tests.conftest import free_port

RunTool = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run_tool(root: Path) -> RunTool:
    """Run a tool on one or more gloo ranks; return rank 0's output."""

    def run(tool: str, *words: object, n_ranks: int = 1) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(root / "tools" / tool), *map(str, words)]
        shared = {**os.environ, "OMP_NUM_THREADS": "1"}
        if n_ranks > 1:
            shared |= {
                "WORLD_SIZE": str(n_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
            }
        ranks = [{} if n_ranks == 1 else {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(n_ranks)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = [subprocess.Popen(command, env={**shared, **rank}, **pipes) for rank in ranks]
        try:
            outputs = [process.communicate(timeout=240) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        return subprocess.CompletedProcess(command, started[0].returncode, *outputs[0])

    return run


@pytest.mark.ranks
@pytest.mark.parametrize(
    "objective", ["autoregressive", pytest.param("masked_diffusion", marks=pytest.mark.slow)]
)
def test_a_study_is_scored_once_and_gives_the_losses_of_training(
    pretrain: Callable[..., subprocess.CompletedProcess[str]],
    words: list[str],
    corpus: Path,
    tmp_path: Path,
    run_tool: RunTool,
    objective: str,
) -> None:
    study, data = tmp_path / "study", corpus / "held_out"
    words = [*words, f"objective.name={objective}", "checkpoint.chkpt_saving_iterations=6"]
    for seed in (0, 1):
        run = study / f"seed{seed}"
        done = pretrain([*words, f"logging.run_dir={run}", f"misc.seed={seed}"])
        assert done.returncode == 0, done.stderr
    n_windows = (IndexedTokens(data).n_tokens - 1) // 32  # training omits the last partial window
    options = ("--data", data, "--num-mc", 2, "--device", "cpu", "--max-samples", n_windows)
    done = run_tool("validate.py", study, *options, "--compare")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("nats per token +-") == 4 and done.stdout.count(", p = ") == 3
    causal = objective == "autoregressive"
    label = f"held_out-{'ar' if causal else 'mc2'}-first{n_windows}-????????"
    written = [line["loss"] for line in read_metrics(study / "seed0") if line["kind"] == "validation"]
    results = [
        json.loads(path.read_text()) for path in sorted(study.glob(f"seed0/validation/*/{label}.json"))
    ]
    assert [result["step"] for result in results] == [6, 12]
    assert [result["loss"] for result in results] == pytest.approx(written, rel=1e-6)
    name = f"seed0/validation/*/{label}.documents.parquet"
    documents = pd.read_parquet(min(study.glob(name)))
    assert documents["tokens"].sum() == 32 * n_windows
    assert documents["nats"].sum() / documents["tokens"].sum() == pytest.approx(results[0]["loss"])
    assert list((study / "seed0" / "tensorboard").iterdir())
    again = run_tool("validate.py", study, *options)
    assert (again.returncode, again.stdout.count("(scored before)")) == (0, 4)
    other = run_tool("validate.py", study, *options, "--seed", 1).stdout
    assert ("scored before" in other) == causal  # without random draws the seed has no effect
    assert len(list(study.glob(name))) == 2
    # the complete data, with two ranks and with one
    whole = [run_tool("validate.py", study / "seed0", *options[:-2], "--batch-size", 5)]
    whole_label = label.replace(f"-first{n_windows}", "")
    paths = sorted(study.glob(f"seed0/validation/*/{whole_label}.json"))
    assert len(paths) == 2
    one_rank = [json.loads(path.read_text()) for path in paths]
    for path in paths:
        path.unlink()
    whole.append(run_tool("validate.py", study / "seed0", *options[:-2], n_ranks=2))
    assert [done.returncode for done in whole] == [0, 0], whole[1].stderr
    two_ranks = [json.loads(path.read_text()) for path in paths]
    for a, b in zip(one_rank, two_ranks, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6) and a["mc_se"] == pytest.approx(b["mc_se"])
    n_tokens = IndexedTokens(data).n_tokens
    assert two_ranks[0]["n_tokens"] == n_tokens - (objective == "autoregressive")


@pytest.mark.slow
def test_a_blend_is_scored_domain_by_domain(
    pretrain: Callable[..., subprocess.CompletedProcess[str]],
    words: list[str],
    corpus: Path,
    tmp_path: Path,
    run_tool: RunTool,
) -> None:
    run = tmp_path / "run"
    assert pretrain([*words, f"logging.run_dir={run}"]).returncode == 0
    (tmp_path / "both.txt").write_text(f"0.25 {corpus / 'train'}\n0.75 {corpus / 'held_out'}\n")
    done = run_tool("validate.py", run, "--data", tmp_path / "both.txt", "--device", "cpu", "--stride", 16)
    assert done.returncode == 0, done.stderr
    assert "no bits per byte: neither corpus nor model names a tokenizer" in done.stderr
    result = json.loads(next(run.glob("validation/*/both-ar-stride16-????????.json")).read_text())
    train, held_out = result["domains"]["train"], result["domains"]["held_out"]
    assert result["n_tokens"] == train["n_tokens"] + held_out["n_tokens"]
    total = train["loss"] * train["n_tokens"] + held_out["loss"] * held_out["n_tokens"]
    assert result["loss"] == pytest.approx(total / result["n_tokens"])
    assert result["loss_by_weight"] == pytest.approx(0.25 * train["loss"] + 0.75 * held_out["loss"])
    assert result["bits_per_byte"] is None
    n_documents = np.array([train["n_documents"], held_out["n_documents"]])
    assert result["n_documents"] == n_documents.sum()


@pytest.mark.slow
def test_a_later_tokenizer_adds_bits_per_byte_to_earlier_scores(
    pretrain: Callable[..., subprocess.CompletedProcess[str]],
    words: list[str],
    corpus: Path,
    tmp_path: Path,
    run_tool: RunTool,
    stories_folder: Path,
) -> None:
    """Also if the tokenizer of the corpus has moved. Per-document results are removed with their scores."""
    run = tmp_path / "run"
    assert pretrain([*words, f"logging.run_dir={run}"]).returncode == 0
    for end in ("bin", "idx", "json"):
        source = corpus / f"held_out.{end}"
        if source.exists():
            (tmp_path / f"moved.{end}").write_bytes(source.read_bytes())
    sidecar = tmp_path / "moved.json"
    about = json.loads(sidecar.read_text()) if sidecar.exists() else {}
    sidecar.write_text(json.dumps({**about, "tokenizer": {"name": str(tmp_path / "gone"), "n_tokens": 64}}))
    options = (run, "--data", tmp_path / "moved", "--device", "cpu")
    first = run_tool("validate.py", *options, "--save-per-document")
    assert first.returncode == 0, first.stderr
    assert (
        f"no bits per byte: {tmp_path / 'gone'}: no such tokenizer folder; give --tokenizer" in first.stderr
    )
    path = next(run.glob("validation/*/moved-ar-????????.json"))
    documents = path.with_suffix(".documents.parquet")
    before = json.loads(path.read_text())
    assert before["bits_per_byte"] is None and documents.exists()
    failed = run_tool("validate.py", *options, "--tokenizer", tmp_path / "none")
    assert failed.returncode == 1 and "none: no such tokenizer folder" in failed.stderr
    again = run_tool("validate.py", *options, "--tokenizer", stories_folder)
    result = json.loads(path.read_text())
    assert again.returncode == 0 and "scored before" not in again.stdout, again.stderr
    assert result["bits_per_byte"] > 0 and result["loss"] == before["loss"] and documents.exists()
    third = run_tool("validate.py", *options)
    assert "scored before" in third.stdout and "no bits per byte" not in third.stderr
    run_tool("validate.py", *options, "--seq-len", 16)
    assert documents.exists() and len(list(path.parent.glob("moved-ar-*.json"))) == 2
    ids = np.fromfile(tmp_path / "moved.bin", np.uint16)
    ids[::-1].tofile(tmp_path / "moved.bin")  # other scores: per-document results are removed
    edited = run_tool("validate.py", *options)
    assert not documents.exists() and "replaced; it was of other weights or data" in edited.stderr


@pytest.mark.slow
def test_bad_input_gives_a_one_line_error(
    pretrain: Callable[..., subprocess.CompletedProcess[str]],
    words: list[str],
    corpus: Path,
    tmp_path: Path,
    run_tool: RunTool,
) -> None:
    run, data = tmp_path / "run", corpus / "held_out"
    assert pretrain([*words, f"logging.run_dir={run}"]).returncode == 0
    for more, sentence in (
        ((tmp_path / "none", "--data", data), "got no checkpoint in it or its subfolders"),
        ((run, "--data", tmp_path / "text"), "expected the prefix of a .bin/.idx dataset"),
        ((run, "--data", data, "--method", "mc"), "its loss is exact. Omit --method mc."),
        ((run, "--data", data, "--stride", 33), "--stride: got 33, expected 1 to 32"),
        ((run, "--data", data, "--compare"), "--compare: got 1 model, expected two or more"),
    ):
        failed = run_tool("validate.py", *more, "--device", "cpu")
        assert failed.returncode == 1
        assert failed.stderr.splitlines()[-1].startswith("error: ") and sentence in failed.stderr
    for more in ((), ("--data", data, "--stride", 0), ("--data", data, "--seq-len", 0)):
        assert run_tool("validate.py", run, *more).returncode == 2
    assert not (run / "validation").exists()


@pytest.mark.slow
def test_results_in_another_folder_leave_the_run_unchanged_and_warn_of_longer_windows(
    pretrain: Callable[..., subprocess.CompletedProcess[str]],
    words: list[str],
    corpus: Path,
    tmp_path: Path,
    run_tool: RunTool,
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    assert pretrain([*words, f"logging.run_dir={run}"]).returncode == 0

    def list_files() -> list[tuple[str, int, int]]:
        paths = [path for path in sorted(run.rglob("*")) if path.is_file()]
        return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]

    before, warning = list_files(), "--seq-len: got 64 positions, "
    options = (run, "--data", corpus / "held_out", "--device", "cpu", "--out", out, "--seq-len")
    trained = run_tool("validate.py", *options, 32)
    assert trained.returncode == 0 and "positions" not in trained.stderr, trained.stderr
    assert [json.loads(path.read_text())["warnings"] for path in out.glob("*.json")] == [[]]
    for path in out.glob("*.json"):
        path.unlink()
    for words_before in ("", "scored before"):
        longer = run_tool("validate.py", *options, 64)
        assert longer.returncode == 0 and words_before in longer.stdout
        assert longer.stderr.count(warning) == 1 and "was trained on 32" in longer.stderr
        (result,) = [json.loads(path.read_text()) for path in out.glob("*.json")]
        assert len(result["warnings"]) == 1 and result["warnings"][0].startswith(warning)
    assert list_files() == before
