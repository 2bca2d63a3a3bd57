"""Size of a preprocessing job before it begins, from a short sample of its own input."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.cli import format_si
from megatron.log import get_logger
from megatron.text.encode import encode_piece
from megatron.text.inputs import describe_inputs, find_inputs, select_part
from megatron.text.preprocess import PreprocessOptions, load_fast_bpe, make_settings
from megatron.text.text_readers import split_into_pieces
from megatron.text.workers import EncoderRecipe
from megatron.tokenizer.kinds import TokenizerSpec, load_tokenizer

SAMPLE_BYTES = 2 << 20  # of a plain file
SAMPLE_TOKENS = 2_000_000  # of a packed file
INDEX_BYTES = 24  # per document: 20 in the index, 4 in a unit

log = get_logger(__name__)


def estimate_job(
    inputs: Sequence[str], prefix: Path, tokenizer: TokenizerSpec | str, options: PreprocessOptions
) -> str:
    """Return the size of the input and of the output; warn if the disk is too small.

    Encodes a piece from the middle of the input and writes nothing. Raises the errors of `preprocess` for the
    inputs and the tokenizer, and ValueError for inputs without bytes, such as standard input, and for a
    sample without documents.
    """
    selection = select_part(find_inputs(inputs), options.part)
    pieces = split_into_pieces(selection.paths, SAMPLE_BYTES, selection.ranges)
    n_bytes = sum(piece.end - piece.begin for piece in pieces)
    if not n_bytes:
        raise ValueError(
            f"{describe_inputs(inputs)}: got no bytes for --dry-run, expected files with content"
        )
    loaded, piece = load_tokenizer(tokenizer), pieces[len(pieces) // 2]
    settings = make_settings(loaded, options, SAMPLE_TOKENS)
    encoder = EncoderRecipe(tokenizer, load_fast_bpe(loaded), options.special_text).build()
    n_read = [piece.end - piece.begin]
    with tempfile.TemporaryDirectory(prefix="dry-run") as scratch:
        record = encode_piece(
            piece, Path(scratch, "sample"), settings, encoder, lambda *counts: n_read.append(counts[0])
        )
    if not record.n_documents:
        raise ValueError(record.error or f"{piece.path}: got no document in a sample, expected some")
    # a packed file reports how far it was read; a plain piece was read as a whole
    share = n_bytes / (n_read[0] if piece.is_plain else n_read[-1])
    if options.max_tokens is not None:  # the job ends when it has them
        share = min(share, options.max_tokens / max(1, record.n_tokens[0]))
    n_tokens, n_documents = round(sum(record.n_tokens) * share), round(record.n_documents * share)
    output_bytes = n_tokens * np.dtype(settings.dtype).itemsize
    # the units exist until the outputs are complete
    disk_bytes = 2 * output_bytes + INDEX_BYTES * n_documents * len(options.keys)
    folder = next(parent for parent in prefix.absolute().parents if parent.is_dir())
    free_bytes = shutil.disk_usage(folder).free
    if disk_bytes > free_bytes:
        log.warning(
            "%s: the disk has %sB free, and the job needs about %sB. Make room, or choose another folder.",
            folder, format_si(free_bytes), format_si(disk_bytes),
        )  # fmt: skip
    return (
        f"{prefix}: {len(selection.paths):,} files, {format_si(n_bytes)}B to read; expected "
        f"{format_si(n_tokens)} tokens, {format_si(output_bytes)}B of output, {format_si(disk_bytes)}B of "
        f"disk until it is complete ({format_si(free_bytes)}B are free); nothing was written"
    )
