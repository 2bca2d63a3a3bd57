"""Complete runs, started from the command line."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import layout
from megatron.plan.run_dir import lock_run, read_metrics
from tests.conftest import load_newest
from tests.train.conftest import read_losses, remove_end

OBJECTIVES = ("autoregressive", "masked_diffusion")


def load_newest_weights(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = load_newest(run / "checkpoints", "step")
    assert checkpoint is not None
    return checkpoint[1]["model"]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_run_learns_and_writes_its_results(pretrain, words, tmp_path, objective) -> None:
    run = tmp_path / "run"
    words = [
        *words,
        f"logging.run_dir={run}",
        f"objective.name={objective}",
        "lr_scheduler.total_iterations=200",
    ]
    done = pretrain([*words, "logging.tensorboard=true"])
    assert done.returncode == 0, done.stderr
    # an untrained model is uniform over 256 rows: 200 tokens, [MASK] and padding
    assert read_losses(run)[0] == pytest.approx(math.log(256), rel=0.1)
    # a model without context cannot be better than log 200, the entropy of these tokens to three digits
    assert read_losses(run, "validation")[-1] < math.log(200) - 0.3
    result = json.loads((run / "result.json").read_text())
    assert result["loss"] == read_losses(run, "validation")[-1]
    assert (result["mc_se"] is None) == (objective == "autoregressive")
    assert "step: 200  loss:" in done.stderr
    assert "mfu: n/a" in done.stderr
    assert list((run / "tensorboard").iterdir())
    assert [p.name for p in run.glob("*.partial")] == []
    again = pretrain(words)
    assert (again.returncode, again.stdout.strip()) == (0, f"{run}: already done")


@pytest.mark.slow
def test_the_test_text_is_scored_once_at_the_end_and_changes_nothing_else(
    pretrain, words, tmp_path, corpus
) -> None:
    """The test text is here the held-out text, whose score is known."""
    words = [*words, "objective.name=masked_diffusion", "evaluation.every_iterations=6"]
    for name, more in (("plain", []), ("tested", [f"dataset.path_test={corpus / 'held_out'}"])):
        done = pretrain([*words, *more, f"logging.run_dir={tmp_path / name}"])
        assert done.returncode == 0, done.stderr
    plain, tested = (
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("plain", "tested")
    )
    assert tested["test_loss"] == tested["loss"] == plain["loss"]
    assert tested["test_loss_se"] == tested["loss_se"]
    assert "test_loss" not in plain
    assert plain["identity"] != tested["identity"]
    assert read_losses(tmp_path / "plain", "validation") == read_losses(tmp_path / "tested", "validation")
    missing = pretrain(
        [*words, f"dataset.path_test={tmp_path / 'absent'}", f"logging.run_dir={tmp_path / 'x'}"]
    )
    assert missing.returncode == 1 and "absent" in missing.stderr and "Traceback" not in missing.stderr


@pytest.mark.slow
def test_bfloat16_products_give_losses_close_to_float32(pretrain, words, tmp_path) -> None:
    for dtype in ("float32", "bfloat16"):
        done = pretrain([*words, f"logging.run_dir={tmp_path / dtype}", f"dist.dtype={dtype}"])
        assert done.returncode == 0, done.stderr
    exact, rough = read_losses(tmp_path / "float32"), read_losses(tmp_path / "bfloat16")
    assert rough != exact
    assert rough == pytest.approx(exact, abs=0.03)


@pytest.mark.slow
def test_offloading_on_a_single_rank_changes_no_loss(pretrain, words, tmp_path) -> None:
    offload = ["dist.cpu_offload=true", "dist.sharding_stage=zero3", "checkpoint.state_dict_type=sharded"]
    for name, more in (("plain", []), ("offload", offload)):
        done = pretrain([*words, *more, f"logging.run_dir={tmp_path / name}", "dataset.microbatch_size=8"])
        assert done.returncode == 0, done.stderr
    for kind in ("train", "validation"):
        expected = pytest.approx(read_losses(tmp_path / "plain", kind), abs=1e-5)
        assert read_losses(tmp_path / "offload", kind) == expected


@pytest.mark.parametrize(
    "word", [*(f"objective.name={objective}" for objective in OBJECTIVES), "dataset.order=megatron"]
)
def test_a_run_stopped_at_step_7_and_resumed_ends_bit_equal(pretrain, words, tmp_path, word) -> None:
    words = [*words, word, "checkpoint.chkpt_saving_iterations=7"]
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    assert pretrain([*words, f"logging.run_dir={whole}"]).returncode == 0
    assert pretrain([*words, f"logging.run_dir={halved}"]).returncode == 0
    remove_end(halved)
    resumed = pretrain([*words, f"logging.run_dir={halved}"])
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming after step 7" in resumed.stderr
    assert read_losses(whole) == read_losses(halved)
    for name, tensor in load_newest_weights(whole).items():
        assert torch.equal(tensor, load_newest_weights(halved)[name]), name
    first, second = (json.loads((run / "result.json").read_text()) for run in (whole, halved))
    assert first["loss"] == second["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("was_logged", [True, False])
def test_a_run_killed_between_its_last_checkpoint_and_its_result_gets_its_result(
    pretrain, words, tmp_path, was_logged
) -> None:
    run = tmp_path / "run"
    assert pretrain([*words, f"logging.run_dir={run}"]).returncode == 0
    before, lines = json.loads((run / "result.json").read_text()), list(read_metrics(run))
    assert lines[-1]["kind"] == "validation"
    (run / "result.json").unlink()
    if not was_logged:
        content = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(content[:-1]))
    again = pretrain([*words, f"logging.run_dir={run}"])
    assert again.returncode == 0, again.stderr
    assert json.loads((run / "result.json").read_text()) == before
    assert list(read_metrics(run)) == lines
    assert len(layout.find_checkpoints(run / "checkpoints")) == 1


# tests/ranks covers both objectives; complete runs are tested with the objective that draws noise
@pytest.mark.ranks
@pytest.mark.parametrize(
    "objective", [pytest.param("autoregressive", marks=pytest.mark.slow), "masked_diffusion"]
)
def test_two_ranks_and_microbatches_give_the_losses_of_a_single_rank(
    pretrain, words, tmp_path, objective
) -> None:
    words = [*words, f"objective.name={objective}"]
    assert pretrain([*words, f"logging.run_dir={tmp_path / 'one'}"]).returncode == 0
    two = pretrain([*words, f"logging.run_dir={tmp_path / 'two'}", "dataset.microbatch_size=4"], n_ranks=2)
    assert two.returncode == 0, two.stderr
    for kind in ("train", "validation"):
        assert read_losses(tmp_path / "two", kind) == pytest.approx(
            read_losses(tmp_path / "one", kind), abs=1e-5
        )


@pytest.mark.slow
@pytest.mark.ranks
def test_a_pipeline_run_resumes_with_sharding_and_the_losses_of_a_single_rank(
    pretrain, words, tmp_path
) -> None:
    words = [*words, "checkpoint.chkpt_saving_iterations=7", "evaluation.max_samples=7", "model.n_heads=2"]
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    assert pretrain([*words, f"logging.run_dir={whole}"]).returncode == 0
    cut = pretrain([*words, f"logging.run_dir={moved}", "dist.pipeline_parallel=2"], n_ranks=2)
    assert cut.returncode == 0, cut.stderr
    remove_end(moved)
    shards = pretrain([*words, f"logging.run_dir={moved}", "dist.sharding_stage=zero3"], n_ranks=2)
    assert shards.returncode == 0, shards.stderr
    for kind in ("train", "validation"):  # 7 samples do not divide among 2 ranks
        assert read_losses(moved, kind) == pytest.approx(read_losses(whole, kind), abs=1e-5)


def test_a_checkpoint_of_another_model_is_refused_and_not_modified(pretrain, words, tmp_path) -> None:
    run = tmp_path / "run"
    assert pretrain([*words, f"logging.run_dir={run}"]).returncode == 0
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    plan = (run / "plan.json").read_text()
    other = pretrain([*words, f"logging.run_dir={run}", "model.d_model=64"])
    assert other.returncode == 1
    last = other.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "model.d_model was 32, is 64" in last
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before
    assert (run / "plan.json").read_text() == plan


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("optim.lrr=1", "optim: unknown key 'lrr'; did you mean 'lr'?"),
        ("dataset.path_train=nowhere/text", "nowhere/text.idx: no such file"),
        ("dataset.batch_size=5", ""),
    ],
)
def test_bad_input_gives_a_one_line_error_and_no_files(pretrain, words, tmp_path, word, sentence) -> None:
    words = [*words, f"logging.run_dir={tmp_path / 'run'}", word]
    if not sentence:
        sentence = "dataset.microbatch_size: got 3, expected a divisor of the 5 samples of a rank"
        words.append("dataset.microbatch_size=3")
    failed = pretrain(words)
    assert failed.returncode == 1
    assert failed.stderr.count("\n") == 1
    assert sentence in failed.stderr
    assert not (tmp_path / "run").exists()


def test_two_trainings_never_share_a_folder(pretrain, words, tmp_path) -> None:
    run_lock = lock_run(tmp_path / "run")
    failed = pretrain([*words, f"logging.run_dir={tmp_path / 'run'}"])
    assert (failed.returncode, failed.stderr.count("\n")) == (1, 1)
    assert "another process is training there" in failed.stderr
    run_lock.close()
    assert pretrain([*words, f"logging.run_dir={tmp_path / 'run'}"]).returncode == 0


@pytest.mark.slow
def test_a_nan_loss_ends_the_run_and_is_never_saved(pretrain, words, tmp_path) -> None:
    run = tmp_path / "run"
    words = [
        *words,
        f"logging.run_dir={run}",
        "optim.lr=1e30",
        "optim.grad_clip=0",
        "logging.every_iterations=100",
    ]
    failed = pretrain([*words, "checkpoint.chkpt_saving_iterations=2"])
    assert failed.returncode == 1
    assert "Lower optim.lr" in failed.stderr.splitlines()[-1]
    assert not layout.find_checkpoints(run / "checkpoints")


def test_a_run_on_a_single_rank_imports_neither_the_compiler_nor_dtensor(
    words, root: Path, tmp_path: Path
) -> None:
    """Each of these imports would add a second to every run of a ladder."""
    program = (
        "import sys; from tools.pretrain import main; status = main(sys.argv[1:]); "
        "heavy = {'torch._dynamo', 'torch.distributed.tensor', 'torch.distributed.checkpoint'}; "
        "sys.exit(status or ' '.join(heavy & set(sys.modules)) or None)"
    )
    config = tmp_path / "empty.yaml"
    config.write_text("name: test\n")
    done = subprocess.run(
        [sys.executable, "-c", program, str(config), *words, f"logging.run_dir={tmp_path}/run"],
        capture_output=True, text=True, timeout=300, cwd=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
