"""tools/validate.py on runs that were really trained, as a person types it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.data.documents import read_parquet
from megatron.data.indexed import IndexedTokens
from megatron.run_dir import read_metrics
from tests.conftest import free_port

Typed = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def typed(root: Path) -> Typed:
    """Run a tool on one or more gloo ranks; what rank 0 says."""

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
            told = [process.communicate(timeout=240) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        return subprocess.CompletedProcess(command, started[0].returncode, *told[0])

    return run


@pytest.mark.ranks
@pytest.mark.parametrize(
    "objective", ["autoregressive", pytest.param("masked_diffusion", marks=pytest.mark.slow)]
)
def test_a_study_is_scored_once_and_gives_what_training_wrote_down(
    pretrain: Callable[..., subprocess.CompletedProcess[str]],
    words: list[str],
    corpus: Path,
    tmp_path: Path,
    typed: Typed,
    objective: str,
) -> None:
    study, data = tmp_path / "study", corpus / "held_out"
    words = [*words, f"objective.name={objective}", "checkpoint.chkpt_saving_iterations=6"]
    for seed in (0, 1):
        run = study / f"seed{seed}"
        done = pretrain([*words, f"logging.run_dir={run}", f"misc.seed={seed}"])
        assert done.returncode == 0, done.stderr
    n_windows = (IndexedTokens(data).n_tokens - 1) // 32  # training leaves out what is no whole window
    options = ("--data", data, "--num-mc", 2, "--device", "cpu", "--max-samples", n_windows)
    done = typed("validate.py", study, *options, "--compare")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("nats a token +-") == 4 and done.stdout.count(", p = ") == 3
    causal = objective == "autoregressive"
    label = f"held_out-{'ar' if causal else 'mc2'}-first{n_windows}-????????"
    written = [line["loss"] for line in read_metrics(study / "seed0") if line["kind"] == "validation"]
    found = [json.loads(path.read_text()) for path in sorted(study.glob(f"seed0/validation/*/{label}.json"))]
    assert [one["step"] for one in found] == [6, 12]
    assert [one["loss"] for one in found] == pytest.approx(written, rel=1e-6)
    name = f"seed0/validation/*/{label}.documents.parquet"
    documents = read_parquet(min(study.glob(name)))
    assert documents["tokens"].sum() == 32 * n_windows
    assert documents["nats"].sum() / documents["tokens"].sum() == pytest.approx(found[0]["loss"])
    assert list((study / "seed0" / "tensorboard").iterdir())
    again = typed("validate.py", study, *options)
    assert (again.returncode, again.stdout.count("(scored before)")) == (0, 4)
    other = typed("validate.py", study, *options, "--seed", 1).stdout
    assert ("scored before" in other) == causal  # where nothing is drawn a seed changes nothing
    assert len(list(study.glob(name))) == 2
    # the whole of it, by two ranks and by one
    whole = [typed("validate.py", study / "seed0", *options[:-2], "--batch-size", 5)]
    whole_label = label.replace(f"-first{n_windows}", "")
    paths = sorted(study.glob(f"seed0/validation/*/{whole_label}.json"))
    assert len(paths) == 2
    one_rank = [json.loads(path.read_text()) for path in paths]
    for path in paths:
        path.unlink()
    whole.append(typed("validate.py", study / "seed0", *options[:-2], n_ranks=2))
    assert [one.returncode for one in whole] == [0, 0], whole[1].stderr
    two_ranks = [json.loads(path.read_text()) for path in paths]
    for a, b in zip(one_rank, two_ranks, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6) and a["mc_se"] == pytest.approx(b["mc_se"])
    n_tokens = IndexedTokens(data).n_tokens
    assert two_ranks[0]["n_tokens"] == n_tokens - (objective == "autoregressive")


def test_a_blend_is_told_domain_by_domain(
    pretrain: Callable[..., subprocess.CompletedProcess[str]],
    words: list[str],
    corpus: Path,
    tmp_path: Path,
    typed: Typed,
) -> None:
    run = tmp_path / "run"
    assert pretrain([*words, f"logging.run_dir={run}"]).returncode == 0
    (tmp_path / "both.txt").write_text(f"0.25 {corpus / 'train'}\n0.75 {corpus / 'held_out'}\n")
    done = typed("validate.py", run, "--data", tmp_path / "both.txt", "--device", "cpu", "--stride", 16)
    assert done.returncode == 0, done.stderr
    assert "no bits per byte: neither corpus nor model names a tokenizer" in done.stderr
    found = json.loads(next(run.glob("validation/*/both-ar-stride16-????????.json")).read_text())
    train, held_out = found["domains"]["train"], found["domains"]["held_out"]
    assert found["n_tokens"] == train["n_tokens"] + held_out["n_tokens"]
    total = train["loss"] * train["n_tokens"] + held_out["loss"] * held_out["n_tokens"]
    assert found["loss"] == pytest.approx(total / found["n_tokens"])
    assert found["loss_by_weight"] == pytest.approx(0.25 * train["loss"] + 0.75 * held_out["loss"])
    assert found["bits_per_byte"] is None
    each = np.array([train["n_documents"], held_out["n_documents"]])
    assert found["n_documents"] == each.sum()


@pytest.mark.slow
def test_a_tokenizer_found_later_adds_bits_per_byte_to_what_was_scored_before(
    pretrain: Callable[..., subprocess.CompletedProcess[str]],
    words: list[str],
    corpus: Path,
    tmp_path: Path,
    typed: Typed,
    scaling_data: Path,
) -> None:
    """Also where the one that the corpus names has moved; documents go with the figures they belong to."""
    run = tmp_path / "run"
    assert pretrain([*words, f"logging.run_dir={run}"]).returncode == 0
    for end in ("bin", "idx", "json"):
        source = corpus / f"held_out.{end}"
        if source.exists():
            (tmp_path / f"moved.{end}").write_bytes(source.read_bytes())
    sidecar = tmp_path / "moved.json"
    about = json.loads(sidecar.read_text()) if sidecar.exists() else {}
    sidecar.write_text(json.dumps({**about, "tokenizer": {"name": str(tmp_path / "gone"), "n_tokens": 64}}))
    tokenizer = scaling_data / "stories260K" / "tok512.bin"
    options = (run, "--data", tmp_path / "moved", "--device", "cpu")
    first = typed("validate.py", *options, "--save-per-document")
    assert first.returncode == 0, first.stderr
    assert f"no bits per byte: {tmp_path / 'gone'}: no such tokenizer folder; --tokenizer" in first.stderr
    path = next(run.glob("validation/*/moved-ar-????????.json"))
    documents = path.with_suffix(".documents.parquet")
    before = json.loads(path.read_text())
    assert before["bits_per_byte"] is None and documents.exists()
    failed = typed("validate.py", *options, "--tokenizer", tmp_path / "none")
    assert failed.returncode == 1 and "none: no such tokenizer folder" in failed.stderr
    again = typed("validate.py", *options, "--tokenizer", tokenizer)
    found = json.loads(path.read_text())
    assert again.returncode == 0 and "scored before" not in again.stdout, again.stderr
    assert found["bits_per_byte"] > 0 and found["loss"] == before["loss"] and documents.exists()
    third = typed("validate.py", *options)
    assert "scored before" in third.stdout and "no bits per byte" not in third.stderr
    typed("validate.py", *options, "--seq-len", 16)
    assert documents.exists() and len(list(path.parent.glob("moved-ar-*.json"))) == 2
    ids = np.fromfile(tmp_path / "moved.bin", np.uint16)
    ids[::-1].tofile(tmp_path / "moved.bin")  # other figures under the name: the documents of old ones go
    edited = typed("validate.py", *options)
    assert not documents.exists() and "replaced; it was of other weights or files" in edited.stderr


def test_bad_input_is_one_sentence(
    pretrain: Callable[..., subprocess.CompletedProcess[str]],
    words: list[str],
    corpus: Path,
    tmp_path: Path,
    typed: Typed,
) -> None:
    run, data = tmp_path / "run", corpus / "held_out"
    assert pretrain([*words, f"logging.run_dir={run}"]).returncode == 0
    for more, sentence in (
        ((tmp_path / "none", "--data", data), "no checkpoint there, nor in folders below it"),
        ((run, "--data", tmp_path / "text"), "wanted the prefix of a .bin/.idx pair"),
        ((run, "--data", data, "--method", "mc"), "its loss is exact; leave --method mc out"),
        ((run, "--data", data, "--stride", 33), "--stride: found 33, wanted 1 to 32"),
        ((run, "--data", data, "--compare"), "--compare: wants two models or more"),
    ):
        failed = typed("validate.py", *more, "--device", "cpu")
        assert failed.returncode == 1
        assert failed.stderr.splitlines()[-1].startswith("error: ") and sentence in failed.stderr
    for more in ((), ("--data", data, "--stride", 0), ("--data", data, "--seq-len", 0)):
        assert typed("validate.py", run, *more).returncode == 2
    assert not (run / "validation").exists()


def test_results_that_go_elsewhere_leave_the_run_alone_and_say_what_passes_the_trained_positions(
    pretrain: Callable[..., subprocess.CompletedProcess[str]],
    words: list[str],
    corpus: Path,
    tmp_path: Path,
    typed: Typed,
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    assert pretrain([*words, f"logging.run_dir={run}"]).returncode == 0

    def files() -> list[tuple[str, int, int]]:
        found = [path for path in sorted(run.rglob("*")) if path.is_file()]
        return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in found]

    before, told = files(), "--seq-len: got 64 positions, "
    options = (run, "--data", corpus / "held_out", "--device", "cpu", "--out", out, "--seq-len")
    trained = typed("validate.py", *options, 32)
    assert trained.returncode == 0 and "positions" not in trained.stderr, trained.stderr
    assert [json.loads(path.read_text())["warnings"] for path in out.glob("*.json")] == [[]]
    for path in out.glob("*.json"):
        path.unlink()
    for words_before in ("", "scored before"):
        longer = typed("validate.py", *options, 64)
        assert longer.returncode == 0 and words_before in longer.stdout
        assert longer.stderr.count(told) == 1 and "was trained on 32" in longer.stderr
        (result,) = [json.loads(path.read_text()) for path in out.glob("*.json")]
        assert len(result["warnings"]) == 1 and result["warnings"][0].startswith(told)
    assert files() == before
