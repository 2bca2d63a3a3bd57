"""The encoder as a step of a datatrove pipeline: documents to .bin/.idx datasets, one per task.

datatrove (https://github.com/huggingface/datatrove) runs a pipeline of readers, filters and writers as tasks,
on one machine, on Slurm or on Ray. This module requires it: pip install 'megatron-scaling[datatrove]'.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.readers.jsonl import JsonlReader
from datatrove.utils.logging import logger

from megatron.data.indexed_writer import IndexedWriter, dtype_for
from megatron.data.sidecar import read_sidecar
from megatron.text.encode import BATCH_DOCUMENTS
from megatron.text.join import dataset_prefix
from megatron.text.preprocess import describe_settings, load_fast_bpe
from megatron.text.text_readers import check_texts, find_text, parse_record
from megatron.text.workers import EncoderRecipe
from megatron.tokenizer.encoder import NO_EOD, build_fast_bpe, encode_with_location
from megatron.tokenizer.kinds import TokenizerSpec, load_tokenizer

KEY = "text"


class EncodeToMegatron(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Pipeline step that encodes documents to `<output_prefix>-part-RRRRR-of-NNNNN_text_document`.

    Task R of N writes one part, with the ids of tools/preprocess_data_many_cores.py. A part is complete or
    absent. Documents are passed on to the next step after they have been encoded.
    """

    name = "Megatron .bin/.idx"
    type = "🔢 - TOKENIZER"

    def __init__(
        self,
        output_prefix: str | Path,
        tokenizer: TokenizerSpec | str = "gpt2",
        *,
        append_eod: bool = False,
        special_text: bool = True,
        overwrite: bool = False,
    ) -> None:
        """Load the tokenizer, so that wrong arguments are errors before any task starts.

        output_prefix   on a file system that all nodes share; a relative path is resolved now
        special_text    the text of a special token becomes its id, as in `tokenizers`
        overwrite       replace parts of other documents or settings

        Raises FileNotFoundError or ValueError.
        """
        super().__init__()
        word = str(output_prefix)
        if "://" in word or word.endswith("/") or not word:
            raise ValueError(
                f"output_prefix: got '{word}', expected the first part of a file name on a shared file "
                "system, such as tokens/c4."
            )
        self.output_prefix = Path(word).absolute()  # a Ray worker has another working directory
        self.tokenizer = _resolve_paths(tokenizer)
        self.special_text, self.overwrite = special_text, overwrite
        loaded = load_tokenizer(tokenizer)
        load_fast_bpe(loaded)  # warns about a slow tokenizer before the tasks start
        self.eod = loaded.eod_id if append_eod else NO_EOD
        eod_id = None if loaded.eod is None else loaded.eod.id
        settings = ["datatrove", loaded.sha256, eod_id, self.eod, special_text]
        self.meta = describe_settings(loaded, append_eod, special_text)
        self.meta |= {"json_key": KEY, "job": _hash_text(json.dumps(settings))}

    def run(self, data: Iterator[Document] | None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Write part `rank` of `world_size`, and yield its documents.

        Raises ValueError for a document that cannot be encoded, if another process writes the part, and if
        the part exists from other documents or settings, unless `overwrite` is set. No part is written then.
        """
        name = f"{self.output_prefix.name}-part-{rank:05d}-of-{world_size:05d}"
        part = dataset_prefix(self.output_prefix.with_name(name), KEY)
        sources: Counter[str | None] = Counter()
        self._check_replaceable(part, "job", self.meta["job"])
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one core per task
        loaded = load_tokenizer(self.tokenizer)
        if loaded.sha256 != self.meta["tokenizer"]["sha256"]:
            raise ValueError(f"{loaded.name}: got other files than at the start. Use the same on all nodes.")
        encoder = EncoderRecipe(self.tokenizer, build_fast_bpe(loaded)[0], self.special_text).build()
        # common to the parts of this dataset; the inputs are not known here
        dataset = _hash_text(f"{self.meta['job']} {self.output_prefix}")
        number = {"number": rank + 1, "of": world_size, "inputs_sha256": dataset}
        with IndexedWriter(part, dtype_for(loaded.n_tokens), self.meta | {"part": number}) as writer:
            n_empty, documents = 0, iter(data or list[Document]())
            while batch := list(islice(documents, BATCH_DOCUMENTS)):
                paths = [document.metadata.get("file_path") for document in batch]
                places = [f"{path or 'document'}, id {d.id}" for path, d in zip(paths, batch, strict=True)]
                with self.track_time("batch"):
                    texts = check_texts([document.text for document in batch], KEY, places)
                    ids, lengths = encode_with_location(encoder, texts, places, self.eod)
                    writer.add_documents(ids, lengths)
                n_empty += int((lengths == int(self.eod != NO_EOD)).sum())
                sources.update(paths)
                self.stat_update("documents", value=len(batch), unit="batch")
                self.stat_update("tokens", value=len(ids), unit="batch")
                yield from batch
            described = [_describe_source(path, n) for path, n in sources.items()]
            writer.meta |= {"empty_documents": n_empty, "sources": described}
            writer.prepare()
            self._check_replaceable(part, "sha256", writer.sha256)
        logger.info(f"{part}: {writer.n_documents:,} documents, {writer.n_tokens:,} tokens")

    def _check_replaceable(self, part: Path, entry: str, value: Any) -> None:
        """Raise ValueError if the part exists with another value of an entry of its sidecar."""
        with suppress(FileNotFoundError):  # absent, or killed during the renames: the sidecar comes last
            if read_sidecar(part).get(entry) != value and not self.overwrite:
                what = "settings" if entry == "job" else "documents"
                raise ValueError(
                    f"{part}: exists already, from other {what}. Choose another output_prefix, or set "
                    "overwrite=True."
                )


class StrictJsonlReader(JsonlReader):  # type: ignore[misc]  # datatrove has no types
    """datatrove's JsonlReader with the rules of tools/preprocess_data_many_cores.py, for the same documents.

    JsonlReader skips a line that is not JSON and the rest of a file after bytes that are not UTF-8, with a
    warning, and drops documents without text. This reader raises ValueError with file and line for the first
    two and for a missing text, and keeps empty documents. Blank lines are not documents.
    """

    name = "🐿 Jsonl, strict"

    def read_file(self, filepath: str) -> Iterator[Document]:
        """Yield the documents of one file. Raises ValueError with file and line."""
        with self.data_folder.open(filepath, "rb", compression=self.compression) as file:
            for i, line in enumerate(file):
                if not line.strip():
                    continue
                with self.track_time():
                    try:
                        record = parse_record(line)
                        text = find_text(record, self.text_key)
                    except ValueError as error:
                        place = self.data_folder.resolve_paths(filepath)
                        raise ValueError(f"{place}, line {i + 1}: {error}") from error
                    # the base class drops documents without text, so it gets a space
                    document = self.get_document_from_dict(record | {self.text_key: text or " "}, filepath, i)
                    document.text = text
                yield document


def order_for_tasks(files: Sequence[str], n_tasks: int) -> list[str]:
    """Return the lines of a `paths_file` with which the parts, joined by rank, are in the order of `files`.

    datatrove gives files r, r + n_tasks, r + 2 n_tasks, ... of its list to task r. With the returned order
    these are neighbours in `files`: 5 files a b c d e and 2 tasks give a d b e c, so task 0 reads a b c.
    """
    if n_tasks < 1:
        raise ValueError(f"n_tasks: got {n_tasks}, expected 1 or more")
    ordered, rest = list(files), iter(files)
    for rank in range(n_tasks):
        ordered[rank::n_tasks] = islice(rest, len(ordered[rank::n_tasks]))
    return ordered


def _describe_source(path: str | None, n_documents: int) -> dict[str, Any]:
    """Return the entry of a sidecar for one source; `path` is None if the reader does not record it."""
    # as for local files of the other tools, a name without its folders; a URL is kept
    entry = {} if path is None else {"path": path if "://" in path else Path(path).name}
    return entry | {"documents_read": n_documents}


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _resolve_paths(tokenizer: TokenizerSpec | str) -> TokenizerSpec:
    """Return the spec with absolute paths; a name that is no file or folder here is one of the hub."""
    spec = TokenizerSpec(model=tokenizer) if isinstance(tokenizer, str) else tokenizer
    words = {name: getattr(spec, name) for name in ("model", "vocab_file", "merge_file")}
    paths: dict[str, Any] = {
        name: str(Path(word).absolute()) for name, word in words.items() if word and Path(word).exists()
    }
    return replace(spec, **paths)
