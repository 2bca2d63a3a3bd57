"""Registration of the records of one file: the location and the properties of each document.

Lines of JSON are passed to DuckDB as one memory block, and nothing is parsed in Python. If a block contains a
broken line, it is evaluated a second time, line by line, to locate the error.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data import open_dataset
from megatron.data.sidecar import read_sidecar
from megatron.mixture.catalog.line_blocks import (
    BLOCK_BYTES,
    LineBlock,
    mask_nonblank,
    read_line_blocks,
    split_lines,
)
from megatron.mixture.catalog.part_files import PartWriter
from megatron.mixture.catalog.properties import Property, quote_identifier
from megatron.mixture.catalog.tars import MAX_SAMPLE_BYTES, TAR_SUFFIXES, iter_samples
from megatron.mixture.lazy_imports import fetch_rows, import_duckdb, import_pyarrow
from megatron.text.text_readers import iter_columns
from megatron.text.token_counts import TokenCounter

LENGTHS_COLUMN = "tokens_of_the_text"  # unlikely as a column name of a user
ROWS_AT_ONCE = 1 << 14  # rows of parquet per batch
TOKENS_INDEX = 4  # after the columns file, row, begin, size
MAX_BROKEN_LISTED = 1000  # lines per file that are listed; all are counted


@dataclass
class RecordCounts:
    """Counts of the records of a file. `broken`: (line or row from 1, reason)."""

    n_documents: int = 0
    n_broken: int = 0
    broken: list[tuple[int, str]] = field(default_factory=list)

    def add_broken(self, places: Sequence[int], reasons: Sequence[str]) -> None:
        """Count broken records, and list at most MAX_BROKEN_LISTED of them."""
        self.n_broken += len(places)
        self.broken += list(zip(places, reasons, strict=True))[: MAX_BROKEN_LISTED - len(self.broken)]


@dataclass(frozen=True)
class FileTarget:
    """Destination of the documents of the file at `path`: the part `sink`, with the key `file`.

    Expressions over records are evaluated by the database `scratch`. If they fail, nothing is written.
    """

    path: Path
    sink: PartWriter
    scratch: Any
    file: int
    text_key: str
    properties: tuple[Property, ...]
    counter: TokenCounter | None = None
    member_bytes: int = MAX_SAMPLE_BYTES

    def columns_sql(self, is_json: bool) -> str:
        """Return the properties in SQL, each after a comma."""
        return "".join(
            f", {prop.to_sql(is_json)} AS {quote_identifier(prop.name)}" for prop in self.properties
        )


def register_file(target: FileTarget) -> RecordCounts:
    """Write the documents of a file to the part.

    Raises ValueError for a file that cannot be read, or an expression that cannot be evaluated.
    """
    path = target.path
    try:
        if path.suffix == ".bin":
            return _register_dataset(path, target)
        if path.suffix == ".parquet":
            return _register_parquet(path, target)
        if path.name.endswith(TAR_SUFFIXES):
            return _register_tar(path, target)
        return _register_lines(path, target)
    except (import_duckdb().Error, import_pyarrow().ArrowException) as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from error


def _register_lines(path: Path, target: FileTarget) -> RecordCounts:
    counts, n_lines, offset = RecordCounts(), 0, 0
    for block in read_line_blocks(path):
        lines, begins, sizes = split_lines(block)
        mask = mask_nonblank(block, begins, sizes)
        numbers = np.arange(n_lines, n_lines + len(sizes))
        n_lines += len(sizes)
        if not mask.all():
            lines = lines.filter(import_pyarrow().array(mask))
            begins, sizes, numbers = begins[mask], sizes[mask], numbers[mask]
        _register_block(LineBlock(lines, begins + offset, sizes, numbers), target, counts)
        offset += len(block)
    return counts


def _register_tar(path: Path, target: FileTarget) -> RecordCounts:
    """Write the samples of a tar archive.

    A sample is broken if it has no text, or if its members are not adjacent.
    """
    counts = RecordCounts()
    places: list[tuple[int, int, int]] = []  # begin, size, number
    records: list[str] = []
    keys: list[str] = []
    n_chars = 0

    def flush() -> None:
        begins, sizes, numbers = np.array(places, dtype=np.int64).reshape(-1, 3).T.copy()
        lines = import_pyarrow().array(records, import_pyarrow().large_string())
        _register_block(LineBlock(lines, begins, sizes, numbers, keys.copy()), target, counts)
        places.clear()
        records.clear()
        keys.clear()

    for number, sample in enumerate(iter_samples(path, target.member_bytes)):
        try:
            records.append(json.dumps(sample.build_record(target.text_key)))
        except ValueError as error:
            counts.add_broken([number + 1], [f"{sample.key}: {error}"])
            continue
        places.append((sample.begin, sample.end - sample.begin, number))
        keys.append(sample.key)
        n_chars += len(records[-1])
        if n_chars >= BLOCK_BYTES:
            flush()
            n_chars = 0
    flush()
    return counts


def _register_block(block: LineBlock, target: FileTarget, counts: RecordCounts) -> None:
    try:
        insert_block(block, target, counts)
    except (import_duckdb().Error, UnicodeDecodeError):
        # a second attempt after the repair, without the lines that are still invalid
        block = block.replace_lone_surrogates()
        reasons = _find_faults(block, target)
        bad = np.array([reason is not None for reason in reasons])
        bad_reasons = [reason for reason in reasons if reason is not None]
        if block.names:
            bad_reasons = [
                f"{block.names[i]}: {reason}"
                for i, reason in zip(np.flatnonzero(bad).tolist(), bad_reasons, strict=True)
            ]
        counts.add_broken((block.numbers[bad] + 1).tolist(), bad_reasons)
        # an error that remains is in an expression, not in the lines
        insert_block(block.select(~bad), target, counts)


def insert_block(block: LineBlock, target: FileTarget, counts: RecordCounts) -> None:
    """Write documents to the part. If one is broken, raise the error of DuckDB and write none."""
    n, scratch, counter = len(block.sizes), target.scratch, target.counter
    files, numbers = block.files, block.numbers
    if files is None:
        files = np.full(n, target.file, dtype=np.int64)
        numbers = np.arange(counts.n_documents, counts.n_documents + n)
    lines = {"record": block.lines, "file": files, "row": numbers, "begin": block.begins, "size": block.sizes}
    scratch.register("lines", import_pyarrow().table(lines))
    try:
        # a record without text raises, which ends the statement before anything is inserted
        text = "" if counter is None else f", json_extract_string(record, {_json_path(target)})"
        documents = scratch.sql(
            f"SELECT file, CASE WHEN json_type(record, {_json_path(target)}) = 'VARCHAR' THEN row "
            "ELSE error('no text') END AS row, begin, size, CAST(NULL AS BIGINT) AS tokens"
            f"{target.columns_sql(is_json=True)}{text} FROM lines"
        ).to_arrow_table()
    finally:
        scratch.unregister("lines")
    if counter is not None:
        last = documents.num_columns - 1
        tokens = _count_tokens(documents.column(last), target, counts.n_documents)
        documents = documents.remove_column(last).set_column(TOKENS_INDEX, "tokens", tokens)
    target.sink.write(documents)
    counts.n_documents += n


def _count_tokens(texts: Any, target: FileTarget, n_before: int) -> Any:
    """Return the tokens of texts, Arrow int64. Raises ValueError for a text that the tokenizer refuses."""
    assert target.counter is not None
    parts = [np.zeros(0, dtype=np.int64)]
    for part in texts.chunks:
        try:
            parts.append(target.counter.count_tokens(part, n_before))
        except ValueError as error:
            raise ValueError(f"{target.path}, {error}") from error
        n_before += len(part)
    return import_pyarrow().array(np.concatenate(parts))


def _json_path(target: FileTarget) -> str:
    return "'$.\"" + target.text_key.replace("'", "''").replace('"', '\\"') + "\"'"


def _find_faults(block: LineBlock, target: FileTarget) -> list[str | None]:
    """Return the reason why each line is not a document; None for a document."""
    arrow = import_pyarrow()
    connection = target.scratch
    connection.register("lines", arrow.table({"record": block.lines}))
    valid = [is_valid for (is_valid,) in fetch_rows(connection, "SELECT json_valid(record) FROM lines")]
    connection.unregister("lines")
    reasons: list[str | None] = [None if is_valid else "not JSON" for is_valid in valid]
    places = [i for i, is_valid in enumerate(valid) if is_valid]
    connection.register(
        "lines", arrow.table({"record": block.lines.take(arrow.array(places, arrow.int64()))})
    )
    missing = f"no text under '{target.text_key}'"
    for condition, reason in (
        (
            f"json_type(record, {_json_path(target)}) IS DISTINCT FROM 'VARCHAR'",
            missing,
        ),
        *(
            (
                f"{prop.raw_sql(True)} IS NOT NULL AND TRY({prop.to_sql(True)}) IS NULL",
                f"'{prop.name}' is no {prop.kind}",
            )
            for prop in target.properties
        ),
    ):
        answers = fetch_rows(connection, f"SELECT {condition} FROM lines")
        for i, (is_so,) in zip(places, answers, strict=True):
            if is_so and reasons[i] is None:
                reasons[i] = reason
    connection.unregister("lines")
    return reasons


def _register_parquet(path: Path, target: FileTarget) -> RecordCounts:
    """Write the rows of a parquet file; a row without a text is broken.

    The scratch database reads the file, because the catalog's connection may only read its parts.
    """
    counts = RecordCounts()
    source = "read_parquet($path, file_row_number = true)"
    text_column = quote_identifier(target.text_key)
    empty = fetch_rows(
        target.scratch,
        f"SELECT file_row_number + 1 FROM {source} WHERE {text_column} IS NULL ORDER BY 1",
        {"path": str(path)},
    )
    counts.add_broken([row for (row,) in empty], [f"no text under '{target.text_key}'"] * len(empty))
    # rows of documents are consecutive; `begin` remains the row in the file
    row = "row_number() OVER (ORDER BY file_row_number) - 1" if empty else "file_row_number"
    where, tokens = f"WHERE {text_column} IS NOT NULL" if empty else "", "NULL"
    if target.counter is not None:
        lengths = _count_column_tokens(target)
        target.scratch.register("lengths", import_pyarrow().table({LENGTHS_COLUMN: lengths}))
        source, tokens = f"{source} POSITIONAL JOIN lengths", f"lengths.{LENGTHS_COLUMN}"
    try:
        statement = (
            f"SELECT {target.file} AS file, {row} AS row, file_row_number AS begin, 0 AS size, "
            f"CAST({tokens} AS BIGINT) AS tokens{target.columns_sql(is_json=False)} FROM {source} {where}"
        )
        counts.n_documents = target.sink.write(_query_batches(target, statement, {"path": str(path)}))
    finally:
        target.scratch.unregister("lengths")
    return counts


def _query_batches(target: FileTarget, statement: str, parameters: dict[str, Any]) -> Any:
    """Return the result of a statement of the scratch database as a reader of Arrow batches."""
    return target.scratch.sql(statement, params=parameters or None).to_arrow_reader(ROWS_AT_ONCE)


def _count_column_tokens(target: FileTarget) -> np.ndarray:
    """Return the tokens of every row of a parquet file, int64; 0 for a row without a text."""
    parts, n_texts = [np.zeros(0, dtype=np.int64)], 0
    for column in iter_columns(target.path, target.text_key, ROWS_AT_ONCE):
        texts = import_pyarrow().chunked_array([column.drop_null()])
        parts.append(np.zeros(len(column), dtype=np.int64))
        # row numbers must stay aligned with the file, so rows without text count 0 tokens
        has_one = column.is_valid().to_numpy(zero_copy_only=False)
        parts[-1][has_one] = _count_tokens(texts, target, n_texts).to_numpy()
        n_texts += len(texts)
    return np.concatenate(parts)


def _register_dataset(path: Path, target: FileTarget) -> RecordCounts:
    """Write the documents of a .bin/.idx dataset. Their properties are the rows of <prefix>.parquet."""
    prefix, beside = path.with_suffix(""), path.with_suffix(".parquet")
    pair = open_dataset(prefix)
    if target.counter is not None:
        made_with = (read_sidecar(prefix).get("tokenizer") or {}).get("sha256")
        if made_with not in (None, target.counter.settings["sha256"]):
            raise ValueError(
                f"{path}: made with another tokenizer than {target.counter.settings['name']}; its tokens are "
                "counted already. Omit the tokenizer."
            )
    arrow = import_pyarrow()
    numbers = np.arange(pair.n_documents)
    lengths = arrow.table({f"{LENGTHS_COLUMN}_row": numbers, LENGTHS_COLUMN: pair.document_tokens})
    source, parameters = "lengths", {}
    if target.properties:
        if not beside.is_file():
            raise FileNotFoundError(
                f"{beside}: no such file. Put the properties of the .bin/.idx dataset into it."
            )
        source, parameters = "lengths POSITIONAL JOIN read_parquet($path)", {"path": str(beside)}
        ((n_rows,),) = fetch_rows(target.scratch, "SELECT count(*) FROM read_parquet($path)", parameters)
        if n_rows != pair.n_documents:
            raise ValueError(
                f"{beside}: got {n_rows:,} rows, expected {pair.n_documents:,}, one per document."
            )
    target.scratch.register("lengths", lengths)
    try:
        statement = (
            f"SELECT {target.file} AS file, {LENGTHS_COLUMN}_row AS row, 0 AS begin, 0 AS size, "
            f"{LENGTHS_COLUMN} AS tokens{target.columns_sql(is_json=False)} FROM {source}"
        )
        target.sink.write(_query_batches(target, statement, parameters))
    finally:
        target.scratch.unregister("lengths")
    return RecordCounts(n_documents=pair.n_documents)
