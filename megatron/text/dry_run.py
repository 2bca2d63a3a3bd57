"""Cost of a preprocessing job before it begins: time and disk, from a short sample of its own input."""

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np

from megatron.cli import format_si
from megatron.log import get_logger
from megatron.text.encode_piece import encode_piece
from megatron.text.inputs import STDIN, find_inputs
from megatron.text.job_checks import INDEX_BYTES
from megatron.text.join import CHECKPOINT_BYTES, dataset_prefix
from megatron.text.preprocess import PIECE_BYTES, PreprocessOptions, load_fast_bpe, make_settings
from megatron.text.shard_writer import EncodeSettings
from megatron.text.shards import ShardFolder
from megatron.text.sources import Sources, find_line_start, select_part
from megatron.text.text_readers import InputPiece, split_into_pieces
from megatron.tokenizer.encoder import Encoder, FastEncoder, LibraryEncoder
from megatron.tokenizer.kinds import Tokenizer, TokenizerSpec, load_tokenizer

SAMPLE_PIECES = 4
SAMPLE_BYTES = 2 << 20  # of a plain file, a piece
SAMPLE_TOKENS = 2_000_000  # of a packed file, a piece
SAMPLE_S = 3.0  # limit of all pieces together; a piece that is begun is measured up to here

log = get_logger(__name__)


class _EnoughError(Exception):
    """Raised from the progress report of a sample at its time limit."""


@dataclass
class JobSample:
    """Sums of the sampled pieces. Bytes are those on disk, compressed or not."""

    n_bytes: int = 0
    n_documents: int = 0
    n_tokens: int = 0
    seconds: float = 0.0
    files: set[Path] = field(default_factory=set)


@dataclass(frozen=True)
class JobEstimate:
    """Input of a job and its expected cost; `str` formats it for a terminal.

    disk_bytes   of the complete output, and of the shards that wait to be joined
    n_parallel   workers that can be busy at the same time on this machine
    """

    prefix: Path
    n_files: int
    n_bytes: int
    sample: JobSample
    n_workers: int
    n_parallel: int
    n_tokens: int
    seconds: float
    disk_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        sample = self.sample
        rate = sample.n_bytes / sample.seconds if sample.seconds else 0.0
        return "\n".join(
            [
                f"{self.prefix}: {self.n_files:,} files, {format_si(self.n_bytes)}B to read",
                f"expected: {format_si(self.n_tokens)} tokens, {format_si(self.disk_bytes)}B of disk "
                f"({format_si(self.free_bytes)}B are free), "
                f"{timedelta(seconds=max(1, round(self.seconds)))} with {self.n_workers} workers",
                f"measured with one worker on {format_si(sample.n_bytes)}B of {len(sample.files)} of these "
                f"files: {format_si(rate)}B/s; {self.n_parallel} workers count {self.n_parallel} times, and "
                "nothing was written",
            ]
        )


def estimate_job(
    inputs: Sequence[str], prefix: Path, tokenizer: TokenizerSpec | str, options: PreprocessOptions
) -> JobEstimate:
    """Estimate a call of `preprocess` by encoding a few MB of its input; warn if the disk is too small.

    Raises the errors of `preprocess` for its inputs and tokenizer, and ValueError for standard input and for
    an input without documents in the sample. A bad line ends its piece of the sample.
    """
    paths = find_inputs(inputs)
    if STDIN in paths:
        raise ValueError("--dry-run: got standard input, expected files, whose size is known")
    sources = select_part(paths, options.part)
    if options.part is not None:
        prefix = options.part.add_to(prefix)
    loaded, sizes = load_tokenizer(tokenizer), _count_bytes(sources)
    settings = make_settings(loaded, options)
    sample = _encode_sample(_choose_pieces(sources, sizes), settings, options, _make_encoder(loaded, options))
    if not sample.n_documents:
        if sizes:
            raise ValueError(f"{paths[0]}: got no document in a sample of the input, expected some")
        log.warning("%s: this part has no input", prefix)
    scale = sum(sizes.values()) / max(1, sample.n_bytes)
    if options.max_tokens is not None:  # the job ends when it has them
        scale = min(scale, options.max_tokens * len(options.keys) / max(1, sample.n_tokens))
    n_bytes = round(sample.n_bytes * scale)
    n_tokens, n_documents = round(sample.n_tokens * scale), round(sample.n_documents * scale)
    token_bytes = n_tokens * np.dtype(settings.dtype).itemsize
    disk_bytes = token_bytes + INDEX_BYTES * n_documents * len(options.keys)
    # a plain file is shared by workers, a packed file is read by one
    n_pieces = sum(
        -(-size // PIECE_BYTES) if InputPiece(path, 0, size).is_plain else 1 for path, size in sizes.items()
    )
    n_parallel = max(1, min(options.n_workers, os.cpu_count() or 1, n_pieces))
    seconds = sample.seconds * scale / n_parallel
    folder = next(parent for parent in prefix.absolute().parents if parent.is_dir())
    free_bytes = shutil.disk_usage(folder).free
    if finished := [key for key in options.keys if Path(f"{dataset_prefix(prefix, key)}.json").exists()]:
        log.warning("%s: exists already", dataset_prefix(prefix, finished[0]))
    needed = disk_bytes + min(CHECKPOINT_BYTES, token_bytes)
    if needed > free_bytes:
        log.warning(
            "%s: the disk has %sB free, and the job needs about %sB. Make room, or choose another folder.",
            folder, format_si(free_bytes), format_si(needed),
        )  # fmt: skip
    return JobEstimate(
        prefix,
        len(sizes),
        n_bytes,
        sample,
        options.n_workers,
        n_parallel,
        n_tokens,
        seconds,
        needed,
        free_bytes,
    )


def _make_encoder(loaded: Tokenizer, options: PreprocessOptions) -> Encoder:
    fast = load_fast_bpe(loaded)
    if fast is None:
        return LibraryEncoder(loaded, options.special_text)
    return FastEncoder(fast, options.special_text)


def _count_bytes(sources: Sources) -> dict[Path, int]:
    """Return the bytes that the job reads of each file."""
    return {
        path: sources.ranges[path][1] - sources.ranges[path][0]
        if path in sources.ranges
        else path.stat().st_size
        for path in sources.paths
    }


def _choose_pieces(sources: Sources, sizes: dict[Path, int]) -> list[InputPiece]:
    """Return SAMPLE_PIECES pieces or fewer at equal distances in the bytes of the input."""
    ends = np.cumsum(list(sizes.values()), dtype=np.int64)
    pieces: dict[tuple[Path, int], InputPiece] = {}
    for number in range(SAMPLE_PIECES if len(ends) else 0):
        at = int(ends[-1]) * (2 * number + 1) // (2 * SAMPLE_PIECES)
        index = min(int(np.searchsorted(ends, at, side="right")), len(ends) - 1)
        path = list(sizes)[index]
        first, last = sources.ranges.get(path, (0, sizes[path]))
        piece = InputPiece(path, 0, last)
        if piece.is_plain:
            # the middle of the sample may be in the last line: then its begin
            begin = find_line_start(path, first + at - int(ends[index]) + sizes[path], path.stat().st_size)
            begin = begin if begin < last else first
            begun = split_into_pieces([path], SAMPLE_BYTES, {path: (begin, min(last, begin + SAMPLE_BYTES))})
            piece = begun[0] if begun else piece
        pieces[path, piece.begin] = piece
    return list(pieces.values())


def _encode_sample(
    pieces: Sequence[InputPiece], settings: EncodeSettings, options: PreprocessOptions, encoder: Encoder
) -> JobSample:
    """Encode pieces into a temporary folder, up to the limits."""
    sample = JobSample()
    begun = time.perf_counter()
    # `max_tokens` ends a packed piece early
    limited = EncodeSettings(settings.eod, settings.dtype, settings.skip_bad_lines, SAMPLE_TOKENS)
    with tempfile.TemporaryDirectory(prefix="dry-run") as name:
        for number, piece in enumerate(pieces):
            if number and time.perf_counter() - begun > SAMPLE_S:
                break
            (folder := Path(name, str(number))).mkdir()
            shards = ShardFolder(folder, options.keys)
            _encode_one(piece, shards, limited, encoder, sample, begun + SAMPLE_S)
    return sample


def _encode_one(
    piece: InputPiece, shards: ShardFolder, settings: EncodeSettings, encoder: Encoder, sample: JobSample,
    end_s: float,
) -> None:  # fmt: skip
    """Encode a piece up to the limits, and add it to the sample."""
    begun, seconds, counts = time.perf_counter(), 0.0, (0, 0, 0)

    def on_progress(*progress: int) -> None:
        nonlocal counts, seconds
        counts, seconds = (progress[0], progress[1], progress[2]), time.perf_counter() - begun
        if begun + seconds > end_s and counts[0]:
            raise _EnoughError

    with suppress(_EnoughError):
        result = encode_piece(piece, 0, shards, settings, encoder, on_progress)
        if result.error is not None:
            log.warning("%s", result.error)
        # a plain piece reports no bytes. The end of a packed one is not used: its file is hashed there.
        if piece.is_plain:
            seconds = time.perf_counter() - begun
            counts = piece.end - piece.begin, result.n_documents, result.n_tokens
    sample.seconds += seconds
    sample.n_bytes += counts[0]
    sample.n_documents += counts[1]
    sample.n_tokens += counts[2]
    sample.files.add(piece.path)
