"""tools/validate.py on trained runs."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from megatron.data.indexed import IndexedTokens
from megatron.io import read_json
from tests.rank_processes import run_tool, start_ranks, stop_ranks
from tests.tool_modules import Cli, CliResult
from tests.train.conftest import read_losses, save_every


def read_scores(folder: Path, pattern: str) -> list[dict]:
    return [read_json(path) for path in sorted(folder.glob(pattern))]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "objective", ["autoregressive", pytest.param("masked_diffusion", marks=pytest.mark.slow)]
)
def test_a_study_is_scored_once_with_the_losses_of_training(
    pretrain, corpus: Path, tmp_path: Path, cli: Cli, objective: str
) -> None:
    study, data = tmp_path / "study", corpus / "held_out"
    for seed in (0, 1):
        changes = [f"objective.name={objective}", save_every(6), f"misc.seed={seed}"]
        pretrain(study / f"seed{seed}", *changes)
    n_windows = (IndexedTokens(data).n_tokens - 1) // 32  # training omits the last partial window
    options = ("--data", data, "--num-mc", 2, "--device", "cpu")
    first = (*options, "--max-samples", n_windows)
    done = cli("validate.py", study, *first, "--compare")
    assert done.output.count("nats per token +-") == 4 and done.output.count(", p = ") == 3
    causal = objective == "autoregressive"
    label = f"seed0/validation/*/held_out-{'ar' if causal else 'mc2'}-first{n_windows}-????????"
    results = read_scores(study, f"{label}.json")
    assert [result["step"] for result in results] == [6, 12]
    written = read_losses(study / "seed0", "validation")
    assert [result["loss"] for result in results] == pytest.approx(written, rel=1e-6)
    documents = pd.read_parquet(min(study.glob(f"{label}.documents.parquet")))
    assert documents["tokens"].sum() == 32 * n_windows
    assert documents["nats"].sum() / documents["tokens"].sum() == pytest.approx(results[0]["loss"])
    assert list((study / "seed0" / "tensorboard").iterdir())
    assert cli("validate.py", study, *first).output.count("(scored before)") == 4
    other = cli("validate.py", study, *first, "--seed", 1).output
    assert ("scored before" in other) == causal  # without random draws the seed has no effect
    assert len(list(study.glob(f"{label}.documents.parquet"))) == 2
    # the complete data, with two ranks and with one
    cli("validate.py", study / "seed0", *options, "--batch-size", 5)
    whole = label.replace(f"-first{n_windows}", "") + ".json"
    one_rank = read_scores(study, whole)
    assert len(one_rank) == 2
    for path in study.glob(whole):
        path.unlink()
    argv = [str(word) for word in (study / "seed0", *options)]
    ranks = start_ranks(run_tool, "validate.py", argv, n_ranks=2, folder=tmp_path)
    try:
        assert [rank.wait().status for rank in ranks] == [0, 0], ranks[1].wait().error
    finally:
        stop_ranks(ranks)
    two_ranks = read_scores(study, whole)
    for a, b in zip(one_rank, two_ranks, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6) and a["mc_se"] == pytest.approx(b["mc_se"])
    assert two_ranks[0]["n_tokens"] == IndexedTokens(data).n_tokens - causal


@pytest.fixture
def run(pretrain, tmp_path: Path) -> Path:
    """Return the folder of a trained run."""
    pretrain(tmp_path / "run")
    return tmp_path / "run"


def test_a_blend_is_scored_domain_by_domain(run: Path, corpus: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "both.txt").write_text(f"0.25 {corpus / 'train'}\n0.75 {corpus / 'held_out'}\n")
    done = cli("validate.py", run, "--data", tmp_path / "both.txt", "--device", "cpu", "--stride", 16)
    assert "no bits per byte: neither corpus nor model names a tokenizer" in done.error
    (result,) = read_scores(run, "validation/*/both-ar-stride16-????????.json")
    train, held_out = result["domains"]["train"], result["domains"]["held_out"]
    assert result["n_tokens"] == train["n_tokens"] + held_out["n_tokens"]
    total = train["loss"] * train["n_tokens"] + held_out["loss"] * held_out["n_tokens"]
    assert result["loss"] == pytest.approx(total / result["n_tokens"])
    assert result["loss_by_weight"] == pytest.approx(0.25 * train["loss"] + 0.75 * held_out["loss"])
    assert result["bits_per_byte"] is None
    assert result["n_documents"] == train["n_documents"] + held_out["n_documents"]


def test_a_later_tokenizer_adds_bits_per_byte(
    run: Path, corpus: Path, tmp_path: Path, cli: Cli, stories_folder: Path
) -> None:
    """Also if the tokenizer of the corpus has moved. Per-document results are removed with their scores."""
    for source in corpus.glob("held_out.*"):
        shutil.copy(source, tmp_path / f"moved{source.suffix}")
    sidecar = tmp_path / "moved.json"
    about = read_json(sidecar)
    sidecar.write_text(json.dumps({**about, "tokenizer": {"name": str(tmp_path / "gone"), "n_tokens": 64}}))
    score: partial[CliResult] = partial(
        cli, "validate.py", run, "--data", tmp_path / "moved", "--device", "cpu"
    )
    first = score("--save-per-document").error
    assert f"no bits per byte: {tmp_path / 'gone'}: no such tokenizer folder; give --tokenizer" in first
    (path,) = run.glob("validation/*/moved-ar-????????.json")
    documents = path.with_suffix(".documents.parquet")
    before = read_json(path)
    assert before["bits_per_byte"] is None and documents.exists()
    failed = score("--tokenizer", tmp_path / "none", status=1)
    assert "none: no such tokenizer folder" in failed.error
    assert "scored before" not in score("--tokenizer", stories_folder).output
    result = read_json(path)
    assert result["bits_per_byte"] > 0 and result["loss"] == before["loss"] and documents.exists()
    third = score()
    assert "scored before" in third.output and "no bits per byte" not in third.error
    score("--seq-len", 16)
    assert documents.exists() and len(list(path.parent.glob("moved-ar-*.json"))) == 2
    ids = np.fromfile(tmp_path / "moved.bin", np.uint16)
    ids[::-1].tofile(tmp_path / "moved.bin")  # other scores: per-document results are removed
    edited = score().error
    assert not documents.exists() and "replaced; it was of other weights or data" in edited


def test_bad_input_gives_a_one_line_error(run: Path, corpus: Path, tmp_path: Path, cli: Cli) -> None:
    data = corpus / "held_out"
    for more, sentence in (
        ((tmp_path / "none", "--data", data), "got no checkpoint in it or its subfolders"),
        ((run, "--data", tmp_path / "text"), "expected the prefix of a .bin/.idx dataset"),
        ((run, "--data", data, "--method", "mc"), "its loss is exact. Omit --method mc."),
        ((run, "--data", data, "--stride", 33), "--stride: got 33, expected 1 to 32"),
        ((run, "--data", data, "--compare"), "--compare: got 1 model, expected two or more"),
    ):
        failed = cli("validate.py", *more, "--device", "cpu", status=1).error
        assert failed.splitlines()[-1].startswith("error: ") and sentence in failed
    for more in ((), ("--data", data, "--stride", 0), ("--data", data, "--seq-len", 0)):
        cli("validate.py", run, *more, status=2)
    assert not (run / "validation").exists()


def test_scores_elsewhere_leave_the_run_unchanged(run: Path, corpus: Path, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "out"

    def list_files() -> list[tuple[str, int, int]]:
        paths = [path for path in sorted(run.rglob("*")) if path.is_file()]
        return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]

    before, warning = list_files(), "--seq-len: got 64 positions, "
    options = (run, "--data", corpus / "held_out", "--device", "cpu", "--out", out, "--seq-len")
    assert "positions" not in cli("validate.py", *options, 32).error
    assert [result["warnings"] for result in read_scores(out, "*.json")] == [[]]
    for path in out.glob("*.json"):
        path.unlink()
    for expected in ("", "scored before"):
        longer = cli("validate.py", *options, 64)
        assert expected in longer.output
        assert longer.error.count(warning) == 1 and "was trained on 32" in longer.error
        (result,) = read_scores(out, "*.json")
        assert len(result["warnings"]) == 1 and result["warnings"][0].startswith(warning)
    assert list_files() == before
