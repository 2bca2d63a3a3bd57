"""Records of input files: the location and the properties of each document, as Arrow tables.

Lines of JSON are passed to DuckDB as one memory block, and nothing is parsed in Python. If a block contains a
broken line, it is evaluated a second time, line by line, to locate the error.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data import open_dataset
from megatron.mixture.files import DATASET_SUFFIXES, PARTS_SUFFIX, open_decompressed, properties_path
from megatron.mixture.lazy_imports import fetch_rows, import_duckdb, import_pyarrow
from megatron.mixture.properties import Property, quote_identifier, quote_text
from megatron.mixture.tars import MAX_SAMPLE_BYTES, TAR_SUFFIXES, iter_samples
from megatron.text.token_counts import TokenCounter

BLOCK_BYTES = 32 << 20
LOCATION = ("file", "row", "begin", "size")  # columns of every document
MAX_BROKEN_LISTED = 1000  # lines per file that are listed; all are counted
ESCAPE = re.compile(  # any JSON escape; group 1 matches an unpaired surrogate: pairs are matched first
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
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
        self.broken += list(zip(places, reasons, strict=True))[: MAX_BROKEN_LISTED - len(self.broken)]


@dataclass(frozen=True)
class RecordReader:
    """Reader of the documents of files of one corpus.

    scratch   database that evaluates the properties
    function  of the user, called with each record; the dictionary that it returns is merged into the record
    """

    scratch: Any
    text_key: str
    properties: tuple[Property, ...]
    counter: TokenCounter | None = None
    member_bytes: int = MAX_SAMPLE_BYTES
    function: RecordFunction | None = None

    def read(self, path: Path, file: int, counts: RecordCounts) -> Iterator[Any]:
        """Yield Arrow tables of the documents of a file: LOCATION, tokens and the properties.

        file     number of the file, which is the value of the column `file`
        counts   receives the counts of the records

        Raises ValueError for a file that cannot be read, or an expression that cannot be evaluated.
        """
        beside = _open_beside(path)
        try:
            if path.name.endswith(DATASET_SUFFIXES):
                yield from self._read_dataset(path, file, beside, counts)
            elif path.suffix == ".parquet" and self.function is None:
                yield from self._read_parquet(path, file, counts)
            else:
                for block in self._iter_blocks(path, counts):
                    if beside is not None and len(beside) < counts.n_documents + len(block.lines):
                        raise _make_rows_error(path, len(beside))
                    yield from self._evaluate(replace(block, file=file), beside, counts)
        except (import_duckdb().Error, import_pyarrow().ArrowException) as error:
            raise ValueError(f"{path}: {str(error).splitlines()[0]}") from error
        if beside is not None and len(beside) != counts.n_documents:
            raise _make_rows_error(path, len(beside))

    def _iter_blocks(self, path: Path, counts: RecordCounts) -> Iterator["LineBlock"]:
        if path.suffix == ".parquet":
            blocks = self._iter_row_records(path)
        elif path.name.endswith(TAR_SUFFIXES):
            blocks = self._iter_sample_records(path, counts)
        else:
            blocks = iter_line_blocks(path)
        for block in blocks:
            yield block if self.function is None else self._apply_function(path, block)

    def _apply_function(self, path: Path, block: "LineBlock") -> "LineBlock":
        """Return the block with the function's values in each record. Broken lines stay as they are."""
        assert self.function is not None
        lines: list[str] = []
        for i, line in enumerate(block.lines.cast(import_pyarrow().large_binary()).to_pylist()):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                lines.append(line.decode(errors="replace"))
                continue
            try:
                lines.append(json.dumps(record | (self.function(record) or {}), allow_nan=False))
            except Exception as error:  # a function of the user may raise anything
                number = int(block.numbers[i]) + 1
                raise ValueError(
                    f"{path}, record {number}: the function raised {error!r}. Correct it."
                ) from error
        return replace(block, lines=import_pyarrow().array(lines, import_pyarrow().large_string()))

    def _iter_sample_records(self, path: Path, counts: RecordCounts) -> Iterator["LineBlock"]:
        """Yield the records of a tar. A sample without text, or with members that are apart, is broken."""
        places, records, n_chars = [], [], 0
        with open_decompressed(path) as stream:
            for number, sample in enumerate(iter_samples(path, stream, self.member_bytes)):
                try:
                    records.append(json.dumps(sample.build_record(self.text_key)))
                except ValueError as error:
                    counts.add_broken([number + 1], [f"{sample.key}: {error}"])
                    continue
                places.append((sample.begin, sample.end - sample.begin, number))
                n_chars += len(records[-1])
                if n_chars >= BLOCK_BYTES:
                    yield LineBlock.from_records(records, places)
                    places, records, n_chars = [], [], 0
        yield LineBlock.from_records(records, places)

    def _iter_row_records(self, path: Path) -> Iterator["LineBlock"]:
        """Yield the rows of a parquet file as records, for a function of the user."""
        n_rows = 0
        for batch in import_pyarrow().parquet.ParquetFile(path).iter_batches(1 << 10):
            rows = batch.to_pylist()
            places = [(n_rows + i, 0, n_rows + i) for i in range(len(rows))]
            yield LineBlock.from_records([json.dumps(row, default=str) for row in rows], places)
            n_rows += len(rows)

    def _evaluate(self, block: "LineBlock", beside: Any, counts: RecordCounts) -> Iterator[Any]:
        try:
            documents = self.select_block(block, beside, counts.n_documents)
        except (import_duckdb().Error, UnicodeDecodeError):
            # a second attempt after the repair, without the lines that are still invalid
            block = block.replace_lone_surrogates()
            reasons = self._find_faults(block)
            bad = np.array([reason is not None for reason in reasons])
            counts.add_broken((block.numbers[bad] + 1).tolist(), [why for why in reasons if why is not None])
            # an error that remains is in an expression, not in the lines
            documents = self.select_block(block.filter(~bad), beside, counts.n_documents)
        counts.n_documents += len(documents)
        yield documents

    def select_block(self, block: "LineBlock", beside: Any, n_before: int) -> Any:
        """Return the documents of a block. If one is broken, raise the error of DuckDB."""
        n, arrow = len(block.lines), import_pyarrow()
        lines = {"record": block.lines, "file": block.file if isinstance(block.file, np.ndarray) else
                 np.full(n, block.file), "row": np.arange(n_before, n_before + n) if block.rows is None else
                 block.rows, "begin": block.begins, "size": block.sizes}  # fmt: skip
        columns = [] if beside is None else [name for name in beside.column_names if name not in lines]
        lines |= {name: beside.column(name).slice(n_before, n) for name in columns}
        text = f", json_extract_string(record, {self._json_path})" if self.counter is not None else ""
        self.scratch.register("lines", arrow.table(lines))
        try:
            # a record without text raises, which ends the statement before anything is selected
            documents = self.scratch.sql(
                f"SELECT file, CASE WHEN json_type(record, {self._json_path}) = 'VARCHAR' THEN row "
                "ELSE error('no text') END AS row, begin, size, CAST(NULL AS BIGINT) AS tokens"
                f"{self._columns_sql(columns)}{text} FROM lines"
            ).to_arrow_table()
        finally:
            self.scratch.unregister("lines")
        if self.counter is None:
            return documents
        tokens = self._count_tokens(documents.column(documents.num_columns - 1), n_before)
        documents = documents.remove_column(documents.num_columns - 1)
        return documents.set_column(len(LOCATION), "tokens", arrow.array(tokens))

    def _columns_sql(self, columns: Sequence[str], is_json: bool = True) -> str:
        """Return the properties in SQL, each after a comma. `columns`: of the parquet beside the file."""
        return "".join(
            f", {prop.to_sql(is_json and prop.root not in columns)} AS {quote_identifier(prop.name)}"
            for prop in self.properties
        )

    def _count_tokens(self, texts: Any, n_before: int) -> np.ndarray:
        assert self.counter is not None
        parts = [np.zeros(0, dtype=np.int64)]
        for part in texts.chunks:
            parts.append(self.counter.count_tokens(part, n_before))
            n_before += len(part)
        return np.concatenate(parts)

    @property
    def _json_path(self) -> str:
        return "'$.\"" + self.text_key.replace("'", "''").replace('"', '\\"') + "\"'"

    def _find_faults(self, block: "LineBlock") -> list[str | None]:
        """Return the reason why each line is not a document; None for a document."""
        missing = f"no text under {quote_text(self.text_key)}"
        # TRY: the order in which a CASE evaluates its conditions is not defined
        kind = f"TRY(json_type(record, {self._json_path}))"
        cases = ["WHEN NOT json_valid(record) THEN 'not JSON'"]
        cases.append(f"WHEN {kind} IS DISTINCT FROM 'VARCHAR' THEN {quote_text(missing)}")
        for prop in self.properties:
            fault = quote_text(f"'{prop.name}' is no {prop.kind}")
            raw, value = prop.raw_sql(True), prop.to_sql(True)
            cases.append(f"WHEN TRY({raw}) IS NOT NULL AND TRY({value}) IS NULL THEN {fault}")
        self.scratch.register("lines", import_pyarrow().table({"record": block.lines}))
        try:
            answers = fetch_rows(self.scratch, f"SELECT CASE {' '.join(cases)} END FROM lines")
        finally:
            self.scratch.unregister("lines")
        return [reason for (reason,) in answers]

    def _read_parquet(self, path: Path, file: int, counts: RecordCounts) -> Iterator[Any]:
        """Yield the rows of a parquet file, by row group; a row without a text is broken."""
        arrow, column = import_pyarrow(), quote_identifier(self.text_key)
        source = arrow.parquet.ParquetFile(path)
        for group in range(source.num_row_groups):
            rows, first = source.read_row_group(group), counts.n_documents + counts.n_broken
            rows = rows.append_column(BEGIN, arrow.array(np.arange(first, first + len(rows))))
            rows = rows.append_column(TOKENS, arrow.nulls(len(rows), arrow.int64()))
            documents = self._select_columns(rows, file, column)
            empty = sorted(set(range(first, first + len(rows))) - set(documents.column("begin").to_pylist()))
            counts.add_broken([row + 1 for row in empty], [f"no text under '{self.text_key}'"] * len(empty))
            numbers = arrow.array(np.arange(counts.n_documents, counts.n_documents + len(documents)))
            documents = documents.set_column(1, "row", numbers)
            if self.counter is not None:
                texts = documents.column(documents.num_columns - 1).cast(arrow.large_string())
                tokens = arrow.array(self._count_tokens(texts, counts.n_documents))
                documents = documents.set_column(len(LOCATION), "tokens", tokens)
            counts.n_documents += len(documents)
            yield documents

    def _read_dataset(self, path: Path, file: int, beside: Any, counts: RecordCounts) -> Iterator[Any]:
        """Yield the documents of a .bin/.idx dataset. Their properties are the rows of <prefix>.parquet."""
        dataset, arrow = (
            open_dataset(str(path).removesuffix(PARTS_SUFFIX).removesuffix(".bin")),
            import_pyarrow(),
        )
        made_with = ((dataset.sidecar or {}).get("tokenizer") or {}).get("sha256")
        if self.counter is not None and made_with not in (None, self.counter.settings["sha256"]):
            raise ValueError(
                f"{path}: made with another tokenizer than {self.counter.settings['name']}; its tokens are "
                "counted already. Omit the tokenizer."
            )
        if self.properties and beside is None:
            raise FileNotFoundError(
                f"{properties_path(path)}: no such file. Put the properties of the dataset into it."
            )
        counts.n_documents = dataset.n_documents
        if beside is None or len(beside) == dataset.n_documents:  # the caller refuses another number of rows
            lengths = {BEGIN: np.arange(dataset.n_documents), TOKENS: dataset.document_tokens}
            columns = {} if beside is None else dict(zip(beside.column_names, beside.columns, strict=True))
            yield self._select_columns(arrow.table(lengths | columns), file)

    def _select_columns(self, rows: Any, file: int, text: str | None = None) -> Any:
        """Return LOCATION, tokens, the properties and last the text of the rows that have one."""
        self.scratch.register("rows", rows)
        try:
            return self.scratch.sql(
                f'SELECT {file} AS file, {BEGIN} AS row, {BEGIN} AS "begin", 0 AS size, {TOKENS} AS tokens'
                f"{self._columns_sql((), is_json=False)}"
                f"{f', {text} FROM rows WHERE {text} IS NOT NULL' if text else ' FROM rows'}"
            ).to_arrow_table()
        finally:
            self.scratch.unregister("rows")


BEGIN, TOKENS = "row_of_the_file", "tokens_of_the_text"  # unlikely as column names of a user


@dataclass(frozen=True)
class LineBlock:
    """Lines as Arrow strings, and for each its first byte, its size, and its number in the file from 0.

    file, rows   number of the file, or of each line with its row, for lines of several files
    """

    lines: Any
    begins: np.ndarray
    sizes: np.ndarray
    numbers: np.ndarray
    file: int | np.ndarray = 0
    rows: np.ndarray | None = None

    @classmethod
    def from_records(cls, records: Sequence[str], places: Sequence[tuple[int, int, int]]) -> "LineBlock":
        """Return the block of records at (begin, size, number)."""
        arrow = import_pyarrow()
        begins, sizes, numbers = np.array(places, dtype=np.int64).reshape(-1, 3).T.copy()
        return cls(arrow.array(records, arrow.large_string()), begins, sizes, numbers)

    def replace_lone_surrogates(self) -> "LineBlock":
        """Return the block with lone surrogates replaced by U+FFFD. DuckDB rejects them as invalid JSON."""
        arrow = import_pyarrow()
        _, bounds, text = self.lines.buffers()
        mended = arrow.py_buffer(replace_lone_surrogates(text.to_pybytes()))
        lines = arrow.LargeStringArray.from_buffers(len(self.lines), bounds, mended, offset=self.lines.offset)
        return replace(self, lines=lines)

    def filter(self, mask: np.ndarray) -> "LineBlock":
        """Return the lines where `mask` is True."""
        arrays = {name: getattr(self, name)[mask] for name in ("begins", "sizes", "numbers")}
        return replace(self, lines=self.lines.filter(import_pyarrow().array(mask)), **arrays)


def replace_lone_surrogates(lines: bytes) -> bytes:
    """Replace escapes of unpaired surrogates in JSON lines by the escape of U+FFFD, of the same length."""
    return ESCAPE.sub(lambda match: b"\\ufffd" if match[1] else match[0], lines)


def iter_line_blocks(path: Path) -> Iterator[LineBlock]:
    """Yield the lines of a file, without blank ones, in blocks of BLOCK_BYTES or more."""
    n_lines = offset = 0
    with open_decompressed(path) as file:
        rest = b""
        while True:
            part = file.read(BLOCK_BYTES)
            content = rest + part
            # cut after the last complete line; a newline is added to the last line of the file
            cut = content.rfind(b"\n") + 1 if part else len(content)
            rest = content[cut:]
            if cut:
                content = content if not rest else content[:cut]
                n, block = split_lines(content if content.endswith(b"\n") else content + b"\n")
                yield replace(block, begins=block.begins + offset, numbers=block.numbers + n_lines)
                n_lines, offset = n_lines + n, offset + cut
            if not part:
                return


def split_lines(content: bytes) -> tuple[int, LineBlock]:
    """Return the number of lines, and those with other characters than white space."""
    arrow, block = import_pyarrow(), np.frombuffer(content, dtype=np.uint8)
    bounds = np.concatenate([np.zeros(1, dtype=np.int64), np.flatnonzero(block == ord("\n")) + 1])
    begins, sizes = bounds[:-1], np.diff(bounds)
    # offsets and block become Arrow buffers without a copy: line i is block[bounds[i]:bounds[i + 1]]
    lines = arrow.LargeStringArray.from_buffers(len(sizes), arrow.py_buffer(bounds), arrow.py_buffer(block))
    mask = np.ones(len(sizes), dtype=bool)
    for i in np.flatnonzero((block[begins] <= 32) | (sizes < 2)):  # the others begin with a visible character
        mask[i] = bool(content[begins[i] : begins[i] + sizes[i]].strip())
    whole = LineBlock(lines, begins, sizes, np.arange(len(sizes)))
    return len(sizes), whole if mask.all() else whole.filter(mask)


def read_small_files(reader: RecordReader, paths: Sequence[Path], keys: Sequence[int]) -> Any:
    """Return (documents, number of each file) of small plain files, evaluated by one statement.

    None if a line of one of them is broken: `RecordReader.read` locates it.
    """
    contents = [path.read_bytes() for path in paths]
    # otherwise the last line of a file and the first one of the next would be one line
    contents = [part if not part or part.endswith(b"\n") else part + b"\n" for part in contents]
    sizes = np.array([len(part) for part in contents])
    ends = np.cumsum(sizes)
    _, block = split_lines(b"".join(contents))
    # The files are concatenated: a line belongs to the first file that ends after its begin.
    # Files of 10, 0 and 5 bytes: ends = [10, 10, 15]. A line at byte 10 belongs to file 2: `right` skips the
    # empty file, whose end is that of the file before it.
    of_file = np.searchsorted(ends, block.begins, side="right")
    counts = np.bincount(of_file, minlength=len(paths))
    # line number minus the number of the first line of its file; counts [3, 2]: rows 0 1 2 0 1
    rows = np.arange(len(of_file)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = block.begins - (ends - sizes)[of_file]
    try:
        block = replace(block, begins=begins, file=np.array(keys, dtype=np.int64)[of_file], rows=rows)
        return reader.select_block(block, None, 0), counts.tolist()
    except (import_duckdb().Error, import_pyarrow().ArrowException, ValueError):
        return None


def _open_beside(path: Path) -> Any:
    """Return the properties beside a file as an Arrow table; None without them."""
    beside = properties_path(path)
    return (
        None
        if path.suffix == ".parquet" or not beside.is_file()
        else import_pyarrow().parquet.read_table(beside)
    )


def _make_rows_error(path: Path, n_rows: int) -> ValueError:
    return ValueError(
        f"{properties_path(path)}: got {n_rows:,} rows, expected one per document of {path.name}. "
        "Write it again."
    )
