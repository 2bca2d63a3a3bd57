"""Checks of a preprocessing job: what it would replace, whether it has documents, and the bytes it needs."""

from collections.abc import Sequence
from pathlib import Path

from megatron.log import get_logger
from megatron.text.arguments import check_not_exists, dataset_files
from megatron.text.inputs import describe_inputs
from megatron.text.join import dataset_prefix, is_from_job
from megatron.text.shards import PieceResult, ShardFolder
from megatron.text.sources import Part
from megatron.text.text_readers import DamagedFileError, InputPiece

log = get_logger(__name__)
INDEX_BYTES = 24  # per document: 20 in the index, 4 in the spool of lengths


def check_replaceable(prefix: Path, keys: Sequence[str], job: str | None, shards: ShardFolder) -> None:
    """Raise ValueError if an output of another job exists; a new shard folder is then removed.

    An incomplete or modified output of the same job is written again.
    """
    try:
        for key in keys:
            if not is_from_job(dataset_prefix(prefix, key), job):
                check_not_exists(*dataset_files(dataset_prefix(prefix, key)))
    except ValueError:
        if not shards.has_work():
            shards.remove()
        raise


def estimate_bytes_left(pieces: Sequence[InputPiece], results: dict[int, PieceResult]) -> int | None:
    """Estimate the remaining bytes of output from the finished pieces; None if there are none."""
    sizes = [piece.end - piece.begin for piece in pieces]
    n_read = sum(sizes[number] for number in results)
    if not n_read:
        return None
    # output per byte of input is nearly constant within a corpus: extrapolate linearly
    n_written = sum(result.n_bytes + INDEX_BYTES * result.n_documents for result in results.values())
    return n_written * (sum(sizes) - n_read) // n_read


def check_not_empty(
    inputs: Sequence[str],
    pieces: Sequence[InputPiece],
    results: dict[int, PieceResult],
    part: Part | None = None,
) -> None:
    """Raise ValueError if the inputs have neither a document nor a rejected line.

    A part may be empty, for example if there are fewer packed files than parts: a warning is logged.
    """
    if any(result.n_documents or result.n_rejected for result in results.values()):
        return
    damaged = [
        (pieces[i].path, result.damage) for i, result in sorted(results.items()) if result.damage is not None
    ]
    if damaged:
        raise DamagedFileError(*damaged[0])
    if part is not None:
        log.warning("part %s has no document; there are %d pieces of input in it", part, len(pieces))
        return
    raise ValueError(
        f"{describe_inputs(inputs)}: got no document. The program that wrote it may have failed."
    )
