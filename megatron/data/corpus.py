"""Text for a small study: some thousand documents, from wherever this machine has some, split for good."""

import glob
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron.data.documents import cut, find_inputs, lines_of, text_of
from megatron.run_dir import read_json, write_json
from megatron.tokenizer.hub import why_hub_is_silent

LIBRARY = "the text of Python's standard library"
HELD_OUT_SHARE = 0.05
FIRST_DOCUMENT_S = 60.0  # C4 is given up when its first document has not come by then
NEXT_DOCUMENT_S = 60.0
ABOUT = "corpus.json"
LINES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
BLANK_LINE = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class Source:
    """A text that can be had, why it was taken, and the files it is read from, if any."""

    name: str
    why: str
    texts: Callable[[], Iterator[str]]
    paths: tuple[Path, ...] = ()


def prepare_corpus(
    which: str, folder: Path, max_bytes: int, max_documents: int | None = None
) -> tuple[dict[str, Any], bool]:
    """Write <folder>/train.jsonl, held_out.jsonl and corpus.json.

    Returns the content of the last, and False where the folder had it already, made from the same files.
    `which` is auto, c4, stdlib, or a path (see `choose`). A document is held out by the sha256 of its text,
    so that the split needs no list and exact copies, which are dropped, could never lie on both sides.
    Raises FileNotFoundError, ConnectionError or ValueError; then the folder is as before.
    """
    folder = folder.resolve()
    asked = {"which": which, "max_bytes": max_bytes, "max_documents": max_documents}
    local = _local(which)
    asked["files"] = [_identity(path) for path in local.paths] if local else []
    held = read_json(folder / ABOUT)
    if held is not None and held.get("asked") == asked:
        return held, False
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        source = local or _from_hub(which)
        told: dict[str, Any] = {"corpus": source.name, "why": source.why, "asked": asked}
        told |= _write_split(source.texts(), partial, max_bytes, max_documents)
        if not told["held_out_documents"]:
            raise ValueError(
                f"{source.name}: {told['documents']} documents are too few to hold any out; give more"
            )
        write_json(partial / ABOUT, told)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ABOUT).unlink(missing_ok=True)  # it vouches for the two that are replaced now
        for name in ("train.jsonl", "held_out.jsonl", ABOUT):
            (partial / name).replace(folder / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return told, True


def choose(which: str) -> Source:
    """The text to take. auto: the C4 sample of $SCALING_DATA, else C4 from the hub, else Python's library.

    A path names JSON-lines files (one, a folder or a pattern; the text is under "text"), or .txt files: of
    several each is a document, of a single one each paragraph, set apart by blank lines. Raises
    FileNotFoundError for a path without text, ConnectionError where c4 is not to be had.
    """
    return _local(which) or _from_hub(which)


def _local(which: str) -> Source | None:
    """What lies on this machine, None where the hub has to be asked."""
    if which == "stdlib":
        return Source(LIBRARY, "it was asked for", standard_library)
    if which == "auto":
        folder = _scaling_data() / "c4"
        found = tuple(sorted(folder.glob("c4_en_*.jsonl")) + sorted(folder.glob("redpajama_c4_*.jsonl")))
        names = ", ".join(path.name for path in found)
        why = "it lies in $SCALING_DATA"
        return Source(f"a sample of C4 ({names})", why, lambda: _json_texts(found), found) if found else None
    return None if which == "c4" else _from_path(which)


def _from_hub(which: str) -> Source:
    stream = C4Stream()
    if stream.first is not None:
        why = "it was asked for" if which == "c4" else "no sample lies in $SCALING_DATA, and the hub answers"
        return Source("the first documents of C4 (allenai/c4, en)", why, stream.texts)
    if which == "c4":
        raise ConnectionError(
            f"allenai/c4: not to be had from the Hugging Face hub ({stream.reason}); "
            "take stdlib or a path instead"
        )
    why = f"no C4 sample lies in $SCALING_DATA, and the Hugging Face hub gives none ({stream.reason})"
    return Source(LIBRARY, why, standard_library)


def _scaling_data() -> Path:
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    return Path(os.environ.get("SCALING_DATA", beside))


def _identity(path: Path) -> list[str | int]:
    """Changes when the file does; a sum of the content would read all of a file of which little is taken."""
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]


def standard_library() -> Iterator[str]:
    """Each module of Python's standard library, in the order of the paths."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "dist-packages"} & set(path.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few tests of Python are not UTF-8 on purpose
        if text.strip():
            yield text


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
        raise FileNotFoundError(f"{error}; and none of the words auto, c4 and stdlib") from error
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


def _write_split(
    texts: Iterator[str], folder: Path, max_bytes: int, max_documents: int | None
) -> dict[str, int]:
    """The first texts without copies and blank ones, in two files; how many documents and bytes each got."""
    seen: set[bytes] = set()
    counts = {"documents": 0, "copies_dropped": 0, "train_documents": 0, "held_out_documents": 0}
    n_bytes = {"train": 0, "held_out": 0}
    with (
        (folder / "train.jsonl").open("w", encoding="utf-8") as train,
        (folder / "held_out.jsonl").open("w", encoding="utf-8") as held_out,
    ):
        files = {"train": train, "held_out": held_out}
        for text in texts:
            raw = text.encode("utf-8", "replace")
            digest = hashlib.sha256(raw).digest()
            if not text.strip() or digest in seen:
                counts["copies_dropped"] += digest in seen
                continue
            seen.add(digest)
            side = "held_out" if int.from_bytes(digest[:8]) < HELD_OUT_SHARE * 2**64 else "train"
            files[side].write(json.dumps({"text": raw.decode()}, ensure_ascii=False) + "\n")
            counts["documents"] += 1
            counts[f"{side}_documents"] += 1
            n_bytes[side] += len(raw)
            if sum(n_bytes.values()) >= max_bytes or counts["documents"] == max_documents:
                break
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    return {**counts, "train_bytes": n_bytes["train"], "held_out_bytes": n_bytes["held_out"]}
