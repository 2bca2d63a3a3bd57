"""End-of-document tokens: equal for a folder and the tokenizer.json in it, and set by options."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from megatron.data.sidecar import read_sidecar
from megatron.text.preprocess import PreprocessOptions, preprocess
from megatron.tokenizer.bpe import load_hf_tokenizer
from megatron.tokenizer.encoder import build_fast_bpe
from megatron.tokenizer.kinds import TokenizerSpec, load_tokenizer
from tests.datasets import read_documents, write_texts

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
