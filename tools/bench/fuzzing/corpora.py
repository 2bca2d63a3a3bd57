"""Fuzz targets of datasets and tokenizers: indexes, sidecars, data-path files, tokenizer files."""

import json
import struct
from itertools import zip_longest
from pathlib import Path

import numpy as np
from fuzzing.cases import FileCase
from fuzzing.harness import FuzzTarget, WrongAnswerError
from fuzzing.mutate import mutate_bytes, mutate_fields, mutate_json, mutate_text
from fuzzing.text import WORDS, train_tokenizer


def write_dataset(prefix: Path, seed: int = 0, eod: bool = True) -> None:
    """Write a dataset of 12 documents with ids below 50."""
    from megatron.data.indexed_writer import IndexedWriter

    rng = np.random.default_rng(seed)
    sidecar = {
        "tokenizer": {"n_tokens": 50, "name": "t", "sha256": "0" * 64, "eod_id": 0, "eod_token": "x"},
        "append_eod": eod, "n_documents": 12, "unigram_entropy_nats": 3.2,
    }  # fmt: skip
    with IndexedWriter(prefix, np.dtype(np.uint16), sidecar) as writer:
        for _ in range(12):
            # 1 to 8 ids, each 1 to 49: id 0 is the end of a document
            writer.add_document(rng.integers(1, 50, rng.integers(1, 9)))


def reference_documents(prefix: Path) -> list[list[int]]:
    """Read the documents of a dataset independently, from the description of the format."""
    content = prefix.with_suffix(".idx").read_bytes()
    # 9 bytes of magic, 8 of version; then dtype code, counts, lengths, byte offsets, document bounds
    code, n_sequences, n_bounds = struct.unpack_from("<BQQ", content, 17)
    dtype = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}[code]
    # 34 = 9 + 8 + 1 + 8 + 8 bytes of header; a length has 4 bytes, an offset 8
    sizes = struct.unpack_from(f"<{n_sequences}i", content, 34)
    pointers = struct.unpack_from(f"<{n_sequences}q", content, 34 + 4 * n_sequences)
    bounds = struct.unpack_from(f"<{n_bounds}q", content, 34 + 12 * n_sequences)
    data = prefix.with_suffix(".bin").read_bytes()
    sequences = [
        np.frombuffer(data, dtype, size, at).tolist() for size, at in zip(sizes, pointers, strict=True)
    ]
    # bounds [0, 2, 3]: document 0 is sequences 0 and 1, document 1 is sequence 2
    spans = zip(bounds, bounds[1:], strict=False)
    return [[token for sequence in sequences[begin:end] for token in sequence] for begin, end in spans]


def open_indexes(folder: Path) -> FileCase:
    """Open an index and its tokens, with sequences as other programs may write them."""
    from megatron.data.indexed import IndexedTokens

    prefix = folder / "train"
    write_dataset(prefix)

    def read() -> None:
        opened = IndexedTokens(prefix)
        # the reference follows every length and offset of the index: the reader must refuse it or agree
        documents = [opened.get_document(i).tolist() for i in range(len(opened.document_tokens))]
        expected = reference_documents(prefix)
        if documents != expected:
            raise WrongAnswerError(f"got {documents}, expected {expected}")
        opened.check_ids(opened.tokens[:100].astype(np.int64))

    # version, dtype, sequences, bounds, then 12 lengths, 12 offsets and 13 bounds; after 9 bytes of magic
    form = "<QBQQ" + "i" * 12 + "q" * 12 + "q" * 13
    return FileCase(folder, {"train.idx": mutate_fields(form, 9), "train.bin": mutate_bytes}, read)


def open_sidecars(folder: Path) -> FileCase:
    """Open sidecars and data-path files, and values computed from them."""
    from megatron.data.sidecar import parse_eod_use, read_sidecar
    from megatron.plan.datapaths import compare_eods, compare_tokenizers, count_corpus_tokens, read_corpora

    for i, name in enumerate(("a", "b")):
        write_dataset(folder / name, i)
    (folder / "paths.txt").write_text(
        f'# weights and prefixes\n0.75 {folder}/a\n1e-1 "{folder}/b"   # a comment\n\n'
    )

    def read() -> None:
        corpora = read_corpora(str(folder / "paths.txt"))
        if not all(corpus.weight > 0 for corpus in corpora) or not corpora:
            raise WrongAnswerError(f"got {corpora}, expected positive weights")
        compare_eods([corpus.prefix for corpus in corpora])
        compare_tokenizers(corpora[0].prefix, corpora[-1].prefix, "paths.txt")
        for corpus in corpora:
            if read_sidecar(corpus.prefix) is None or count_corpus_tokens(corpus.prefix) < 0:
                raise WrongAnswerError(f"{corpus.prefix}: got a negative number of tokens")
            parse_eod_use(read_sidecar(corpus.prefix))

    return FileCase(folder, {"a.json": mutate_json, "b.json": mutate_json, "paths.txt": mutate_text}, read)


def open_parts(folder: Path) -> FileCase:
    """Open a dataset of two parts, and verify it."""
    from megatron.data import open_dataset
    from megatron.text.inspect_dataset import find_faults
    from megatron.text.write_parts import write_parts_list

    for seed in (0, 1):
        write_dataset(folder / f"part{seed}", seed)
    prefix = folder / "all"
    write_parts_list([str(folder / f"part{seed}") for seed in (0, 1)], prefix)
    expected = open_dataset(prefix).tokens[:].tolist()

    def read() -> None:
        opened = open_dataset(prefix)
        # the list names the parts and their sizes: what opens has the tokens of some order of them
        documents = [opened.get_document(i).tolist() for i in range(opened.n_documents)]
        if [token for document in documents for token in document] != opened.tokens[:].tolist():
            raise WrongAnswerError(f"got {documents}, expected the documents of {expected}")
        list(find_faults(prefix))

    form = "<QBQQ" + "i" * 24 + "q" * 24 + "q" * 25
    mutators = {
        "all.parts.idx": mutate_fields(form, 9),
        "all.parts.json": mutate_json,
        "part0.json": mutate_json,
    }
    return FileCase(folder, mutators, read)


def open_inspected(folder: Path) -> FileCase:
    """Open a dataset as training and tools/inspect_data.py do."""
    from megatron.data.indexed import IndexedTokens
    from megatron.text.inspect_dataset import find_faults, summarize_lengths

    prefix = folder / "train"
    write_dataset(prefix)

    def read() -> None:
        summarize_lengths(IndexedTokens(prefix))
        list(find_faults(prefix))

    form = "<QBQQ" + "i" * 12 + "q" * 12 + "q" * 13
    mutators = {"train.idx": mutate_fields(form, 9), "train.json": mutate_json, "train.bin": mutate_bytes}
    return FileCase(folder, mutators, read)


def _compare_ids(folder: Path) -> None:
    """Compare the ids of the C++ encoder with those of the library, if both support the tokenizer."""
    from tokenizers import Tokenizer

    from megatron.tokenizer.encoder import FastEncoder, build_fast_bpe
    from megatron.tokenizer.kinds import load_tokenizer_by_name

    tokenizer = load_tokenizer_by_name(str(folder))
    texts = [word for word in WORDS if word]
    # the library may accept a damaged file and fail only at the first text
    tokenizer.encode_batch(texts)
    fast, reason = build_fast_bpe(tokenizer)
    # the C++ encoder may refuse a tokenizer that it does not support, but must state why
    if fast is None and not reason:
        raise WrongAnswerError("got no encoder and no reason")
    if fast is None:
        return
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = [encoding.ids for encoding in library.encode_batch(texts, add_special_tokens=False)]
    ids, lengths = FastEncoder(fast).encode(texts)
    got = [row.tolist() for row in np.split(ids, np.cumsum(lengths))[:-1]]
    if got != expected:
        rows = enumerate(zip_longest(texts, got, expected))
        raise WrongAnswerError(f"text, got, expected: {next(r for r in rows if r[1][1] != r[1][2])}")


def open_tokenizers(folder: Path) -> FileCase:
    """Open tokenizer.json and tokenizer_config.json."""
    train_tokenizer(folder)
    settings = {"eos_token": {"content": "<|endoftext|>"}, "bos_token": None, "chat_template": "{{x}}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    mutators = {"tokenizer.json": mutate_json, "tokenizer_config.json": mutate_json}
    return FileCase(folder, mutators, lambda: _compare_ids(folder))


def open_other_tokenizers(folder: Path) -> FileCase:
    """Open vocab.json with merges.txt, a SentencePiece .model and BERT's vocab.txt."""
    import sentencepiece

    from megatron.tokenizer.kinds import TokenizerSpec, load_tokenizer, load_tokenizer_by_name

    pair = folder / "pair"
    pair.mkdir()
    train_tokenizer(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (pair / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    (pair / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (folder / "text").write_text("\n".join(WORDS[:8] * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "sp"), vocab_size=400, hard_vocab_limit=False,
        minloglevel=2, byte_fallback=True,
    )  # fmt: skip
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "a", "te", "##x", "##t", "日", "x"]))

    def read() -> None:
        bert = TokenizerSpec("BertWordPieceCase", vocab_file=str(folder / "vocab.txt"))
        tokenizers = [load_tokenizer_by_name(str(folder / name)) for name in ("pair", "sp.model")]
        for tokenizer in (*tokenizers, load_tokenizer(bert)):
            ids = tokenizer.encode_batch(["a text", "日本 x", ""])
            if len(ids) != 3:
                raise WrongAnswerError(f"{tokenizer.name}: got {ids}")

    mutators = {
        "pair/vocab.json": mutate_json, "pair/merges.txt": mutate_text, "sp.model": mutate_bytes,
        "t.bin": mutate_fields("<ifi", 0), "vocab.txt": mutate_text,
    }  # fmt: skip
    return FileCase(folder, mutators, read)


TARGETS = (
    FuzzTarget("tokenizer.json", 3, open_tokenizers),
    FuzzTarget("other tokenizers", 1, open_other_tokenizers),
    FuzzTarget("idx and bin", 6, open_indexes),
    FuzzTarget("sidecars, data paths", 4, open_sidecars),
    FuzzTarget("inspected datasets", 2, open_inspected),
    FuzzTarget("datasets of parts", 2, open_parts),
)
