"""Tensor names of other programs' models, one family per column of utils/tensor_names.tsv."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config.schema import ModelConfig

# a link to utils/tensor_names.tsv; a copy of it in a wheel
TABLE_FILE = Path(__file__).with_name("tensor_names.tsv")
N_QKV = 3  # our matrices that are joined to one of queries, keys and values
# The dot before the kind is missing where Transformer Engine stores a
# norm in the matrix after it, as "linear_qkv.layer_norm_weight".
NAME = re.compile(r"(.+?)(?:\.|(?<=_))(weight|bias)")
NUMBER = re.compile(r"\.([0-9]+)\.")
# Buffers of older files: rotary frequencies, the causal mask
# and the score of hidden positions. "c_attn.bias" is a weight.
BUFFERS = re.compile(r"rotary_(pos_)?emb\.inv_freq$|\.(attn|attention)\.(masked_)?bias$")


@dataclass(frozen=True)
class Family:
    """Names of one family of models, with # for the number of a block.

    prefix      of all names but the head's; files of the bare model omit it
    names       our module -> theirs
    by_group    rows of joined query, key and value: for each key head its queries,
                the key, the value; otherwise all queries, all keys, all values
    transposed  matrices of blocks are [in, out]
    """

    title: str
    prefix: str
    names: dict[str, str]
    by_group: bool
    transposed: bool

    def list_parts(self, module: str) -> list[str]:
        """Return our modules whose rows are joined in one of theirs; an empty list for an unknown one."""
        return [ours for ours, theirs in self.names.items() if theirs == module]


def _read_families() -> tuple[dict[str, Family], dict[str, str]]:
    """Return the families by title, and the modules of Megatron core by their older names."""
    lines = TABLE_FILE.read_text(encoding="utf-8").splitlines()[3:]
    titles, prefixes, *rows = (line.split("\t") for line in lines)
    families = {}
    for i, title in enumerate(titles[1:-1], 1):
        by_group, transposed = title in ("GPT-NeoX", "Megatron core"), title == "GPT-2"
        names = {row[0]: row[i] for row in rows if row[i]}
        families[title] = Family(title, prefixes[i], names, by_group, transposed)
    return families, {older: row[-2] for row in rows for older in row[-1].split()}


FAMILIES, OLDER_MEGATRON = _read_families()
MEGATRON = FAMILIES["Megatron core"]  # with Transformer Engine
TITLES = {"gpt2": "GPT-2", "gpt_neox": "GPT-NeoX", "llada": "LLaDA"}


def choose_family(kind: str, config: ModelConfig) -> Family:
    """Return the family of a model_type of transformers."""
    if config.norm_placement == "output":
        return FAMILIES["OLMo 2"]
    return FAMILIES[TITLES.get(kind, "Llama")]


def export_names(family: Family, state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Rename and join the tensors of a model."""
    named: dict[str, Tensor] = {}
    for name in state:
        module, number, kind = _split_name(name)
        theirs = family.names[module]
        parts = [_join_name(part, number, kind) for part in family.list_parts(theirs)]
        # a model without gates has no mlp.gate
        parts = [part for part in parts if part in state]
        if name == parts[0]:
            tensor = _join_rows([state[part] for part in parts], family, config)
            named[_join_name(theirs, number, kind)] = _transpose(tensor, family, number)
    return named


def import_names(family: Family, state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Invert `export_names`. Names of the bare model, without the prefix, are accepted too.

    Rotary frequencies and causal masks of older files are dropped, as in
    transformers, which computes them from the configuration. Raises ValueError
    for any other tensor, for two tensors of one name, and for a joined matrix
    with another number of rows.
    """
    heads = tuple(theirs for theirs in family.names.values() if not theirs.startswith(family.prefix))
    named: dict[str, Tensor] = {}
    for name, tensor in state.items():
        full = name if name.startswith((family.prefix, *heads)) else family.prefix + name
        if BUFFERS.search(full):
            continue
        module, number, kind = _split_name(full)
        parts = family.list_parts(module)
        if not parts:
            raise ValueError(f"{name}: got an unknown tensor, expected one of {family.title}'s")
        tensors = [_transpose(tensor, family, number)]
        if len(parts) > 1:
            parts = [part for part in parts if config.feed_forward == "swiglu" or part != "blocks.#.mlp.gate"]
            tensors = _split_rows(name, tensors[0], parts, family, config)
        renamed = [_join_name(part, number, kind) for part in parts]
        if set(renamed) & set(named):
            raise ValueError(
                f"{name}: got two tensors of this name, with and without {family.prefix!r}, expected one"
            )
        named |= zip(renamed, tensors, strict=True)
    return named


def normalize_megatron_names(stage: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of one pipeline stage under the names of MEGATRON, without extra states.

    A table of rotary frequencies keeps its name. Raises ValueError for an
    unknown tensor, and if two different tensors map to one name.
    """
    named: dict[str, Tensor] = {}
    for name, tensor in _flatten_tables(stage, ""):
        if name.endswith("_extra_state"):
            continue
        plain = _find_megatron_name(name)
        if tensor.ndim not in (1, 2):
            raise ValueError(f"{name}: got {tensor.ndim} dimensions, expected 1 or 2")
        if plain in named and not torch.equal(named[plain], tensor):
            raise ValueError(f"{name}: differs from {plain} under another name, expected equal tensors")
        named[plain] = tensor
    return named


def count_blocks(tensors: Iterable[str]) -> int:
    """Return the number of blocks with one of these tensors."""
    return len({match[1] for name in tensors if (match := NUMBER.search(name))})


def _find_megatron_name(name: str) -> str:
    # Enclosing modules are skipped, as in "language_model.encoder.final_layernorm.weight".
    # With pipeline parallelism the last stage has a copy
    # of a tied embedding, "word_embeddings_for_head.weight".
    match = NAME.fullmatch(name.replace("_for_head.", "."))
    if name.endswith("rotary_pos_emb.inv_freq"):
        return "rotary_pos_emb.inv_freq"
    if match is not None:
        *_, number, part = ("", "", *re.split(r"(?:^|\.)layers\.(\d+)\.", match[1])[-2:])
        older = part if number else match[1].rpartition(".")[2]
        module = OLDER_MEGATRON.get(older, f"decoder.layers.#.{part}")
        if module in MEGATRON.names.values() and bool(number) == ("#" in module):
            return _join_name(module, number, match[2])
    raise ValueError(f"got the tensor {name}, which this model does not have")


def _flatten_tables(tables: dict[str, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dictionaries under dotted names."""
    if not isinstance(tables, dict):
        raise ValueError(
            f"{prefix or 'model'}: got {type(tables).__name__}, expected a dictionary of tensors"
        )
    for key, value in tables.items():
        name = f"{prefix}{key}"
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, dict):
            yield from _flatten_tables(value, name + ".")


def _split_name(name: str) -> tuple[str, str, str]:
    """Return (module with # for the number of its block, this number or "", "weight" or "bias")."""
    match = NAME.fullmatch(name)
    if match is None:
        return "", "", ""
    number = NUMBER.search(match[1])
    return NUMBER.sub(".#.", match[1], 1), number[1] if number else "", match[2]


def _join_name(module: str, number: str, kind: str) -> str:
    """Invert `_split_name`."""
    return f"{module.replace('#', number)}{'' if module.endswith('_') else '.'}{kind}"


def _join_rows(parts: list[Tensor], family: Family, config: ModelConfig) -> Tensor:
    if len(parts) < N_QKV or not family.by_group:
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    # [H K, ...] -> [G, H / G, K, ...] and twice [G K, ...]
    # -> [G, 1, K, ...]; joined [G, H / G + 2, K, ...]
    groups = [part.unflatten(0, (config.kv_heads, -1, config.d_head)) for part in parts]
    return torch.cat(groups, dim=1).flatten(0, 2)


def _split_rows(
    name: str, tensor: Tensor, parts: list[str], family: Family, config: ModelConfig
) -> list[Tensor]:
    """Invert `_join_rows`."""
    key = config.kv_heads * config.d_head
    is_qkv = len(parts) == N_QKV
    sizes = [config.n_heads * config.d_head, key, key] if is_qkv else [config.d_ff] * len(parts)
    if len(tensor) != sum(sizes):
        raise ValueError(f"{name}: got {len(tensor)} rows, expected {sum(sizes)}")
    if not is_qkv or not family.by_group:
        return list(tensor.split(sizes))
    # Example: 8 query heads and 2 key heads are 2 groups of 4 + 1 + 1
    # heads. Splitting into 3 ranges of rows would mix the three kinds.
    groups = tensor.unflatten(0, (config.kv_heads, -1, config.d_head))  # [G, H / G + 2, K, ...]
    return [groups[:, :-2].flatten(0, 2), groups[:, -2].flatten(0, 1), groups[:, -1].flatten(0, 1)]


def _transpose(tensor: Tensor, family: Family, number: str) -> Tensor:
    # neither biases nor embeddings are transposed
    return tensor.t().contiguous() if family.transposed and number and tensor.ndim == 2 else tensor
