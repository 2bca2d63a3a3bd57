"""Tests of models by their name on the hub: the local cache, and downloads from a hub on this machine."""

import json
from pathlib import Path

import pytest

from megatron.text import hub_models
from megatron.text.hub_models import is_complete_model, open_hub_model, parse_hub_name
from tests.data.fake_hub import COMMIT, FakeHub, serve_hub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache; no name is a path below the working folder."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def put_model(cache: Path, repo: str, commit: str, revision: str, files: dict[str, str]) -> Path:
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / revision).write_text(commit)
    for name, text in files.items():
        (snapshot / name).write_text(text)
    return snapshot


def test_names_have_an_optional_owner_and_revision(cache: Path, tmp_path: Path) -> None:
    assert parse_hub_name("gpt2") == ("gpt2", "main")
    assert parse_hub_name("EleutherAI/pythia-70m@step1000") == ("EleutherAI/pythia-70m", "step1000")
    for text in ("/tmp/gpt2", "./gpt2", "../gpt2", "a/b/c", "a/../b", "gpt2@", "gpt2@../main", ".hidden", ""):
        assert parse_hub_name(text) is None, text
    # a mistyped run of an existing folder is not sent to the hub
    (tmp_path / "experiments").mkdir()
    assert parse_hub_name("experiments/rnu") is None


def test_a_cached_model_is_opened_at_its_revision(cache: Path) -> None:
    whole = {"config.json": "{}", "model.safetensors": "x"}
    main = put_model(cache, "acme/tiny", "c1", "main", whole)
    early = put_model(cache, "acme/tiny", "c2", "step10", whole)
    assert open_hub_model("acme/tiny") == main
    assert open_hub_model("acme/tiny@step10") == open_hub_model("acme/tiny@c2") == early


def test_a_model_is_complete_with_all_shards_of_its_index(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "m-1.safetensors").write_text("")
    assert not is_complete_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert not is_complete_model(tmp_path)
    (tmp_path / "m-2.safetensors").write_text("")
    assert is_complete_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="got no weight_map"):
        is_complete_model(tmp_path)


def test_an_incomplete_model_without_a_network_is_an_error_that_names_the_cache(cache: Path) -> None:
    put_model(cache, "acme/tiny", "c1", "main", {"config.json": "{}", "tokenizer.json": "{}"})
    for name in ("acme/tiny", "acme/absent"):
        with pytest.raises(
            FileNotFoundError, match=f"^{name}: .*no complete model in the hub's cache {cache}"
        ):
            open_hub_model(name)


def test_missing_files_are_downloaded_into_the_cache_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}", "evil.py": b"1"}
    with serve_hub(FakeHub({"models/acme/tiny": {**files, "pytorch_model.bin": b"pickle"}})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.delenv("HF_HUB_OFFLINE")
        snapshot = open_hub_model("acme/tiny")
    assert snapshot == cache / "models--acme--tiny" / "snapshots" / COMMIT
    # neither code nor a pickle
    assert {path.name for path in snapshot.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    monkeypatch.setattr(hub_models, "find_hub_error", lambda: pytest.fail("the cache is complete"))
    assert open_hub_model("acme/tiny") == snapshot
