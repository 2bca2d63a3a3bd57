"""DeepSpeed's universal checkpoints, merged from tensor ranks by DeepSpeed's own converter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.convert.formats import read_any
from megatron.model.transformer import Gpt
from tests.checkpoint.test_megatron_layouts import GPT2, LLAMA, UNTIED, make_args, shard_layer, share
from tests.checkpoint.test_megatron_objective import EVERYTHING, FORK

ROW_PARALLEL = [r"\d+.self_attention.dense.weight", r"\d+.mlp.dense_4h_to_h.weight"]
REPLICATED = [
    r".*layernorm.*",
    r"\d+.self_attention.dense.bias",
    r"\d+.mlp.dense_4h_to_h.bias",
    r"\d+.weight",
]
REPLICATED += [r"\d+.bias", r".*position_embeddings.*"]


def list_rank_tensors(model: Gpt, rank: int, n: int) -> dict[str, Tensor]:
    """Return one tensor rank's parameters under the names of Megatron-DeepSpeed's pipeline."""
    n_layers = model.config.n_layers
    tensors = {"tied_modules.embed.word_embeddings.weight": share(model.embedding.weight, rank, n)}
    if model.position_embedding is not None:
        tensors["tied_modules.embed.position_embeddings.weight"] = model.position_embedding.weight
    for i in range(n_layers):
        tensors |= {f"{i + 3}.{name}": x for name, x in shard_layer(model, i, rank, n).items()}
    tensors |= {f"{n_layers + 4}.{name}": x for name, x in model.norm.named_parameters()}
    if model.unembedding is not None:
        tensors[f"{n_layers + 5}.lm_head.weight"] = share(model.unembedding.weight, rank, n)
    return tensors


def write_universal(
    model: Gpt, folder: Path, n_ranks: int, declares_halves: bool = True, **args: Any
) -> None:
    """Split every parameter over tensor ranks and over two data ranks, and merge it with DeepSpeed."""
    from deepspeed.checkpoint import ds_to_universal

    step, slices = folder / "global_step7_universal", folder / "slices"
    ranks = [list_rank_tensors(model, rank, n_ranks) for rank in range(n_ranks)]
    info: dict[str, Any] = {
        "tp_replicated_parameter_patterns": REPLICATED,
        "parameter_with_row_parallelism_patterns": ROW_PARALLEL,
    }
    if declares_halves and model.config.feed_forward == "swiglu":
        info["parameter_with_2_sub_params_cat_dim_0"] = [r"\d+.mlp.dense_h_to_4h.weight"]
    for name in ranks[0]:
        for rank, tensors in enumerate(ranks):
            flat = tensors[name].detach().flatten()
            half = len(flat) // 2
            for data_rank, (begin, n) in enumerate([(0, half), (half, len(flat) - half)]):
                for state in ("fp32", "exp_avg", "exp_avg_sq"):
                    ds_to_universal.dump_param_fragment(
                        str(slices), rank, data_rank, state, flat, name, begin, n
                    )
        shapes = [tensors[name].shape for tensors in ranks]
        ds_to_universal.merge_tp_slices(info, str(step / "zero"), str(slices), n_ranks, (name, shapes))
    described = make_args(model)
    described.num_key_value_heads, described.group_query_attention = model.config.kv_heads, False
    vars(described).update({"tensor_model_parallel_size": n_ranks, **args})
    for rank in range(n_ranks):
        torch.save({"module": None, "args": described}, step / f"mp_rank_{rank:02d}_model_states.pt")
    (folder / "latest_universal").write_text("global_step7_universal")


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize("shape", [LLAMA, UNTIED | {"qk_norm": False}, GPT2], ids=["llama", "untied", "gpt2"])
def test_a_universal_checkpoint_is_read_bit_for_bit(
    tiny_of: Callable[..., Gpt], tmp_path: Path, shape: dict[str, Any], n_ranks: int
) -> None:
    pytest.importorskip("deepspeed")
    model = tiny_of(**shape)
    write_universal(model, tmp_path / "ck", n_ranks, **FORK, attn_mask=EVERYTHING)
    weights = read_any(tmp_path / "ck")
    assert weights.config == model.config and weights.objective == "masked_diffusion"
    assert weights.state.keys() == model.state_dict().keys()
    assert all(torch.equal(weights.state[key], tensor) for key, tensor in model.state_dict().items())


@pytest.mark.slow
def test_gates_in_an_unknown_order_are_refused(tiny_of: Callable[..., Gpt], tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    write_universal(tiny_of(**LLAMA), tmp_path / "two", 2, declares_halves=False)
    with pytest.raises(ValueError, match="without the order of its halves"):
        read_any(tmp_path / "two")
    write_universal(tiny_of(**LLAMA), tmp_path / "one", 1, declares_halves=False)
    assert read_any(tmp_path / "one").config.d_ff == 64


def test_plain_parameters_are_read_and_others_refused(tiny_of: Callable[..., Gpt], tmp_path: Path) -> None:
    """Written by hand, without DeepSpeed; early versions store the tensor itself."""
    model = tiny_of(**LLAMA)
    step = tmp_path / "global_step7_universal"
    for number, (name, tensor) in enumerate(list_rank_tensors(model, 0, 1).items()):
        (step / "zero" / name).mkdir(parents=True)
        content = tensor.detach() if number % 2 else {"param": tensor.detach(), "cat_dim": 0}
        torch.save(content, step / "zero" / name / "fp32.pt")
    args = make_args(model)
    args.tensor_model_parallel_size = 1
    torch.save({"module": None, "args": args}, step / "mp_rank_00_model_states.pt")
    weights = read_any(step)
    assert all(torch.equal(weights.state[key], tensor) for key, tensor in model.state_dict().items())
    torch.save({"step": 3}, step / "zero" / "3.mlp.dense_h_to_4h.weight" / "fp32.pt")
    with pytest.raises(ValueError, match="got no tensor 'param'"):
        read_any(step)
