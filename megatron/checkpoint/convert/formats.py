"""Convert a checkpoint from any supported format to any other."""

from dataclasses import replace
from pathlib import Path

import torch

from megatron.checkpoint.convert.huggingface import CONFIG_FILE, read_huggingface, write_huggingface
from megatron.checkpoint.convert.megatron_export import write_megatron
from megatron.checkpoint.convert.megatron_layouts import is_megatron_checkpoint, read_megatron
from megatron.checkpoint.model_weights import Weights, find_newest_checkpoint, load_weights, save_weights
from megatron.checkpoint.reshard import reshard_to_full, reshard_to_sharded
from megatron.log import get_logger

log = get_logger(__name__)

# these keep the optimizer state, so a run can resume
RESHARD_FUNCTIONS = {"full": reshard_to_full, "sharded": reshard_to_sharded}


def read_any(
    path: Path, *, tokenizer: str | None = None, n_tokens: int | None = None, objective: str | None = None
) -> Weights:
    """Load the weights at a path. The format is detected from its files.

    tokenizer   overrides the tokenizer recorded in the source
    n_tokens    number of tokenizer ids, for Megatron checkpoints
                that do not record how many rows are padding
    objective   training objective, for Megatron checkpoints that do not record it

    Raises FileNotFoundError or ValueError with a one-line message.
    """
    if path.is_file():
        raise ValueError(
            f"{path}: got a file, expected a checkpoint's folder. Convert other formats, such as "
            "llama2.c's, to a Hugging Face folder first."
        )
    # config.json has precedence over rank files,
    # and both over a checkpoint of this project
    if (path / CONFIG_FILE).is_file():
        weights = read_huggingface(path)
    elif path.is_dir() and is_megatron_checkpoint(path):
        weights = read_megatron(path, n_tokens, objective)
    else:
        weights = load_weights(path)
    if n_tokens is not None and weights.config.n_tokens != n_tokens:
        raise ValueError(
            f"{path}: got {weights.config.n_tokens} tokens, expected {n_tokens}. Omit --n-tokens."
        )
    if objective is not None and weights.objective != objective:
        raise ValueError(f"{path}: got {weights.objective}, expected {objective}. Omit --objective.")
    return weights if tokenizer is None else replace(weights, tokenizer=tokenizer)


def convert_checkpoint(
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
    """Convert `source` to `target` in format `to` (TARGETS of config/cli_choices.py); return a summary line.

    `dtype` and `strip_rows` (omit the rows of [MASK] and padding) apply to
    huggingface only. Raises FileNotFoundError or ValueError with a one-line
    message; a partial target is removed.
    """
    if target.exists():
        raise ValueError(f"{target}: already exists; choose another name or delete it")
    if to != "huggingface" and (strip_rows or dtype != "float32"):
        raise ValueError(f"--strip-rows and --dtype are for --to huggingface, not {to}")
    if to in RESHARD_FUNCTIONS:
        if not (tokenizer is None and n_tokens is None and objective is None):
            raise ValueError(
                f"--tokenizer, --n-tokens, --objective: --to {to} keeps the run's settings; omit them"
            )
        checkpoint = find_newest_checkpoint(source)
        RESHARD_FUNCTIONS[to](checkpoint, target)
        return f"{to}, from {checkpoint}"
    weights = read_any(source, tokenizer=tokenizer, n_tokens=n_tokens, objective=objective)
    if strip_rows and weights.objective == "masked_diffusion":
        raise ValueError(f"{source}: a masked-diffusion model needs its [MASK] row. Omit --strip-rows.")
    # builds the model: wrong names or shapes raise before anything is written
    n_parameters = sum(parameter.numel() for parameter in weights.build_model().parameters())
    summary = f"{weights.objective}, {n_parameters:,} parameters"
    if strip_rows:
        weights = weights.strip_spare_rows()
    if to == "native":
        save_weights(weights, target)
    elif to == "megatron":
        write_megatron(weights, target)
    else:
        if weights.tokenizer is None:
            log.warning("the tokenizer is unknown, so none is written; give it with --tokenizer")
        write_huggingface(weights, target, getattr(torch, dtype))
    return summary
