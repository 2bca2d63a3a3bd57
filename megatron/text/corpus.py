"""Text for a small study: some thousand documents from a source that this machine has, with a fixed split."""

import glob
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron.io import open_partial_folder, publish_files, read_json, write_json
from megatron.text.corpus_split import HELD_OUT_SHARE, HELD_OUT_SHARE_RANGE, SplitWriter, is_intact
from megatron.text.inputs import Source, find_inputs, locate_source, stat_source
from megatron.text.local_text import (
    LOCAL_SOURCES,
    PYTHON,
    LocalText,
    describe_sources,
    installed_version,
    read_local_text,
)
from megatron.text.text_readers import iter_lines, parse_text, split_into_pieces
from megatron.tokenizer.hub_cache import find_hub_error

FIRST_DOCUMENT_S = 60.0  # time limit for the first document of C4
NEXT_DOCUMENT_S = 60.0
META_FILE = "corpus.json"
JSON_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
NO_LOCAL_TEXT = LocalText([], {}, {})
REQUESTED = "it was requested"
FILLED = ("auto", "c4", "local")  # the last has all local text already
BLANK_LINE = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class TextSource:
    """An available text, the reason for choosing it, and its origin: files or installed packages."""

    name: str
    reason: str
    texts: Callable[[], Iterator[str]]
    paths: tuple[Source, ...] = ()
    installed: tuple[str, ...] = ()  # sources as in local_text


@dataclass(frozen=True)
class CorpusLimits:
    """Size limits: maximum bytes and documents, minimum bytes, and share of held-out documents.

    fill  whether local text is added to reach `min_bytes`
    """

    max_bytes: int
    max_documents: int | None = None
    min_bytes: int = 0
    held_out_share: float = HELD_OUT_SHARE
    fill: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for limits that no text can satisfy."""
        if self.max_bytes < 1:
            raise ValueError(f"got at most {self.max_bytes:,} bytes of text, expected 1 or more")
        if not 0 <= self.min_bytes <= self.max_bytes:
            raise ValueError(
                f"got at least {self.min_bytes:,} and at most {self.max_bytes:,} bytes of text, expected the "
                "first between 0 and the second. Raise --max-mb or lower --min-mb."
            )
        if not HELD_OUT_SHARE_RANGE[0] <= self.held_out_share <= HELD_OUT_SHARE_RANGE[1]:
            raise ValueError(
                f"got {self.held_out_share:g} as the share of held-out documents, expected "
                f"{HELD_OUT_SHARE_RANGE[0]:g} to {HELD_OUT_SHARE_RANGE[1]:g}"
            )


def prepare_corpus(
    which: str,
    folder: Path,
    max_bytes: int,
    max_documents: int | None = None,
    min_bytes: int = 0,
    held_out_share: float = HELD_OUT_SHARE,
    fill: bool = False,
) -> tuple[dict[str, Any], bool]:
    """Write <folder>/train.jsonl, held_out.jsonl and corpus.json.

    Returns the content of corpus.json, and False if the folder already has it, built from the same files.
    `which` is auto, c4, local, stdlib, or a path (see `choose_source`). The corpus is the start of that text,
    up to `max_bytes` and `max_documents`. If this is less than `min_bytes`, documents of the local text are
    added until it is reached: always to auto and c4, and to another text only with `fill`. The sha256 of a
    document's text decides whether it is held out. So the split needs no list, and exact copies, which are
    dropped, could never be on both sides.
    Raises FileNotFoundError, ConnectionError or ValueError, also if another process is writing the corpus;
    the folder is then unchanged.
    """
    folder = folder.resolve()
    limits = CorpusLimits(max_bytes, max_documents, min_bytes, held_out_share, fill or which in FILLED)
    on_disk = _find_local_source(which)
    request = {"which": which} | asdict(limits)
    request["files"] = [_file_signature(path) for path in on_disk.paths] if on_disk else []
    # versions of local sources are part of the request if local text may be used
    may_be_local = (min_bytes > 0 and limits.fill) or on_disk is None or on_disk.installed
    request["installed"] = {name: installed_version(name) for name in LOCAL_SOURCES} if may_be_local else {}
    existing = read_json(folder / META_FILE)
    if existing is not None and existing.get("asked") == request and is_intact(folder, existing.get("files")):
        return existing, False
    with open_partial_folder(folder, replace=True) as partial:
        content = _write_split(on_disk or _open_hub_source(which), partial, limits)
        write_json(partial / META_FILE, content | {"asked": request})
        folder.mkdir(parents=True, exist_ok=True)
        # META_FILE last: a folder with it is complete, and a kill before it makes the next call start again
        names = ("train.jsonl", "held_out.jsonl", META_FILE)
        publish_files([(partial / name, folder / name) for name in names])
    return read_json(folder / META_FILE) or {}, True


def _write_split(source: TextSource, folder: Path, limits: CorpusLimits) -> dict[str, Any]:
    """Write both files, with local text added as `limits` allows; return the content of corpus.json."""
    # read once here, not through `source.texts`: the counts of skipped files are needed too
    local = read_local_text(source.installed) if source.installed else NO_LOCAL_TEXT
    documents = (
        iter(local.documents) if source.installed else ((source.name, text) for text in source.texts())
    )
    with SplitWriter(folder, limits.held_out_share) as writer:
        for name, text in documents:
            writer.add(name, text)
            if writer.n_bytes >= limits.max_bytes or writer.n_documents == limits.max_documents:
                break
        n_bytes, n_documents = writer.n_bytes, writer.n_documents  # of the source, before local text is added
        others = tuple(name for name in LOCAL_SOURCES if name not in source.installed)
        more = NO_LOCAL_TEXT
        if others and limits.fill and n_bytes < limits.min_bytes:
            more = read_local_text(others)
        for name, text in more.documents:
            if writer.n_bytes >= limits.min_bytes:
                break
            writer.add(name, text)
        # before the renames in prepare_corpus
        writer.sync()
    missing = local.missing | more.missing
    totals = writer.count_totals()
    _check_enough(source, totals, limits, missing)
    sources = [_add_version(entry, local.skipped | more.skipped) for entry in writer.source_stats()]
    content: dict[str, Any] = {"corpus": source.name, "why": source.reason, "documents": writer.n_documents}
    if source.installed:
        content["corpus"] = describe_sources([name for name in source.installed if name not in missing])
    content["copies_dropped"] = sum(entry["skipped"]["copies"] for entry in sources)
    content |= totals
    if writer.n_bytes > n_bytes:
        content["added"] = describe_sources([name for name in others if name not in missing])
        content["added_documents"] = writer.n_documents - n_documents
        content["added_bytes"] = writer.n_bytes - n_bytes
    return content | {"sources": sources, "missing": missing, "files": writer.file_sha256()}


def _check_enough(
    source: TextSource, totals: dict[str, int], limits: CorpusLimits, missing: dict[str, str]
) -> None:
    """Raise ValueError if a side of the split is empty, or the whole text has less than `min_bytes`."""
    n_bytes = totals["train_bytes"] + totals["held_out_bytes"]
    without = "; ".join(f"{name}: {why}" for name, why in missing.items())
    needed = f"expected at least {limits.min_bytes / 1e6:,.1f} MB"
    if n_bytes < limits.min_bytes and not limits.fill:
        raise ValueError(
            f"{source.name}: got {n_bytes:,} bytes ({n_bytes / 1e6:,.1f} MB) of text without copies, "
            f"{needed}. Give more text, or add local text with --fill (make quickstart: FILL=1)."
        )
    if n_bytes < limits.min_bytes:
        raise ValueError(
            f"{source.name}: got {n_bytes / 1e6:,.1f} MB with all local text added"
            f"{f' (without {without})' if without else ''}, {needed}. "
            "Lower --min-mb, or give more text."
        )
    n_documents = totals["train_documents"] + totals["held_out_documents"]
    if not totals["held_out_documents"]:
        raise ValueError(
            f"{source.name}: got {n_documents} documents, too few to hold any out"
            f"{f' (without {without})' if without else ''}. Give more text."
        )
    if not totals["train_documents"]:
        raise ValueError(f"{source.name}: got {n_documents} documents, all held out. Give more text.")


def _add_version(entry: dict[str, Any], skipped: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Return a source of corpus.json with its version and the counts of files skipped when it was read."""
    if entry["name"] not in skipped:
        return entry | {"version": None}
    counts = skipped[entry["name"]]
    counts = counts | {"copies": counts["copies"] + entry["skipped"]["copies"]}
    return entry | {"version": installed_version(entry["name"]), "skipped": counts}


def choose_source(which: str) -> TextSource:
    """Choose the source of text. auto: the C4 sample of $SCALING_DATA, else C4 from the hub, else local text.

    local is Python's standard library and the sources of some installed packages (local_text); stdlib is the
    standard library alone. A path names JSON-lines files (a file, a folder or a pattern; the text is under
    "text"), or .txt files. Each of several .txt files is a document. In a single .txt file each paragraph is
    a document; blank lines separate paragraphs.
    Raises FileNotFoundError for a path without text, and ConnectionError if c4 is not available.
    """
    return _find_local_source(which) or _open_hub_source(which)


def _find_local_source(which: str) -> TextSource | None:
    """Return the source if it is on this machine, None if it requires the hub."""
    if which in ("local", "stdlib"):
        return _make_installed_source(LOCAL_SOURCES if which == "local" else (PYTHON,), REQUESTED)
    if which == "auto":
        folder = _scaling_data_folder() / "c4"
        paths = tuple(sorted(folder.glob("c4_en_*.jsonl")) + sorted(folder.glob("redpajama_c4_*.jsonl")))
        names = ", ".join(path.name for path in paths)
        reason = "it is in $SCALING_DATA"
        return (
            TextSource(f"a sample of C4 ({names})", reason, lambda: _iter_json_texts(paths), paths)
            if paths
            else None
        )
    return None if which == "c4" else _find_path_source(which)


def _make_installed_source(sources: tuple[str, ...], reason: str) -> TextSource:
    """Return local text as a source. `describe_sources` names the packages that are installed."""
    name = describe_sources([source for source in sources if installed_version(source) is not None])
    return TextSource(
        name, reason, lambda: (text for _, text in read_local_text(sources).documents), (), sources
    )


def _open_hub_source(which: str) -> TextSource:
    stream = C4Stream()
    if stream.first is not None:
        reason = REQUESTED if which == "c4" else "no sample is in $SCALING_DATA, and the hub is reachable"
        return TextSource("the first documents of C4 (allenai/c4, en)", reason, stream.iter_texts)
    if which == "c4":
        raise ConnectionError(
            f"allenai/c4: not available from the Hugging Face hub ({stream.reason}). "
            "Use local, stdlib or a path instead."
        )
    reason = f"no C4 sample is in $SCALING_DATA, and the Hugging Face hub returns none ({stream.reason})"
    return _make_installed_source(LOCAL_SOURCES, reason)


def _scaling_data_folder() -> Path:
    # <checkout>/../shared/data
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    return Path(os.environ.get("SCALING_DATA", beside))


def _file_signature(path: Source) -> list[str | int | None]:
    """Return a signature that changes with the file.

    A hash of the content would read the whole file, of which the corpus may use a small part.
    """
    return [locate_source(path), *stat_source(path)]


def _find_path_source(pattern: str) -> TextSource:
    reason = REQUESTED
    path = Path(pattern)
    plain = sorted(path.glob("*.txt")) if path.is_dir() else [Path(p) for p in sorted(glob.glob(pattern))]
    if plain and all(file.suffix == ".txt" and file.is_file() for file in plain):
        if len(plain) == 1:
            return TextSource(
                f"the paragraphs of {plain[0]}", reason, lambda: _split_paragraphs(plain[0]), (plain[0],)
            )
        return TextSource(
            f"{len(plain)} files of {pattern}", reason, lambda: map(_read_text_file, plain), tuple(plain)
        )
    try:
        paths = find_inputs([pattern])
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error} It is none of auto, c4, local and stdlib either.") from error
    if unsupported := [file for file in paths if not file.name.endswith(JSON_SUFFIXES)]:
        raise ValueError(f"{unsupported[0]}: expected .txt or one of {', '.join(JSON_SUFFIXES)}")
    return TextSource(pattern, reason, lambda: _iter_json_texts(paths), tuple(paths))


def _read_text_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: got content that is not UTF-8 ({error}), expected UTF-8 text") from error


def _split_paragraphs(path: Path) -> Iterator[str]:
    return (text.strip("\n") for text in BLANK_LINE.split(_read_text_file(path)))


def _iter_json_texts(paths: Sequence[Source]) -> Iterator[str]:
    for piece in split_into_pieces(paths, piece_bytes=1 << 62):  # one piece per file
        for i, line in iter_lines(piece):
            if not line.strip():
                continue
            try:
                yield parse_text(line, "text")
            except ValueError as error:
                raise ValueError(f"{piece.path}, line {i + 1}: {error}") from error


class C4Stream:
    """C4 streamed from the hub by a child process, so that a timeout can end a read that hangs."""

    def __init__(self) -> None:
        """Wait for the first document. On a timeout `first` is None, and `reason` contains the cause."""
        context = multiprocessing.get_context("spawn")
        self._connection, child_connection = context.Pipe(duplex=False)
        # spawn: the child imports `datasets` without the threads and locks of this process
        self._child = context.Process(target=_stream_c4, args=(child_connection,), daemon=True)
        self._child.start()
        child_connection.close()  # so that recv raises EOFError when the child ends
        self.first: str | None = None
        self.reason = f"no document within {FIRST_DOCUMENT_S:.0f} s"
        # a timeout here, not in the child: a library that hangs in native code cannot time out its own call
        if self._connection.poll(FIRST_DOCUMENT_S):
            self.first = self._receive()
        if self.first is None:
            self._child.kill()

    def _receive(self) -> str | None:
        try:
            kind, text = self._connection.recv()
        except EOFError:
            return None
        if kind == "error":
            self.reason = text
            return None
        return text

    def iter_texts(self) -> Iterator[str]:
        """Yield the documents in order. Raises ConnectionError when the stream ends."""
        text = self.first
        try:
            while text is not None:
                yield text
                text = self._receive() if self._connection.poll(NEXT_DOCUMENT_S) else None
            raise ConnectionError(
                f"allenai/c4: the stream ended early ({self.reason}). Run the same command again."
            )
        finally:
            self._child.kill()


def _stream_c4(pipe: Connection) -> None:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        if silent := find_hub_error():
            raise ConnectionError(silent)
        import datasets  # heavy, and only needed here

        for record in datasets.load_dataset("allenai/c4", "en", split="train", streaming=True):
            # blocks while the pipe is full: the child downloads only a little more than the parent reads
            pipe.send(("text", record["text"]))
    except (BrokenPipeError, KeyboardInterrupt):
        # the parent has ended, or the user has pressed Ctrl-C
        return
    except Exception as error:  # any exception of the libraries: the parent reports its first line
        pipe.send(("error", (str(error).strip() or type(error).__name__).splitlines()[0]))
