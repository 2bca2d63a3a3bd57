"""The options of Megatron's preprocessing scripts are accepted, and change no token."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.config.megatron_args import load_rows
from megatron.data.indexed import IndexedTokens
from megatron.tokenizer.kinds import KINDS, TokenizerSpec, load_tokenizer
from tests.datasets import read_documents, write_texts
from tests.tool_modules import TOOLS, Cli, load_tool

# options of preprocess_data_many_cores.py of the data-constrained study, and of Megatron's preprocess_data.py
THEIRS = {
    "--root", "--input", "--json-keys", "--split-sentences", "--keep-newlines", "--tokenizer-type",
    "--vocab-file", "--merge-file", "--append-eod", "--tokenizer-model", "--seq-length",
    "--trust-remote-code", "--make-vocab-size-divisible-by", "--pad-vocab-size-to", "--output-prefix",
    "--dataset-impl", "--workers", "--log-interval", "--lang", "--partitions", "--vocab-size",
}  # fmt: skip
FLAGS = [row for row in load_rows() if "preprocessing" in row.conversion]
THEIR_KINDS = {
    "BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer", "HFTokenizer",
    "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "NullTokenizer",
}  # fmt: skip
# no letter with a combining accent: transformers composes it first, Google's and Megatron's code does not
TEXTS = [
    "Hello, world! unaffable naïve Ünïcödé İstanbul", "", "a\tb\n\nc\u00a0d\u200be \x00\x07\ufffd end.",
    "中文 and 日本語, kana カタカナ 한국어", "don't [SEP] [MASK] it's e-mail@x.org $5.00 «quoted» …",
    "x" * 150, "x" * 201, "ΑΒΓ straße Ǆ ﬁ ½ ² é", "emoji 🙂👩\u200d💻 ok",
]  # fmt: skip


NUMBERS = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "9")
Write = Callable[..., tuple[list[list[int]], list[str]]]


@pytest.fixture
def write_tokens(cli: Cli, tmp_path: Path) -> Write:
    """Return a function: options -> (tokens of each document, warnings), on three documents of numbers."""
    write_texts(tmp_path / "in.jsonl", ("1 2\n3", "4", ""))

    def write(*words: str, base: tuple[str, ...] = NUMBERS) -> tuple[list[list[int]], list[str]]:
        out = ["--output-prefix", "x", "--root", tmp_path, "--quiet", "--overwrite"]
        lines = cli("prepare", "--input", tmp_path / "in.jsonl", *base, *out, *words).error.splitlines()
        documents = read_documents(tmp_path / "x_text_document")
        return documents, [line[9:] for line in lines if re.match(r"[\d:]{8} --", line)]

    return write


def test_every_option_and_kind_of_their_scripts_is_known() -> None:
    parser = load_tool(TOOLS / "preprocess_data_many_cores.py").build_parser()
    assert set(parser._option_string_actions) >= THEIRS
    assert set(KINDS) >= THEIR_KINDS


def test_options_without_effect_are_accepted_with_the_reason(write_tokens: Write) -> None:
    values = {"switch": ""}
    rows = [
        *((f"--{flag.name} {values.get(flag.form, '7')}", f"no effect: {flag.note}.") for flag in FLAGS),
        *((f"--dataset-impl {name}", f"got {name}, writing mmap, the only format that is read.")
          for name in ("lazy", "cached")),
        *((f"--{name} nowhere", "no effect: NullTokenizer is read from --vocab-size.")
          for name in ("vocab-file", "merge-file")),
    ]  # fmt: skip
    for words, reason in rows:
        expected = [f"{words.split()[0]}: {reason}"]
        assert write_tokens(*words.split()) == ([[1, 2, 3], [4], []], expected)
    assert write_tokens("--dataset-impl", "mmap")[1] == []


def test_an_input_is_also_searched_below_the_output_folder(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "data" / "c4").mkdir(parents=True)
    for name, text in (("data/a.jsonl", "1"), ("data/c4/b.jsonl", "1"), ("a.jsonl", "2 2")):
        write_texts(tmp_path / name, [text])

    def prepare(name: str, *inputs: str, status: int = 0) -> list[int]:
        words = ["--output-prefix", name, *NUMBERS, "--root", "data", "--quiet"]
        cli("prepare", "--input", *inputs, *words, cwd=tmp_path, status=status)
        return [] if status else IndexedTokens(tmp_path / f"data/{name}_text_document").tokens.tolist()

    prepare("x", "c4/b.jsonl", "c4/*.jsonl", status=1)  # twice
    assert prepare("x", "c4/*.jsonl") == [1]
    assert prepare("y", "a.jsonl", "c4") == [2, 2, 1]  # a path that exists as given has precedence
    prepare("z", "none.jsonl", status=1)


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory, scaling_data: Path) -> Path:
    """A vocabulary of 600 pieces, trained on the texts, in BERT's form."""
    from tokenizers import BertWordPieceTokenizer

    trained = BertWordPieceTokenizer(lowercase=False, strip_accents=False)
    trained.train_from_iterator(
        TEXTS * 3, vocab_size=600, min_frequency=1, limit_alphabet=500, show_progress=False
    )
    path = tmp_path_factory.mktemp("bert") / "vocab.txt"
    pieces = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    path.write_text("".join(f"{piece}\n" for piece, _ in pieces), "utf-8")
    return path


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_bert_tokenizers_give_the_ids_of_googles_code(vocab: Path, kind: str) -> None:
    legacy = pytest.importorskip("transformers.models.bert.tokenization_bert_legacy")
    table = {piece: i for i, piece in enumerate(vocab.read_text("utf-8").splitlines())}
    words = legacy.BasicTokenizer(do_lower_case=kind.endswith("LowerCase"))
    pieces = legacy.WordpieceTokenizer(table, "[UNK]", max_input_chars_per_word=200)
    tokenizer = load_tokenizer(TokenizerSpec(kind, vocab_file=str(vocab)))
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert ids == [table[piece] for word in words.tokenize(text) for piece in pieces.tokenize(word)]
    assert tokenizer.n_tokens == len(table)


def test_bert_tokenizers_end_documents_as_named(write_tokens: Write, vocab: Path, tmp_path: Path) -> None:
    table = {piece: i for i, piece in enumerate(vocab.read_text("utf-8").splitlines())}
    base = ("--tokenizer-type", "BertWordPieceCase", "--vocab-file", str(vocab))
    write_texts(tmp_path / "in.jsonl", ["a"])
    documents, warnings = write_tokens("--append-eod", "--eod-token", "[SEP]", base=base)
    assert (documents, warnings) == ([[table["a"], table["[SEP]"]]], [])
    with pytest.raises(ValueError, match="no line \\[UNK\\]"):
        (tmp_path / "other.txt").write_text("a\nb\n")
        load_tokenizer(TokenizerSpec("BertWordPieceCase", vocab_file=str(tmp_path / "other.txt")))
    with pytest.raises(ValueError, match="Set it with --eod-token"):
        _ = load_tokenizer(TokenizerSpec("BertWordPieceCase", vocab_file=str(vocab))).eod_id
