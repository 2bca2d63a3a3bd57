"""Damaged sidecars of datasets raise an error of one sentence in every reader."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from megatron.data.sidecar import read_sidecar
from megatron.plan.datapaths import read_data_paths
from megatron.text.inspect_dataset import find_faults
from megatron.text.merge import merge_datasets
from megatron.text.preprocess import PreprocessOptions, preprocess
from megatron.tokenizer.kinds import TokenizerSpec

N_MUTATIONS = 400
ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 5, 1 << 63, 10**30, 0.5, float("nan"), float("inf"), "", "x", "5", "\ud800",
    [], [5], [[]], {}, {"a": 5}, {"n_tokens": "x"}, [{"path": 5}], "uint16", "float32",
]  # fmt: skip


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps({"text": f"{i} {i + 1}"}) + "\n" for i in range(8)))
    tokenizer, options = TokenizerSpec("NullTokenizer", vocab_size=9), PreprocessOptions(append_eod=True)
    preprocess([str(source)], folder / "x", tokenizer, options)
    return folder / "x_text_document"


def mutate_sidecar(content: dict[str, Any], rng: random.Random) -> str:
    """Return the text of a sidecar in which one value, at any depth, is removed or replaced."""
    changed = json.loads(json.dumps(content))
    inner: Any = changed
    while True:
        key = rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        if not isinstance(inner[key], dict | list) or not inner[key] or rng.random() < 0.2:
            break
        inner = inner[key]
    if rng.random() < 0.15:
        del inner[key]
    else:
        inner[key] = rng.choice(ODD_VALUES)
    text = json.dumps(changed)
    if rng.random() < 0.1:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(["", "\x00", "[" * 100_000, "9" * 5000, "}"]) + text[at + 1 :]
    return text


def test_hundreds_of_changed_sidecars_are_read_or_refused_in_a_sentence(
    dataset: Path, tmp_path: Path
) -> None:
    sidecar = Path(f"{dataset}.json")
    whole = sidecar.read_text()
    content, rng = json.loads(whole), random.Random(0)
    listed = tmp_path / "data.txt"
    listed.write_text(f"1 {dataset}\n")
    n_refused = n_read = 0
    try:
        for trial in range(N_MUTATIONS):
            sidecar.write_text(mutate_sidecar(content, rng), errors="surrogatepass")
            try:
                read_sidecar(dataset)
                read_data_paths(listed)
                list(find_faults(dataset))
                if trial % 10 == 0:
                    merge_datasets([str(dataset)], tmp_path / "merged", overwrite=True)
                n_read += 1
            except ValueError as error:
                assert str(sidecar) in str(error) and "\n" not in str(error)
                n_refused += 1
    finally:
        sidecar.write_text(whole)
    assert n_refused > N_MUTATIONS // 4 and n_read > N_MUTATIONS // 20


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("tokenizer", 5, "tokenizer: got '5', expected an object"),
        ("sha256", {"block_bytes": "8M"}, "sha256.block_bytes: got '8M', expected a whole number"),
        ("tokens", True, "tokens: got 'True', expected a whole number"),
        ("append_eod", "yes", "append_eod: got 'yes', expected true or false"),
        ("merged_from", [5], "merged_from: got '.5.', expected a list of objects"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(
    dataset: Path, tmp_path: Path, name: str, value: Any, expected: str
) -> None:
    content = json.loads(Path(f"{dataset}.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps(content | {name: value}))
    with pytest.raises(ValueError, match=f"a.json: {expected}"):
        read_sidecar(tmp_path / "a")
