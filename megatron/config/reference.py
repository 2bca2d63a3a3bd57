"""The reference of a run's configuration, written from the dataclasses: no key is told by hand."""

import types
import typing
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from typing import Any

from megatron.config.schema import RunConfig

PAGE = "examples_scaling/training/CONFIG.md"
HEAD = """# Every key of a configuration

Written by `make docs` from `megatron/config/schema.py`; a test fails where it is not current. A run's YAML
has these sections, and `section.key=value` words of `tools/pretrain.py` change single keys; in a study they
stand under `run`. `null`: not set. `model.hf_config` takes a shape by Hugging Face's names instead, as in
[MODELS.md](MODELS.md).
"""
# unit of a number, by the end of its name where that tells, else by its name
ENDS = {
    "_iterations": "steps", "_tokens": "tokens", "_epochs": "epochs", "_minutes": "minutes",
    "_hours": "hours",
    "_s": "seconds", "_fraction": "share", "_ratio": "share", "_parallel": "ranks", "_layers": "blocks",
    "_heads": "heads", "_positions": "positions", "_threads": "threads", "_workers": "threads",
    "_samples": "samples",
}  # fmt: skip
NAMES = {
    "shard_size": "ranks", "pipeline_chunks": "pieces a rank", "seq_len": "tokens", "batch_size": "samples",
    "microbatch_size": "samples", "d_model": "features", "d_ff": "features", "d_head": "features",
    "base_d_model": "features", "base_d_head": "features", "vocab_rows": "rows", "rope_theta": "-",
    "norm_eps": "-", "eod_id": "id", "attention_dropout": "share", "rate_min": "share",
    "low_noise_start": "share", "init_std": "-",
    "orders": "orders", "order_noise": "samples' lengths", "lr": "-", "weight_decay": "-", "beta1": "-",
    "beta2": "-", "eps": "-", "grad_clip": "L2 norm", "chkpt_at": "steps", "keep_every": "steps",
    "keep_last": "checkpoints", "num_mc": "masks a sample", "profile_steps": "steps", "seed": "-",
}  # fmt: skip


def kind_of(one: Field) -> str:
    """The type as the YAML has it: int, float, bool, text, lists of them, or its choices."""
    if one.metadata["choices"]:
        return " or ".join(f"`{choice}`" for choice in one.metadata["choices"])
    names = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    told = typing.get_args(one.type) if isinstance(one.type, types.UnionType) else (one.type,)
    (inner,) = [part for part in told if part is not types.NoneType]
    if typing.get_origin(inner) is list:
        return f"list of {names[typing.get_args(inner)[0]]}s"
    return names[inner]


def unit_of(one: Field) -> str:
    """The unit of a number, empty for what is none. ValueError for a number without one."""
    if "number" not in kind_of(one):
        return ""
    if one.name in NAMES:
        return NAMES[one.name]
    for end, unit in ENDS.items():
        if f"_{one.name}".endswith(end):
            return unit
    raise ValueError(f"megatron/config/reference.py: no unit for '{one.name}'; add it to NAMES")


def default_of(one: Field) -> str:
    """As one would write it. The shape has none: it comes from the size, or from keys of its own."""
    if one.metadata["above"] == 0 and one.default == 0:
        return "from the corpus" if one.name in ("n_tokens", "vocab_rows") else "from `model.size`"
    if one.default is None:
        return "`null`"
    if isinstance(one.default, bool):
        return f"`{str(one.default).lower()}`"
    return f"`{one.default}`"


def meaning_of(one: Field) -> str:
    """Its line of documentation, and from where on a number may be."""
    above = one.metadata["above"]
    if above is None or above < 0:
        return one.metadata["help"] + ("" if above is None else f"; {above + 1} or more")
    return f"{one.metadata['help']}; more than {above}"


def sections() -> Iterator[tuple[str, str, list[Field]]]:
    """(name, what it is, its keys), the keys outside of any section first."""
    yield "", "", [one for one in fields(RunConfig) if not is_dataclass(one.type)]
    for section in fields(RunConfig):
        if is_dataclass(section.type):
            yield section.name, section.type.__doc__ or "", list(fields(section.type))


def reference() -> str:
    """The page, as markdown."""
    lines = [HEAD]
    for name, what, keys in sections():
        lines.append(f"## {name or 'The run'}\n")
        if what:
            lines.append(f"{what.partition(chr(10))[0]}\n")
        lines += ["| key | what it may be | default | unit | meaning |", "|---|---|---|---|---|"]
        for key in keys:
            path = f"{name}.{key.name}" if name else key.name
            cells = (f"`{path}`", kind_of(key), default_of(key), unit_of(key), _cell(meaning_of(key)))
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(text: Any) -> str:
    return str(text).replace("|", "\\|")
