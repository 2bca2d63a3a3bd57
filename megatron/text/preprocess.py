"""Resumable parallel tokenisation of text to datasets on disk, in the order of the input.

The input is split into pieces. A thread encodes each piece
to one unit in a folder beside the output: in C++ if that is exact
for the tokenizer, else in its library. A restart encodes the pieces
that have no unit. At the end the units are joined in order.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.cli import ProgressBar, format_si
from megatron.data.indexed_writer import dtype_for
from megatron.log import get_logger
from megatron.text.encode import encode_piece
from megatron.text.inputs import (
    STDIN,
    Part,
    Selection,
    Source,
    describe_inputs,
    find_inputs,
    locate_source,
    select_part,
    stat_source,
)
from megatron.text.join import PreprocessResult, UnitJoiner, dataset_prefix, rejects_path
from megatron.text.outputs import find_finished
from megatron.text.text_readers import DamagedFileError, split_into_pieces
from megatron.text.units import EncodeSettings, UnitFolder
from megatron.text.workers import encode_pieces, encoder_builder
from megatron.tokenizer.encoder import NO_EOD, Encoder, build_fast_bpe
from megatron.tokenizer.fast_bpe import FastBpe
from megatron.tokenizer.kinds import Tokenizer, TokenizerSpec, load_tokenizer

PIECE_BYTES = 8 << 20
# a sample of --dry-run
SAMPLE_BYTES = 2 << 20  # from a plain file
SAMPLE_TOKENS = 2_000_000  # from a packed file

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """Options of a job. `special_text`: the text of a special token becomes its id, as in `tokenizers`.

    overwrite   replace outputs of another job
    part        the job reads this part of the bytes of the input,
                and its number is added to the prefix
    """

    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    special_text: bool = True
    skip_bad_lines: bool = False
    max_tokens: int | None = None
    n_workers: int = 1
    quiet: bool = False
    overwrite: bool = False
    part: Part | None = None


def preprocess(
    inputs: Sequence[str], prefix: Path, tokenizer: TokenizerSpec | str, options: PreprocessOptions,
    published: str | None = None,
) -> PreprocessResult:  # fmt: skip
    """Tokenise the documents of `inputs` to `<prefix>_<key>_document.bin/.idx/.json`, a dataset per key.

    After a kill at any moment, the same call resumes with the pieces
    that are not finished, and the outputs are byte for byte those
    of an uninterrupted call. `max_tokens` uses the smallest number
    of first documents with at least so many tokens of the first key.
    A blank line is not a document. An empty text is a document without tokens,
    or with the end-of-document token only; the sidecar counts these.

    published   URL of the folder where the outputs exist
                already, or will be: nothing is done if so

    Raises FileNotFoundError; ValueError with file, line and reason for a bad line,
    unless bad lines are skipped, for inputs without documents, and for a file that
    changes meanwhile; OSError for a full disk. Existing outputs are then unchanged.
    """
    paths = find_inputs(inputs)
    if options.part is not None:
        prefix = options.part.add_to(prefix)
    _check_options(options, prefix, paths)
    selection = select_part(paths, options.part)
    loaded = load_tokenizer(tokenizer)
    settings = make_settings(loaded, options)
    job = _hash_job(selection, loaded, settings, options)
    units = UnitFolder(prefix.with_name(f".{prefix.name}.shards"), settings)
    with units.lock(prefix):
        # an interrupted call of this job has
        # perhaps published a part of its outputs
        is_begun = units.is_begun(job, prefix, options.overwrite)
        try:
            may_replace = is_begun or options.overwrite
            result = _find_existing(prefix, published, options.keys, job, may_replace)
            if result is None:
                if not is_begun:
                    units.begin(job)
                joiner = UnitJoiner(
                    split_into_pieces(selection.paths, PIECE_BYTES, selection.ranges), units, prefix,
                    _describe_part(loaded, options, selection), options.max_tokens, options.n_workers,
                )  # fmt: skip
                build = encoder_builder(tokenizer, load_fast_bpe(loaded), options.special_text)
                try:
                    _encode_missing(joiner, build, options)
                    sources = joiner.describe_sources(selection.paths)
                finally:  # instead of the error of a line that was read while it was written
                    if _hash_job(selection, loaded, settings, options) != job:
                        names = describe_inputs(inputs)
                        raise ValueError(f"{names}: a file changed while it was read. Run it again.")
                _check_documents(joiner, inputs, options)
                result = joiner.join(sources, job)
        except ValueError:
            units.remove()  # the same call fails again
            raise
        units.remove()
    return result


def _find_existing(
    prefix: Path, published: str | None, keys: Sequence[str], job: str | None, may_replace: bool
) -> PreprocessResult | None:
    """Return the finished outputs of the job, on this machine or in the store. Raises as `find_finished`."""
    # under the lock of the units, so that no other process replaces them afterwards
    for folder in (prefix.parent, published):
        result = find_finished(folder, prefix, keys, job, may_replace) if folder else None
        if result is not None:
            log.info("%s: exists already, from the same files and settings", prefix)
            return result
    return None


def load_fast_bpe(loaded: Tokenizer) -> FastBpe | None:
    """Return the C++ encoder, or None with a warning if only the tokenizer's library is exact."""
    fast, reason = build_fast_bpe(loaded)
    if fast is None:
        log.warning("%s: using its own library, which is slower than C++; reason: %s", loaded.name, reason)
    return fast


def make_settings(
    loaded: Tokenizer, options: PreprocessOptions, max_tokens: int | None = None
) -> EncodeSettings:
    """Return the settings that every piece is encoded with. `max_tokens`: default as in the options."""
    return EncodeSettings(
        keys=options.keys,
        eod=loaded.eod_id if options.append_eod else NO_EOD,
        dtype=dtype_for(loaded.n_tokens).str,
        skip_bad_lines=options.skip_bad_lines,
        max_tokens=max_tokens or options.max_tokens,
    )


def _check_options(options: PreprocessOptions, prefix: Path, paths: Sequence[Source]) -> None:
    """Raise ValueError for inconsistent options, and for an output that is an input."""
    if options.n_workers < 1:
        raise ValueError(f"workers: got {options.n_workers}, expected 1 or more")
    if len(set(options.keys)) < len(options.keys):
        raise ValueError(f"json keys: got a key twice in {', '.join(options.keys)}, expected distinct keys")
    if options.part is not None and options.max_tokens is not None:
        raise ValueError(
            "--max-tokens: got it with --part, expected one of them. Join the parts, and select their first "
            "tokens with tools/subset_corpus.py."
        )
    if slashed := [key for key in options.keys if "/" in key]:
        raise ValueError(
            f"json keys: got '{slashed[0]}', expected a key without a slash, as it is part of a file name. "
            "Rename the key."
        )
    outputs = {Path(f"{dataset_prefix(prefix, key)}.json").resolve() for key in options.keys}
    for path in paths:
        if Path(locate_source(path)) in outputs | {rejects_path(prefix).resolve()}:
            raise ValueError(
                f"{path}: is an input, and would be overwritten. Choose another --output-prefix."
            )


def _hash_job(
    selection: Selection, loaded: Tokenizer, settings: EncodeSettings, options: PreprocessOptions
) -> str | None:
    """Return the hash of what the outputs depend on: jobs with equal hashes have equal outputs.

    None if standard input is read, whose content is not known in advance. The
    number of workers and --quiet are not included: a call with other workers may
    resume this one.
    """
    if STDIN in selection.paths:
        return None
    words: list[Any] = [loaded.sha256, settings.eod, settings.dtype]
    words += [options.special_text, options.skip_bad_lines]
    if loaded.eod is not None and loaded.eod.source.startswith("--"):
        words.append(loaded.eod.id)  # the sidecar contains it, whether documents end with it or not
    words += [options.max_tokens, *options.keys]
    if options.part is not None:
        ranges = [
            [str(path), *selection.ranges[path]] for path in selection.paths if path in selection.ranges
        ]
        part = [options.part.number, options.part.count]
        words.append({"part": part, "inputs_sha256": selection.inputs_sha256, "ranges": ranges})
    # the time instead of a hash: a hash would read terabytes before the first token
    files = [[locate_source(path), *stat_source(path)] for path in selection.paths]
    # JSON, not str: it quotes strings, so that no two lists have the same text
    return hashlib.sha256(json.dumps([words, files]).encode()).hexdigest()


def describe_settings(loaded: Tokenizer, append_eod: bool, special_text: bool) -> dict[str, Any]:
    """Return the entries of a sidecar on the tokenizer and its use."""
    end = loaded.eod
    meta = {
        "name": loaded.name,
        "sha256": loaded.sha256,
        "n_tokens": loaded.n_tokens,
        "eod_id": None if end is None else end.id,
        "eod_token": None if end is None else end.token,
        "eod_from": None if end is None else end.source,
    }
    return {"append_eod": append_eod, "special_text": special_text, "tokenizer": meta}


def _describe_part(loaded: Tokenizer, options: PreprocessOptions, selection: Selection) -> dict[str, Any]:
    """Return the entries of the sidecars that are known before the encoding."""
    meta = describe_settings(loaded, options.append_eod, options.special_text)
    if (part := options.part) is not None:
        numbers = {"number": part.number, "of": part.count}
        meta |= {"part": numbers | {"inputs_sha256": selection.inputs_sha256}}
    if options.append_eod and (end := loaded.eod) is not None:
        source = end.source if end.token is None else f"{end.token}, {end.source}"
        log.info("documents end with id %d (%s)", loaded.eod_id, source)
    return meta


def estimate_job(
    inputs: Sequence[str], prefix: Path, tokenizer: TokenizerSpec | str, options: PreprocessOptions
) -> str:
    """Return the size of the input, of the output and of the free disk.

    Encodes a piece from the middle of the input and writes nothing.
    Raises the errors of `preprocess` for the inputs
    and the tokenizer, and ValueError for inputs without bytes,
    such as standard input, and for a sample without documents.
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
    encoder = encoder_builder(tokenizer, load_fast_bpe(loaded), options.special_text)()
    n_read = [piece.end - piece.begin]
    with tempfile.TemporaryDirectory(prefix="dry-run") as scratch:
        record = encode_piece(piece, Path(scratch, "sample"), settings, encoder, n_read.append)
    if not record.n_documents:
        raise ValueError(f"{piece.path}: got no document in a sample, expected some")
    # a packed file reports how far it was read; a plain piece was read as a whole
    share = n_bytes / (n_read[0] if piece.is_plain else n_read[-1])
    if options.max_tokens is not None:  # the job ends when it has them
        share = min(share, options.max_tokens / max(1, record.n_tokens[0]))
    n_tokens = round(sum(record.n_tokens) * share)
    output_bytes = n_tokens * np.dtype(settings.dtype).itemsize
    folder = next(parent for parent in prefix.absolute().parents if parent.is_dir())
    # the units exist until the outputs are complete
    disk, free = format_si(2 * output_bytes), format_si(shutil.disk_usage(folder).free)
    return (
        f"{prefix}: {len(selection.paths):,} files, {format_si(n_bytes)}B to read; expected "
        f"{format_si(n_tokens)} tokens, {format_si(output_bytes)}B of output, {disk}B of disk until it is "
        f"complete ({free}B are free); nothing was written"
    )


def _encode_missing(joiner: UnitJoiner, build: Callable[[], Encoder], options: PreprocessOptions) -> None:
    """Encode the pieces that have no record, and show progress.

    With max_tokens no piece is begun after the first pieces with enough tokens.
    Raises ValueError for the first bad line.
    """
    pieces, records = joiner.pieces, joiner.units.read_records()
    if records:
        log.info("resuming: %d of %d pieces are done already", len(records), len(pieces))
    sizes = [piece.end - piece.begin for piece in pieces]
    title = "tokenising" if options.part is None else f"tokenising part {options.part}"
    n_finished = sum(sizes[number] for number in records)
    missing = {i: piece for i, piece in enumerate(pieces) if i not in records}
    with (
        ProgressBar(title, sum(sizes) or None, "B", n_finished, options.quiet) as bar,
        closing(encode_pieces(missing, joiner.units, build, options.n_workers, bar)) as encoded,
    ):
        for number in range(len(pieces)):
            joiner.add_record(records.get(number) or next(encoded))
            if joiner.has_enough:
                break


def _check_documents(joiner: UnitJoiner, inputs: Sequence[str], options: PreprocessOptions) -> None:
    """Raise ValueError if the inputs have neither a document nor a rejected line.

    A part may be empty, for example if there are fewer packed files than parts: a
    warning is logged.
    """
    if options.max_tokens is not None and not joiner.has_enough:
        log.warning(
            "%s: got fewer than the requested %s tokens; all are used",
            describe_inputs(inputs), f"{options.max_tokens:,}",
        )  # fmt: skip
    if any(record.n_documents or record.rejects for record in joiner.records):
        return
    for piece, record in zip(joiner.pieces, joiner.records, strict=True):
        if record.damage is not None:
            raise DamagedFileError(piece.path, record.damage)
    if options.part is None:
        raise ValueError(
            f"{describe_inputs(inputs)}: got no document. The program that wrote it may have failed."
        )
    n_pieces = len(joiner.pieces)
    log.warning("part %s has no document; there are %d pieces of input in it", options.part, n_pieces)
