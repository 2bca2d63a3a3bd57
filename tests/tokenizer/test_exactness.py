"""The C++ encoder gives exactly the ids of `tokenizers` for real data, adversarial text and JSON."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from megatron.data.indexed import IndexedTokens
from megatron.text.preprocess import PreprocessOptions, preprocess
from megatron.tokenizer.bpe import load_hf_tokenizer
from megatron.tokenizer.encoder import FastEncoder, build_fast_bpe
from tests.datasets import read_documents
from tests.tokenizer.encoder_pair import (
    compare_encoders,
    draw_pattern_texts,
    draw_plane_texts,
    draw_token_texts,
)

EOD_TEXT = "<|endoftext|>"
ODD_TEXTS = [
    "", " ", "  ", "\n", "a", "'", "''s", "'s 't 're 've 'm 'll 'd", "'S 'RE it'sn't", "don't'", " 's",
    "'l", "'r e", "a  b", "a   \n\n  b  ", "\t\tx", "x\xa0 y", "\u3000\u3000a", "a\u2028b\u2029c\x85d",
    "\r\n\r\n", "<|endoftext|>", "a<|endoftext|>b  <|endoftext|>", "<|endoftext|", "<<|endoftext|>>",
    "  <|endoftext|>  ", "12345678901234567890", "\u0661\u0662\xbd\u2167", "1a2b3c",
    "e\u0301\u0301\u200d\U0001f469\u200d\U0001f680", "\ue000\uf8ff\U000f0000\u0378\U0002fffe\ufffe",
    "\x00\x01\x7f",
    "xxxxxxxxxxxxxxx xxxxxxxxxxxxxxxx xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy",
]  # fmt: skip


class EncoderPair:
    """C++ encoder and library encoder of one tokenizer."""

    def __init__(self, folder: Path, special: bool = True) -> None:
        fast, reason = build_fast_bpe(load_hf_tokenizer(str(folder)))
        assert fast is not None, reason
        self.fast = FastEncoder(fast, special)
        self.library: Tokenizer = load_hf_tokenizer(str(folder)).inner
        self.library.encode_special_tokens = not special

    def assert_equal(self, texts: list[str]) -> int:
        """Compare the ids of all texts, and return the number of tokens."""
        return compare_encoders(self.fast, self.library, texts)


@pytest.fixture(scope="module")
def gpt2(scaling_data: Path) -> EncoderPair:
    return EncoderPair(scaling_data / "gpt2_tokenizer")


@pytest.fixture(scope="module")
def small(scaling_data: Path, tmp_path_factory: pytest.TempPathFactory) -> EncoderPair:
    """Vocabulary of 5,000 from Megatron's tests, in which most words are merged from pieces."""
    folder = tmp_path_factory.mktemp("tiny")
    for name in ("vocab.json", "merges.txt"):
        source = scaling_data / "megatron_openwebtext" / f"gpt2-tiny-{name}"
        (folder / name).write_bytes(source.read_bytes())
    return EncoderPair(folder)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_real_text_files_pass_the_pipeline_token_for_token(
    tmp_path: Path, scaling_data: Path, gpt2: EncoderPair, small: EncoderPair, whole: bool
) -> None:
    published = {  # from the index of the data
        "c4_en_shard00000_first1000.jsonl": 485_006,
        "redpajama_c4_sample2_1000.jsonl": 493_321,
        "derived_slimpajama_schema.jsonl.gz": 3_738_369,
    }
    n_files, options = 0, PreprocessOptions(quiet=True, overwrite=True)
    for path in sorted(scaling_data.rglob("*.json*")):
        if not whole and not path.name.startswith(("c4", "olmo", "redpajama_c4")):
            continue
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        first = raw.split(b"\n", 1)[0]
        if not first.startswith(b'{"') or not isinstance(json.loads(first).get("text"), str):
            continue
        texts = [json.loads(line)["text"] for line in raw.splitlines()]
        expected, lengths = gpt2.fast.encode(texts)
        if whole:  # the library takes minutes
            assert gpt2.assert_equal(texts) == len(expected)
            small.assert_equal(texts[::10])
        preprocess([str(path)], tmp_path / "out", str(scaling_data / "gpt2_tokenizer"), options)
        tokens = IndexedTokens(tmp_path / "out_text_document")
        assert np.array_equal(tokens.tokens[: tokens.n_tokens], expected), path
        assert np.array_equal(tokens.document_tokens, lengths), path
        assert tokens.n_tokens == published.pop(path.name, tokens.n_tokens), path
        n_files += 1
    assert len(published) == (0 if whole else 1) and n_files > (15 if whole else 2)


def draw_runs(rng: np.random.Generator) -> str:
    """Draw runs of digits, spaces, letters and marks, with lengths near powers of two."""
    kinds = ["0", "7", "٣", "½", "a", "e", "Z", "é", "中", "-", "'"] + [" ", "\n", "\t", "\u3000"]
    parts = []
    for _ in range(int(rng.integers(1, 6))):
        kind, n = str(rng.choice(kinds)), 2 ** int(rng.integers(0, 9)) + int(rng.integers(-1, 2))
        parts.append(kind * n if rng.random() < 0.7 else "".join(rng.choice([*"0123456789"], n)))
    return "".join(parts)


def draw_texts(n: int) -> list[str]:
    """Draw n texts of each kind."""
    rng = np.random.default_rng(20260821)
    runs, specials = (draw_runs(rng) for _ in range(n)), draw_token_texts([EOD_TEXT], n, seed=3)
    return [*runs, *specials, *draw_pattern_texts(n, seed=1), *draw_plane_texts(n, seed=2)]


def test_odd_and_random_texts_in_both_vocabularies(gpt2: EncoderPair, small: EncoderPair) -> None:
    texts = [*ODD_TEXTS, *draw_texts(1200)]
    assert gpt2.fast.encode([])[0].tolist() == []
    for pair in (gpt2, small):
        assert pair.assert_equal(texts) > len(texts)


def test_every_code_point_beside_a_letter_a_digit_a_mark_and_a_space(gpt2: EncoderPair) -> None:
    # all of the planes with characters, and some of the others
    ranges = (range(0xD800), range(0xE000, 0x34000), range(0xE0000, 0xE1000), range(0x34000, 0x110000, 251))
    points = [point for points in ranges for point in points]
    blocks = ["".join(map(chr, points[i : i + 256])) for i in range(0, len(points), 256)]
    beside = ["".join(f"{c}a {c}1.{c}\n{c}" for c in block) for block in blocks[::11]]
    gpt2.assert_equal(blocks + beside)


@pytest.mark.parametrize("special_text", [True, False])
def test_random_documents_through_the_pipeline(
    tmp_path: Path, scaling_data: Path, special_text: bool
) -> None:
    texts = [*draw_texts(260), ""]
    lines = [json.dumps({"text": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines), encoding="utf-8", newline="")
    reference = EncoderPair(scaling_data / "gpt2_tokenizer", special_text).library
    options = PreprocessOptions(special_text=special_text, quiet=True)
    preprocess([str(tmp_path / "in.jsonl")], tmp_path / "out", str(scaling_data / "gpt2_tokenizer"), options)
    expected = [encoding.ids for encoding in reference.encode_batch(texts, add_special_tokens=False)]
    assert read_documents(tmp_path / "out_text_document") == expected
