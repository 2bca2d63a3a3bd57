"""Readers of strangers' files: changed bytes end in a result, or in an error of a few words."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron import _csrc
from megatron.checkpoint.convert.formats import read_any
from megatron.checkpoint.convert.huggingface import write_huggingface
from megatron.checkpoint.model_weights import Weights
from megatron.config.hf import read_hf_config
from megatron.data import open_dataset
from megatron.text.text_readers import parse_text
from megatron.tokenizer.bpe import load_hf_tokenizer
from megatron.tokenizer.encoder import NO_EOD, FastEncoder, build_fast_bpe
from megatron.tokenizer.kinds import TokenizerSpec, load_tokenizer
from megatron.tokenizer.train_bpe import train_bpe
from tests.conftest import build_tiny
from tests.datasets import write_dataset

REFUSALS = (ValueError, OSError)
MAX_ERROR_CHARS = 2000
WORDS = (
    b"0", b"-1", b"1e999", b"NaN", b"null", b"[]", b"{}", b'""', b"true", b"9" * 400, b"[" * 500, b"\xff",
)  # fmt: skip
Edit = tuple[float, int, bytes]

# an edit at a share of the file: replace, insert or cut a few bytes
inserted_bytes = st.sampled_from(WORDS) | st.binary(max_size=8)
edit = st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 12), inserted_bytes)
edits = st.lists(edit, min_size=1, max_size=3)


def apply_edits(content: bytes, changes: list[Edit]) -> bytes:
    """Replace at each place some bytes by others, of another number as a rule."""
    for share, n_removed, inserted in changes:
        at = int(share * len(content))
        content = content[:at] + inserted + content[at + n_removed :]
    return content


def read_dataset(folder: Path) -> None:
    tokens = open_dataset(folder / "data")
    for i in range(min(tokens.n_documents, 1000)):
        tokens.get_document(i)


def write_tokens(folder: Path) -> None:
    folder.mkdir()
    write_dataset(folder / "data", [[0, 1, 2], [], [0, 1, 2, 3, 4]], {"tokenizer": {"n_tokens": 300}})


def write_tokenizer(folder: Path) -> None:
    train_bpe(["some text of words and more words in a text"] * 20, 262, folder)


def read_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(TokenizerSpec(model=str(folder)))
    ids = tokenizer.encode("some words, naïve")
    assert all(0 <= i < tokenizer.n_tokens for i in ids)


def write_model(folder: Path) -> None:
    model = build_tiny(40)
    state, config = model.state_dict(), model.config
    write_huggingface(Weights(config=config, objective="autoregressive", state=state, seq_len=64), folder)


def read_model(folder: Path) -> None:
    assert all(isinstance(tensor, torch.Tensor) for tensor in read_any(folder).state.values())


def read_config_json(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_bytes())
    if isinstance(content, dict):
        read_hf_config(content)


READERS: dict[str, tuple[Callable[[Path], None], str, Callable[[Path], None]]] = {
    "index": (write_tokens, "data.idx", read_dataset),
    "tokens": (write_tokens, "data.bin", read_dataset),
    "sidecar": (write_tokens, "data.json", read_dataset),
    "tokenizer": (write_tokenizer, "tokenizer.json", read_tokenizer),
    "weights": (write_model, "model.safetensors", read_model),
    "configuration": (write_model, "config.json", read_config_json),
}


@pytest.mark.parametrize("name", READERS)
def test_changed_files_are_read_or_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    write, file_name, read = READERS[name]
    folder = tmp_path / "files"
    write(folder)
    read(folder)
    path = folder / file_name
    valid = path.read_bytes()

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(edits)
    def check(changes: list[Edit]) -> None:
        path.write_bytes(apply_edits(valid, changes))
        try:
            read(folder)
        except REFUSALS as error:
            assert 0 < len(str(error)) < MAX_ERROR_CHARS, error

    check()


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> FastEncoder:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    fast, _ = build_fast_bpe(load_hf_tokenizer(str(folder)))
    return FastEncoder(fast, True)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(["text", "texts", "id"]), values, max_size=3), edits, st.booleans())
def test_a_line_that_cpp_accepts_has_the_text_that_python_reads(
    encoder: FastEncoder, tmp_path: Path, record: dict[str, Any], changes: list[Edit], is_changed: bool
) -> None:
    line = json.dumps(record, ensure_ascii=is_changed).encode()
    line = (apply_edits(line, changes) if is_changed else line).replace(b"\n", b" ")
    path, ids_path, lengths_path = (tmp_path / name for name in ("line", "ids", "lengths"))
    path.write_bytes(line)
    with path.open("rb") as file, ids_path.open("wb") as ids, lengths_path.open("wb") as lengths:
        files = ids.fileno(), lengths.fileno()
        _, n_documents, _, _, is_refused = _csrc.encode_lines(
            encoder.worker, file.fileno(), 0, len(line), "text", True, NO_EOD, False, *files
        )
    if is_refused or not n_documents:
        return  # Python decides about the line
    expected = encoder.encode([parse_text(line, "text")], NO_EOD)[0]
    assert np.fromfile(ids_path, "<u2").tolist() == expected.tolist()
