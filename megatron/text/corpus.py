"""Text for a small study: some thousand documents from an available source, with a fixed split."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.data.block_hash import hash_file
from megatron.io import fsync_path, open_partial_folder, publish_files, read_json, write_json
from megatron.log import get_logger
from megatron.text.inputs import Source, find_inputs, locate_source, stat_source
from megatron.text.local_text import describe_local_text, read_local_text
from megatron.text.subset import iter_documents
from megatron.tokenizer.hub_cache import find_hub_error

log = get_logger(__name__)
HELD_OUT_SHARE = 0.05
# below: too few held-out documents for a score; above: too little text to train on
HELD_OUT_SHARE_RANGE = (0.001, 0.5)
META_FILE, TRAINING_RECORD = "corpus.json", "training.json"
JSON_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
C4 = "the first documents of C4 (allenai/c4, en)"
FILLED = ("auto", "c4")  # with local text, if they are too small


@dataclass(frozen=True)
class CorpusLimits:
    """Size limits: maximum and minimum bytes, and share of held-out documents."""

    max_bytes: int
    min_bytes: int = 0
    held_out_share: float = HELD_OUT_SHARE

    def __post_init__(self) -> None:
        """Raise ValueError for limits that no text can satisfy."""
        if not 0 <= self.min_bytes <= self.max_bytes or self.max_bytes < 1:
            raise ValueError(
                f"got at least {self.min_bytes:,} and at most {self.max_bytes:,} bytes of text, expected the "
                "first between 0 and the second. Raise --max-mb or lower --min-mb."
            )
        low, high = HELD_OUT_SHARE_RANGE
        if not low <= self.held_out_share <= high:
            raise ValueError(f"--held-out-share: got {self.held_out_share:g}, expected {low:g} to {high:g}")


class SplitWriter:
    """Write each text once, to the side that the first 8 bytes of its sha256 select."""

    def __init__(self, train: Any, held_out: Any, held_out_share: float) -> None:
        self.counts: Counter[str] = Counter()
        self.n_documents = self.n_bytes = 0  # on both sides
        self._files = {"train": train, "held_out": held_out}
        self._limit = held_out_share * 2**64  # first 8 bytes of sha256 are uniform on 0..2^64 - 1
        self._digests: set[bytes] = set()  # 32 bytes per document

    def add(self, text: str) -> None:
        """Write a document, or count it as skipped if it is blank or a copy of an earlier one."""
        # an unpaired surrogate becomes "?"; the
        # digest is of the bytes that are written
        raw = text.encode("utf-8", "replace")
        digest = hashlib.sha256(raw).digest()
        if not text.strip() or digest in self._digests:
            self.counts["n_skipped"] += 1
            return
        self._digests.add(digest)
        side = "held_out" if int.from_bytes(digest[:8]) < self._limit else "train"
        # no ASCII escapes: the file is then about
        # as large as the text, in any script
        line = json.dumps({"text": raw.decode()}, ensure_ascii=False) + "\n"
        self._files[side].write(line.encode())
        self.counts[f"{side}_documents"] += 1
        self.counts[f"{side}_bytes"] += len(raw)
        self.n_documents += 1
        self.n_bytes += len(raw)


def prepare_corpus(which: str, folder: Path, limits: CorpusLimits) -> tuple[dict[str, Any], bool]:
    """Write <folder>/train.jsonl, held_out.jsonl and corpus.json.

    Returns the content of corpus.json, and False if the folder has it already, from
    the same files. `which` is auto, c4, local, or a path (see `choose_source`). The
    corpus is the start of that text, up to the limits. If auto and c4 are less than
    `min_bytes`, documents of the local text are added until it is reached. The
    sha256 of a text decides whether it is held out, so copies are never on both
    sides. Raises FileNotFoundError, ConnectionError or ValueError, also if another
    process is writing the corpus; the folder is then unchanged.
    """
    folder = folder.resolve()
    paths = find_paths(which)
    request = {"which": which} | asdict(limits)
    # a hash of the content would read the whole
    # files, of which the corpus may use a small part
    request["files"] = [[locate_source(path), *stat_source(path)] for path in paths]
    # versions of local sources are part of the request if local text may be used
    may_be_local = not paths or (which in FILLED and limits.min_bytes > 0)
    request["installed"] = describe_local_text() if may_be_local else None
    existing = read_json(folder / META_FILE)
    if existing and existing.get("asked") == request and existing.get("files") == _hash_sides(folder):
        return existing, False
    with open_partial_folder(folder, replace=True) as partial:
        content = _write_split(which, paths, partial, limits)
        content |= {"files": _hash_sides(partial), "asked": request}
        write_json(partial / META_FILE, content)
        folder.mkdir(parents=True, exist_ok=True)
        # META_FILE last: a folder with it
        # is complete, and after a kill
        # before it the next call starts again
        names = ("train.jsonl", "held_out.jsonl", META_FILE)
        publish_files([(partial / name, folder / name) for name in names])
    return content, True


def _hash_sides(folder: Path) -> dict[str, str]:
    """Return the sha256 of each side's file that exists."""
    paths = (folder / "train.jsonl", folder / "held_out.jsonl")
    return {path.name: hash_file(path) for path in paths if path.is_file()}


def _write_split(which: str, paths: Sequence[Source], folder: Path, limits: CorpusLimits) -> dict[str, Any]:
    """Write both files, filled up with local text; return the content of corpus.json."""
    name, documents = choose_source(which, paths)
    with (folder / "train.jsonl").open("wb") as train, (folder / "held_out.jsonl").open("wb") as held_out:
        writer = SplitWriter(train, held_out, limits.held_out_share)
        for text in documents:
            writer.add(text)
            if writer.n_bytes >= limits.max_bytes:
                break
        n_bytes, n_documents = writer.n_bytes, writer.n_documents  # before local text is added
        if which in FILLED and n_bytes < limits.min_bytes:
            for text in read_local_text():
                if writer.n_bytes >= limits.min_bytes:
                    break
                writer.add(text)
    for side in ("train", "held_out"):
        fsync_path(folder / f"{side}.jsonl")  # before the renames in prepare_corpus
    _check_enough(name, writer, limits)
    content = {"corpus": name, "documents": writer.n_documents, **writer.counts}
    if writer.n_bytes > n_bytes:
        content["added"] = describe_local_text()
        content["added_documents"] = writer.n_documents - n_documents
        content["added_bytes"] = writer.n_bytes - n_bytes
    return content


def _check_enough(name: str, writer: SplitWriter, limits: CorpusLimits) -> None:
    """Raise ValueError for an empty side of the split, and for less than `min_bytes` of text."""
    if writer.n_bytes < limits.min_bytes:
        raise ValueError(
            f"{name}: got {writer.n_bytes:,} bytes of text without copies, expected at least "
            f"{limits.min_bytes / 1e6:,.1f} MB. Give more text, or lower --min-mb."
        )
    for side in ("train", "held_out"):
        if not writer.counts[f"{side}_documents"]:
            raise ValueError(
                f"{name}: got {writer.n_documents} documents and none in {side}.jsonl, "
                "expected some on both sides. Give more text."
            )


def find_paths(which: str) -> list[Source]:
    """Return the files of a text that is on this machine; none: local text, or text of the hub.

    Raises FileNotFoundError for a path without text.
    """
    if which == "auto":
        # <checkout>/../shared/data, unless the variable names another folder
        beside = Path(__file__).resolve().parents[2].parent / "shared" / "data"
        folder = Path(os.environ.get("SCALING_DATA", beside)) / "c4"
        return [*sorted(folder.glob("c4_en_*.jsonl")), *sorted(folder.glob("redpajama_c4_*.jsonl"))]
    if which in ("c4", "local"):
        return []
    try:
        return find_inputs([which], JSON_SUFFIXES)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error} It is not auto, c4 or local either.") from error


def choose_source(which: str, paths: Sequence[Source]) -> tuple[str, Iterable[str]]:
    """Return the name of a text and its documents. `paths`: as `find_paths` returns them.

    auto     the C4 sample of $SCALING_DATA, else C4 from the hub, else local text
    local    Python's standard library and the sources of some installed packages (local_text)
    a path   JSON-lines files with the text under "text"

    Raises ConnectionError if c4 is not available.
    """
    if paths:
        name = f"a sample of C4 ({', '.join(path.name for path in paths)})" if which == "auto" else which
        return name, iter_texts(paths)
    if which in ("auto", "c4"):
        error = find_hub_error()
        if error is None:
            return C4, _stream_c4()
        if which == "c4":
            raise ConnectionError(
                f"allenai/c4: not available from the Hugging Face hub ({error}). Use local or a path instead."
            )
        log.info("no C4 sample in $SCALING_DATA and no Hugging Face hub (%s): local text is used", error)
    return describe_local_text(), read_local_text()


def _stream_c4() -> Iterator[str]:
    import datasets  # heavy, and only needed here

    try:
        for record in datasets.load_dataset("allenai/c4", "en", split="train", streaming=True):
            yield record["text"]
    except Exception as error:  # any exception of the libraries
        raise ConnectionError(
            f"allenai/c4: cannot be streamed ({(str(error) or type(error).__name__).splitlines()[0]}). "
            "Run the same command again, or give --corpus local."
        ) from error


def iter_texts(paths: Sequence[Source], key: str = "text") -> Iterator[str]:
    """Yield the documents of JSON-lines files.

    Raises ValueError with file and line for a line without text under the key.
    """
    yield from (document.text for document in iter_documents(paths, key))


def train_tokenizer(path: Path, key: str, n_tokens: int, folder: Path) -> bool:
    """Train on the texts of a .jsonl. Return False if the folder has its result already.

    Raises FileNotFoundError, and ValueError as `iter_texts` and `train_bpe`.
    """
    from megatron.tokenizer.train_bpe import train_bpe  # imports the library

    source = {"sha256": hash_file(path), "key": key, "n_tokens": n_tokens}
    record_path = folder / TRAINING_RECORD
    if (folder / "tokenizer.json").is_file() and read_json(record_path) == source:
        return False
    # otherwise a run killed below would leave
    # this record beside another text's tokenizer
    record_path.unlink(missing_ok=True)
    train_bpe(iter_texts([path], key), n_tokens, folder)
    # last: the record exists only beside a complete tokenizer.json
    write_json(record_path, source)
    return True
