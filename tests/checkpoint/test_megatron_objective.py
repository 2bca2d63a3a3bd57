"""The objective of a Megatron checkpoint is read from its saved arguments or required, never guessed."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.convert.formats import convert_checkpoint, read_any
from megatron.checkpoint.convert.megatron_args import read_objective
from megatron.checkpoint.convert.megatron_layouts import read_megatron
from tests.checkpoint.test_megatron_layouts import LLAMA, UNTIED, write_deepspeed, write_megatron_lm
from tests.conftest import build_tiny
from tests.tool_modules import Cli

# default arguments of wmn-231314/diffusion-data-constraint
FORK = {
    "low_noise_start": False, "low_noise_iter": 1000, "low_noise_ratio": 0.5, "ar_ratio": 0.0,
    "untie_with_additional_mask": False, "randmask_ratio": 0.0, "target_random_ratio": 0.0,
    "use_order_list": False, "block_size": 2048, "wandb_project": "diffusion_data_constraint",
}  # fmt: skip
EVERYTHING = torch.zeros(1, 1, 16, 16, dtype=torch.bool)  # as its pretrain_diff_gpt.py saves it
CAUSAL = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
RANDOM = CAUSAL | (torch.rand(3, 1, 16, 16, generator=torch.Generator().manual_seed(0)) < 0.3)
TIED = LLAMA | {"qk_norm": False}


def change_args(folder: Path, **changes: Any) -> None:
    for path in folder.rglob("*.pt"):
        part = torch.load(path, weights_only=False)
        if "args" in part:
            vars(part["args"]).update(changes)
            torch.save(part, path)


@pytest.mark.parametrize(
    ("args", "requested", "expected"),
    [
        ({}, None, "autoregressive"),
        ({}, "masked_diffusion", "masked_diffusion"),
        ({"attn_mask": CAUSAL}, None, "autoregressive"),
        (FORK | {"attn_mask": EVERYTHING}, None, "masked_diffusion"),
        (FORK | {"attn_mask": EVERYTHING.half()}, None, "masked_diffusion"),
        (FORK | {"attn_mask": CAUSAL}, None, "autoregressive"),
        (FORK | {"attn_mask": RANDOM, "randmask_ratio": 0.1}, None, "autoregressive"),
        (FORK | {"attn_mask": CAUSAL, "low_noise_start": True}, None, "autoregressive"),
        (FORK, "autoregressive", "autoregressive"),
        (FORK, "masked_diffusion", "masked_diffusion"),
        ({"attn_mask": EVERYTHING}, "masked_diffusion", "masked_diffusion"),
        (FORK, None, "do not show whether it is autoregressive or masked diffusion"),
        (FORK | {"attn_mask": None}, None, "do not show"),
        (FORK | {"attn_mask": "not a tensor"}, None, "do not show"),
        (FORK | {"attn_mask": torch.zeros(1, 1, 1, 1)}, None, "do not show"),
        (FORK | {"attn_mask": CAUSAL[..., :9]}, None, "do not show"),
        (FORK | {"attn_mask": CAUSAL.roll(1)}, None, "do not show"),
        (FORK | {"low_noise_start": True}, None, "do not show"),
        ({"attn_mask": EVERYTHING}, None, "do not show"),
        ({"use_masked_diffusion": True}, None, "do not show"),
        (FORK | {"attn_mask": EVERYTHING}, "autoregressive", "its saved attn_mask is for masked_diff"),
        ({"attn_mask": CAUSAL}, "masked_diffusion", "its saved attn_mask is for autoregressive"),
    ],
)
def test_the_objective_comes_from_the_arguments_and_the_caller_and_is_not_guessed(
    args: dict[str, Any], requested: str | None, expected: str
) -> None:
    """`expected` is an objective, or the sentence of the refusal."""
    if expected in ("autoregressive", "masked_diffusion"):
        assert read_objective(Namespace(**args), requested) == expected
        return
    with pytest.raises(ValueError, match=expected) as caught:
        read_objective(Namespace(**args), requested)
    assert "--objective" in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [("pipeline", UNTIED | {"qk_norm": False}), ("deepspeed", TIED), ("megatron-lm", UNTIED)],
)
def test_a_diffusion_checkpoint_is_read_with_its_mask_row(
    tmp_path: Path, layout: str, shape: dict[str, Any]
) -> None:
    model = build_tiny(**shape)
    if layout == "megatron-lm":
        write_megatron_lm(model, tmp_path / "ck", 1, 2, "core")
    else:
        write_deepspeed(model, tmp_path / "ck", 1, layout == "pipeline")
    change_args(tmp_path / "ck", **FORK, attn_mask=EVERYTHING)
    weights = read_any(tmp_path / "ck")
    assert (weights.objective, weights.rate_min) == ("masked_diffusion", 1e-3)
    assert weights.config == model.config and weights.config.n_tokens == 41
    tokens = torch.tensor([[3, 41, 7, 41, 1]])  # row 41 is [MASK] in both
    assert torch.equal(weights.build_model()(tokens, causal=False), model(tokens, causal=False))
    convert_checkpoint(tmp_path / "ck", tmp_path / "native", to="native")
    again = read_any(tmp_path / "native")
    assert (again.objective, again.rate_min) == ("masked_diffusion", 1e-3)
    change_args(tmp_path / "ck", attn_mask=CAUSAL)
    assert read_any(tmp_path / "ck").rate_min is None


def test_the_additional_mask_row_moves_to_the_row_after_the_ids(tmp_path: Path) -> None:
    """Option --untie-with-additional-mask: [MASK] is row 48 of 49 embedding rows; the head has 48 rows."""
    model = build_tiny(**UNTIED | {"qk_norm": False})
    write_deepspeed(model, tmp_path / "ck", 1, True)
    (path,) = (tmp_path / "ck").rglob("layer_01-model_00-model_states.pt")
    extra = torch.randn(1, model.config.d_model, generator=torch.Generator().manual_seed(1))
    torch.save({"word_embeddings.weight": torch.cat([model.embedding.weight.detach(), extra])}, path)
    change_args(tmp_path / "ck", **FORK | {"untie_with_additional_mask": True})
    weights = read_any(tmp_path / "ck", objective="masked_diffusion")
    assert weights.objective == "masked_diffusion"
    assert torch.equal(weights.state["embedding.weight"][41], extra[0])
    with torch.no_grad():
        model.embedding.weight[41] = extra[0]
        tokens = torch.tensor([[3, 41, 7, 41, 1]])
        assert torch.equal(weights.build_model()(tokens, causal=False), model(tokens, causal=False))
    with pytest.raises(ValueError, match="expected one embedding row more than head rows, and padding"):
        read_any(tmp_path / "ck", n_tokens=48, objective="masked_diffusion")


@pytest.mark.parametrize(
    ("changes", "n_tokens", "expected"),
    [
        ({"vocab_size": None}, 41, 41),
        ({"vocab_size": 40, "tokenizer_type": "NullTokenizer"}, None, 41),
        ({"vocab_size": 41, "tokenizer_type": "GPT2BPETokenizer"}, None, 41),
        ({"vocab_size": None}, None, "got no vocab_size in args for 48 embedding rows"),
        ({"vocab_size": 48}, None, "got 48 ids for 48 embedding rows"),
        ({}, 49, "got 49 ids for 48 embedding rows"),
    ],
)
def test_the_mask_row_needs_the_number_of_ids(
    tmp_path: Path, changes: dict[str, Any], n_tokens: int | None, expected: Any
) -> None:
    write_deepspeed(build_tiny(**TIED), tmp_path / "ck", 1, False)
    change_args(tmp_path / "ck", **FORK | {"attn_mask": EVERYTHING} | changes)
    if isinstance(expected, int):
        assert read_any(tmp_path / "ck", n_tokens=n_tokens).config.n_tokens == expected
        return
    with pytest.raises(ValueError, match=expected) as caught:
        read_any(tmp_path / "ck", n_tokens=n_tokens)
    assert "Give --n-tokens" in str(caught.value)


def test_the_command_requires_and_accepts_the_objective(tmp_path: Path, cli: Cli) -> None:
    write_deepspeed(build_tiny(**TIED), tmp_path / "ck", 1, False)
    change_args(tmp_path / "ck", **FORK)
    command = ("convert_checkpoint.py", tmp_path / "ck", tmp_path / "out", "--to", "native")
    refused = cli(*command, status=1)
    assert "--objective autoregressive or --objective masked_diffusion." in refused.error
    assert not (tmp_path / "out").exists()
    assert ": masked_diffusion, " in cli(*command, "--objective", "masked_diffusion").output
    with pytest.raises(ValueError, match="got masked_diffusion, expected autoregressive"):
        read_any(tmp_path / "out", objective="autoregressive")


def change_model(folder: Path, rank: str, change: Callable[[dict[str, Any]], None]) -> None:
    (path,) = folder.rglob(f"{rank}/model_optim_rng.pt")
    part = torch.load(path, weights_only=False)
    change(part["model"])
    torch.save(part, path)


def test_no_tensor_of_megatron_is_dropped_without_a_check(tmp_path: Path) -> None:
    model = build_tiny(**TIED)
    write_megatron_lm(model, tmp_path / "bert", 1, 1, "legacy")
    change_model(tmp_path, "mp_rank_00", lambda tensors: tensors.update(lm_head={"bias": torch.zeros(48)}))
    with pytest.raises(ValueError, match="got the tensor lm_head.bias, which this model does not have"):
        read_megatron(tmp_path / "bert")

    write_megatron_lm(model, tmp_path / "pp", 1, 2, "legacy")
    head = {"word_embeddings_for_head": {"weight": torch.zeros(48, model.config.d_model)}}
    change_model(tmp_path / "pp", "mp_rank_00_001", lambda tensors: tensors.update(head))
    with pytest.raises(ValueError, match="got two different tensors embedding.word_embeddings.weight"):
        read_megatron(tmp_path / "pp")

    write_megatron_lm(model, tmp_path / "rope", 1, 1, "core")
    d_head = model.config.d_head
    table = {"rotary_pos_emb.inv_freq": 10000.0 ** -(torch.arange(0, d_head, 2) / d_head)}
    change_model(tmp_path / "rope", "mp_rank_00", lambda tensors: tensors.update(table))
    assert read_megatron(tmp_path / "rope").state.keys() == model.state_dict().keys()
