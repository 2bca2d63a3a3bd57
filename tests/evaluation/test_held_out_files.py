"""Result files of held-out scores: one per scoring, none for failed ones."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.checkpoint.model_weights import Weights, save_weights
from megatron.evaluation import corpus_tokenizer, held_out
from megatron.evaluation.held_out import HeldOutScoring, score_held_out
from megatron.evaluation.scored_models import find_models
from megatron.generation.nonfinite_scores import NonFiniteError
from megatron.model.transformer import Gpt
from tests.datasets import write_dataset
from tests.evaluation.conftest import ALONE


def write_corpus(prefix: Path, seed: int, **tokenizer: Any) -> str:
    """Write five documents of ids below 39, each ended by id 39; return the prefix."""
    rng = np.random.default_rng(seed)
    documents = [np.append(rng.integers(0, 39, length), 39) for length in (7, 1, 12, 3, 20)]
    return write_dataset(prefix, documents, {"tokenizer": {"n_tokens": 40, "eod_id": 39, **tokenizer}})


@pytest.fixture
def saved(tmp_path: Path, tiny: Gpt) -> Callable[..., Path]:
    """Return a function that saves the tiny model; keywords are fields of Weights, `spoil` one bad value."""

    def save(name: str = "model", spoil: str | None = None, **more: Any) -> Path:
        state = {key: value.clone() for key, value in tiny.state_dict().items()}
        if spoil is not None:
            next(iter(state.values())).view(-1)[0] = float(spoil)
        weights = Weights(
            config=tiny.config, state=state, **{"objective": "autoregressive", "seq_len": 8} | more
        )
        save_weights(weights, tmp_path / name)
        return tmp_path / name

    return save


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of the test."""
    warnings: list[str] = []
    for module in (held_out, corpus_tokenizer):
        monkeypatch.setattr(module.log, "warning", lambda words, *more: warnings.append(words % more))
    return warnings


def reverse_start(file: Path) -> None:
    """Change the text of a corpus, with the same size and the old checksums in the sidecar."""
    ids = np.fromfile(file, np.uint16)
    ids[:5] = ids[:5][::-1]
    ids.tofile(file)


def score(path: Path, data: str, **more: Any) -> tuple[dict[str, Any], Path, bool]:
    return score_held_out(find_models([path])[0], HeldOutScoring(data=data, **more), ALONE)


@pytest.mark.parametrize("objective", ["autoregressive", "masked_diffusion"])
def test_scores_of_other_data_or_settings_are_not_overwritten(
    saved: Callable[..., Path], tmp_path: Path, objective: str
) -> None:
    (tmp_path / "A").mkdir()
    (tmp_path / "B").mkdir()
    a, b = (write_corpus(tmp_path / folder / "held_out", seed) for seed, folder in enumerate("AB"))
    (tmp_path / "one.txt").write_text(f"0.5 {a}\n0.5 {b}\n")
    (tmp_path / "other.txt").write_text(f"0.25 {a}\n0.75 {b}\n")
    (tmp_path / "C").mkdir()
    (tmp_path / "C" / "one.txt").write_text(f"0.25 {a}\n0.75 {b}\n")
    ways: list[dict[str, Any]] = [
        {"data": a}, {"data": b}, {"data": a, "seq_len": 6}, {"data": a, "max_samples": 2},
        {"data": a, "windows": "document"}, {"data": str(tmp_path / "one.txt")},
        {"data": str(tmp_path / "other.txt")}, {"data": str(tmp_path / "C" / "one.txt")},
    ]  # fmt: skip
    if objective == "autoregressive":
        ways.append({"data": a, "stride": 4})
    else:
        ways += [{"data": a, "seed": 1}, {"data": a, "num_mc": 3}, {"data": a, "method": "ar"}]
    path = saved(objective=objective)
    results = [score(path, **{"num_mc": 2, **way, "per_document": True}) for way in ways]
    files = [file for _, file, _ in results]
    assert len(set(files)) == len(ways) and not any(before for _, _, before in results)
    for way, (result, file, _) in zip(ways, results, strict=True):
        stored = json.loads(file.read_text())
        assert stored == json.loads(json.dumps(result)) and file.with_suffix(".documents.parquet").is_file()
        assert {key: stored[key] for key in way} == way
        assert file.name.startswith(Path(way["data"]).name.removesuffix(".txt") + "-")
    again = [score(path, **{"num_mc": 2, **way, "per_document": True}) for way in ways]
    assert all(before for _, _, before in again)


def test_scores_are_reused_for_a_moved_corpus_and_not_for_an_edited_one(
    saved: Callable[..., Path], tmp_path: Path, warned: list[str]
) -> None:
    path, data = saved(), write_corpus(tmp_path / "held_out", 0)
    before, file, _ = score(path, data)
    (tmp_path / "new").mkdir()
    for end in ("bin", "idx", "json"):
        (tmp_path / f"held_out.{end}").rename(tmp_path / "new" / f"held_out.{end}")
    moved = score(path, str(tmp_path / "new" / "held_out"))
    assert moved[1:] == (file, True) and not [words for words in warned if "replaced" in words]
    reverse_start(tmp_path / "new" / "held_out.bin")
    result, same, is_current = score(path, str(tmp_path / "new" / "held_out"))
    assert not is_current and same == file and result["loss"] != before["loss"]
    assert f"{file}: replaced; it was of other weights or data under the same names" in warned


def test_killed_between_documents_and_result_no_old_result_is_left(
    saved: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = saved(), write_corpus(tmp_path / "held_out", 0)
    _, file, _ = score(path, data, per_document=True)
    reverse_start(tmp_path / "held_out.bin")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(held_out, "write_json", die)
    with pytest.raises(KeyboardInterrupt):
        score(path, data, per_document=True)
    # its documents would be the new text's
    assert not file.exists() and file.with_suffix(".documents.parquet").is_file()


@pytest.mark.parametrize(
    ("objective", "method", "spoil"),
    [("autoregressive", None, "nan"), ("masked_diffusion", None, "inf"), ("masked_diffusion", "ar", "nan")],
)
def test_weights_that_are_nan_or_inf_have_no_score(
    saved: Callable[..., Path], tmp_path: Path, objective: str, method: str | None, spoil: str
) -> None:
    model = saved(spoil=spoil, objective=objective)
    data = write_corpus(tmp_path / "held_out", 0)
    sentence = "got a loss of .* for document .* of .*held_out, expected a"
    for windows in ("corpus", "document"):
        with pytest.raises(NonFiniteError, match=sentence):
            score(model, data, windows=windows, method=method, num_mc=2)
    assert not list(tmp_path.rglob("*held_out-*"))


def test_a_corpus_of_another_tokenizer_is_refused_or_recorded(
    saved: Callable[..., Path], tmp_path: Path, warned: list[str]
) -> None:
    path, same = saved(), write_corpus(tmp_path / "same", 0, sha256="f" * 64, name="gone")
    meta = json.loads((path / "meta.json").read_text())
    meta["config"]["dataset"] = {"seq_len": 8, "path_train": same}
    (path / "meta.json").write_text(json.dumps(meta))
    other = write_corpus(tmp_path / "other", 0, sha256="e" * 64)
    silent = write_corpus(tmp_path / "silent", 0)
    assert "other_tokenizer" not in score(path, same)[0] and "other_tokenizer" not in score(path, silent)[0]
    with pytest.raises(ValueError, match="eeeeeeeeeeee, expected ffffffffffff as in"):
        score(path, other)
    assert not list(tmp_path.rglob("other-*")) and not [word for word in warned if "eeee" in word]
    result, file, _ = score(path, other, allow_other_tokenizer=True)
    assert "eeeeeeeeeeee" in json.loads(file.read_text())["other_tokenizer"][0]
    assert any("eeeeeeeeeeee" in word for word in warned)
    with pytest.raises(ValueError, match="--allow-other-tokenizer"):  # the stored result is not reused either
        score(path, other)


def test_settings_contain_all_fields_that_affect_a_score() -> None:
    """A new field must be added to the settings or to the list of fields without effect."""
    # float32 is not a setting, so that scores from before the option stay valid
    assert "dtype" not in HeldOutScoring(data="x").settings()
    scoring = HeldOutScoring(data="x", dtype="bfloat16")
    assert set(asdict(scoring)) - set(scoring.settings()) == {
        "data", "batch_size", "per_document", "allow_other_tokenizer",
    }  # fmt: skip


def test_bytes_are_counted_on_every_rank_or_on_none(
    stories_folder: Path, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    """The bytes are summed over ranks: a rank without a tokenizer would block the others."""
    sidecar = {"tokenizer": {"name": str(stories_folder)}}
    arguments = (SimpleNamespace(sidecar=sidecar), SimpleNamespace(tokenizer=None), None, ALONE)
    tokenizer = corpus_tokenizer.load_byte_tokenizer(*arguments)
    assert tokenizer is not None and not warned
    monkeypatch.setattr(corpus_tokenizer, "any_rank", lambda lacks, world: True)  # another rank has none
    assert corpus_tokenizer.load_byte_tokenizer(*arguments) is None
    assert warned == [f"no bits per byte: a rank cannot load {tokenizer.name}; give --tokenizer"]
