"""What the `args` saved in a Megatron checkpoint say: its objective, its [MASK] row, and what is not read.

Megatron-LM and Microsoft's Megatron-DeepSpeed train autoregressive models of this shape only. The fork
wmn-231314/diffusion-data-constraint trains both objectives with the same arguments and the same tensors: its
checkpoints are recognised by FORK, and what they were trained for by
    attn_mask                     saved by its pipeline: True where attention is hidden. Nothing hidden:
                                  masked diffusion. Everything later hidden: autoregressive. Certain.
    DIFFUSION_ONLY, CAUSAL_ONLY   options that one of its two trainers reads, where they are switched on.
Where these are silent or disagree, the caller has to name the objective.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config.yaml_file import is_finite

AUTOREGRESSIVE, MASKED_DIFFUSION = "autoregressive", "masked_diffusion"
FORK = ("low_noise_start", "ar_ratio", "randmask_ratio")  # in every version of the fork, and in no other's
DIFFUSION_ONLY = ("low_noise_start", "ar_ratio", "untie_with_additional_mask")
CAUSAL_ONLY = ("randmask_ratio", "use_order_list", "target_random_ratio")
FORK_RATE_MIN = 1e-3  # `eps` of its pretrain_diff_gpt.py
NOT_READ = (  # switched on, each of them changes the computation
    "apply_layernorm_1p", "rotary_interleaved", "use_target_position_embeddings", "squared_relu", "geglu",
    "quick_geglu", "use_rope_scaling", "rotary_seq_len_interpolation_factor", "multi_latent_attention",
    "apply_residual_connection_post_layernorm", "window_size",
)  # fmt: skip
# what is read of args, by type
COUNTS = ("num_attention_heads", "num_query_groups", "num_key_value_heads", "kv_channels", "seq_length")
NUMBERS = ("norm_epsilon", "layernorm_epsilon", "rotary_base", "rope_theta")
SWITCHES = ("swiglu", "group_query_attention", "add_bias_linear", "use_rotary_position_embeddings")


def read_objective(args: Namespace, requested: str | None, step: Path) -> str:
    """The objective that a checkpoint was trained for; `requested` is what the caller says, None: nothing.

    ValueError where neither args nor the caller say it, or attn_mask contradicts the caller.
    """
    is_fork = any(hasattr(args, name) for name in FORK)
    certain = _objective_of_mask(getattr(args, "attn_mask", None))
    if certain == MASKED_DIFFUSION and not is_fork:
        certain = None  # reads both sides, but nothing says how it was trained
        undecided = True
    else:
        foreign = [name for name in vars(args) if "diffusion" in str(name) and name not in DIFFUSION_ONLY]
        undecided = is_fork or any(_is_on(vars(args)[name]) for name in foreign)
    if certain is not None and requested not in (None, certain):
        raise ValueError(
            f"{step}: --objective {requested}, but its saved attn_mask is that of {certain}. "
            "Leave --objective out."
        )
    if certain or requested:
        return certain or requested or ""
    if not undecided:
        return AUTOREGRESSIVE
    hints = {
        objective
        for objective, names in ((MASKED_DIFFUSION, DIFFUSION_ONLY), (AUTOREGRESSIVE, CAUSAL_ONLY))
        if any(_is_on(getattr(args, name, None)) for name in names)
    }
    if is_fork and len(hints) == 1:
        return hints.pop()
    raise ValueError(
        f"{step}: its args do not say whether it is autoregressive or masked diffusion. Convert it with "
        f"tools/convert_checkpoint.py --objective {AUTOREGRESSIVE} or --objective {MASKED_DIFFUSION}."
    )


def rate_min_of(args: Namespace, objective: str) -> float | None:
    """The smallest masking rate in training, where it is known."""
    is_fork = any(hasattr(args, name) for name in FORK)
    return FORK_RATE_MIN if is_fork and objective == MASKED_DIFFUSION else None


def count_tokens(args: Namespace, requested: int | None, rows: int, objective: str, step: Path) -> int:
    """Ids of the tokenizer among `rows` of the embedding: `requested`, else args.vocab_size, else all.

    Under masked diffusion the row after the ids is [MASK], so they must be known and leave a row.
    """
    vocab_size = getattr(args, "vocab_size", None)
    if type(vocab_size) is not int or vocab_size < 1:
        vocab_size = None
    elif getattr(args, "tokenizer_type", None) == "NullTokenizer":
        vocab_size += 1  # its argument does not count the id that ends a document
    n_tokens = requested or vocab_size
    if objective == AUTOREGRESSIVE:
        return min(n_tokens or rows, rows)
    if n_tokens is None or n_tokens >= rows:
        raise ValueError(
            f"{step}: got {'no vocab_size in args' if n_tokens is None else f'{n_tokens} ids'} for {rows} "
            "embedding rows, expected the ids of the tokenizer and a row for [MASK] after them. "
            "Give --n-tokens, as many as the tokenizer that it was trained with has ids."
        )
    return n_tokens


def place_mask_row(args: Namespace, merged: dict[str, Tensor], n_tokens: int, step: Path) -> None:
    """Move the [MASK] row of `--untie-with-additional-mask` to where this project has it, in place.

    That option adds one row to the embedding, after the padding, and none to the head. Here [MASK] is the row
    after the ids; the padding row that was there is no token's, and its embedding is never read.
    """
    head, name = merged.get("output_layer.weight"), "word_embeddings.weight"
    if not _is_on(getattr(args, "untie_with_additional_mask", None)) or head is None:
        return
    embedding = merged[name]
    if len(embedding) != len(head) + 1 or n_tokens >= len(head):
        raise ValueError(
            f"{step}: untie_with_additional_mask with {len(embedding)} embedding rows, {len(head)} head rows "
            f"and {n_tokens} ids, expected one embedding row more than head rows, and padding after the ids"
        )
    moved = embedding[:-1].clone()
    moved[n_tokens] = embedding[-1]
    merged[name] = moved


def check_args(args: Namespace, step: Path) -> None:
    """ValueError for settings of other types, and for those of a model that this one cannot be."""
    _check_types(args, step)
    if getattr(args, "num_experts", None) not in (None, 1, [1]):
        raise ValueError(f"{step}: num_experts is {args.num_experts}, this model has no experts")
    for name in NOT_READ:
        if _is_on(getattr(args, name, None)):
            raise ValueError(f"{step}: it was trained with {name}, which this model has not")
    percent = getattr(args, "rotary_percent", None)
    if percent not in (None, 1.0):
        raise ValueError(f"{step}: rotary_percent is {percent}, this model turns whole heads")
    expected = {
        "position_embedding_type": ("rope", "learned_absolute"),
        "normalization": ("rmsnorm", "layernorm"),
    }
    for name, choices in expected.items():
        value = getattr(args, name, None)
        if value is not None and str(value).lower() not in choices:
            raise ValueError(f"{step}: {name} is {value}, expected {' or '.join(choices)}")
    is_other = any(_is_on(getattr(args, name, None)) for name in ("swiglu", "openai_gelu"))
    if getattr(args, "bias_gelu_fusion", None) is False and not is_other:
        # Megatron's fused kernel is the tanh form, its plain one is exact
        raise ValueError(f"{step}: bias_gelu_fusion is False: its GELU is exact, this model's the tanh form")


def _check_types(args: Namespace, step: Path) -> None:
    """ValueError for what is read of args and is not of its type; None counts as not given."""
    checks = (
        (COUNTS, "a whole number above 0", lambda value: type(value) is int and 0 < value < 1 << 31),
        (NUMBERS, "a number above 0", lambda value: is_finite(value) and value > 0),
        (SWITCHES, "True or False", lambda value: value in (0, 1)),
        (("normalization",), "a word", lambda value: isinstance(value, str)),
    )
    for names, expected, is_sound in checks:
        for name in names:
            value = getattr(args, name, None)
            if value is not None and not is_sound(value):
                raise ValueError(f"{step}: args.{name}: got {str(value)[:40]!r}, expected {expected}")
    n_heads, groups = args.num_attention_heads, getattr(args, "num_query_groups", None)
    if n_heads is None:
        raise ValueError(f"{step}: args.num_attention_heads: got None, expected a whole number above 0")
    if _is_on(getattr(args, "group_query_attention", None)) and groups is not None and n_heads % groups:
        raise ValueError(f"{step}: got {n_heads} heads in {groups} groups, expected a multiple of the groups")


def _objective_of_mask(mask: Any) -> str | None:
    """What a mask [..., S, S], True where attention is hidden, allows; None for anything else."""
    if not isinstance(mask, Tensor) or mask.ndim < 2 or mask.shape[-1] != mask.shape[-2]:
        return None
    if mask.shape[-1] < 2 or not mask.numel():
        return None
    hidden = mask.reshape(-1, *mask.shape[-2:]).bool()
    if not hidden.any():
        return MASKED_DIFFUSION
    later = torch.ones(mask.shape[-2:], dtype=torch.bool).triu(1)
    return AUTOREGRESSIVE if bool(hidden[:, later].all()) else None


def _is_on(value: Any) -> bool:
    """Whether an argument was given; stand-ins of unknown classes count as given."""
    return not (value is None or value is False or (type(value) in (int, float) and value == 0))
