"""Ablations in complete runs: their noise depends on the sample, not on the rank."""

import pytest

from tests.train.conftest import read_losses

ABLATIONS = {
    "autoregressive": [
        "objective.orders=4", "objective.randmask_ratio=0.3", "model.attention_dropout=0.2",
    ],
    "masked_diffusion": [
        "objective.name=masked_diffusion", "objective.t_draw=stratified", "objective.ar_ratio=0.3",
        "objective.low_noise_start=0.5", "objective.low_noise_iterations=4", "model.attention_dropout=0.2",
    ],
}  # fmt: skip

GPT2_AND_MORE = [
    "model.norm=layernorm", "model.feed_forward=gelu", "model.positions=learned", "model.biases=true",
    "model.tied_embedding=false", "model.n_kv_heads=1", "model.qk_norm=true", "model.document_mask=true",
    "model.eod_id=7", "model.parametrization=completep", "model.base_d_model=16", "model.base_n_layers=1",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("objective", ABLATIONS)
def test_two_ranks_match_a_single_rank_under_every_ablation(pretrain, words, tmp_path, objective) -> None:
    words = [*words, *ABLATIONS[objective], "lr_scheduler.total_iterations=6"]
    single = pretrain([*words, f"logging.run_dir={tmp_path / 'one'}"])
    assert single.returncode == 0, single.stderr
    two = pretrain([*words, f"logging.run_dir={tmp_path / 'two'}", "dataset.microbatch_size=4"], n_ranks=2)
    assert two.returncode == 0, two.stderr
    for kind in ("train", "validation"):
        assert read_losses(tmp_path / "two", kind) == pytest.approx(
            read_losses(tmp_path / "one", kind), abs=1e-5
        )


def test_gpt2s_shape_with_document_masks_trains_under_completep(pretrain, words, tmp_path) -> None:
    done = pretrain([*words, *GPT2_AND_MORE, f"logging.run_dir={tmp_path / 'run'}"])
    assert done.returncode == 0, done.stderr
    train = read_losses(tmp_path / "run", "train")
    assert train[-1] < train[0] - 0.3
    assert ", size custom, N " in done.stderr
