"""Text for a small study: some thousand documents, from wherever this machine has some, split for good."""

import glob
import multiprocessing
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron.data.corpus_split import HELD_OUT_SHARE, SHARES, SplitWriter, is_intact
from megatron.data.documents import cut, find_inputs, lines_of, text_of
from megatron.data.local_text import (
    LOCAL,
    PYTHON,
    LocalText,
    describe_sources,
    installed_version,
    read_local_text,
)
from megatron.run_dir import read_json, write_json
from megatron.tokenizer.hub import why_hub_is_silent

FIRST_DOCUMENT_S = 60.0  # C4 is given up when its first document has not come by then
NEXT_DOCUMENT_S = 60.0
ABOUT = "corpus.json"
LINES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
NO_LOCAL_TEXT = LocalText([], {}, {})
BLANK_LINE = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class Source:
    """A text that can be had, why it was taken, and what it is read from: files or installed sources."""

    name: str
    why: str
    texts: Callable[[], Iterator[str]]
    paths: tuple[Path, ...] = ()
    installed: tuple[str, ...] = ()  # sources of local_text


@dataclass(frozen=True)
class Limits:
    """How much text: the first bytes and documents of a corpus, bytes at least, and the share held out."""

    max_bytes: int
    max_documents: int | None = None
    min_bytes: int = 0
    held_out_share: float = HELD_OUT_SHARE

    def __post_init__(self) -> None:
        """Raise ValueError for limits that no text can meet."""
        if self.max_bytes < 1:
            raise ValueError(f"got at most {self.max_bytes:,} bytes of text, expected 1 or more")
        if not 0 <= self.min_bytes <= self.max_bytes:
            raise ValueError(
                f"got at least {self.min_bytes:,} and at most {self.max_bytes:,} bytes of text, expected the "
                "first between 0 and the second. Raise --max-mb or lower --min-mb."
            )
        if not SHARES[0] <= self.held_out_share <= SHARES[1]:
            raise ValueError(
                f"got {self.held_out_share:g} as the share of held-out documents, expected "
                f"{SHARES[0]:g} to {SHARES[1]:g}"
            )


def prepare_corpus(
    which: str,
    folder: Path,
    max_bytes: int,
    max_documents: int | None = None,
    min_bytes: int = 0,
    held_out_share: float = HELD_OUT_SHARE,
) -> tuple[dict[str, Any], bool]:
    """Write <folder>/train.jsonl, held_out.jsonl and corpus.json.

    Returns the content of the last, and False where the folder had it already, made from the same files.
    `which` is auto, c4, local, stdlib, or a path (see `choose`); of it the first `max_bytes` and
    `max_documents` are taken. Where that is less than `min_bytes`, documents of the local text are added
    until it is reached. A document is held out by the sha256 of its text, so that the split needs no list
    and exact copies, which are dropped, could never lie on both sides.
    Raises FileNotFoundError, ConnectionError or ValueError; then the folder is as before.
    """
    folder = folder.resolve()
    limits = Limits(max_bytes, max_documents, min_bytes, held_out_share)
    on_disk = _local(which)
    asked = {"which": which} | asdict(limits)
    asked["files"] = [_identity(path) for path in on_disk.paths] if on_disk else []
    may_be_local = min_bytes > 0 or on_disk is None or on_disk.installed
    asked["installed"] = {name: installed_version(name) for name in LOCAL} if may_be_local else {}
    held = read_json(folder / ABOUT)
    if held is not None and held.get("asked") == asked and is_intact(folder, held.get("files")):
        return held, False
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        content = _write_text(on_disk or _from_hub(which), partial, limits)
        write_json(partial / ABOUT, content | {"asked": asked})
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ABOUT).unlink(missing_ok=True)  # it vouches for the two that are replaced now
        for name in ("train.jsonl", "held_out.jsonl", ABOUT):
            (partial / name).replace(folder / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return read_json(folder / ABOUT) or {}, True


def _write_text(source: Source, folder: Path, limits: Limits) -> dict[str, Any]:
    """Write the two files of a source, filled up with local text; the content of corpus.json."""
    local = read_local_text(source.installed) if source.installed else NO_LOCAL_TEXT
    documents = iter(local.documents) if source.installed else ((source.name, one) for one in source.texts())
    with SplitWriter(folder, limits.held_out_share) as writer:
        for name, text in documents:
            writer.add(name, text)
            if writer.n_bytes >= limits.max_bytes or writer.n_documents == limits.max_documents:
                break
        n_bytes, n_documents = writer.n_bytes, writer.n_documents
        others = tuple(name for name in LOCAL if name not in source.installed)
        more = read_local_text(others) if others and n_bytes < limits.min_bytes else NO_LOCAL_TEXT
        for name, text in more.documents:
            if writer.n_bytes >= limits.min_bytes:
                break
            writer.add(name, text)
        writer.sync()
    missing = local.missing | more.missing
    totals = writer.totals()
    _check_enough(source, totals, limits.min_bytes, missing)
    sources = [_with_version(one, local.skipped | more.skipped) for one in writer.sources()]
    content: dict[str, Any] = {"corpus": source.name, "why": source.why, "documents": writer.n_documents}
    if source.installed:
        content["corpus"] = describe_sources([name for name in source.installed if name not in missing])
    content["copies_dropped"] = sum(one["skipped"]["copies"] for one in sources)
    content |= totals
    if writer.n_bytes > n_bytes:
        content["added"] = describe_sources([name for name in others if name not in missing])
        content["added_documents"] = writer.n_documents - n_documents
        content["added_bytes"] = writer.n_bytes - n_bytes
    return content | {"sources": sources, "missing": missing, "files": writer.file_sums()}


def _check_enough(source: Source, totals: dict[str, int], min_bytes: int, missing: dict[str, str]) -> None:
    """Raise ValueError where a side of the split is empty, or all text together is less than `min_bytes`."""
    n_bytes = totals["train_bytes"] + totals["held_out_bytes"]
    without = "; ".join(f"{name}: {why}" for name, why in missing.items())
    if n_bytes < min_bytes:
        raise ValueError(
            f"{source.name}: got {n_bytes / 1e6:,.1f} MB with all local text added"
            f"{f' (without {without})' if without else ''}, expected at least {min_bytes / 1e6:,.1f} MB. "
            "Lower --min-mb, or give more text."
        )
    n_documents = totals["train_documents"] + totals["held_out_documents"]
    if not totals["held_out_documents"]:
        raise ValueError(
            f"{source.name}: {n_documents} documents are too few to hold any out"
            f"{f' (without {without})' if without else ''}; give more"
        )
    if not totals["train_documents"]:
        raise ValueError(f"{source.name}: all of {n_documents} documents are held out; give more")


def _with_version(source: dict[str, Any], skipped: dict[str, dict[str, int]]) -> dict[str, Any]:
    """A source of corpus.json with its version, and with the files that were left out when it was read."""
    if source["name"] not in skipped:
        return source | {"version": None}
    counts = skipped[source["name"]]
    counts = counts | {"copies": counts["copies"] + source["skipped"]["copies"]}
    return source | {"version": installed_version(source["name"]), "skipped": counts}


def choose(which: str) -> Source:
    """The text to take. auto: the C4 sample of $SCALING_DATA, else C4 from the hub, else local text.

    local is Python's standard library and the sources of some installed packages (local_text), stdlib the
    first of these alone. A path names JSON-lines files (one, a folder or a pattern; the text is under
    "text"), or .txt files: of several each is a document, of a single one each paragraph, set apart by blank
    lines.
    Raises FileNotFoundError for a path without text, ConnectionError where c4 is not to be had.
    """
    return _local(which) or _from_hub(which)


def _local(which: str) -> Source | None:
    """What lies on this machine, None where the hub has to be asked."""
    if which in ("local", "stdlib"):
        return _installed(LOCAL if which == "local" else (PYTHON,), "it was asked for")
    if which == "auto":
        folder = _scaling_data() / "c4"
        found = tuple(sorted(folder.glob("c4_en_*.jsonl")) + sorted(folder.glob("redpajama_c4_*.jsonl")))
        names = ", ".join(path.name for path in found)
        why = "it lies in $SCALING_DATA"
        return Source(f"a sample of C4 ({names})", why, lambda: _json_texts(found), found) if found else None
    return None if which == "c4" else _from_path(which)


def _installed(sources: tuple[str, ...], why: str) -> Source:
    """Local text; what is installed of it is known once it is read."""
    name = describe_sources([one for one in sources if installed_version(one) is not None])
    return Source(name, why, lambda: (text for _, text in read_local_text(sources).documents), (), sources)


def _from_hub(which: str) -> Source:
    stream = C4Stream()
    if stream.first is not None:
        why = "it was asked for" if which == "c4" else "no sample lies in $SCALING_DATA, and the hub answers"
        return Source("the first documents of C4 (allenai/c4, en)", why, stream.texts)
    if which == "c4":
        raise ConnectionError(
            f"allenai/c4: not to be had from the Hugging Face hub ({stream.reason}); "
            "take local, stdlib or a path instead"
        )
    why = f"no C4 sample lies in $SCALING_DATA, and the Hugging Face hub gives none ({stream.reason})"
    return _installed(LOCAL, why)


def _scaling_data() -> Path:
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    return Path(os.environ.get("SCALING_DATA", beside))


def _identity(path: Path) -> list[str | int]:
    """Changes when the file does; a sum of the content would read all of a file of which little is taken."""
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]


def _from_path(words: str) -> Source:
    why = "it was asked for"
    path = Path(words)
    plain = sorted(path.glob("*.txt")) if path.is_dir() else [Path(p) for p in sorted(glob.glob(words))]
    if plain and all(one.suffix == ".txt" and one.is_file() for one in plain):
        if len(plain) == 1:
            return Source(f"the paragraphs of {plain[0]}", why, lambda: _paragraphs(plain[0]), (plain[0],))
        return Source(f"{len(plain)} files of {words}", why, lambda: map(_read_plain, plain), tuple(plain))
    try:
        found = find_inputs([words])
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; and none of the words auto, c4, local and stdlib") from error
    if strange := [one for one in found if not one.name.endswith(LINES)]:
        raise ValueError(f"{strange[0]}: wanted .txt or one of {', '.join(LINES)}")
    return Source(words, why, lambda: _json_texts(found), tuple(found))


def _read_plain(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error})") from error


def _paragraphs(path: Path) -> Iterator[str]:
    return (text.strip("\n") for text in BLANK_LINE.split(_read_plain(path)))


def _json_texts(paths: Sequence[Path]) -> Iterator[str]:
    for piece in cut(paths, piece_bytes=1 << 62):
        for i, line in lines_of(piece):
            if not line.strip():
                continue
            try:
                yield text_of(line, "text")
            except ValueError as error:
                raise ValueError(f"{piece.path}, line {i + 1}: {error}") from error


class C4Stream:
    """C4 as the hub streams it, read in a child so that a network that hangs can be given up."""

    def __init__(self) -> None:
        """`first` is None where no document came in time, and `reason` says why."""
        context = multiprocessing.get_context("spawn")
        self._end, theirs = context.Pipe(duplex=False)
        self._child = context.Process(target=_stream_c4, args=(theirs,), daemon=True)
        self._child.start()
        theirs.close()
        self.first: str | None = None
        self.reason = f"no document within {FIRST_DOCUMENT_S:.0f} s"
        if self._end.poll(FIRST_DOCUMENT_S):
            self.first = self._receive()
        if self.first is None:
            self._child.kill()

    def _receive(self) -> str | None:
        try:
            kind, text = self._end.recv()
        except EOFError:
            return None
        if kind == "error":
            self.reason = text
            return None
        return text

    def texts(self) -> Iterator[str]:
        """The documents, in order, as long as they are asked for. ConnectionError when the stream ends."""
        text = self.first
        try:
            while text is not None:
                yield text
                text = self._receive() if self._end.poll(NEXT_DOCUMENT_S) else None
            raise ConnectionError(
                f"allenai/c4: the stream broke off ({self.reason}); run the same command again"
            )
        finally:
            self._child.kill()


def _stream_c4(pipe: Connection) -> None:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        if silent := why_hub_is_silent():
            raise ConnectionError(silent)
        import datasets  # heavy, and only needed here

        for record in datasets.load_dataset("allenai/c4", "en", split="train", streaming=True):
            pipe.send(("text", record["text"]))
    except (BrokenPipeError, KeyboardInterrupt):
        return
    except Exception as error:  # whatever the libraries below raise, the parent wants one sentence
        pipe.send(("error", (str(error).strip() or type(error).__name__).splitlines()[0]))
