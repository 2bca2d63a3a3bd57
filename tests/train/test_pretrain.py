"""Complete runs: what they learn, write and refuse, alone and on two ranks."""

import math
import shutil
import sys
from pathlib import Path

import pytest

from megatron.io import read_json
from megatron.plan.run_dir import lock_run, read_metrics
from megatron.train import loop
from tests.train.conftest import (
    MDM,
    assert_same_losses,
    assert_same_weights,
    list_saved,
    read_error,
    read_lines,
    read_losses,
    remove_end,
    save_every,
)

OBJECTIVES = ("autoregressive", "masked_diffusion")
ABLATIONS = {
    "autoregressive": [
        "objective.orders=4", "objective.randmask_ratio=0.3", "model.attention_dropout=0.2",
    ],
    "masked_diffusion": [
        MDM, "objective.t_draw=stratified", "objective.ar_ratio=0.3", "objective.low_noise_start=0.5",
        "objective.low_noise_iterations=4", "model.attention_dropout=0.2",
    ],
}  # fmt: skip
GPT2_AND_MORE = [
    "model.norm=layernorm", "model.feed_forward=gelu", "model.positions=learned", "model.biases=true",
    "model.tied_embedding=false", "model.n_kv_heads=1", "model.qk_norm=true", "model.document_mask=true",
    "model.eod_id=7", "model.parametrization=completep", "model.base_d_model=16", "model.base_n_layers=1",
    "dist.compile=auto",
]  # fmt: skip


def read_result(run: Path) -> dict:
    return read_json(run / "result.json")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_run_learns_and_writes_its_results(pretrain, tmp_path, objective) -> None:
    run = tmp_path / "run"
    changes = [f"objective.name={objective}", "lr_scheduler.total_iterations=100"]
    done = pretrain(run, *changes)
    # an untrained model is uniform over 256 rows: 200 tokens, [MASK] and padding
    assert read_losses(run)[0] == pytest.approx(math.log(256), rel=0.1)
    # a model without context cannot be better than log 200, the entropy of these tokens to three digits
    assert read_losses(run, "validation")[-1] < math.log(200) - 0.3
    result = read_result(run)
    assert result["loss"] == read_losses(run, "validation")[-1]
    assert read_json(run / "plan.json")["microbatch_size"] == 24
    assert (result["mc_se"] is None) == (objective == "autoregressive")
    assert "step: 100  loss:" in done.error and "mfu: n/a" in done.error
    assert [p.name for p in run.glob("*.partial")] == []
    assert pretrain(run, *changes).output.strip() == f"{run}: already done"


def test_gpt2s_shape_with_document_masks_trains(pretrain, tmp_path) -> None:
    done = pretrain(tmp_path, *GPT2_AND_MORE)
    train = read_losses(tmp_path)
    assert train[-1] < train[0] - 0.3
    assert ", size custom, N " in done.error


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_uniform_tokens_cost_their_entropy(pretrain, tmp_path, objective) -> None:
    synthetic = ["dataset.path_train=synthetic", "dataset.path_eval=synthetic", "model.n_tokens=10"]
    pretrain(tmp_path, *synthetic, f"objective.name={objective}", "lr_scheduler.total_iterations=60")
    held_out = read_lines(tmp_path, "validation")[-1]
    # no model can be better than log 10 nats, up to the error of the estimate; an untrained model starts near
    # log 128, the log of its rows
    error = 4 * math.hypot(held_out["loss_se"], held_out["mc_se"] or 0)
    assert math.log(10) - error < held_out["loss"] < math.log(10) + 0.3


def test_the_test_text_is_scored_once_at_the_end(pretrain, tmp_path, corpus) -> None:
    """The test text is here the held-out text, whose score is known."""
    plain, tested = tmp_path / "plain", tmp_path / "tested"
    changes = [MDM, "evaluation.every_iterations=6"]
    pretrain(plain, *changes)
    pretrain(tested, *changes, f"dataset.path_test={corpus / 'held_out'}")
    result, expected = read_result(tested), read_result(plain)
    assert result["test_loss"] == result["loss"] == expected["loss"]
    assert result["test_loss_se"] == result["loss_se"]
    assert "test_loss" not in expected and expected["identity"] != result["identity"]
    assert read_losses(plain, "validation") == read_losses(tested, "validation")
    missing = pretrain(tmp_path / "x", *changes, f"dataset.path_test={tmp_path / 'absent'}", status=1)
    assert "absent" in missing.error


def test_bfloat16_and_offloading_give_the_losses_of_float32(pretrain, tmp_path) -> None:
    exact, rough, offload = (tmp_path / name for name in ("exact", "rough", "offload"))
    pretrain(exact)
    pretrain(rough, "dist.dtype=bfloat16")
    assert read_losses(rough) != read_losses(exact)
    assert_same_losses(rough, exact, 0.03)
    changes = ["dist.cpu_offload=true", "dist.sharding_stage=zero3", "checkpoint.state_dict_type=sharded"]
    pretrain(offload, *changes, "dataset.microbatch_size=8")
    assert_same_losses(offload, exact)


@pytest.mark.parametrize("change", ["objective.name=autoregressive", MDM, "dataset.order=megatron", "blend"])
def test_a_run_resumed_without_workers_ends_bit_equal(pretrain, blend, tmp_path, change) -> None:
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    changes = [*(blend if change == "blend" else [change]), save_every(7)]
    done = pretrain(whole, *changes, "dataset.num_workers=2")
    if change == "blend":
        assert "train: 75.00% of the samples" in done.error
        plan, last = read_json(whole / "plan.json"), read_lines(whole)[-1]
        assert [last[key] for key in ("unique_tokens", "repeated_tokens")] == [
            plan[key] for key in ("unique_tokens", "repeated_tokens")
        ]
        assert last["epochs"] == {corpus["name"]: corpus["epochs"] for corpus in plan["corpora"]}
    shutil.copytree(whole, halved)
    remove_end(halved)
    assert "resuming after step 7" in pretrain(halved, *changes, "dataset.num_workers=0").error
    assert read_losses(whole) == read_losses(halved)
    assert_same_weights(halved, whole)
    assert read_result(whole)["loss"] == read_result(halved)["loss"]


@pytest.mark.parametrize("was_logged", [True, False])
def test_a_run_killed_before_its_result_gets_its_result(pretrain, tmp_path, was_logged) -> None:
    pretrain(tmp_path)
    before, lines = read_result(tmp_path), list(read_metrics(tmp_path))
    assert lines[-1]["kind"] == "validation"
    (tmp_path / "result.json").unlink()
    if not was_logged:
        content = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "metrics.jsonl").write_text("".join(content[:-1]))
    pretrain(tmp_path)
    assert read_result(tmp_path) == before
    assert list(read_metrics(tmp_path)) == lines
    assert len(list_saved(tmp_path)) == 1


# tests/ranks covers both objectives without ablations; noise depends on the sample, not on the rank
@pytest.mark.ranks
@pytest.mark.parametrize("ablation", ABLATIONS)
def test_two_ranks_have_the_losses_of_a_single_rank(pretrain, tmp_path, ablation) -> None:
    changes = [*ABLATIONS[ablation], "lr_scheduler.total_iterations=6"]
    pretrain(tmp_path / "one", *changes)
    pretrain(tmp_path / "two", *changes, "dataset.microbatch_size=4", n_ranks=2)
    assert_same_losses(tmp_path / "two", tmp_path / "one")


@pytest.mark.ranks
def test_a_pipeline_run_resumes_with_sharding(pretrain, tmp_path) -> None:
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    # 7 samples do not divide among 2 ranks
    changes = [save_every(7), "evaluation.max_samples=7"]
    pretrain(whole, *changes)
    pretrain(moved, *changes, "dist.pipeline_parallel=2", n_ranks=2)
    remove_end(moved)
    pretrain(moved, *changes, "dist.sharding_stage=zero3", n_ranks=2)
    assert_same_losses(moved, whole)


def test_a_branch_of_a_trunk_ends_bit_equal_to_a_run_alone(pretrain, tmp_path) -> None:
    trunk, alone, branch = (tmp_path / name for name in ("trunk", "alone", "branch"))
    wsd = ["lr_scheduler.kind=wsd", "lr_scheduler.decay_iterations=4", "checkpoint.keep_last=null"]
    pretrain(trunk, *wsd, "lr_scheduler.total_iterations=20", save_every(8))
    pretrain(alone, *wsd)
    at_8, at_16, _ = (checkpoint.path for checkpoint in list_saved(trunk))
    wsd.append(f"checkpoint.branch_from={at_8}")
    assert "resuming after step 8" in pretrain(branch, *wsd).error
    # 12 steps, the last 4 with decay: the branch takes these, the trunk has taken the others
    ours, theirs = (
        [(line["step"], line["loss"], line["lr"]) for line in read_lines(run)] for run in (branch, alone)
    )
    assert [step for step, *_ in ours] == [9, 10, 11, 12] and ours == theirs[8:]
    assert_same_weights(branch, alone)
    # interrupted and restarted, it resumes from its own checkpoint, not from the trunk's
    (branch / "result.json").unlink()
    assert "resuming after step 12 from" in pretrain(branch, *wsd).error
    shutil.rmtree(branch)
    late = pretrain(branch, *wsd, f"checkpoint.branch_from={at_16}", status=1)
    assert "learning rates equal this run's for the first 8 only" in read_error(late)
    assert "run with another model, corpus" in pretrain(branch, *wsd, "misc.seed=5", status=1).error


def test_a_checkpoint_of_another_run_is_refused(pretrain, blend, tmp_path) -> None:
    run, listed = tmp_path / "run", tmp_path / "blend.txt"
    pretrain(run, *blend)
    before = sorted((run / "checkpoints").iterdir()), (run / "plan.json").read_text()
    for change, weight, sentence in (
        ("model.d_model=64", "3 ", "model.d_model was 32, is 64"),
        ("model.d_model=32", "2 ", "checkpoint of another run (its corpus has changed"),
    ):
        listed.write_text(listed.read_text().replace("3 ", weight))
        last = read_error(pretrain(run, *blend, change, status=1))
        assert last.startswith("error: ") and sentence in last
    assert (sorted((run / "checkpoints").iterdir()), (run / "plan.json").read_text()) == before


def test_bad_input_is_refused_without_files(pretrain, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    for change, sentence in (
        ("optim.lrr=1", "optim: unknown key 'lrr'; did you mean 'lr'?"),
        ("dataset.path_train=nowhere/text", "nowhere/text.idx: no such file"),
        ("dataset.microbatch_size=5", "got 5, expected a divisor of the 24 samples of a rank"),
        ("dist.engine=deepspeed", "in sys.modules). pip install deepspeed"),
    ):
        failed = pretrain(tmp_path, change, status=1)
        assert failed.error.count("\n") == 1 and sentence in failed.error
        assert list(tmp_path.iterdir()) == []
    pretrain(tmp_path)  # with torch, without DeepSpeed


def test_two_trainings_never_share_a_folder(pretrain, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(loop, "LOCK_WAIT_S", 0.0)
    run_lock = lock_run(tmp_path / "run")
    failed = pretrain(tmp_path / "run", status=1)
    assert failed.error.count("\n") == 1 and "another process is training there" in failed.error
    run_lock.close()
    pretrain(tmp_path / "run")
