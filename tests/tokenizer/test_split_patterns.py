"""Split patterns, added tokens and NFC in C++ give the ids of `tokenizers`, for tokenizers trained here."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megatron.tokenizer import split_pattern
from megatron.tokenizer.automaton import compile_automaton
from megatron.tokenizer.code_points import (
    CATEGORIES,
    N_CODE_POINTS,
    load_folds,
    load_gpt2_classes,
    load_property,
    load_table,
)
from megatron.tokenizer.fast_bpe import compile_fast_bpe, unicode_to_bytes
from megatron.tokenizer.split_pattern import UnsupportedPatternError
from tests.tokenizer.encoder_pair import (
    add_random_tokens,
    assert_equal_ids,
    assert_equal_line,
    draw_pattern_texts,
    draw_plane_texts,
    draw_token_texts,
)

# published split patterns, and others that use each supported construct; a list has several splits in a row
PATTERNS: dict[str, list[str]] = json.loads(Path(__file__).with_name("split_patterns.json").read_text())
LLAMA3 = PATTERNS["llama3"][0]


@cache
def train_pieces(words: int) -> str:
    """Train a byte-level BPE, with pieces of several words, on text of many scripts; return its JSON."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = byte_level(), decoders.ByteLevel()
    texts = [
        "The cat's 12345 WORDS don't end; they'LL go on in 2024/25.\n\n  def f(x):\n\treturn x_1 != 'a'\r\n",
        "\u4e2d\u6587\u5b57\u7b26 \u3042\u3044\u3046 \uac00 na\u00efve e\u0301 \U0001f642\U0001f680 \u00df",
        *draw_pattern_texts(300, seed=1),
    ]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + words, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(texts, trainer)
    return inner.to_str()


def build(parts: list[Any], normalizer: Any = None, words: int = 400) -> Tokenizer:
    inner = Tokenizer.from_str(train_pieces(words))
    inner.pre_tokenizer = pre_tokenizers.Sequence(parts)
    if normalizer is not None:
        inner.normalizer = normalizer
    return inner


def split(pattern: str, behavior: str = "isolated", invert: bool = False) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def byte_level(use_regex: bool = False) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


@cache
def make_hostile_texts(n: int = 400) -> list[str]:
    return [*draw_pattern_texts(n, seed=2), *draw_plane_texts(n, seed=3)]


OTHERS: dict[str, list[Any]] = {
    "gpt2": [byte_level(True)],
    "no pattern": [byte_level()],
    "a stage before gpt2": [split(r"\p{Lu}+"), byte_level(True)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), byte_level(True)],
    "runs of digits": [pre_tokenizers.Digits(individual_digits=False), byte_level(True)],
    "only matches": [split(r"\p{L}+|\p{N}", "removed", invert=True), byte_level()],
    "a text": [pre_tokenizers.Split("e", "isolated"), pre_tokenizers.Sequence([split(LLAMA3)]), byte_level()],
}
STAGES = OTHERS | {name: [*map(split, texts), byte_level()] for name, texts in PATTERNS.items()}


@pytest.mark.parametrize("name", STAGES)
def test_a_trained_tokenizer_with_each_pattern_and_kind_of_pre_tokenizer(name: str) -> None:
    assert assert_equal_ids(build(STAGES[name]), make_hostile_texts()) == 800


@pytest.mark.parametrize("name", PATTERNS)
def test_pairs_of_ascii_are_split_as_by_the_library(name: str) -> None:
    """Merges of the pairs show in the ids where a pattern splits, as after the last letter of a range."""
    kinds = "\n\r az'1!_/"  # each character beside a character of each kind
    pairs = {pair for a in map(chr, range(128)) for b in kinds for pair in ((a, b), (b, a))}
    letters = {byte: letter for letter, byte in unicode_to_bytes().items()}
    merges = [tuple(letters[ord(character)] for character in pair) for pair in sorted(pairs)]
    vocabulary = {letter: i for i, letter in enumerate(letters.values())}
    inner = Tokenizer(models.BPE(vocabulary | {a + b: 256 + i for i, (a, b) in enumerate(merges)}, merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence(STAGES[name])
    assert_equal_ids(inner, ["".join(pair) for pair in pairs])


def test_words_of_the_vocabulary_before_merges() -> None:
    saved = json.loads(build([split(LLAMA3), byte_level()], words=600).to_str())
    # without these merges the words of the vocabulary are reachable only as a whole
    saved["model"]["merges"] = saved["model"]["merges"][::3]
    saved["model"]["ignore_merges"] = True
    assert_equal_ids(Tokenizer.from_str(json.dumps(saved)), make_hostile_texts())


def test_ids_above_65535_in_short_and_long_words() -> None:
    saved = json.loads(build([split(LLAMA3), byte_level()]).to_str())
    saved["model"]["vocab"] = {piece: i * 300 for piece, i in saved["model"]["vocab"].items()}
    texts = make_hostile_texts() + ["the " * 50, "x" * 500, " ".join("ab" * n for n in range(40))]
    assert_equal_ids(Tokenizer.from_str(json.dumps(saved)), texts)


TOKENS = ["<|a|>", "<|a|>b", "|>", "the", "e\u0301", "  ", "   ", "_x_", "\u4e2d", "<", "a", "<|a"]


def test_added_tokens_with_every_condition() -> None:
    rng = np.random.default_rng(4)
    for normalizer in (None, normalizers.NFC()):
        for pattern in ([byte_level(True)], [split(LLAMA3), byte_level()], [byte_level(True)]):
            inner = build(pattern, normalizer, words=50)
            add_random_tokens(inner, TOKENS, rng)
            for special in (True, False):
                assert_equal_ids(inner, list(draw_token_texts(TOKENS, 200, seed=4)), special)


def test_text_that_nfc_changes_and_text_that_it_does_not() -> None:
    inner = build([split(LLAMA3), byte_level()], normalizers.NFC())
    texts = ["é", "é", "가", "क़", "ạ̇", "ạ̇", "Ω", "ok"]
    ranks = load_table("combining")
    marks = [chr(point) for point in np.flatnonzero(ranks) if point != 0x345][::11]
    sequences = [a + b + c for a in "a\u00e9\u0915\u4e2d" for b in marks for c in marks[::3]]
    assert len(sequences) > 1000
    assert_equal_ids(inner, [*texts, *sequences, *make_hostile_texts(), "a" * 5000 + "\u0301", ""])
    sequence = build([split(LLAMA3), byte_level()], normalizers.Sequence([normalizers.NFC()]))
    sequence.add_tokens([AddedToken("e\u0301", normalized=False)])  # searched before the text is normalized
    assert_equal_ids(sequence, [*texts, "a e\u0301 o\u0301 \u00e9", "xe\u0301x"])


def test_real_texts(scaling_data: Path) -> None:
    path = scaling_data / "redpajama_sample" / "sample_github1.jsonl"
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    for name in ("llama3", "o200k", "deepseek v3"):
        assert_equal_ids(build(STAGES[name]), texts[::5])


@pytest.mark.parametrize("name", ["llama3", "deepseek v3", "lazy"])
def test_a_line_of_megabytes_has_the_ids_of_its_whole_text(name: str, tmp_path: Path) -> None:
    inner = build(STAGES[name], normalizers.NFC())
    inner.add_special_tokens([AddedToken("<|a|>", lstrip=True)])
    words = ["the cat ", "x1 + 22", "\n\n  ", "\u4e2d\u6587 ", " <|a|> ", "don't ", "caf\u00e9 is "]
    assert_equal_line(inner, words, tmp_path)


def test_other_constructs_are_refused_and_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for pattern in (
        r"a*", r"(?=a)", r"(?<=a)b", r"\bx", r"^a", r"(?>a)", r"[[:alpha:]]", r"[a&&b]", r"\p{Greek}",
        r"(?i:st)", "(?i:\u00e9)", r"\h", r"\w", r"(a)\1", r"a{1,3}+", r"a**", r"(?!ab)c", r"(ab)++", r"(",
        r"a)", r"[b-a]", r"\xe9", r"a{65}", "[",
    ):  # fmt: skip
        with pytest.raises(UnsupportedPatternError):
            compile_automaton(pattern)
    saved = json.loads(build([split(r"\p{L}+"), byte_level()]).to_str())
    saved["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"(?<=a)b"
    fast, reason = compile_fast_bpe(json.dumps(saved))
    assert fast is None and "a look-behind, or" in reason and "(?<=a)b" in reason
    monkeypatch.setattr(split_pattern, "HAS_PARSER", False)
    fast, reason = compile_fast_bpe(build([split(LLAMA3), byte_level()]).to_str())
    assert fast is None and "an untried parser of Python" in reason


def test_tables_are_those_of_the_installed_library() -> None:
    # a sample of code points and every boundary; csrc/derive_code_points.py checks all of them
    points = {*range(0, N_CODE_POINTS, 997)}
    for name in ("categories", "space"):
        borders = np.flatnonzero(np.diff(load_table(name).astype(int)))
        points |= {*borders.tolist(), *(borders + 1).tolist()}
    sample = np.array(sorted(point for point in points if not 0xD800 <= point < 0xE000))
    text = "".join(map(chr, sample))
    names = {*CATEGORIES, "L", "N", "M", "P", "S"} - {"Cs"}
    tables = {rf"\p{{{name}}}": load_property(name) for name in names}
    for pattern, members in (tables | {r"\s": load_table("space") == 1}).items():
        assert members is not None
        remains = np.ones(len(sample), dtype=bool)
        for _, (begin, end) in split(f"(?:{pattern})+", "removed").pre_tokenize_str(text):
            remains[begin:end] = False
        assert np.array_equal(remains, members[sample]), pattern
    assert load_folds() == {"k": [0x212A], "s": [0x17F]}
    assert np.bincount(load_gpt2_classes(), minlength=4).min() > 20
