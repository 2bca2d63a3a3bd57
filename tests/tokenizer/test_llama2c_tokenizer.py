"""Tokenizers of llama2.c, compared with its encoding loop in Python."""

import json
from pathlib import Path

import pytest

from megatron.tokenizer.kinds import load_tokenizer_by_name
from megatron.tokenizer.llama2c_tokenizer import Llama2cTokenizer, read_pieces


@pytest.fixture(scope="module")
def vocabulary(scaling_data: Path) -> Path:
    return scaling_data / "stories260K" / "tok512.bin"


def encode_slowly(text: str, pieces: list[str], scores: list[float]) -> list[int]:
    """Encode as run.c does: characters or bytes, then merge the neighbours of best score, leftmost first."""
    id_of_piece = {piece: i for i, piece in enumerate(pieces)}
    ids = []
    for character in " " + text if text else "":
        piece_id = id_of_piece.get(character)
        ids += [piece_id] if piece_id is not None else [byte + 3 for byte in character.encode()]
    while True:
        best, at = float("-inf"), -1
        for i in range(len(ids) - 1):
            merged = id_of_piece.get(pieces[ids[i]] + pieces[ids[i + 1]])
            if merged is not None and scores[merged] > best:
                best, at = scores[merged], i
        if at < 0:
            return ids
        ids[at : at + 2] = [id_of_piece[pieces[ids[at]] + pieces[ids[at + 1]]]]


def test_ids_of_real_text_are_those_of_llama2c(vocabulary: Path, scaling_data: Path) -> None:
    pieces, scores = read_pieces(vocabulary)
    tokenizer = Llama2cTokenizer(vocabulary)
    texts = ["", " ", "Once upon a time", "caf\u00e9 \u4f60\u597d \U0001f600\n\tend ", "aaaa bbb <s> <0x41>"]
    with (scaling_data / "c4" / "c4_en_shard00000_first1000.jsonl").open() as lines:
        texts += [json.loads(next(lines))["text"][:300] for _ in range(150)]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids == encode_slowly(text, pieces, scores), text
        assert tokenizer.decode(ids) == text


def test_common_words_of_children_are_few_pieces(vocabulary: Path) -> None:
    tokenizer = Llama2cTokenizer(vocabulary)
    pieces, _ = read_pieces(vocabulary)
    tokens = [pieces[i] for i in tokenizer.encode("Once upon a time, there was a little")]
    assert tokens == [" Once", " upon", " a", " time", ",", " there", " was", " a", " little"]
    assert (tokenizer.n_tokens, tokenizer.bos_id, tokenizer.eod_id) == (512, 1, 1)
    assert load_tokenizer_by_name(str(vocabulary)).sha256 == tokenizer.sha256


def test_a_file_of_another_format_is_refused_in_one_sentence(tmp_path: Path, vocabulary: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such tokenizer file"):
        Llama2cTokenizer(tmp_path / "none.bin")
    cut = tmp_path / "cut.bin"
    cut.write_bytes(vocabulary.read_bytes()[:-3])
    with pytest.raises(ValueError, match="expected a tokenizer of llama2.c"):
        Llama2cTokenizer(cut)
    cut.write_bytes(b"\x07\x00\x00\x00" + b"\x00" * 12)
    with pytest.raises(ValueError, match="expected a tokenizer of llama2.c"):
        Llama2cTokenizer(cut)
