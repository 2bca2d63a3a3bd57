"""From any format that is read to any that is written."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.huggingface import CONFIG, read_huggingface, write_huggingface
from megatron.checkpoint.llama2c import read_llama2c, write_llama2c
from megatron.checkpoint.megatron_layouts import is_megatron, read_megatron
from megatron.checkpoint.reshard import to_full, to_sharded
from megatron.checkpoint.tokenizer_files import write_tokenizer
from megatron.checkpoint.weights import Weights, load_weights, newest_in, save_weights
from megatron.config.choices import TARGET_DTYPES
from megatron.log import get_logger

log = get_logger(__name__)

RESHAPED = {"full": to_full, "sharded": to_sharded}  # with the optimizer, for a run to go on from
DTYPES = {name: getattr(torch, name) for name in TARGET_DTYPES}


def read_any(
    path: Path, *, tokenizer: str | None = None, n_tokens: int | None = None, objective: str | None = None
) -> Weights:
    """The weights at a path, whatever wrote them: what is there tells the format.

    tokenizer   overrides what the source says about it
    n_tokens    ids of the tokenizer, where a Megatron checkpoint does not say how many rows are padding
    objective   what it was trained for, where a Megatron checkpoint does not say

    Raises FileNotFoundError or ValueError in one sentence.
    """
    if path.is_file():
        weights = read_llama2c(path)
    elif (path / CONFIG).is_file():
        weights = read_huggingface(path)
    elif path.is_dir() and is_megatron(path):
        weights = read_megatron(path, n_tokens, objective)
    else:
        weights = load_weights(path)
    if n_tokens is not None and weights.config.n_tokens != n_tokens:
        raise ValueError(f"{path}: says that it has {weights.config.n_tokens} tokens, not {n_tokens}")
    if objective is not None and weights.objective != objective:
        raise ValueError(f"{path}: says that it is {weights.objective}, not {objective}")
    return weights if tokenizer is None else replace(weights, tokenizer=tokenizer)


def convert(
    source: Path,
    target: Path,
    *,
    to: str,
    tokenizer: str | None = None,
    n_tokens: int | None = None,
    objective: str | None = None,
    dtype: str = "float32",
    strip_rows: bool = False,
) -> str:
    """Read `source`, write `target` as one of config/choices.py's TARGETS, and say in a line what it is.

    dtype and strip_rows (no rows for [MASK] and padding) are for huggingface.
    Raises FileNotFoundError or ValueError in one sentence; nothing half-written stays.
    """
    if target.exists():
        raise ValueError(f"{target}: is already there; choose another name or delete it")
    if to != "huggingface" and (strip_rows or dtype != "float32"):
        raise ValueError(f"--strip-rows and --dtype are for --to huggingface, not {to}")
    if to in RESHAPED:
        if not (tokenizer is None and n_tokens is None and objective is None):
            raise ValueError(
                f"--tokenizer, --n-tokens and --objective: --to {to} keeps what the run says; leave them out"
            )
        checkpoint = newest_in(source)
        RESHAPED[to](checkpoint, target)
        return f"{to}, from {checkpoint}"
    weights = read_any(source, tokenizer=tokenizer, n_tokens=n_tokens, objective=objective)
    if strip_rows and weights.objective == "masked_diffusion":
        raise ValueError(
            f"{source}: a diffusion model without the row of [MASK] can do nothing; keep the rows"
        )
    told = f"{weights.objective}, {sum(of.numel() for of in weights.model().parameters()):,} parameters"
    if strip_rows:
        weights = weights.without_spare_rows()
    if to == "native":
        save_weights(weights, target)
    elif to == "llama2c":
        write_llama2c(weights, target)
    else:
        write_huggingface(weights, target, DTYPES[dtype], _tokenizer_writer(weights))
    return told


def _tokenizer_writer(weights: Weights) -> Callable[[Path], dict[str, Any]] | None:
    if weights.tokenizer is None:
        log.warning("no tokenizer is known, so none is written; name it with --tokenizer")
        return None
    return partial(write_tokenizer, weights.tokenizer)
