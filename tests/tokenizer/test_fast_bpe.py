"""What the C++ encoder refuses, and files read without the library's vocabulary: the library's attributes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from megatron.tokenizer.bpe import BpeTokenizer, FileBpeTokenizer, load_hf_tokenizer
from megatron.tokenizer.fast_bpe import compile_fast_bpe, unicode_to_bytes
from megatron.tokenizer.tokenizer_file import read_bpe_file
from megatron.tokenizer.train_bpe import train_bpe


def test_tokenizers_of_another_kind_are_left_to_the_library_with_the_reason() -> None:
    alphabet = {letter: i for i, letter in enumerate(unicode_to_bytes())}

    def build(normalizer: Any, *pre_tokenizer: bool, vocab: dict[str, int] = {}) -> Tokenizer:  # noqa: B006
        bpe = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        bpe.normalizer = normalizer
        for add_prefix_space in pre_tokenizer:
            bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
        return bpe

    two_spellings = build(normalizers.NFC(), False, vocab=alphabet)
    two_spellings.add_tokens([AddedToken(text, normalized=True) for text in ("\u00e9", "e\u0301")])
    plain = build(None, False, vocab=alphabet).to_str()
    merged = plain.replace('"merges":[]', '"merges":[["e","s"]]')
    features = {"dropout": "0.1", "continuing_subword_prefix": '"##"', "end_of_word_suffix": '"</w>"'}
    for saved, reason in (
        (Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str(), "WordLevel"),
        (build(None).to_str(), "pre-tokenizer"),
        (build(None, False).to_str(), "lacks 243 of the bytes of UTF-8"),  # 13 of 256 bytes never occur
        (build(None, True).to_str(), "adds a blank"),
        (build(normalizers.NFKC(), True).to_str(), "NFKC"),
        (two_spellings.to_str(), "two of its added tokens are '\u00e9'"),
        (merged, "a merge of pieces outside the vocabulary"),
        *((plain.replace(f'"{key}":null', f'"{key}":{features[key]}'), f"has {key}") for key in features),
    ):
        fast, why = compile_fast_bpe(saved)
        assert fast is None and reason in why


def train(folder: Path) -> Tokenizer:
    texts = ['the "quoted" \\ text\n\t of the tests, \u4e2d \x01 \U0001f642'] * 5
    return Tokenizer.from_file(str(train_bpe(texts, 280, folder)))


def add_tokens(inner: Tokenizer) -> None:
    inner.add_special_tokens(["<s>", '<"\n\u2028>'])
    inner.add_tokens([AddedToken("the", lstrip=True, normalized=True), AddedToken("zzz", single_word=True)])


def add_bos(inner: Tokenizer) -> None:
    inner.add_special_tokens(["<s>"])
    inner.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
    )


def add_eos(inner: Tokenizer) -> None:
    inner.post_processor = processors.TemplateProcessing(
        "$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )


def limit(inner: Tokenizer) -> None:
    inner.enable_truncation(5)
    inner.enable_padding(length=8)


@pytest.mark.parametrize("change", [None, add_tokens, add_bos, add_eos, limit])
@pytest.mark.parametrize("is_legacy", [False, True])
def test_attributes_are_those_of_the_library(tmp_path: Path, change: Any, is_legacy: bool) -> None:
    inner = train(tmp_path)
    if change is not None:
        change(inner)
    saved = json.loads(inner.to_str())
    if is_legacy:  # merges as in files of older versions, and another order of keys and of pieces
        saved["model"]["merges"] = [" ".join(pair) for pair in saved["model"]["merges"]]
        saved["model"]["vocab"] = dict(reversed(saved["model"]["vocab"].items()))
        saved = dict(reversed(saved.items()))
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved, ensure_ascii=is_legacy, indent=2))
    read = load_hf_tokenizer(str(tmp_path))
    assert isinstance(read, FileBpeTokenizer) and "inner" not in vars(read)
    built = BpeTokenizer(Tokenizer.from_file(str(tmp_path / "tokenizer.json")), str(tmp_path))
    for name in ("sha256", "n_tokens", "bos_id", "eod", "missing_eod"):
        assert getattr(read, name) == getattr(built, name), name
    for token in ("<|endoftext|>", "<s>", "the", "zzz", "a", "absent"):
        assert read.token_id(token) == built.token_id(token)
    assert read.encode("the text") == built.encode("the text")


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "an id far beyond the others": lambda saved: saved["model"]["vocab"].update(qq=1_000_000),
    "an added token with another id": lambda saved: saved["added_tokens"][0].update(id=5),
    "an added token twice": lambda saved: saved["added_tokens"].append(saved["added_tokens"][0]),
    "a number that is not an integer": lambda saved: saved["model"].update(dropout=0.1),
    "another model": lambda saved: saved["model"].update(type="WordPiece"),
    "a setting that the library refuses": lambda saved: saved.update(decoder={"type": "Other"}),
    "no model": lambda saved: saved.pop("model"),
}


def test_other_files_are_left_to_the_library(tmp_path: Path) -> None:
    valid = train(tmp_path).to_str()
    assert read_bpe_file(valid.encode()) is not None
    for name, change in CHANGES.items():
        saved = json.loads(valid)
        change(saved)
        assert read_bpe_file(json.dumps(saved).encode()) is None, name


def test_a_file_that_changes_after_it_was_read_is_refused(tmp_path: Path) -> None:
    path, inner = tmp_path / "tokenizer.json", train(tmp_path)
    read = load_hf_tokenizer(str(path))
    add_tokens(inner)
    inner.save(str(path))
    with pytest.raises(ValueError, match=r"tokenizer\.json: got another tokenizer than a moment ago"):
        read.encode("a")
