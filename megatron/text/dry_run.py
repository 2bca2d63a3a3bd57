"""Input of a preprocessing job before it begins: files and bytes, and whether its tokenizer loads."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron.terminal import format_si
from megatron.text.inputs import STDIN, find_inputs
from megatron.tokenizer.kinds import TokenizerSpec, load_tokenizer


def describe_job(inputs: Sequence[str], prefix: Path, tokenizer: TokenizerSpec | str) -> str:
    """Return a description of the input of a job. Nothing is written.

    Raises the errors of `preprocess` for its inputs and tokenizer, and ValueError for standard input.
    """
    paths = find_inputs(inputs)
    if STDIN in paths:
        raise ValueError("--dry-run: got standard input, expected files, whose size is known")
    n_ids = load_tokenizer(tokenizer).n_tokens
    n_bytes = sum(path.stat().st_size for path in paths)
    folder = next(parent for parent in prefix.absolute().parents if parent.is_dir())
    free_bytes = shutil.disk_usage(folder).free
    return (
        f"{prefix}: {len(paths):,} files, {format_si(n_bytes)}B to read, a tokenizer of {n_ids:,} ids, and "
        f"{format_si(free_bytes)}B of disk are free"
    )
