"""Text for a small study: some thousand documents, from wherever this machine has some, split for good."""

import gzip
import hashlib
import json
import multiprocessing
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from megatron.data.documents import find_inputs, text_of
from megatron.run_dir import read_json, write_json

HELD_OUT_SHARE = 0.05
FIRST_DOCUMENT_S = 60.0  # C4 is given up when its first document has not come by then
STREAM_S = 600.0
ABOUT = "corpus.json"


@dataclass(frozen=True)
class Source:
    """A text that can be had, and why it was taken."""

    name: str
    why: str
    texts: Callable[[], Iterator[str]]


def prepare_corpus(which: str, folder: Path, max_bytes: int) -> dict[str, object]:
    """Write <folder>/train.jsonl, held_out.jsonl and corpus.json, and return the content of the last.

    `which` is auto, c4, stdlib, or a path (see `choose`). A document is held out by the sha256 of its text,
    so that the split needs no list and exact copies, which are dropped, could never lie on both sides. A
    folder that already has what is asked for is left as it is. Raises FileNotFoundError or ValueError; then
    the folder is as before.
    """
    asked = {"which": which, "max_bytes": max_bytes}
    held = read_json(folder / ABOUT)
    if held is not None and held.get("asked") == asked:
        return held
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        source = choose(which)
        told = {"corpus": source.name, "why": source.why, "asked": asked}
        told |= _write_split(source.texts(), partial, max_bytes)
        if not told["held_out_documents"]:
            raise ValueError(f"{source.name}: {told['documents']} documents are too few to hold any out")
        write_json(partial / ABOUT, told)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("train.jsonl", "held_out.jsonl", ABOUT):
            (partial / name).replace(folder / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return told


def choose(which: str) -> Source:
    """The text to take. auto: the C4 sample of $SCALING_DATA, else C4 from the hub, else Python's library.

    A path names .jsonl(.gz) files as for preprocessing, or .txt files, whose paragraphs, set apart by
    blank lines, are the documents. Raises FileNotFoundError for a path without text, ConnectionError where
    c4 is not to be had.
    """
    if which == "stdlib":
        return Source("the text of Python's standard library", "it was asked for", standard_library)
    if which not in ("auto", "c4"):
        return Source(which, "it was asked for", _reader_of(which))
    sample = sorted(_scaling_data().glob("c4/*_first1000.jsonl")) + sorted(
        _scaling_data().glob("c4/redpajama_c4_*.jsonl")
    )
    if which == "auto" and sample:
        names = ", ".join(path.name for path in sample)
        return Source(f"a sample of C4 ({names})", "it lies in SCALING_DATA", lambda: _json_texts(sample))
    stream = C4Stream()
    if stream.first is not None:
        why = "it was asked for" if which == "c4" else "no sample lies in SCALING_DATA, and the hub answers"
        return Source("the first documents of C4 (allenai/c4, en)", why, stream.texts)
    if which == "c4":
        raise ConnectionError(
            f"allenai/c4: not to be had from the Hugging Face hub ({stream.reason}); CORPUS=stdlib"
        )
    return Source(
        "the text of Python's standard library",
        "no C4 sample lies in SCALING_DATA, and the Hugging Face hub does not answer",
        standard_library,
    )


def _scaling_data() -> Path:
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    return Path(os.environ.get("SCALING_DATA", beside))


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


def _reader_of(words: str) -> Callable[[], Iterator[str]]:
    path = Path(words)
    if path.suffix == ".txt" or (path.is_dir() and list(path.glob("*.txt"))):
        paths = [path] if path.is_file() else sorted(path.glob("*.txt"))
        if not paths or not paths[0].is_file():
            raise FileNotFoundError(f"{words}: no such text file")
        return lambda: _plain_texts(paths)
    found = find_inputs([words])
    return lambda: _json_texts(found)


def _plain_texts(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        for text in path.read_text(encoding="utf-8", errors="replace").split("\n\n"):
            if text.strip():
                yield text.strip()


def _json_texts(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield text_of(line, "text")
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error


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
                text = self._receive() if self._end.poll(STREAM_S) else None
            raise ConnectionError(
                f"allenai/c4: the stream broke off ({self.reason}); run the same command again"
            )
        finally:
            self._child.kill()


def _stream_c4(pipe: Connection) -> None:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import datasets  # heavy, and only needed here

        for record in datasets.load_dataset("allenai/c4", "en", split="train", streaming=True):
            pipe.send(("text", record["text"]))
    except (BrokenPipeError, KeyboardInterrupt):
        return
    except Exception as error:  # whatever the libraries below raise, the parent wants one sentence
        pipe.send(("error", (str(error).strip() or type(error).__name__).splitlines()[0]))


def _write_split(texts: Iterator[str], folder: Path, max_bytes: int) -> dict[str, int]:
    """The first `max_bytes` of text without copies, in two files; how many documents and bytes each got."""
    seen: set[bytes] = set()
    counts = {"documents": 0, "copies_dropped": 0, "train_documents": 0, "held_out_documents": 0}
    n_bytes = {"train": 0, "held_out": 0}
    with (
        (folder / "train.jsonl").open("w", encoding="utf-8") as train,
        (folder / "held_out.jsonl").open("w", encoding="utf-8") as held_out,
    ):
        for text in texts:
            raw = text.encode()
            digest = hashlib.sha256(raw).digest()
            if digest in seen:
                counts["copies_dropped"] += 1
                continue
            seen.add(digest)
            out = int.from_bytes(digest[:8]) < HELD_OUT_SHARE * 2**64
            (held_out if out else train).write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            counts["documents"] += 1
            counts["held_out_documents" if out else "train_documents"] += 1
            n_bytes["held_out" if out else "train"] += len(raw)
            if sum(n_bytes.values()) >= max_bytes:
                break
    return {**counts, "train_bytes": n_bytes["train"], "held_out_bytes": n_bytes["held_out"]}
