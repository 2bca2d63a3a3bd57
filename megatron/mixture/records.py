"""Records of input files: location and properties of each document, as Arrow tables.

DuckDB gets lines of JSON as one memory block,
and nothing is parsed in Python. A block with a broken line
is evaluated a second time, line by line, to locate the error.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data import open_dataset
from megatron.mixture.files import (
    DATASET_SUFFIXES,
    PARTS_SUFFIX,
    explain_errors,
    import_duckdb,
    import_pyarrow,
    iter_content,
    iter_row_lines,
    properties_path,
)
from megatron.mixture.properties import Corpus, json_path, quote_identifier, quote_text
from megatron.text.token_counts import TokenCounter

BLOCK_BYTES = 32 << 20
LOCATION = ("file", "row", "begin", "size")  # columns of every document
MAX_BROKEN_LISTED = 1000  # lines per file that are listed; all are counted
# any JSON escape; group 1 is an unpaired
# surrogate, because pairs are matched first
ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
)

RecordFunction = Callable[[dict[str, Any]], dict[str, Any] | None]


@dataclass
class RecordCounts:
    """Counts of the records of a file. `broken`: (line or row from 1, reason)."""

    n_documents: int = 0
    n_broken: int = 0
    broken: list[tuple[int, str]] = field(default_factory=list)

    def add_broken(self, places: Sequence[int], reasons: Sequence[str]) -> None:
        """Count broken records, and list at most MAX_BROKEN_LISTED of them."""
        self.n_broken += len(places)
        rest = MAX_BROKEN_LISTED - len(self.broken)
        self.broken += list(zip(places, reasons, strict=True))[:rest]


@dataclass(frozen=True)
class RecordReader:
    """Reader of the documents of files of one corpus.

    scratch   database that evaluates the properties
    function  of the user; the dictionary that it returns is merged into the record
    """

    scratch: Any
    corpus: Corpus
    counter: TokenCounter | None = None
    function: RecordFunction | None = None

    def read(self, path: Path, file: int, counts: RecordCounts) -> Iterator[Any]:
        """Yield Arrow tables of the documents: LOCATION, tokens and the properties.

        file     value of the column `file`
        counts   receives the counts of the records

        Raises ValueError for a file that cannot be read, or an expression that
        cannot be evaluated.
        """
        beside = _open_beside(path)
        with explain_errors(path, ""):
            if path.name.endswith(DATASET_SUFFIXES):
                yield from self._read_dataset(path, file, beside, counts)
            else:
                for block in self._iter_records(path):
                    if beside is not None and len(beside) < counts.n_documents + len(block):
                        raise _make_rows_error(path, len(beside))
                    yield self._evaluate(block, file, beside, counts)
        if beside is not None and len(beside) != counts.n_documents:
            raise _make_rows_error(path, len(beside))

    def _iter_records(self, path: Path) -> Iterator[Any]:
        """Yield records as Arrow tables: record (text), begin, size and _number (in the file)."""
        is_table = path.suffix == ".parquet"
        for block in self._iter_rows(path) if is_table else iter_line_blocks(path, self.corpus.text_key):
            yield block if self.function is None else self._apply_function(path, block)

    def _iter_rows(self, path: Path) -> Iterator[Any]:
        """Yield the rows of a parquet file as records; begin and size refer to the lines of its texts."""
        arrow, n_rows, offset = import_pyarrow(), 0, 0
        for batch in arrow.parquet.ParquetFile(path).iter_batches(1 << 12):
            rows = arrow.Table.from_batches([batch])
            if self.corpus.text_key not in rows.column_names:
                raise ValueError(f"{path}: got no column '{self.corpus.text_key}'. Set --text-key.")
            records = self._query("SELECT CAST(to_json(rows) AS VARCHAR) AS record FROM rows", rows)
            lines = iter_row_lines(rows, self.corpus.text_key)
            sizes = np.fromiter(map(len, lines), np.int64, len(rows))
            ends = offset + np.cumsum(sizes)
            numbers = np.arange(n_rows, n_rows + len(rows))
            record = records.column("record").cast(arrow.large_string())
            yield arrow.table({"record": record, "begin": ends - sizes, "size": sizes, "_number": numbers})
            n_rows, offset = n_rows + len(rows), offset + int(sizes.sum())

    def _apply_function(self, path: Path, block: Any) -> Any:
        """Return the block with the function's values in each record."""
        assert self.function is not None
        arrow = import_pyarrow()
        lines: list[str] = []
        for i, line in enumerate(block.column("record").cast(arrow.large_binary()).to_pylist()):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                lines.append(line.decode(errors="replace"))  # stays a broken line
                continue
            try:
                record = record | (self.function(record) or {})
                lines.append(json.dumps(record, allow_nan=False))
            except Exception as error:  # a function of the user may raise anything
                number = block.column("_number")[i].as_py() + 1
                raise ValueError(
                    f"{path}, record {number}: the function raised {error!r}. Correct it."
                ) from error
        return block.set_column(0, "record", arrow.array(lines, arrow.large_string()))

    def _evaluate(self, block: Any, file: int, beside: Any, counts: RecordCounts) -> Any:
        """Return the documents of a block, and count its broken lines."""
        try:
            documents = self._select_file(block, file, beside, counts.n_documents)
        except (import_duckdb().Error, UnicodeDecodeError):
            # a second attempt after the repair,
            # without the lines that are still invalid
            block = repair_surrogates(block)
            reasons = self._find_faults(block)
            bad = np.array([reason is not None for reason in reasons])
            numbers = (block.column("_number").to_numpy()[bad] + 1).tolist()
            counts.add_broken(numbers, [why for why in reasons if why is not None])
            # an error that remains is in an expression, not in the lines
            block = block.filter(import_pyarrow().array(~bad))
            documents = self._select_file(block, file, beside, counts.n_documents)
        counts.n_documents += len(documents)
        return documents

    def _select_file(self, block: Any, file: int, beside: Any, n_before: int) -> Any:
        n = len(block)
        block = block.append_column("file", [np.full(n, file)])
        block = block.append_column("row", [np.arange(n_before, n_before + n)])
        if beside is not None:
            block = block.append_column("beside", beside.slice(n_before, n).to_struct_array())
            merged = "json_merge_patch(record, to_json(beside))"
            block = self._query(f"SELECT * REPLACE (CAST({merged} AS VARCHAR) AS record) FROM rows", block)
        return self.select_block(block, n_before)

    def select_block(self, block: Any, n_before: int = 0) -> Any:
        """Return the documents of a block with `file` and `row`.

        A broken one raises the error of DuckDB.
        """
        # a record without text raises, which ends
        # the statement before anything is selected
        kind = f"json_type(record, {json_path(self.corpus.text_key)})"
        row = f"CASE WHEN {kind} = 'VARCHAR' THEN row ELSE error('no text') END AS row"
        text = f"json_extract_string(record, {json_path(self.corpus.text_key)})"
        documents = self._query(
            f"SELECT file, {row}, begin, size, CAST(NULL AS BIGINT) AS tokens"
            f"{self._columns_sql()}{'' if self.counter is None else f', {text}'} FROM rows",
            block,
        )
        return self._count_tokens(documents, n_before)

    def _query(self, statement: str, rows: Any) -> Any:
        """Return the result of a statement over `rows`, an Arrow table."""
        self.scratch.register("rows", rows)
        try:
            return self.scratch.sql(statement).to_arrow_table()
        finally:
            self.scratch.unregister("rows")

    def _columns_sql(self) -> str:
        """Return the properties in SQL, each after a comma."""
        return "".join(
            f", {prop.to_sql()} AS {quote_identifier(prop.name)}" for prop in self.corpus.properties
        )

    def _count_tokens(self, documents: Any, n_before: int) -> Any:
        """Return documents with their tokens in place of the text, their last column."""
        if self.counter is None:
            return documents
        arrow, last = import_pyarrow(), documents.num_columns - 1
        tokens = [np.zeros(0, dtype=np.int64)]
        for part in documents.column(last).cast(arrow.large_string()).chunks:
            tokens.append(self.counter.count_tokens(part, n_before))
            n_before += len(part)
        column = arrow.array(np.concatenate(tokens))
        return documents.remove_column(last).set_column(len(LOCATION), "tokens", column)

    def _find_faults(self, block: Any) -> list[str | None]:
        """Return the reason why each line is not a document; None for a document."""
        missing = quote_text(f"no text under '{self.corpus.text_key}'")
        # TRY: the order in which a CASE evaluates its conditions is not defined
        kind = f"TRY(json_type(record, {json_path(self.corpus.text_key)}))"
        cases = ["WHEN NOT json_valid(record) THEN 'not JSON'"]
        cases.append(f"WHEN {kind} IS DISTINCT FROM 'VARCHAR' THEN {missing}")
        for prop in self.corpus.properties:
            fault = quote_text(f"'{prop.name}' is no {prop.kind}")
            raw, value = prop.raw_sql(), prop.to_sql()
            cases.append(f"WHEN TRY({raw}) IS NOT NULL AND TRY({value}) IS NULL THEN {fault}")
        statement = f"SELECT CASE {' '.join(cases)} END AS reason FROM rows"
        return self._query(statement, block).column("reason").to_pylist()

    def _read_dataset(self, path: Path, file: int, beside: Any, counts: RecordCounts) -> Iterator[Any]:
        """Yield the documents of a .bin/.idx dataset, with the rows of <prefix>.parquet."""
        dataset = open_dataset(str(path).removesuffix(PARTS_SUFFIX).removesuffix(".bin"))
        used = ((dataset.sidecar or {}).get("tokenizer") or {}).get("sha256")
        if self.counter is not None and used not in (None, self.counter.settings["sha256"]):
            raise ValueError(
                f"{path}: made with another tokenizer than {self.counter.settings['name']}; "
                "its tokens are counted already. Omit the tokenizer."
            )
        if self.corpus.properties and beside is None:
            raise FileNotFoundError(
                f"{properties_path(path)}: no such file. Put the properties of the dataset into it."
            )
        counts.n_documents = n = dataset.n_documents
        if beside is not None and len(beside) != n:
            return  # the caller refuses another number of rows
        rows = {"begin": np.arange(n), "tokens": dataset.document_tokens}
        values = import_pyarrow().table(rows)
        if beside is not None:
            values = values.append_column("beside", beside.to_struct_array())
        yield self._query(
            f'SELECT {file} AS file, "begin" AS row, "begin", 0 AS size, tokens{self._columns_sql()} FROM '
            f"(SELECT *, {'NULL' if beside is None else 'to_json(beside)'} AS record FROM rows)",
            values,
        )


def repair_surrogates(block: Any) -> Any:
    """Return the block without lone surrogates, which are invalid JSON in DuckDB."""
    arrow, lines = import_pyarrow(), block.column("record").combine_chunks()
    _, bounds, text = lines.buffers()
    text = arrow.py_buffer(replace_lone_surrogates(text.to_pybytes()))
    lines = arrow.LargeStringArray.from_buffers(len(lines), bounds, text, offset=lines.offset)
    return block.set_column(0, "record", lines)


def replace_lone_surrogates(lines: bytes) -> bytes:
    """Replace escapes of unpaired surrogates by the escape of U+FFFD, of the same length."""
    return ESCAPE.sub(lambda match: b"\\ufffd" if match[1] else match[0], lines)


def iter_line_blocks(path: Path, text_key: str) -> Iterator[Any]:
    """Yield the lines of a file, without blank ones, in blocks of BLOCK_BYTES or more."""
    n_lines, offset, parts, n_new = 0, 0, [], 0
    for part in iter_content(path, text_key):
        parts.append(part)
        n_new += len(part)
        if n_new < BLOCK_BYTES:
            continue
        content = b"".join(parts)
        cut = content.rfind(b"\n") + 1  # after the last complete line
        parts, n_new = [content[cut:]], 0
        if cut:
            n, block = split_lines(content[:cut], offset, n_lines)
            yield block
            n_lines, offset = n_lines + n, offset + cut
    if content := b"".join(parts):
        # the last line of the file may have no newline
        end = b"" if content.endswith(b"\n") else b"\n"
        yield split_lines(content + end, offset, n_lines)[1]


def split_lines(content: bytes, offset: int = 0, n_before: int = 0) -> tuple[int, Any]:
    """Return the number of lines, and a block of those with other characters than white space.

    offset, n_before   bytes and lines of the file before the content
    """
    arrow, block = import_pyarrow(), np.frombuffer(content, dtype=np.uint8)
    bounds = np.append(0, np.flatnonzero(block == ord("\n")) + 1)
    begins, sizes = bounds[:-1], np.diff(bounds)
    # offsets and block become Arrow buffers without a copy: line i ends at
    # bounds[i + 1]
    buffers = arrow.py_buffer(bounds), arrow.py_buffer(block)
    lines = arrow.LargeStringArray.from_buffers(len(sizes), *buffers)
    mask = np.ones(len(sizes), dtype=bool)
    # the other lines begin with a visible character
    for i in np.flatnonzero((block[begins] <= 32) | (sizes < 2)):
        mask[i] = bool(content[begins[i] : begins[i] + sizes[i]].strip())
    columns = {"record": lines, "begin": begins + offset, "size": sizes}
    rows = arrow.table(columns | {"_number": np.arange(len(sizes)) + n_before})
    return len(sizes), rows if mask.all() else rows.filter(arrow.array(mask))


def _open_beside(path: Path) -> Any:
    """Return the properties beside a file as an Arrow table; None without them."""
    beside = properties_path(path)
    if path.suffix == ".parquet" or not beside.is_file():
        return None
    return import_pyarrow().parquet.read_table(beside)


def _make_rows_error(path: Path, n_rows: int) -> ValueError:
    return ValueError(
        f"{properties_path(path)}: got {n_rows:,} rows, expected one per document of {path.name}. "
        "Write it again."
    )
