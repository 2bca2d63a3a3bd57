"""Token counts of registered documents, and their use as weights."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter
from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.properties import read_properties
from megatron.mixture.catalog.query import Query
from megatron.mixture.document_chunks import DocumentChunks
from megatron.text.preprocess import PreprocessOptions, preprocess
from megatron.text.token_counts import TokenCounter
from megatron.tokenizer.kinds import TokenizerSpec
from tests.mixture.test_tars import write_tar

HOSTILE = [
    "",
    " ",
    "a<|endoftext|>b",
    "naïve 12345 \u2028 日本語 \U0001f600",
    "x" * 3000,
    '"\\\n\t',
    "\ud800 alone",
]
NULL = TokenizerSpec("NullTokenizer", vocab_size=100)


def load_token_counts(path: Path, corpus: str) -> list[int]:
    with Catalog(path, read_only=True) as catalog:
        table = catalog.get_corpus(corpus).table
        return [
            n
            for (n,) in catalog.connection.execute(
                f"SELECT tokens FROM {table} ORDER BY file, row"
            ).fetchall()
        ]


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("n_threads", [1, 3])
def test_counts_are_the_lengths_that_preprocessing_gives(
    scaling_data, tmp_path, append_eod, n_threads
) -> None:
    texts = HOSTILE[:-1] + [
        json.loads(line)["text"]
        for line in (scaling_data / "c4" / "c4_en_shard00000_first1000.jsonl").open().readlines()[:300]
    ]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "t.jsonl").write_text(lines)
    pyarrow.parquet.write_table(
        pyarrow.table({"text": [*texts[:7], None, *texts[7:]]}), tmp_path / "t.parquet"
    )
    write_tar(tmp_path / "t.tar", [(f"{i}.txt", text.encode()) for i, text in enumerate(texts)])
    tokenizer = str(scaling_data / "gpt2_tokenizer")
    preprocess(
        [str(tmp_path / "t.jsonl")],
        tmp_path / "p",
        tokenizer,
        PreprocessOptions(append_eod=append_eod, quiet=True),
    )
    expected = IndexedTokens(tmp_path / "p_text_document").document_tokens.tolist()
    counter = TokenCounter(tokenizer, append_eod, n_threads=n_threads)
    with Catalog(tmp_path / "c", n_threads=1) as catalog:
        for kind in ("jsonl", "parquet", "tar"):
            catalog.register(kind, [str(tmp_path / f"t.{kind}")], (), quiet=True, counter=counter)
        assert catalog.summarize_corpora()[0].n_tokens == sum(expected)
    for kind in ("jsonl", "parquet", "tar"):
        assert load_token_counts(tmp_path / "c", kind) == expected, kind


def test_a_slow_tokenizer_counts_too_and_names_the_text_it_refuses(tmp_path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text":"1 2 3"}\n{"text":""}\n{"text":"9"}\n')
    with Catalog(tmp_path / "c", n_threads=1) as catalog:
        catalog.register("a", [str(tmp_path / "t.jsonl")], (), quiet=True, counter=TokenCounter(NULL, True))
        (tmp_path / "bad.jsonl").write_text('{"text":"1"}\n{"text":"one"}\n')
        with pytest.raises(ValueError, match=r"bad\.jsonl, document 2: NullTokenizer: got 'one'"):
            catalog.register("b", [str(tmp_path / "bad.jsonl")], (), quiet=True, counter=TokenCounter(NULL))
        assert [summary.name for summary in catalog.summarize_corpora()] == ["a"]
    assert load_token_counts(tmp_path / "c", "a") == [4, 1, 2]


def test_the_tokenizer_of_a_corpus_stays_the_same(tmp_path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text":"1"}\n')
    with IndexedWriter(tmp_path / "pair", np.dtype(np.uint16), {"tokenizer": {"sha256": "other"}}) as writer:
        writer.add_document(np.arange(3))
    with Catalog(tmp_path / "c", n_threads=1) as catalog:
        catalog.register("a", [str(tmp_path / "t.jsonl")], (), quiet=True, counter=TokenCounter(NULL))
        for counter in (None, TokenCounter(NULL, append_eod=True)):
            with pytest.raises(ValueError, match="tokens of null-100. Use the same"):
                catalog.register("a", [str(tmp_path / "t.jsonl")], (), quiet=True, counter=counter)
        with pytest.raises(ValueError, match="made with another tokenizer than null-100"):
            catalog.register("p", [str(tmp_path / "pair")], (), quiet=True, counter=TokenCounter(NULL))


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """Return 600 documents of 2 tokens in the domain `short`, and 600 of 6 tokens in `long`."""
    with (tmp_path / "t.jsonl").open("w") as file:
        for i in range(1200):
            text = " ".join(["1"] * (6 if i % 2 else 2))
            file.write(json.dumps({"text": text, "of": "long" if i % 2 else "short"}) + "\n")
    with Catalog(tmp_path / "c", n_threads=1) as catalog:
        properties = read_properties(["of AS of category"])
        catalog.register("a", [str(tmp_path / "t.jsonl")], properties, quiet=True, counter=TokenCounter(NULL))
        catalog.register("uncounted", [str(tmp_path / "t.jsonl")], properties, quiet=True)
    return tmp_path


@pytest.mark.parametrize(
    ("written", "short_of_16"),
    # half of the tokens each: three short documents per long one
    [("weights: {short: 1, long: 1}", 12), ("weights: {short: 1, long: 1}\ncount: documents", 8),
     ("weights: inferred", 8), ("weights: {short: 1, long: 9}\ncount: tokens", 4)],
)  # fmt: skip
def test_weights_of_whole_documents_count_tokens_or_documents(uneven, written, short_of_16) -> None:
    (uneven / "m.yaml").write_text(f"catalog: c\ncorpora: [a]\nby: [of]\n{written}\n")
    source = DocumentChunks(uneven / "m.yaml", chunk_size=16)
    table = source.read(0, 20)
    for chunk in range(20):
        domains = table.column("domain").to_pylist()[16 * chunk : 16 * chunk + 16]
        assert Counter(source.names[k] for k in domains)["short"] == short_of_16


def test_a_query_sums_tokens_and_reports_uncounted_documents(uneven) -> None:
    with Catalog(uneven / "c", read_only=True) as catalog:
        result = Query(("a",)).run(catalog, ["of"], count_tokens=True)
        assert result.names == ("long", "short")
        assert result.n_tokens == (3600, 1200)
        assert Query(("a",)).where("tokens > 2").run(catalog, ["of"]).names == ("long",)
        with pytest.raises(ValueError, match="tokens of 1,200 of 2,400 documents are not counted"):
            Query().run(catalog, ["of"], count_tokens=True)
    result.save(uneven / "r.arrow")
    assert type(result).load(uneven / "r.arrow").n_tokens == (3600, 1200)
