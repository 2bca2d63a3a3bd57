"""The encoder as a step of a datatrove pipeline: documents to .bin/.idx datasets, one per task.

datatrove (https://github.com/huggingface/datatrove) runs a pipeline of readers,
filters and writers as tasks, on one machine, on Slurm or on Ray. This module
requires it: pip install 'megatron-scaling[datatrove]'.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.readers.jsonl import JsonlReader
from datatrove.utils.logging import logger

from megatron.data.indexed_writer import IndexedWriter, dtype_for
from megatron.text.encode import BATCH_DOCUMENTS
from megatron.text.join import dataset_prefix
from megatron.text.preprocess import describe_settings, load_fast_bpe
from megatron.text.text_readers import check_texts, find_text, parse_record
from megatron.text.workers import encoder_builder
from megatron.tokenizer.encoder import NO_EOD, build_fast_bpe, encode_with_location
from megatron.tokenizer.kinds import TokenizerSpec, load_tokenizer

KEY = "text"


class EncodeToMegatron(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Pipeline step that encodes documents to `<output_prefix>-part-RRRRR-of-NNNNN_text_document`.

    Task R of N writes one part, with the ids of
    tools/preprocess_data_many_cores.py. A part is complete or absent.
    Documents are passed on to the next step after they have been encoded.
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
    ) -> None:
        """Load the tokenizer, so that wrong arguments are errors before any task starts.

        `output_prefix` is on a file system that all nodes share;
        `special_text` as in PreprocessOptions. Paths are resolved
        now: a Ray worker has another working directory.

        Raises FileNotFoundError or ValueError.
        """
        super().__init__()
        word = str(output_prefix)
        if "://" in word or word.endswith("/") or not word:
            raise ValueError(
                f"output_prefix: got '{word}', expected the first part of a file name on a shared file "
                "system, such as tokens/c4."
            )
        self.output_prefix = Path(word).absolute()
        spec = TokenizerSpec(model=tokenizer) if isinstance(tokenizer, str) else tokenizer
        # a name that is not a file or folder here is one of the hub
        names = [name for name in ("model", "vocab_file", "merge_file") if getattr(spec, name)]
        paths = {name: Path(getattr(spec, name)) for name in names}
        local: dict[str, Any] = {name: str(path.absolute()) for name, path in paths.items() if path.exists()}
        self.tokenizer = replace(spec, **local)
        self.special_text, loaded = special_text, load_tokenizer(tokenizer)
        load_fast_bpe(loaded)  # warns about a slow tokenizer before the tasks start
        self.eod = loaded.eod_id if append_eod else NO_EOD
        eod_id = None if loaded.eod is None else loaded.eod.id
        job = _hash_text(json.dumps(["datatrove", loaded.sha256, eod_id, self.eod, special_text]))
        self.meta = describe_settings(loaded, append_eod, special_text) | {"json_key": KEY, "job": job}

    def run(self, data: Iterator[Document] | None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Write part `rank` of `world_size`, and yield its documents.

        An existing part is replaced when the new one is complete.
        Raises ValueError for a document that cannot be encoded,
        and for a part that another process writes; no part is written then.
        """
        name = f"{self.output_prefix.name}-part-{rank:05d}-of-{world_size:05d}"
        part = dataset_prefix(self.output_prefix.with_name(name), KEY)
        sources = Counter[str]()
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one core per task
        loaded = load_tokenizer(self.tokenizer)
        if loaded.sha256 != self.meta["tokenizer"]["sha256"]:
            raise ValueError(f"{loaded.name}: got other files than at the start. Use the same on all nodes.")
        encoder = encoder_builder(self.tokenizer, build_fast_bpe(loaded)[0], self.special_text)()
        # common to the parts of this dataset; the inputs are not known here
        dataset = _hash_text(f"{self.meta['job']} {self.output_prefix}")
        number = {"number": rank + 1, "of": world_size, "inputs_sha256": dataset}
        with IndexedWriter(part, dtype_for(loaded.n_tokens), self.meta | {"part": number}) as writer:
            n_empty, documents = 0, iter(data or list[Document]())
            while batch := list(islice(documents, BATCH_DOCUMENTS)):
                paths = [document.metadata.get("file_path", "document") for document in batch]
                places = [f"{path}, id {d.id}" for path, d in zip(paths, batch, strict=True)]
                with self.track_time("batch"):
                    texts = check_texts([document.text for document in batch], KEY, places)
                    ids, lengths = encode_with_location(encoder, texts, places, self.eod)
                    writer.add_documents(ids, lengths)
                n_empty += int((lengths == int(self.eod != NO_EOD)).sum())
                sources.update(path if "://" in path else Path(path).name for path in paths)
                self.stat_update("documents", value=len(batch), unit="batch")
                self.stat_update("tokens", value=len(ids), unit="batch")
                yield from batch
            read = [{"path": path, "documents_read": n} for path, n in sources.items()]
            writer.meta |= {"empty_documents": n_empty, "sources": read}
        logger.info(f"{part}: {writer.n_documents:,} documents, {writer.n_tokens:,} tokens")


class StrictJsonlReader(JsonlReader):  # type: ignore[misc]  # datatrove has no types
    """datatrove's JsonlReader with the rules of tools/preprocess_data_many_cores.py, for the same documents.

    Bad lines and lines without a text are errors, and empty documents are kept.
    JsonlReader skips them.
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
                    # the base class drops documents
                    # without text, so it gets a space
                    document = self.get_document_from_dict(record | {self.text_key: text or " "}, filepath, i)
                    document.text = text
                yield document


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
