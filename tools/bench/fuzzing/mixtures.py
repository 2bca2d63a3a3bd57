"""Fuzz targets of mixtures: registered files, conditions over a catalog, messages to a server."""

import gzip
import json
import random
from pathlib import Path

import numpy as np
from fuzzing.cases import FileCase, WordCase
from fuzzing.corpora import write_dataset
from fuzzing.harness import FuzzTarget, WrongAnswerError
from fuzzing.mutate import mutate_bytes, mutate_fields, mutate_json, mutate_json_lines, mutate_text
from fuzzing.text import mutate_packed, mutate_tar, write_tar

N_DOCUMENTS = 60
CONDITIONS = (
    "language = 'en'", "stars > 3", "stars BETWEEN 2 AND 9", "language IN ('en', 'de')", "language LIKE 'e%'",
    "NOT language = 'en'", "score >= 0.5 AND stars < 10", "stars IS NULL OR score IS NOT NULL", "size > 20",
    "list_contains(tags, 'a')", "contains(language, 'n')", "good", "day >= '2024-02-10'",
    "corpus = 'c'", "stars <> 5",
    "(language = 'en' AND stars > 2) OR (language = 'de' AND NOT good)", "stars + 1 > 3", "score = 0.25",
    "language = 'O''Neil'", "tokens > 1", "stars = '5'", "stars IN (1, 2, NULL)", "language NOT LIKE '%x%'",
)  # fmt: skip
# Conditions are part of a SQL query. These read files or the environment, end the statement, or use functions
# that are not allowed or not deterministic: each must be refused, or be harmless.
ATTACKS = (
    "read_text('/etc/hostname') IS NOT NULL", "(SELECT 1)", "; DROP TABLE files", "1=1 --",
    "/* x */ good", "$1 = 1",
    "getenv('HOME') = 'x'", "CASE WHEN good THEN 1 END", "language SIMILAR TO '.*'",
    "regexp_matches(language, '(a+)+$')",
    "stars IN (SELECT stars FROM documents_1)", "good AND", "''", "\"language\" = 'en'",
    "language COLLATE NOCASE = 'EN'",
    "CAST(stars AS VARCHAR) = '5'", "stars::HUGEINT > 99999999999999999999999999999999999999",
    "language || 'x' = 'enx'",
    "stars = 1e400", "stars > -9223372036854775809", "score = 'NaN'", "day > '9999-99-99'", "tags = ['a']",
    "random() > 0.5", "NOT NOT NOT good", "stars[0] = 1", "tags[1] = 'a'", "language = e'\\x00'",
    "struct_pack(a := 1) = 1",
)  # fmt: skip


def write_records(path: Path) -> None:
    """Write documents with a property of each type, some values missing."""
    rng = random.Random(0)
    with path.open("w") as file:
        for i in range(N_DOCUMENTS):
            record = {
                "language": rng.choice(("en", "de", "O'Neil", "")), "stars": rng.randrange(12),
                "good": rng.random() < 0.5,
                "score": rng.randrange(8) / 4, "day": f"2024-02-{rng.randrange(1, 29):02}",
                "tags": ["a", "b", "c"][: rng.randrange(4)],
            }  # fmt: skip
            # a tenth of the values are missing: NULL, for which a comparison is neither true nor false
            present = {key: value for key, value in record.items() if rng.random() < 0.9}
            file.write(json.dumps({"text": "word " * rng.randrange(1, 9) + str(i), **present}) + "\n")


def open_conditions(folder: Path) -> WordCase:
    """Open conditions.

    The documents for which one is true, false and unknown must add up to all documents.
    """
    from megatron.mixture.catalog.catalog import Catalog
    from megatron.mixture.catalog.properties import read_properties
    from megatron.mixture.catalog.query import Query

    write_records(folder / "a.jsonl")
    properties = read_properties([
        "language AS language category", "stars AS stars integer", "good AS good boolean",
        "score AS score float",
        "day AS day date", "tags AS tags list",
    ])  # fmt: skip
    with Catalog(folder / "catalog", n_threads=1) as catalog:
        catalog.register("c", [str(folder / "a.jsonl")], properties, quiet=True)
    opened = Catalog(folder / "catalog", read_only=True, n_threads=1)

    def count_matches(condition: str) -> int:
        try:
            return int(Query().where(condition).run(opened).n_documents.sum())
        except ValueError as error:
            # an error for the user of a query, but here the count 0
            if "no document satisfies" in str(error):
                return 0
            raise

    def read(word: str) -> None:
        n_true = count_matches(word)
        try:
            # SQL has three truth values: a, NOT a and a IS NULL must partition the documents
            parts = n_true, count_matches(f"NOT ({word})"), count_matches(f"({word}) IS NULL")
        except ValueError:
            return  # `a = 1 --` is valid alone but not within brackets
        if sum(parts) != N_DOCUMENTS:
            raise WrongAnswerError(
                f"{word!r}: true, false and unknown for {parts}, expected {N_DOCUMENTS} in all"
            )

    def mutate(rng: random.Random, word: bytes) -> bytes:
        kind = rng.randrange(4)
        if kind == 0:
            other = rng.choice((*CONDITIONS, *ATTACKS)).encode()
            return word + rng.choice((b" AND ", b" OR ", b" ", b", ", b" = ")) + other
        return mutate_text(rng, word)

    return WordCase((*CONDITIONS, *CONDITIONS, *ATTACKS), mutate, read)


def open_catalog(folder: Path) -> FileCase:
    """Open the files of a catalog: marker, commit, part and snapshot. A changed commit gets a valid name."""
    from megatron.mixture.catalog.catalog import Catalog
    from megatron.mixture.catalog.commits import hash_content_name
    from megatron.mixture.catalog.properties import read_properties
    from megatron.mixture.catalog.query import Query

    write_records(folder / "a.jsonl")
    path = folder / "catalog"
    with Catalog(path, n_threads=1) as catalog:
        properties = read_properties(["language AS language category", "stars AS stars integer"])
        catalog.register("c", [str(folder / "a.jsonl")], properties, quiet=True)
        snapshot = catalog.pin()
    (commit,) = (path / "commits").iterdir()
    (part,) = path.glob("corpus=c/*.parquet")
    names = {file: file.relative_to(folder).as_posix() for file in (commit, part)}

    def read() -> None:
        content = commit.read_bytes()
        named = commit.with_name(f"{hash_content_name(content)}.json")
        if named != commit:
            commit.rename(named)
        try:
            for id in (None, snapshot):
                with Catalog(path, read_only=True, n_threads=1, snapshot=id) as opened:
                    opened.list_snapshots()
                    opened.summarize_corpora()
                    opened.locate_texts([file.entry.key for file in opened.files])
                    Query().run(opened, ["language"])
        finally:
            if named != commit:
                named.rename(commit)

    return FileCase(
        folder,
        {
            "catalog/catalog.json": mutate_json, names[commit]: mutate_json, names[part]: mutate_bytes,
            f"catalog/snapshots/{snapshot}.json": mutate_json,
        },
        read,
    )  # fmt: skip


def open_registered(folder: Path) -> FileCase:
    """Open files for registration: plain and compressed JSON lines, parquet, tars, datasets."""
    import zstandard

    from megatron.mixture.catalog.catalog import Catalog
    from megatron.mixture.catalog.properties import read_properties
    from megatron.text.text_readers import write_parquet_columns

    write_records(folder / "a.jsonl")
    lines = (folder / "a.jsonl").read_bytes()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(lines))
    texts = ["some text", "more"] * 5
    write_parquet_columns(
        folder / "d.parquet", {"text": texts, "stars": np.arange(10), "language": ["en", ""] * 5}
    )
    write_tar(folder / "e.tar")
    write_dataset(folder / "f")
    write_parquet_columns(folder / "f.parquet", {"stars": np.arange(12), "language": ["en"] * 12})
    properties = read_properties(["language AS language category", "stars AS stars integer"])
    # a dataset is registered by its .bin; the other three files are read with it
    inputs = {"f.idx": "f.bin", "f.json": "f.bin", "f.parquet": "f.bin"}
    catalog = Catalog(folder / "catalog", n_threads=1)

    def read() -> None:
        # Find the mutated file. The first call comes from the constructor of FileCase, before `case` is set:
        # then nothing is mutated, and `else` returns.
        for name, content in case.valid.items() if case else ():
            if (folder / name).read_bytes() != content:
                break
        else:
            return
        try:
            registered = catalog.register("c", [str(folder / inputs.get(name, name))], properties, quiet=True)
            listed = catalog.list_broken("c")
            if (
                registered.n_broken < 0
                or registered.n_documents > 10_000
                or len(listed) < min(registered.n_broken, 1000)
            ):
                raise WrongAnswerError(f"got {registered}, {len(listed)} broken lines listed")
        # the next input must register all files again, so the corpus is removed even after an error
        finally:
            if any(corpus.name == "c" for corpus in catalog.list_corpora()):
                catalog.remove("c")

    form = "<QBQQ" + "i" * 12 + "q" * 12 + "q" * 13
    case: FileCase | None = None
    case = FileCase(
        folder,
        {
            "a.jsonl": mutate_json_lines, "b.jsonl.gz": mutate_packed(gzip.compress, lines),
            "c.jsonl.zst": mutate_packed(zstandard.compress, lines), "d.parquet": mutate_bytes,
            "e.tar": mutate_tar,
            "f.idx": mutate_fields(form, 9), "f.json": mutate_json, "f.parquet": mutate_bytes,
        },
        read,
    )  # fmt: skip
    return case


def open_messages(folder: Path) -> WordCase:
    """Open requests, reports and actions, as passed to the server's request handler."""
    from megatron.mixture.catalog.catalog import Catalog
    from megatron.mixture.catalog.properties import read_properties
    from megatron.mixture.document_chunks import DocumentChunks
    from megatron.mixture.serve.service import RequestHandler

    write_records(folder / "a.jsonl")
    with Catalog(folder / "catalog", n_threads=1) as catalog:
        catalog.register(
            "c", [str(folder / "a.jsonl")], read_properties(["good AS good boolean"]), quiet=True
        )
    base = "catalog: catalog\nby: [good]\ncount: documents\n"
    (folder / "m.yaml").write_text(base)
    (folder / "n.yaml").write_text(base + "adaptive: {rule: loss, every_steps: 1}\n")
    mixtures = {name: DocumentChunks(folder / f"{name}.yaml", chunk_size=8, run=None) for name in ("m", "n")}
    desk = RequestHandler(mixtures)
    k = len(mixtures["m"].names)
    words = [
        json.dumps({"mixture": name, "identity": source.identity, "first": 0, "n": 1, **run})
        for name, source in mixtures.items() for run in ({}, {"run": "a"})
    ] + [
        json.dumps({"mixture": name, "identity": source.identity, "chunk": 0, "nats": [1.5] * k,
        "tokens": [5] * k, "run": "r"})
        for name, source in mixtures.items()
    ]  # fmt: skip

    def read(word: str) -> None:
        body = word.encode("utf-8", "surrogateescape")
        if b"chunk" in body:
            desk.handle_action("report", body, "fuzz")
        else:
            answer = desk.stream_chunks(body, "fuzz")
            # range first: zip stops at it without requesting a fourth table
            for _, table in zip(range(3), answer, strict=False):
                if len(table) > 64:
                    raise WrongAnswerError(f"got {len(table)} rows in a table")
            # runs the generator's `finally`, which counts the request
            answer.close()
        (
            desk.handle_action("status", b"", "fuzz"),
            desk.handle_action("metrics", b"", "fuzz"),
            desk.handle_action("describe", b"", "fuzz"),
        )

    return WordCase(tuple(words), mutate_json, read)


def open_catalog_messages(folder: Path) -> WordCase:
    """Open requests about the catalog and the mixtures of a served folder."""
    from megatron.mixture.journal import RUN_NAME
    from megatron.mixture.serve.catalog_protocol import read_mixture_request, read_registration
    from megatron.mixture.serve.directory import ServedDirectory
    from megatron.mixture.serve.jobs import RateLimiter

    (folder / "served").mkdir()
    write_records(folder / "served" / "a.jsonl")
    directory = ServedDirectory(folder / "served", 0, [])
    directory._rate = RateLimiter(1e9, 1 << 30)
    registration = {"corpus": "c", "inputs": ["a.jsonl"], "properties": ["good AS good boolean"]}
    directory._register(
        read_registration(json.dumps(registration).encode(), directory.folder, directory.roots)
    )
    spec = {"by": ["good"], "weights": [{"where": {"good": True}, "weight": 1}], "where": "size > 20"}
    words = [
        json.dumps(registration), json.dumps({**registration, "tokenizer": "a.jsonl", "append_eod": True}),
        json.dumps({**registration, "inputs": ["*.jsonl", "../served/a.jsonl"], "text_key": "text"}),
        json.dumps({"spec": spec}), json.dumps({"spec": {**spec, "adaptive": {"rule": "ado"}}, "name": "n"}),
        json.dumps({"documents": {"where": ["good"], "by": ["good"], "list_domains": "each"}}),
        json.dumps({"documents": {"where": "good OR size > 9"}, "tokens": False}),
        json.dumps({"documents": {"corpora": ["c"], "where": "size BETWEEN 1 AND 90"}}),
    ]  # fmt: skip

    def read(word: str) -> None:
        body = word.encode("utf-8", "surrogateescape")
        if b"inputs" in body:
            files = read_registration(body, directory.folder, directory.roots).files
            outside = [file for file in files if not Path(file).is_relative_to(directory.folder)]
            if outside:
                raise WrongAnswerError(f"got {outside[0]} to register, outside of the folder")
        elif b"spec" in body:
            name, keys = read_mixture_request(body)
            if not RUN_NAME.fullmatch(name) or "catalog" in keys:
                raise WrongAnswerError(f"got the mixture {name!r} with {sorted(keys)}")
        else:
            json.dumps(directory.handle("query", body), allow_nan=False)

    return WordCase(tuple(words), mutate_json, read)


TARGETS = (
    FuzzTarget("where conditions", 2, open_conditions),
    FuzzTarget("registered files", 2, open_registered),
    FuzzTarget("catalogs", 1, open_catalog),
    FuzzTarget("server messages", 3, open_messages),
    FuzzTarget("catalog messages", 2, open_catalog_messages),
)
