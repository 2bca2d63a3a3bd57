"""Compute logits with megatron-core on a CPU. Run with the Python of an environment that has it.

python -P megatron_core_logits.py CHECKPOINT OUT [TORCH_DIST]

TORCH_DIST is a folder for the same model in Megatron core's own format. The local layers are used, since
Transformer Engine requires a GPU. Their norms have names of their own.
"""

import contextlib
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

warnings.filterwarnings("ignore")
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # type: ignore[attr-defined]  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

TOKENS = torch.arange(24).reshape(2, 12) % 41


class _NoTracker:
    """Replaces the tracker of CUDA random states, which dropout uses."""

    def fork(self, *args: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def build(args: object) -> torch.nn.Module:
    """Build a GPTModel from saved arguments, as Megatron-LM's core_transformer_config_from_args does."""
    get = vars(args).__getitem__
    learned = get("position_embedding_type") == "learned_absolute"
    config = TransformerConfig(
        num_layers=get("num_layers"), hidden_size=get("hidden_size"), ffn_hidden_size=get("ffn_hidden_size"),
        num_attention_heads=get("num_attention_heads"), num_query_groups=get("num_query_groups"),
        kv_channels=get("kv_channels"), normalization=get("normalization"),
        layernorm_epsilon=get("norm_epsilon"), add_bias_linear=get("add_bias_linear"),
        add_qkv_bias=get("add_qkv_bias"), qk_layernorm=get("qk_layernorm"),
        gated_linear_unit=get("swiglu"), activation_func=F.silu if get("swiglu") else F.gelu,
        bias_activation_fusion=get("bias_gelu_fusion"), use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, rotary_interleaved=False, apply_rope_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, bias_dropout_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(qk_layernorm=get("qk_layernorm"), normalization=get("normalization"))
    return GPTModel(
        config, spec, vocab_size=get("padded_vocab_size"), max_sequence_length=get("max_position_embeddings"),
        position_embedding_type="learned_absolute" if learned else "rope", rotary_base=get("rotary_base"),
        rotary_percent=get("rotary_percent"), rope_scaling=get("use_rope_scaling"),
        rope_scaling_factor=get("rope_scaling_factor"),
        seq_len_interpolation_factor=get("rotary_seq_len_interpolation_factor"),
        share_embeddings_and_output_weights=not get("untie_embeddings_and_output_weights"),
        parallel_output=False,
    )  # fmt: skip


def main(checkpoint: Path, out: Path, torch_dist: Path | None = None) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]  # tables of angles
    tensor_parallel.random._CUDA_RNG_STATE_TRACKER = _NoTracker()
    tensor_parallel.random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    release = checkpoint / (checkpoint / "latest_checkpointed_iteration.txt").read_text().strip()
    saved = torch.load(release / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    model = build(saved["args"]).eval()
    state = {
        name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.").replace(
            "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
        ): tensor
        for name, tensor in saved["model"].items()
    }
    result = model.load_state_dict(state, strict=False)
    missing = [name for name in result.missing_keys if "_extra_state" not in name]
    assert not missing and not result.unexpected_keys, (missing, result.unexpected_keys)
    n = TOKENS.shape[1]
    # True: hidden
    mask = torch.ones(1, 1, n, n, dtype=torch.bool).triu(1)
    with torch.no_grad():
        logits = model(TOKENS, torch.arange(n).expand(len(TOKENS), n), mask)
    torch.save(logits.contiguous(), out)
    if torch_dist is not None:
        torch.cuda.synchronize = lambda device=None: None
        torch_dist.mkdir()
        common = {key: saved[key] for key in ("args", "checkpoint_version", "iteration")}
        dist_checkpointing.save({"model": model.sharded_state_dict(), **common}, str(torch_dist))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
