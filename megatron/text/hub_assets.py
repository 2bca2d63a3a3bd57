"""Downloads from the Hugging Face hub for a study: shards of text, a tokenizer, pretrained weights.

A shard is downloaded whole, written as JSON lines or parquet, and listed in <folder>/<split>.about. Listed
shards are not downloaded again. Weights are safetensors only: loading a pickle executes code in it.
"""

import contextlib
import fnmatch
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.io import atomic_path, read_json, write_json
from megatron.text.hub_download import HubFile, HubRepository
from megatron.text.text_readers import InputPiece, iter_lines

FETCHED = ".fetched"  # folder of downloads that are not yet converted
STYLES = ("jsonl", "parquet", "packed")
# repository and files of a text
TEXT_DATASETS = {
    "c4": ("allenai/c4", "en/c4-{split}.*.json.gz"),
    "slimpajama": ("DKYoon/SlimPajama-6B", "data/{split}-*.parquet"),
}
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
TOKENIZER_REQUIRED = ("tokenizer.json", "tokenizer.model", "vocab.json")
WEIGHT_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json")
WEIGHT_REQUIRED = ("*.safetensors",)
BATCH_ROWS = 1024  # parquet rows in memory at a time


@dataclass(frozen=True)
class DownloadLimits:
    """Limits of a text download; None: no limit. n_bytes: maximum size as JSON lines, with line ends."""

    n_documents: int | None = None
    n_bytes: int | None = None
    n_shards: int | None = None


def fetch_folder(
    repository: HubRepository, patterns: Sequence[str], required: Sequence[str], folder: Path
) -> list[Path]:
    """Download the top-level files that match a pattern. Raises ValueError if none matches `required`."""
    available = repository.list_files("*")
    chosen = [file for file in available if _matches_any(file, patterns)]
    if not any(_matches_any(file, required) for file in chosen):
        raise ValueError(
            f"{repository.repo}: expected {' or '.join(required)}, got only "
            f"{', '.join(file.path for file in available)}"
        )
    for file in chosen:
        target = folder / file.path
        if not target.is_file() or target.stat().st_size != file.n_bytes:
            repository.fetch(file, target)
    return [folder / file.path for file in chosen]


def _matches_any(file: HubFile, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(file.path, pattern) for pattern in patterns)


def fetch_text(
    repository: HubRepository, pattern: str, folder: Path, split: str, style: str, limit: DownloadLimits
) -> Iterator[tuple[Path, int, bool]]:
    """Write shards as <folder>/<split>-<number>.<style>; yield (file, its documents, whether it is new).

    Style packed stores a shard as on the hub, and does not count its documents (0).
    Raises ValueError if the folder has the same split from another request.
    """
    if style == "packed" and (limit.n_documents or limit.n_bytes):
        raise ValueError(
            "packed shards are stored whole. Limit the number of shards, or use jsonl or parquet."
        )
    # sorted by name: the first n shards are the same in every call at the same commit
    shards = repository.list_files(pattern)[: limit.n_shards]
    about = folder / f"{split}.about"
    request = {
        "repository": repository.repo, "commit": repository.commit, "files": pattern, "style": style,
        "documents": limit.n_documents, "bytes": limit.n_bytes,
    }  # fmt: skip
    record = read_json(about) or {"asked": request, "shards": {}}
    changed = [key for key in request if record["asked"].get(key) != request[key]]
    if changed:
        raise ValueError(
            f"{folder}: got {split} with other {', '.join(changed)}. Choose another folder, or delete it."
        )
    # remaining limits, reduced by each shard, whether it is new or listed already
    documents, n_bytes = limit.n_documents, limit.n_bytes
    for i, shard in enumerate(shards):
        # c4-train.00001-of-01024.json.gz, i = 1: after the last "00001" is "-of-01024.json.gz", suffix
        # ".json.gz"
        suffix = f".{Path(shard.path).name.rpartition(f'{i:05d}')[2].partition('.')[2]}"
        target = folder / f"{split}-{i:05d}{suffix if style == 'packed' else '.' + style}"
        is_new = shard.path not in record["shards"] or not target.is_file()
        if is_new:
            record["shards"][shard.path] = _convert_shard(
                repository, shard, target, style, documents, n_bytes
            )
            # After the shard has its final name. A kill between the two means that the shard is fetched
            # again; in the other order the record would list a shard that does not exist.
            write_json(about, record)
        counts = record["shards"][shard.path]
        yield target, counts["documents"], is_new
        # counts of listed shards too, so that a resumed call ends at the same document as an uninterrupted
        # one
        documents = None if documents is None else documents - counts["documents"]
        n_bytes = None if n_bytes is None else n_bytes - counts["bytes"]
        # is_cut: by bytes the limit is rarely met exactly, so that `n_bytes` stays above 0
        if counts["is_cut"] or 0 in (documents, n_bytes):
            return


def _convert_shard(
    repository: HubRepository,
    shard: HubFile,
    target: Path,
    style: str,
    documents: int | None,
    n_bytes: int | None,
) -> dict[str, Any]:
    """Download and convert a shard, atomically; return its counts."""
    if style == "packed":
        repository.fetch(shard, target)
        return {"documents": 0, "bytes": shard.n_bytes, "is_cut": False}
    fetched = target.parent / FETCHED / Path(shard.path).name
    if not fetched.is_file():
        repository.fetch(shard, fetched)
    part = _LimitedLines(_iter_json_lines(fetched), documents, n_bytes)
    with atomic_path(target) as partial:
        if style == "jsonl":
            with partial.open("wb") as file:
                file.writelines(line + b"\n" for line in part)
        else:
            _write_parquet_rows(partial, part)
    fetched.unlink()  # after the converted shard has its final name
    with contextlib.suppress(OSError):  # not empty if another split's download was interrupted
        fetched.parent.rmdir()
    return {"documents": part.n_documents, "bytes": part.n_bytes, "is_cut": part.is_cut}


class _LimitedLines:
    """Iterator over the first lines within the limits, which counts documents and bytes."""

    def __init__(self, lines: Iterator[bytes], documents: int | None, n_bytes: int | None) -> None:
        self.lines, self.most_documents, self.most_bytes = lines, documents, n_bytes
        self.n_documents = self.n_bytes = 0
        self.is_cut = False

    def __iter__(self) -> Iterator[bytes]:
        for line in self.lines:
            size = self.n_bytes + len(line) + 1
            full = self.most_documents is not None and self.n_documents == self.most_documents
            # a line is never cut: the first line that would exceed a limit ends the part
            if full or (self.most_bytes is not None and size > self.most_bytes):
                self.is_cut = True
                return
            self.n_documents, self.n_bytes = self.n_documents + 1, size
            yield line


def _iter_json_lines(path: Path) -> Iterator[bytes]:
    """Yield documents of JSON lines or parquet as JSON lines."""
    if path.suffix != ".parquet":
        for _, line in iter_lines(InputPiece(path, 0, path.stat().st_size)):
            yield line
        return
    import pyarrow.parquet  # slow to import

    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(BATCH_ROWS):
            for row in batch.to_pylist():
                yield json.dumps(row, ensure_ascii=False, default=str).encode()


def _write_parquet_rows(path: Path, lines: Iterator[bytes] | _LimitedLines) -> None:
    """Write JSON lines as parquet rows; the first BATCH_ROWS rows define the schema."""
    import pyarrow.parquet

    writer = None
    rows: list[Any] = []

    def write_rows() -> None:
        nonlocal writer
        table = pyarrow.Table.from_pylist(rows, schema=None if writer is None else writer.schema)
        writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table)
        rows.clear()

    try:
        for line in lines:
            rows.append(json.loads(line))
            if len(rows) == BATCH_ROWS:
                write_rows()
        if rows or writer is None:
            write_rows()
    except pyarrow.ArrowException as error:
        raise ValueError(
            f"{path}: got rows of different types ({str(error).splitlines()[0]}). Use jsonl."
        ) from error
    finally:
        if writer is not None:
            writer.close()
