"""Several keys of the same lines: a document is one for all of them or for none."""

import gzip
import json
import random
from pathlib import Path

import pytest

from megatron.data import preprocess as module
from megatron.data.documents import text_of
from megatron.data.indexed import IndexedTokens
from megatron.data.preprocess import Options, preprocess
from megatron.tokenizer.bpe import load_tokenizer
from megatron.tokenizer.train_bpe import train_bpe

KEYS = ("a", "b", "c")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["red fish blue fish"] * 9, 262, folder)
    return str(folder)


def lines_of(seed: int, n: int) -> list[bytes]:
    """Some lack one key or another, some are odd JSON that only Python reads, some none at all."""
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
        made = json.dumps(record, ensure_ascii=rng.random() < 0.5)
        if 0.25 < kind < 0.35:
            made = made.replace('"n"', '"\\u0061"' if kind < 0.3 else '"n": NaN, "m"')
        return b"" if kind > 0.97 else (made[:-1] if kind > 0.93 else made).encode()

    return [line() for _ in range(n)]


def twin(lines: list[bytes]) -> tuple[list[dict[str, str]], list[int]]:
    """Documents, and numbers of the lines that are none, by Python's json alone."""
    documents, rejected = [], []
    for number, line in enumerate(lines, 1):
        try:
            if line:
                documents.append({key: text_of(line, key) for key in KEYS})
        except ValueError:
            rejected.append(number)
    return documents, rejected


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_of_lines_good_and_bad_every_key_gets_the_same_documents(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, seed: int, packed: bool
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 5000)
    lines = lines_of(seed, 400)
    documents, rejected = twin(lines)
    assert 20 < len(rejected) < 200
    path = tmp_path / ("in.jsonl.gz" if packed else "in.jsonl")
    content = b"\n".join(lines)
    path.write_bytes(gzip.compress(content) if packed else content)
    options = Options(keys=KEYS, append_eod=True, skip_bad_lines=True, n_workers=2)
    told = preprocess([str(path)], tmp_path / "out", tokenizer, options)
    reference = load_tokenizer(tokenizer)
    for key in KEYS:
        tokens = IndexedTokens(tmp_path / f"out_{key}_document")
        wanted = [[*reference.encode(document[key]), reference.eod_id] for document in documents]
        assert [tokens.document(i).tolist() for i in range(tokens.n_documents)] == wanted
    assert told.rejects is not None
    assert [json.loads(line)["line"] for line in told.rejects.read_text().splitlines()] == rejected
    with pytest.raises(ValueError, match=rf", line {rejected[0]}: "):
        preprocess([str(path)], tmp_path / "strict", tokenizer, Options(keys=KEYS))
    assert not list(tmp_path.glob("*strict*"))


def test_max_tokens_counts_the_first_key_and_all_keys_end_with_the_same_document(
    tmp_path: Path, tokenizer: str
) -> None:
    lines = [line for line in lines_of(9, 200) if line]
    documents, _ = twin(lines)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(lines))
    reference = load_tokenizer(tokenizer)
    n_tokens = sum(len(reference.encode(document["b"])) for document in documents[:50])
    options = Options(keys=("b", "a", "c"), skip_bad_lines=True, max_tokens=n_tokens)
    told = preprocess([str(path)], tmp_path / "out", tokenizer, options)
    assert [output.n_documents for output in told.outputs] == [50, 50, 50]
    assert told.outputs[0].n_tokens == n_tokens
    assert IndexedTokens(tmp_path / "out_c_document").document(49).tolist() == reference.encode(
        documents[49]["c"]
    )
