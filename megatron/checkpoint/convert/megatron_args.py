"""Read the `args` of a Megatron checkpoint: its objective, its [MASK] row, and unsupported settings.

Megatron-LM and Microsoft's Megatron-DeepSpeed train autoregressive models of this shape only. The fork
wmn-231314/diffusion-data-constraint trains both objectives with the same arguments and the same tensors: its
checkpoints are recognised by the arguments in FORK, and their objective by
    attn_mask                     saved by its pipeline; True: attention is masked. Nothing masked: masked
                                  diffusion. All later positions masked: autoregressive. Conclusive.
Without it the caller must give the objective.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.convert.names import count_blocks
from megatron.config.schema import ModelConfig
from megatron.config.yaml_file import is_finite

AUTOREGRESSIVE, MASKED_DIFFUSION = "autoregressive", "masked_diffusion"
EMBEDDING = "embedding.word_embeddings.weight"  # name in Megatron core
# in every version of the fork, and in no other project
FORK = ("low_noise_start", "ar_ratio", "randmask_ratio")
FORK_RATE_MIN = 1e-3  # `eps` of its pretrain_diff_gpt.py
NOT_READ = (  # each of these changes the computation if it is enabled
    "apply_layernorm_1p", "rotary_interleaved", "use_target_position_embeddings", "squared_relu", "geglu",
    "quick_geglu", "multi_latent_attention", "apply_residual_connection_post_layernorm",
    "window_attn_skip_freq",
)  # fmt: skip
# args that are read, by the form of their values
COUNTS = ("num_attention_heads", "num_query_groups", "num_key_value_heads", "kv_channels", "seq_length")
NUMBERS = (
    "norm_epsilon", "layernorm_epsilon", "rotary_base", "rope_theta", "rotary_percent", "rope_scaling_factor",
    "rotary_seq_len_interpolation_factor",
)  # fmt: skip
SWITCHES = (
    "swiglu", "group_query_attention", "add_bias_linear", "use_rotary_position_embeddings", "add_qkv_bias",
    "use_rope_scaling",
)  # fmt: skip


def get_args(part: Any, path: Path) -> Namespace:
    """Return the args of a rank file. Raises ValueError without them."""
    args = part.get("args") if isinstance(part, dict) else None
    if not isinstance(args, Namespace) or getattr(args, "num_attention_heads", None) is None:
        raise ValueError(f"{path}: got no args with num_attention_heads, expected a Megatron checkpoint")
    return args


def read_objective(args: Namespace, requested: str | None) -> str:
    """Return the objective of a checkpoint; `requested` is the caller's objective or None.

    Raises ValueError if neither args nor the caller give it, or if attn_mask
    contradicts the caller.
    """
    # written by this project's export; the caller's
    # objective is compared with it by `read_any`
    if (exported := getattr(args, "training_objective", None)) in (AUTOREGRESSIVE, MASKED_DIFFUSION):
        return str(exported)
    saved = _infer_objective(getattr(args, "attn_mask", None))
    # A contradiction between the mask of the attention and the caller is an error,
    # because the weights load under either objective and would score wrongly.
    # Bidirectional attention in another project: its objective is unknown.
    certain = saved if is_fork(args) or saved == AUTOREGRESSIVE else None
    if certain and requested not in (None, certain):
        raise ValueError(
            f"got --objective {requested}, but its saved attn_mask is for {certain}. Omit --objective."
        )
    # an unknown option with "diffusion" in its name:
    # perhaps another fork, of unknown objective
    is_foreign = any("diffusion" in str(name) and _is_enabled(value) for name, value in vars(args).items())
    if not (certain or requested) and (is_fork(args) or saved or is_foreign):
        raise ValueError(
            "its args do not show whether it is autoregressive or masked diffusion. Convert it with "
            f"tools/convert_checkpoint.py --objective {AUTOREGRESSIVE} or --objective {MASKED_DIFFUSION}."
        )
    return certain or requested or AUTOREGRESSIVE


def is_fork(args: Namespace) -> bool:
    """Return whether args come from the fork."""
    return any(hasattr(args, name) for name in FORK)


def count_tokens(args: Namespace, requested: int | None, rows: int, objective: str) -> int:
    """Return the number of tokenizer ids among `rows` of the embedding.

    It is `requested`, else args.vocab_size, else all rows. Under masked
    diffusion the row after the ids is [MASK], so their number must be known and
    smaller than `rows`.
    """
    vocab_size = getattr(args, "vocab_size", None)
    if type(vocab_size) is not int or vocab_size < 1:
        vocab_size = None
    elif getattr(args, "tokenizer_type", None) == "NullTokenizer":
        vocab_size += 1  # its vocab_size does not count the end-of-document id
    n_tokens = requested or vocab_size
    if objective == AUTOREGRESSIVE:
        return min(n_tokens or rows, rows)
    if n_tokens is None or n_tokens >= rows:
        raise ValueError(
            f"got {'no vocab_size in args' if n_tokens is None else f'{n_tokens} ids'} for {rows} "
            "embedding rows, expected the ids of the tokenizer and a row for [MASK] after them. "
            "Give --n-tokens, the number of ids of its training tokenizer."
        )
    return n_tokens


def move_mask_row(args: Namespace, merged: dict[str, Tensor], n_tokens: int) -> None:
    """Move the [MASK] row of `--untie-with-additional-mask` to this project's [MASK] row, in place.

    That option adds one row to the embedding, after the padding, and none to
    the head. In this project [MASK] is the row after the ids. It replaces a
    padding row, whose embedding is never read.
    """
    head, name = merged.get("output_layer.weight"), EMBEDDING
    if not _is_enabled(getattr(args, "untie_with_additional_mask", None)) or head is None:
        return
    embedding = merged[name]
    if len(embedding) != len(head) + 1 or n_tokens >= len(head):
        raise ValueError(
            f"got untie_with_additional_mask, {len(embedding)} embedding rows, {len(head)} head rows "
            f"and {n_tokens} ids, expected one embedding row more than head rows, and padding after the ids"
        )
    # rows [ids, padding, MASK] -> [ids, MASK, rest of the padding]
    # Example: 4 ids and 3 rows of padding, 8 rows with
    # [MASK] at index 7. It moves to index 4, and 7 rows are
    # left, as many as the head has.
    moved = embedding[:-1].clone()
    moved[n_tokens] = embedding[-1]
    merged[name] = moved


def check_args(args: Namespace) -> None:
    """Raise ValueError for settings of a wrong type, and for those that this model does not support."""
    checks = (
        (COUNTS, "a whole number above 0", lambda value: type(value) is int and 0 < value < 1 << 31),
        (NUMBERS, "a number above 0", lambda value: is_finite(value) and value > 0),
        (SWITCHES, "True or False", lambda value: value in (0, 1)),
    )
    for names, form, is_sound in checks:
        for name in names:
            if (value := getattr(args, name, None)) is not None and not is_sound(value):
                raise ValueError(f"args.{name}: got {str(value)[:40]!r}, expected {form}")
    if getattr(args, "num_experts", None) not in (None, 1, [1]):
        raise ValueError(f"got num_experts {args.num_experts}, expected none; this model has no experts")
    for name in NOT_READ:
        if _is_enabled(getattr(args, name, None)):
            raise ValueError(f"it was trained with {name}, which this model does not support")
    expected = {
        "position_embedding_type": ("rope", "learned_absolute"),
        "normalization": ("rmsnorm", "layernorm"),
    }
    for name, choices in expected.items():
        value = getattr(args, name, None)
        if value is not None and str(value).lower() not in choices:
            raise ValueError(f"got {name} {value}, expected {' or '.join(choices)}")


def build_config(args: Namespace, merged: dict[str, Tensor], n_tokens: int) -> ModelConfig:
    """Return the model configuration given by args and tensor shapes. Raises ValueError without an MLP."""

    def get_arg(name: str, default: Any) -> Any:
        value = getattr(args, name, None)
        return default if value is None else value

    down = merged.get("decoder.layers.0.mlp.linear_fc2.weight")  # [D, F] in both kinds of MLP
    if down is None:
        raise ValueError("got no MLP in its first layer, expected a Megatron transformer")
    rows, d_model = merged[EMBEDDING].shape
    n_heads = args.num_attention_heads
    d_head = get_arg("kv_channels", d_model // n_heads)
    is_rotary = get_arg("position_embedding_type", "") == "rope"
    is_rotary |= bool(get_arg("use_rotary_position_embeddings", False))
    # num_query_groups counts only with its switch: Megatron-LM's
    # default is 1 also for ordinary attention. Megatron-DeepSpeed has
    # num_key_value_heads instead, whose default is the number of heads.
    groups = get_arg("num_query_groups", n_heads) if get_arg("group_query_attention", False) else n_heads
    positions = merged.get("embedding.position_embeddings.weight")
    biases = bool(get_arg("add_bias_linear", True))
    # Megatron's fused kernel uses the tanh approximation
    # of GELU, its unfused one the exact form
    is_fused = get_arg("bias_gelu_fusion", True) is not False or _is_enabled(get_arg("openai_gelu", None))
    return ModelConfig(
        d_model=d_model,
        d_ff=down.shape[1],
        d_head=d_head,
        n_heads=n_heads,
        n_kv_heads=min(groups, get_arg("num_key_value_heads", groups)),
        n_layers=count_blocks(merged),
        n_tokens=n_tokens,
        vocab_rows=rows,
        norm_eps=get_arg("norm_epsilon", get_arg("layernorm_epsilon", 1e-5)),
        norm="rmsnorm" if str(get_arg("normalization", "")).lower() == "rmsnorm" else "layernorm",
        positions="rotary" if is_rotary else "learned",
        n_positions=None if positions is None else len(positions),
        tied_embedding="output_layer.weight" not in merged,
        biases=biases,
        qkv_biases=not biases and bool(get_arg("add_qkv_bias", False)),
        qk_norm="decoder.layers.0.self_attention.q_layernorm.weight" in merged,
        feed_forward="swiglu" if get_arg("swiglu", False) else "gelu" if is_fused else "gelu_exact",
        attention_window=_read_window(get_arg("window_size", None)),
        rope_theta=float(get_arg("rotary_base", get_arg("rope_theta", 10000.0))),
        **(_read_rotary(args, d_head) if is_rotary else {}),
    )


def _read_rotary(args: Namespace, d_head: int) -> dict[str, Any]:
    """Return the keys of ModelConfig for partly rotated and for scaled positions."""
    options: dict[str, Any] = {}
    percent = getattr(args, "rotary_percent", None)
    if percent not in (None, 1.0):
        options["rotary_dims"] = int(d_head * percent)
        if not 2 <= options["rotary_dims"] <= d_head or options["rotary_dims"] % 2:
            raise ValueError(f"got rotary_percent {percent} of {d_head} channels, expected an even number")
    linear = getattr(args, "rotary_seq_len_interpolation_factor", None)
    if linear and getattr(args, "use_rope_scaling", None):
        raise ValueError("got two scalings of rotary positions, expected at most one")
    if linear:
        options |= {"rope_scaling": "linear", "rope_factor": float(linear)}
    elif getattr(args, "use_rope_scaling", None):
        factor = getattr(args, "rope_scaling_factor", None)
        # its other constants cannot be set
        options |= {"rope_scaling": "llama3", "rope_factor": 8.0 if factor is None else float(factor)}
        options["rope_original_positions"] = 8192
    return options


def _read_window(window: Any) -> int | None:
    if window is None:
        return None
    # positions before and after; none after, as in causal attention
    is_pair = isinstance(window, list | tuple) and [type(n) for n in window] == [int, int]
    if not is_pair or window[0] < 0 or window[1] != 0:
        raise ValueError(f"got window_size {str(window)[:40]}, expected (positions before, 0)")
    return int(window[0] + 1)


def _infer_objective(mask: Any) -> str | None:
    """Return the objective of an attention mask [..., S, S] (True: masked); None if it is neither's."""
    if not isinstance(mask, Tensor) or mask.ndim < 2 or mask.shape[-1] != mask.shape[-2]:
        return None
    # for one position, both objectives have the same mask
    if mask.shape[-1] < 2 or not mask.numel():
        return None
    # [N, S, S] over all leading axes, such as
    # the batch and an axis of heads of size 1
    hidden = mask.reshape(-1, *mask.shape[-2:]).bool()
    if not hidden.any():
        return MASKED_DIFFUSION
    # Pairs (query, key) with key > query, above the diagonal. The rest is not
    # compared: a causal mask may also hide earlier documents of the sample.
    later = torch.ones(mask.shape[-2:], dtype=torch.bool).triu(1)
    return AUTOREGRESSIVE if bool(hidden[:, later].all()) else None


def _is_enabled(value: Any) -> bool:
    """Return True if an argument is set and not False or 0. Placeholders of unknown classes count as set."""
    return bool(value) if isinstance(value, (int, float)) else value is not None
