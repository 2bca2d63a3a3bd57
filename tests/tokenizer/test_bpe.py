"""Byte-level BPE tokenizers: loaded from a folder, from GPT-2's files, and trained."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.text.corpus import train_tokenizer
from megatron.tokenizer.bpe import load_hf_tokenizer
from megatron.tokenizer.train_bpe import train_bpe
from tests.datasets import write_texts
from tests.tool_modules import Cli
from tests.wrong_values import read_refusal

TEXT = ["the cat sat on the mat, the cat's mat", "3.14 and \u00e9t\u00e9 \U0001f600"] * 30


def test_a_trained_tokenizer_has_every_id_and_gives_back_any_text(tmp_path: Path) -> None:
    train_bpe(TEXT, 280, tmp_path)
    tokenizer = load_hf_tokenizer(str(tmp_path))
    assert tokenizer.n_tokens == 280
    assert tokenizer.eod_id == 0
    for text in [*TEXT[:2], "bytes never seen: \u4e2d\u6587 \x00 \t"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch(TEXT) == [tokenizer.encode(text) for text in TEXT]
    assert load_hf_tokenizer(str(tmp_path / "tokenizer.json")).sha256 == tokenizer.sha256


def test_an_impossible_tokenizer_is_not_trained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected 257 or more"):
        train_bpe(TEXT, 256, tmp_path)
    with pytest.raises(ValueError, match="Use more text"):
        train_bpe(["ab"], 5000, tmp_path)
    with pytest.raises(FileNotFoundError, match="No such file"):
        train_tokenizer(tmp_path / "none.jsonl", "text", 300, tmp_path)


def set_in_model(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda saved: saved["model"].update(values)


CONFIG = "tokenizer_config.json"
REFUSED: list[tuple[dict[str, str], Callable[[dict[str, Any]], object] | None, str]] = [
    # files in the folder, a change of a valid tokenizer.json (None: there is none), sentence
    ({}, None, "has neither tokenizer.json nor"),
    ({"tokenizer.json": "{}"}, None, "not a tokenizer"),
    ({"vocab.json": '{"a": 1}', "merges.txt": "x y z"}, None, "not a vocabulary and its merges"),
    # serialising this takes the library minutes and gigabytes
    ({}, lambda saved: saved["model"]["vocab"].update(A=2**32 - 1), "got 4,294,967,296 ids, expected"),
    # it would give other tokens at each run; 1 is read without the library, 0.1 with it
    ({}, set_in_model(dropout=0.1), "got BPE dropout 0.1, which gives other tokens at each run"),
    ({}, set_in_model(dropout=1), "got BPE dropout 1, which gives other tokens at each run"),
    ({CONFIG: '{"eos_token": "\\ud800"}'}, set_in_model(), "got eos_token .*, expected a line of"),
    *(({CONFIG: text}, set_in_model(), f"{CONFIG}: ") for text in ("[]", '{"eos_token": 5}', "{")),
]


def test_an_unusable_folder_is_refused_in_a_sentence(tmp_path: Path) -> None:
    train_bpe(["some text"] * 9, 260, tmp_path / "valid")
    valid = (tmp_path / "valid" / "tokenizer.json").read_text()
    for number, (files, change, sentence) in enumerate(REFUSED):
        folder = tmp_path / str(number)
        folder.mkdir()
        if change is not None:
            saved = json.loads(valid)
            change(saved)
            (folder / "tokenizer.json").write_text(json.dumps(saved))
        for name, text in files.items():
            (folder / name).write_text(text)
        assert re.search(sentence, str(read_refusal(lambda: load_hf_tokenizer(str(folder)))))  # noqa: B023


def test_an_unreachable_hub_is_reported_in_one_sentence_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # other tests set it for the whole process
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port, which refuses connections
    message = str(read_refusal(lambda: load_hf_tokenizer("no-such-tokenizer")))
    assert "not available on the Hugging Face hub" in message and "127.0.0.1:9" in message
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        load_hf_tokenizer("no-such-tokenizer")


def test_a_line_without_text_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    for line, reason in (
        (b'{"text": 3}', "line 2: 'text' is int"),
        (b'{"body": "x"}', "line 2: no key 'text'"),
        (b'{"text": "\xff"}', "line 2: not UTF-8"),
    ):
        source.write_bytes(b'{"text": "a\\ud800b"}\n' + line + b"\n")
        with pytest.raises(ValueError, match=reason):
            train_tokenizer(source, "text", 300, tmp_path / "t")
        assert not (tmp_path / "t").exists()


def test_the_tool_trains_once_and_reports_it(cli: Cli, tmp_path: Path) -> None:
    write_texts(tmp_path / "text.jsonl", TEXT)

    def train(name: str, n_tokens: int, status: int = 0) -> str:
        words = [tmp_path / name, "--n-tokens", n_tokens, "--out", tmp_path / "t"]
        done = cli("tokenizer", *words, status=status)
        return (done.output + done.error).rpartition(": ")[2]

    assert train("text.jsonl", 270) == "270 tokens\n"
    assert train("text.jsonl", 270) == "270 tokens, already there\n"
    assert train("text.jsonl", 275) == "275 tokens\n"
    assert train("none.jsonl", 270, status=1).lower().startswith("no such file")
