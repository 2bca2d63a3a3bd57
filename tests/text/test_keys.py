"""Several keys of the same lines: a line is a document for all keys or for none."""

import gzip
import json
import random
from pathlib import Path

import pytest

from megatron.data.indexed import IndexedTokens
from megatron.text import preprocess as module
from megatron.text.preprocess import PreprocessOptions, preprocess
from megatron.text.text_readers import parse_text
from megatron.tokenizer.bpe import load_hf_tokenizer
from megatron.tokenizer.train_bpe import train_bpe

KEYS = ("a", "b", "c")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["red fish blue fish"] * 9, 262, folder)
    return str(folder)


def make_lines(seed: int, n: int) -> list[bytes]:
    """Return random lines: some lack a key, some are JSON that only Python parses, some are invalid."""
    rng = random.Random(seed)

    def text(key: str) -> str:
        return f"{key} " + " ".join(
            rng.choices(["red", "fish", "blue", "\u00e9t\u00e9", "\n"], k=rng.randrange(9))
        )

    def line() -> bytes:
        record: dict[str, object] = {key: text(key) for key in KEYS} | {"n": 1}
        kind = rng.random()
        if kind < 0.15:
            record.pop(rng.choice(KEYS))
        elif kind < 0.25:
            record[rng.choice(KEYS)] = None
        text_line = json.dumps(record, ensure_ascii=rng.random() < 0.5)
        if 0.25 < kind < 0.35:
            text_line = text_line.replace('"n"', '"\\u0061"' if kind < 0.3 else '"n": NaN, "m"')
        return b"" if kind > 0.97 else (text_line[:-1] if kind > 0.93 else text_line).encode()

    return [line() for _ in range(n)]


def parse_in_python(lines: list[bytes]) -> tuple[list[dict[str, str]], list[int]]:
    """Return the documents, and the numbers of invalid lines, by Python's json alone."""
    documents, rejected = [], []
    for number, line in enumerate(lines, 1):
        try:
            if line:
                documents.append({key: parse_text(line, key) for key in KEYS})
        except ValueError:
            rejected.append(number)
    return documents, rejected


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_every_key_gets_the_same_documents_of_valid_and_invalid_lines(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, seed: int, packed: bool
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 5000)
    lines = make_lines(seed, 400)
    documents, rejected = parse_in_python(lines)
    assert 20 < len(rejected) < 200
    path = tmp_path / ("in.jsonl.gz" if packed else "in.jsonl")
    content = b"\n".join(lines)
    path.write_bytes(gzip.compress(content) if packed else content)
    options = PreprocessOptions(keys=KEYS, append_eod=True, skip_bad_lines=True, n_workers=2)
    result = preprocess([str(path)], tmp_path / "out", tokenizer, options)
    reference = load_hf_tokenizer(tokenizer)
    for key in KEYS:
        tokens = IndexedTokens(tmp_path / f"out_{key}_document")
        expected = [[*reference.encode(document[key]), reference.eod_id] for document in documents]
        assert [tokens.get_document(i).tolist() for i in range(tokens.n_documents)] == expected
    assert result.rejects is not None
    assert [json.loads(line)["line"] for line in result.rejects.read_text().splitlines()] == rejected
    with pytest.raises(ValueError, match=rf", line {rejected[0]}: "):
        preprocess([str(path)], tmp_path / "strict", tokenizer, PreprocessOptions(keys=KEYS))
    assert not list(tmp_path.glob("*strict*"))


def test_max_tokens_counts_the_first_key_and_all_keys_end_with_the_same_document(
    tmp_path: Path, tokenizer: str
) -> None:
    lines = [line for line in make_lines(9, 200) if line]
    documents, _ = parse_in_python(lines)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(lines))
    reference = load_hf_tokenizer(tokenizer)
    n_tokens = sum(len(reference.encode(document["b"])) for document in documents[:50])
    options = PreprocessOptions(keys=("b", "a", "c"), skip_bad_lines=True, max_tokens=n_tokens)
    result = preprocess([str(path)], tmp_path / "out", tokenizer, options)
    assert [output.n_documents for output in result.outputs] == [50, 50, 50]
    assert result.outputs[0].n_tokens == n_tokens
    assert IndexedTokens(tmp_path / "out_c_document").get_document(49).tolist() == reference.encode(
        documents[49]["c"]
    )
