"""What a study takes from the Hugging Face hub: shards of a text, a tokenizer, pretrained weights.

A shard is fetched whole, written as JSON lines or parquet, and listed in <folder>/<split>.about: what is
listed there is not fetched again. Weights are safetensors only; a pickle would run what it holds.
"""

import contextlib
import fnmatch
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data.documents import Piece, lines_of
from megatron.data.hub import HubFile, Repository
from megatron.run_dir import read_json, write_json, written_whole

FETCHED = ".fetched"  # folder of what is not yet written in another form
STYLES = ("jsonl", "parquet", "packed")
# repository and files of a text
TEXTS = {
    "c4": ("allenai/c4", "en/c4-{split}.*.json.gz"),
    "slimpajama": ("DKYoon/SlimPajama-6B", "data/{split}-*.parquet"),
}
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
TOKENIZER_CORE = ("tokenizer.json", "tokenizer.model", "vocab.json")
WEIGHT_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json")
WEIGHT_CORE = ("*.safetensors",)
ROWS = 1024  # of parquet that are held at a time


@dataclass(frozen=True)
class Limit:
    """How much of a text to take; None is all. n_bytes is of JSON lines with their ends, at most."""

    n_documents: int | None = None
    n_bytes: int | None = None
    n_shards: int | None = None


def fetch_folder(
    repository: Repository, patterns: Sequence[str], core: Sequence[str], folder: Path
) -> list[Path]:
    """The files of the repository's top that match a pattern. ValueError where none is of `core`."""
    there = repository.files("*")
    chosen = [file for file in there if _matches(file, patterns)]
    if not any(_matches(file, core) for file in chosen):
        raise ValueError(
            f"{repository.repo}: has no {' or '.join(core)}, only {', '.join(f.path for f in there)}"
        )
    for file in chosen:
        target = folder / file.path
        if not target.is_file() or target.stat().st_size != file.n_bytes:
            repository.fetch(file, target)
    return [folder / file.path for file in chosen]


def _matches(file: HubFile, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(file.path, pattern) for pattern in patterns)


def fetch_text(
    repository: Repository, pattern: str, folder: Path, split: str, style: str, limit: Limit
) -> Iterator[tuple[Path, int, bool]]:
    """Write shards as <folder>/<split>-<number>.<style>; yield (file, its documents, whether it is new).

    A packed shard is as the hub has it, and its documents are not counted (0).
    Raises ValueError where the folder holds another part of that split.
    """
    if style == "packed" and (limit.n_documents or limit.n_bytes):
        raise ValueError("packed shards are taken whole; say how many shards, or take jsonl or parquet")
    shards = repository.files(pattern)[: limit.n_shards]
    about = folder / f"{split}.about"
    asked = {
        "repository": repository.repo, "commit": repository.commit, "files": pattern, "style": style,
        "documents": limit.n_documents, "bytes": limit.n_bytes,
    }  # fmt: skip
    told = read_json(about) or {"asked": asked, "shards": {}}
    other = [key for key in asked if told["asked"].get(key) != asked[key]]
    if other:
        raise ValueError(
            f"{folder}: holds {split} with other {', '.join(other)}; choose another, or delete it"
        )
    documents, n_bytes = limit.n_documents, limit.n_bytes
    for i, shard in enumerate(shards):
        suffix = f".{Path(shard.path).name.rpartition(f'{i:05d}')[2].partition('.')[2]}"
        target = folder / f"{split}-{i:05d}{suffix if style == 'packed' else '.' + style}"
        is_new = shard.path not in told["shards"] or not target.is_file()
        if is_new:
            told["shards"][shard.path] = _take(repository, shard, target, style, documents, n_bytes)
            write_json(about, told)
        counts = told["shards"][shard.path]
        yield target, counts["documents"], is_new
        documents = None if documents is None else documents - counts["documents"]
        n_bytes = None if n_bytes is None else n_bytes - counts["bytes"]
        if counts["is_cut"] or 0 in (documents, n_bytes):
            return


def _take(
    repository: Repository,
    shard: HubFile,
    target: Path,
    style: str,
    documents: int | None,
    n_bytes: int | None,
) -> dict[str, Any]:
    """One shard, whole under its name, and what it holds."""
    if style == "packed":
        repository.fetch(shard, target)
        return {"documents": 0, "bytes": shard.n_bytes, "is_cut": False}
    fetched = target.parent / FETCHED / Path(shard.path).name
    if not fetched.is_file():
        repository.fetch(shard, fetched)
    part = _Part(_lines(fetched), documents, n_bytes)
    with written_whole(target) as partial:
        if style == "jsonl":
            with partial.open("wb") as file:
                file.writelines(line + b"\n" for line in part)
        else:
            _write_parquet(partial, part)
    fetched.unlink()
    with contextlib.suppress(OSError):  # another split's download, which was stopped, may wait in it
        fetched.parent.rmdir()
    return {"documents": part.n_documents, "bytes": part.n_bytes, "is_cut": part.is_cut}


class _Part:
    """The first lines within the limits, counted as they go by."""

    def __init__(self, lines: Iterator[bytes], documents: int | None, n_bytes: int | None) -> None:
        self.lines, self.most_documents, self.most_bytes = lines, documents, n_bytes
        self.n_documents = self.n_bytes = 0
        self.is_cut = False

    def __iter__(self) -> Iterator[bytes]:
        for line in self.lines:
            size = self.n_bytes + len(line) + 1
            full = self.most_documents is not None and self.n_documents == self.most_documents
            if full or (self.most_bytes is not None and size > self.most_bytes):
                self.is_cut = True
                return
            self.n_documents, self.n_bytes = self.n_documents + 1, size
            yield line


def _lines(path: Path) -> Iterator[bytes]:
    """Documents as JSON, a line each, of JSON lines or of parquet."""
    if path.suffix != ".parquet":
        for _, line in lines_of(Piece(path, 0, path.stat().st_size)):
            yield line
        return
    import pyarrow.parquet  # slow to import

    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(ROWS):
            for row in batch.to_pylist():
                yield json.dumps(row, ensure_ascii=False, default=str).encode()


def _write_parquet(path: Path, lines: Iterator[bytes] | _Part) -> None:
    """Lines of JSON as rows; the first `ROWS` say which columns there are."""
    import pyarrow.parquet

    writer, held = None, []

    def flush() -> None:
        nonlocal writer
        table = pyarrow.Table.from_pylist(held, schema=None if writer is None else writer.schema)
        writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table)
        held.clear()

    try:
        for line in lines:
            held.append(json.loads(line))
            if len(held) == ROWS:
                flush()
        if held or writer is None:
            flush()
    except pyarrow.ArrowException as error:
        raise ValueError(
            f"{path}: rows of different kinds ({str(error).splitlines()[0]}); take jsonl"
        ) from error
    finally:
        if writer is not None:
            writer.close()
