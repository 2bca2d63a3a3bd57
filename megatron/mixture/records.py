"""Records of one file into the catalog's table: what stands where, with which properties.

Lines of JSON are handed to DuckDB as they lie in memory; nothing is parsed in Python. A block of lines in
which something is wrong is looked at a second time, line by line, to say what.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.datapaths import read_sidecar
from megatron.data.documents import PLAIN, blocks_of, columns_of, without_lone_surrogates
from megatron.data.indexed import IndexedTokens
from megatron.data.token_counts import TokenCounter
from megatron.mixture.libraries import duckdb, pyarrow, rows
from megatron.mixture.properties import Property, quoted
from megatron.mixture.tars import MEMBER_BYTES, TARS, samples_of

BLOCK_BYTES = 32 << 20
LINE_END = 10
OWN_COLUMN = "tokens_of_the_text"  # no column of a user's
ROWS_AT_ONCE = 1 << 14  # of parquet, to count their tokens
TOKENS_AT = 4  # the column behind file, row, begin, size
BROKEN_HELD = 1000  # lines of a file that are written down; all are counted


@dataclass
class Records:
    """What a file turned out to hold. `broken`: (line or row from 1, why)."""

    n_documents: int = 0
    n_broken: int = 0
    broken: list[tuple[int, str]] = field(default_factory=list)

    def blame(self, places: Sequence[int], reasons: Sequence[str]) -> None:
        """Count broken ones in."""
        self.n_broken += len(places)
        self.broken += list(zip(places, reasons, strict=True))[: BROKEN_HELD - len(self.broken)]


@dataclass(frozen=True)
class Target:
    """Where the documents of the file at `path` go: into `table`, as those of file number `file`.

    Lines are evaluated by `scratch`, a database of its own: what fails there leaves the transaction alone.
    """

    path: Path
    connection: Any
    scratch: Any
    table: str
    file: int
    text_key: str
    properties: tuple[Property, ...]
    counter: TokenCounter | None = None
    member_bytes: int = MEMBER_BYTES

    def columns(self, is_json: bool) -> str:
        """The properties, in SQL, each behind a comma."""
        return "".join(f", {one.sql(is_json)} AS {quoted(one.name)}" for one in self.properties)


def take_file(target: Target) -> Records:
    """Put the documents of a file into the table. ValueError for what cannot be read or evaluated."""
    path = target.path
    try:
        if path.suffix == ".bin":
            return _take_pair(path, target)
        if path.suffix == ".parquet":
            return _take_columns(path, target)
        if path.name.endswith(TARS):
            return _take_samples(path, target)
        return _take_lines(path, target)
    except (duckdb().Error, pyarrow().ArrowException) as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from error


def _take_lines(path: Path, target: Target) -> Records:
    found, n_lines, offset = Records(), 0, 0
    for block in _blocks(path):
        lines, begins, sizes = find_lines(block)
        wanted = find_not_blank(block, begins, sizes)
        numbers = np.arange(n_lines, n_lines + len(sizes))
        n_lines += len(sizes)
        if not wanted.all():
            lines = lines.filter(pyarrow().array(wanted))
            begins, sizes, numbers = begins[wanted], sizes[wanted], numbers[wanted]
        _take_block(Block(lines, begins + offset, sizes, numbers), target, found)
        offset += len(block)
    return found


def _take_samples(path: Path, target: Target) -> Records:
    """Samples of a tar; one without a text is broken, as is one whose members stand apart."""
    found = Records()
    places: list[tuple[int, int, int]] = []  # begin, size, number
    records: list[str] = []
    keys: list[str] = []
    held = 0

    def flush() -> None:
        begins, sizes, numbers = np.array(places, dtype=np.int64).reshape(-1, 3).T.copy()
        lines = pyarrow().array(records, pyarrow().large_string())
        _take_block(Block(lines, begins, sizes, numbers, keys.copy()), target, found)
        places.clear(), records.clear(), keys.clear()

    for number, sample in enumerate(samples_of(path, target.member_bytes)):
        try:
            records.append(json.dumps(sample.record(target.text_key)))
        except ValueError as error:
            found.blame([number + 1], [f"{sample.key}: {error}"])
            continue
        places.append((sample.begin, sample.end - sample.begin, number))
        keys.append(sample.key)
        held += len(records[-1])
        if held >= BLOCK_BYTES:
            flush()
            held = 0
    flush()
    return found


def _blocks(path: Path) -> Iterator[np.ndarray]:
    """The bytes of a file, uint8, in blocks that end where lines end; the last line gets an end."""
    parts: list[bytes] = []
    held = 0
    for piece in _pieces(path):
        cut = piece.rfind(b"\n") + 1 if held + len(piece) >= BLOCK_BYTES else 0
        if not cut:
            parts.append(piece)
            held += len(piece)
            continue
        yield np.frombuffer(b"".join([*parts, piece[:cut]]), dtype=np.uint8)
        parts, held = [piece[cut:]], len(piece) - cut
    rest = b"".join(parts)
    if rest:
        yield np.frombuffer(rest if rest.endswith(b"\n") else rest + b"\n", dtype=np.uint8)


def _pieces(path: Path) -> Iterator[bytes]:
    if not path.name.endswith(PLAIN):
        yield from blocks_of(path)
        return
    with path.open("rb", buffering=0) as file:
        while piece := file.read(BLOCK_BYTES):
            yield piece


def find_lines(block: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray]:
    """(the lines with their ends as Arrow strings that lie in the block, where each begins, its bytes)."""
    ends = np.flatnonzero(block == LINE_END) + 1
    bounds = np.concatenate([np.zeros(1, dtype=np.int64), ends])
    arrow = pyarrow()
    lines = arrow.LargeStringArray.from_buffers(len(ends), arrow.py_buffer(bounds), arrow.py_buffer(block))
    return lines, bounds[:-1], np.diff(bounds)


def find_not_blank(block: np.ndarray, begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    wanted = np.ones(len(sizes), dtype=bool)
    for i in np.flatnonzero((block[begins] <= 32) | (sizes < 2)):  # the others begin with something to see
        wanted[i] = bool(block[begins[i] : begins[i] + sizes[i]].tobytes().strip())
    return wanted


@dataclass(frozen=True)
class Block:
    """Lines as Arrow strings; where each begins in the file, its bytes, its number in the file from 0.

    names   of samples, to say which is broken; empty for lines
    files   of lines of several files the number of each one's; then `numbers` are rows
    """

    lines: Any
    begins: np.ndarray
    sizes: np.ndarray
    numbers: np.ndarray
    names: Sequence[str] = ()
    files: np.ndarray | None = None

    def without_lone_surrogates(self) -> "Block":
        """What DuckDB takes for no JSON and the tokeniser's reader takes for U+FFFD is such here too."""
        arrow = pyarrow()
        _, bounds, text = self.lines.buffers()
        mended = arrow.py_buffer(without_lone_surrogates(text.to_pybytes()))
        return replace(self, lines=arrow.LargeStringArray.from_buffers(len(self.lines), bounds, mended))

    def of(self, wanted: np.ndarray) -> "Block":
        return Block(
            self.lines.filter(pyarrow().array(wanted)),
            self.begins[wanted], self.sizes[wanted], self.numbers[wanted],
        )  # fmt: skip


def _take_block(block: Block, target: Target, found: Records) -> None:
    try:
        insert_block(block, target, found)
    except (duckdb().Error, UnicodeDecodeError):
        block = block.without_lone_surrogates()
        reasons = _faults(block, target)
        bad = np.array([reason is not None for reason in reasons])
        told = [reason for reason in reasons if reason is not None]
        if block.names:
            told = [f"{block.names[i]}: {one}" for i, one in zip(np.flatnonzero(bad), told, strict=True)]
        found.blame((block.numbers[bad] + 1).tolist(), told)
        insert_block(block.of(~bad), target, found)  # what still fails is the expression, not the lines


def insert_block(block: Block, target: Target, found: Records) -> None:
    """Put documents into the table. Raises what DuckDB raises for a broken one, and then none is in it."""
    n, scratch, counter = len(block.sizes), target.scratch, target.counter
    files, numbers = block.files, block.numbers
    if files is None:
        files = np.full(n, target.file, dtype=np.int32)
        numbers = np.arange(found.n_documents, found.n_documents + n)
    lines = {"record": block.lines, "file": files, "row": numbers, "begin": block.begins, "size": block.sizes}
    scratch.register("lines", pyarrow().table(lines))
    try:
        # the row is what it is only where there is a text: one that has none ends the statement
        text = "" if counter is None else f", json_extract_string(record, {_path(target)})"
        documents = scratch.sql(
            f"SELECT file, CASE WHEN json_type(record, {_path(target)}) = 'VARCHAR' THEN row "
            "ELSE error('no text') END AS row, begin, size, CAST(NULL AS BIGINT) AS tokens"
            f"{target.columns(is_json=True)}{text} FROM lines"
        ).to_arrow_table()
    finally:
        scratch.unregister("lines")
    if counter is not None:
        last = documents.num_columns - 1
        tokens = _counted(documents.column(last), target, found.n_documents)
        documents = documents.remove_column(last).set_column(TOKENS_AT, "tokens", tokens)
    _insert_documents(documents, target)
    found.n_documents += n


def _insert_documents(documents: Any, target: Target) -> int:
    """Put an Arrow table, or a reader of one, into the catalog's. Returns how many."""
    target.connection.register("documents", documents)
    try:
        ((n,),) = rows(target.connection, f"INSERT INTO {target.table} SELECT * FROM documents")
    finally:
        target.connection.unregister("documents")
    return n


def _counted(texts: Any, target: Target, n_before: int) -> Any:
    """Tokens of texts, Arrow int64. ValueError for one that the tokenizer does not take."""
    assert target.counter is not None
    parts = [np.zeros(0, dtype=np.int64)]
    for part in texts.chunks:
        try:
            parts.append(target.counter.lengths(part, n_before))
        except ValueError as error:
            raise ValueError(f"{target.path}, {error}") from error
        n_before += len(part)
    return pyarrow().array(np.concatenate(parts))


def _path(target: Target) -> str:
    return "'$.\"" + target.text_key.replace("'", "''").replace('"', '\\"') + "\"'"


def _faults(block: Block, target: Target) -> list[str | None]:
    """Why each line is no document; None for one that is."""
    arrow = pyarrow()
    connection = target.scratch
    connection.register("lines", arrow.table({"record": block.lines}))
    valid = [one for (one,) in rows(connection, "SELECT json_valid(record) FROM lines")]
    connection.unregister("lines")
    reasons: list[str | None] = [None if one else "not JSON" for one in valid]
    places = [i for i, one in enumerate(valid) if one]
    connection.register(
        "lines", arrow.table({"record": block.lines.take(arrow.array(places, arrow.int64()))})
    )
    missing = f"no text under '{target.text_key}'"
    for condition, reason in (
        (
            f"json_type(record, {_path(target)}) IS DISTINCT FROM 'VARCHAR'",
            missing,
        ),
        *(
            (
                f"{one.raw(True)} IS NOT NULL AND TRY({one.sql(True)}) IS NULL",
                f"'{one.name}' is no {one.kind}",
            )
            for one in target.properties
        ),
    ):
        answers = rows(connection, f"SELECT {condition} FROM lines")
        for i, (is_so,) in zip(places, answers, strict=True):
            if is_so and reasons[i] is None:
                reasons[i] = reason
    connection.unregister("lines")
    return reasons


def _take_columns(path: Path, target: Target) -> Records:
    """Rows of a parquet file; one without a text is broken.

    Read by the scratch database: the catalog's own reads no files.
    """
    found = Records()
    source = "read_parquet($path, file_row_number = true)"
    key = quoted(target.text_key)
    empty = rows(
        target.scratch,
        f"SELECT file_row_number + 1 FROM {source} WHERE {key} IS NULL ORDER BY 1",
        {"path": str(path)},
    )
    found.blame([row for (row,) in empty], [f"no text under '{target.text_key}'"] * len(empty))
    row = "row_number() OVER (ORDER BY file_row_number) - 1" if empty else "file_row_number"
    where, tokens = f"WHERE {key} IS NOT NULL" if empty else "", "NULL"
    if target.counter is not None:
        lengths = _lengths_of_column(target)
        target.scratch.register("lengths", pyarrow().table({OWN_COLUMN: lengths}))
        source, tokens = f"{source} POSITIONAL JOIN lengths", f"lengths.{OWN_COLUMN}"
    try:
        statement = (
            f"SELECT {target.file} AS file, {row} AS row, file_row_number AS begin, 0 AS size, "
            f"CAST({tokens} AS BIGINT) AS tokens{target.columns(is_json=False)} FROM {source} {where}"
        )
        found.n_documents = _insert_documents(_read(target, statement, {"path": str(path)}), target)
    finally:
        target.scratch.unregister("lengths")
    return found


def _read(target: Target, statement: str, given: dict[str, Any]) -> Any:
    """What the scratch database answers, as a reader of Arrow batches."""
    return target.scratch.sql(statement, params=given or None).to_arrow_reader(ROWS_AT_ONCE)


def _lengths_of_column(target: Target) -> np.ndarray:
    """Tokens of every row of a parquet file, int64; 0 where there is no text."""
    parts, n_texts = [np.zeros(0, dtype=np.int64)], 0
    for column in columns_of(target.path, target.text_key, ROWS_AT_ONCE):
        texts = pyarrow().chunked_array([column.drop_null()])
        parts.append(np.zeros(len(column), dtype=np.int64))
        has_one = column.is_valid().to_numpy(zero_copy_only=False)
        parts[-1][has_one] = _counted(texts, target, n_texts).to_numpy()
        n_texts += len(texts)
    return np.concatenate(parts)


def _take_pair(path: Path, target: Target) -> Records:
    """Documents of a .bin/.idx pair; their properties are the rows of <prefix>.parquet."""
    prefix, beside = path.with_suffix(""), path.with_suffix(".parquet")
    pair = IndexedTokens(prefix)
    if target.counter is not None:
        made_with = (read_sidecar(prefix).get("tokenizer") or {}).get("sha256")
        if made_with not in (None, target.counter.told["sha256"]):
            raise ValueError(
                f"{path}: made with another tokenizer than {target.counter.told['name']}; its tokens are "
                "counted already, leave the tokenizer out"
            )
    arrow = pyarrow()
    numbers = np.arange(pair.n_documents)
    lengths = arrow.table({f"{OWN_COLUMN}_row": numbers, OWN_COLUMN: pair.document_tokens})
    source, given = "lengths", {}
    if target.properties:
        if not beside.is_file():
            raise FileNotFoundError(f"{beside}: no such file; the properties of a pair are parquet beside it")
        source, given = "lengths POSITIONAL JOIN read_parquet($path)", {"path": str(beside)}
        ((n_rows,),) = rows(target.scratch, "SELECT count(*) FROM read_parquet($path)", given)
        if n_rows != pair.n_documents:
            raise ValueError(f"{beside}: {n_rows:,} rows for the {pair.n_documents:,} documents of its pair")
    target.scratch.register("lengths", lengths)
    try:
        statement = (
            f"SELECT {target.file} AS file, {OWN_COLUMN}_row AS row, 0 AS begin, 0 AS size, "
            f"{OWN_COLUMN} AS tokens{target.columns(is_json=False)} FROM {source}"
        )
        _insert_documents(_read(target, statement, given), target)
    finally:
        target.scratch.unregister("lengths")
    return Records(n_documents=pair.n_documents)
