"""Tensor names of other programs' models, one table per family, and the joining of their matrices.

All tables map this model's names to theirs, without `.weight` and `.bias`.
"""

import re
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron.config.schema import ModelConfig

QKV = ("attention.query", "attention.key", "attention.value")
OUR_BLOCK = re.compile(r"blocks\.([0-9]+)\.(.+)\.(weight|bias)")
# Buffers of older files: rotary frequencies, the causal mask
# and the score of hidden positions. "c_attn.bias" is a weight.
BUFFERS = re.compile(r"rotary_(pos_)?emb\.inv_freq$|\.(attn|attention)\.(masked_)?bias$")


@dataclass(frozen=True, kw_only=True)
class Family:
    """Names of one family of models.

    prefix      of all names but the head's; files of the bare model omit it
    block       prefix of the blocks' numbers
    joined      their matrix -> our matrices that are joined in it over the rows
    by_group    rows of joined query, key and value: for each key head its queries, the key, the value;
                otherwise all queries, all keys, all values
    transposed  matrices of blocks are [in, out]
    """

    title: str
    prefix: str
    block: str
    outer: dict[str, str]
    inner: dict[str, str]
    joined: dict[str, tuple[str, ...]] = field(default_factory=dict)
    by_group: bool = False
    transposed: bool = False


LLAMA = Family(
    title="Llama",
    prefix="model.",
    block="model.layers.",
    outer={"embedding": "model.embed_tokens", "norm": "model.norm", "unembedding": "lm_head"},
    inner={
        "attention_norm": "input_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.out": "self_attn.o_proj",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
)
OLMO2_NORMS = {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
OLMO2 = replace(LLAMA, inner=LLAMA.inner | OLMO2_NORMS)
GPT_NEOX = Family(
    title="GPT-NeoX",
    prefix="gpt_neox.",
    block="gpt_neox.layers.",
    outer={
        "embedding": "gpt_neox.embed_in",
        "norm": "gpt_neox.final_layer_norm",
        "unembedding": "embed_out",
    },
    inner={
        "attention_norm": "input_layernorm",
        "attention.out": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    joined={"attention.query_key_value": QKV},
    by_group=True,
)
GPT2 = Family(
    title="GPT-2",
    prefix="transformer.",
    block="transformer.h.",
    outer={
        "embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "norm": "transformer.ln_f",
        "unembedding": "lm_head",
    },
    inner={
        "attention_norm": "ln_1",
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    joined={"attn.c_attn": QKV},
    transposed=True,
)
LLADA = Family(
    title="LLaDA",
    prefix="model.",
    block="model.transformer.blocks.",
    outer={
        "embedding": "model.transformer.wte",
        "norm": "model.transformer.ln_f",
        "unembedding": "model.transformer.ff_out",
    },
    inner={
        "attention_norm": "attn_norm",
        "attention.query": "q_proj",
        "attention.key": "k_proj",
        "attention.value": "v_proj",
        "attention.out": "attn_out",
        "mlp_norm": "ff_norm",
        "mlp.gate": "ff_proj",
        "mlp.up": "up_proj",
        "mlp.down": "ff_out",
    },
)
# Megatron core's GPTModel with Transformer Engine,
# which stores a norm with the matrix that follows it
MEGATRON = Family(
    title="Megatron core",
    prefix="",
    block="decoder.layers.",
    outer={
        "embedding": "embedding.word_embeddings",
        "position_embedding": "embedding.position_embeddings",
        "norm": "decoder.final_layernorm",
        "unembedding": "output_layer",
    },
    inner={
        "attention_norm": "self_attention.linear_qkv.layer_norm_",
        "attention.query_norm": "self_attention.q_layernorm",
        "attention.key_norm": "self_attention.k_layernorm",
        "attention.out": "self_attention.linear_proj",
        "mlp_norm": "mlp.linear_fc1.layer_norm_",
        "mlp.down": "mlp.linear_fc2",
    },
    joined={"self_attention.linear_qkv": QKV, "mlp.linear_fc1": ("mlp.gate", "mlp.up")},
    by_group=True,
)


def choose_family(kind: str, config: ModelConfig) -> Family:
    """Return the family of a model_type of transformers."""
    if config.norm_placement == "output":
        return OLMO2
    return {"gpt2": GPT2, "gpt_neox": GPT_NEOX, "llada": LLADA}.get(kind, LLAMA)


def export_names(family: Family, state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Rename and join the tensors of a model."""
    named: dict[str, Tensor] = {}
    whole = {part: theirs for theirs, parts in family.joined.items() for part in parts}
    for name, tensor in state.items():
        block = OUR_BLOCK.fullmatch(name)
        if block is None:
            module, _, kind = name.rpartition(".")
            named[f"{family.outer[module]}.{kind}"] = tensor
            continue
        number, part, kind = block.groups()
        theirs = whole.get(part) or family.inner[part]
        if part in whole:
            names = [f"blocks.{number}.{our_part}.{kind}" for our_part in family.joined[theirs]]
            # a model without gates has no mlp.gate
            names = [our_name for our_name in names if our_name in state]
            if name != names[0]:
                continue
            tensor = _join_rows([state[our_name] for our_name in names], family, config)
        separator = "" if theirs.endswith("_") else "."
        named[f"{family.block}{number}.{theirs}{separator}{kind}"] = _transpose(tensor, family)
    return named


def import_names(family: Family, state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Invert `export_names`. Names of the bare model, without the prefix, are accepted too.

    Rotary frequencies and causal masks of older files are dropped, as in transformers, which computes them
    from the configuration. Raises ValueError for any other tensor, for two tensors of one name, and for a
    joined matrix with another number of rows.
    """
    heads = tuple(theirs for theirs in family.outer.values() if not theirs.startswith(family.prefix))
    named: dict[str, Tensor] = {}
    for name, tensor in state.items():
        full = name if name.startswith((family.prefix, *heads)) else family.prefix + name
        if BUFFERS.search(full):
            continue
        renamed = _import_tensor(family, full, tensor, config)
        if not renamed:
            raise ValueError(f"{name}: got an unknown tensor, expected those of {family.title}")
        if set(renamed) & set(named):
            raise ValueError(
                f"{name}: got two tensors of this name, with and without {family.prefix!r}, expected one"
            )
        named |= renamed
    return named


def _import_tensor(family: Family, name: str, tensor: Tensor, config: ModelConfig) -> dict[str, Tensor]:
    """Return one or more tensors of this model, or none for an unknown name."""
    block = re.fullmatch(re.escape(family.block) + r"([0-9]+)\.(.+?)(?:\.|(?<=_))(weight|bias)", name)
    if block is None:
        module, _, kind = name.rpartition(".")
        return {f"{ours}.{kind}": tensor for ours, theirs in family.outer.items() if theirs == module}
    number, part, kind = block.groups()
    tensor = _transpose(tensor, family)
    names = [ours for ours, theirs in family.inner.items() if theirs == part]
    parts = [tensor]
    if part in family.joined:
        gated = config.feed_forward == "swiglu"
        names = [ours for ours in family.joined[part] if gated or ours != "mlp.gate"]
        parts = _split_rows(name, tensor, names, family, config)
    return {f"blocks.{number}.{ours}.{kind}": piece for ours, piece in zip(names, parts, strict=False)}


def _join_rows(parts: list[Tensor], family: Family, config: ModelConfig) -> Tensor:
    if len(parts) < len(QKV) or not family.by_group:
        return torch.cat(parts)
    # [H K, ...] -> [G, H / G, K, ...] and twice [G K, ...]
    # -> [G, 1, K, ...]; joined [G, H / G + 2, K, ...]
    groups = [part.unflatten(0, (config.kv_heads, -1, config.d_head)) for part in parts]
    return torch.cat(groups, dim=1).flatten(0, 2)


def _split_rows(
    name: str, tensor: Tensor, names: list[str], family: Family, config: ModelConfig
) -> list[Tensor]:
    """Invert `_join_rows`."""
    query, key = config.n_heads * config.d_head, config.kv_heads * config.d_head
    rows = dict.fromkeys(("mlp.gate", "mlp.up"), config.d_ff) | dict(zip(QKV, (query, key, key), strict=True))
    sizes = [rows[ours] for ours in names]
    if len(tensor) != sum(sizes):
        raise ValueError(f"{name}: got {len(tensor)} rows, expected {sum(sizes)}")
    if len(names) < len(QKV) or not family.by_group:
        return list(tensor.split(sizes))
    # Example: 8 query heads and 2 key heads are 2 groups of 4 + 1 + 1
    # heads. Splitting into 3 ranges of rows would mix the three kinds.
    groups = tensor.unflatten(0, (config.kv_heads, -1, config.d_head))  # [G, H / G + 2, K, ...]
    return [groups[:, :-2].flatten(0, 2), groups[:, -2].flatten(0, 1), groups[:, -1].flatten(0, 1)]


def _transpose(tensor: Tensor, family: Family) -> Tensor:
    # biases are not transposed
    return tensor.t().contiguous() if family.transposed and tensor.ndim == 2 else tensor
