"""Tests of models by their name, with a hub on this machine."""

import pytest

from megatron.text.hub import open_hub_model, parse_hub_name
from tests.text.fake_hub import COMMIT, serve_hub


def test_models_by_name_are_opened_from_the_cache_or_downloaded_into_it(tmp_path, monkeypatch) -> None:
    assert parse_hub_name("EleutherAI/pythia-70m@step1000") == ("EleutherAI/pythia-70m", "step1000")
    for text in ("/tmp/gpt2", "./gpt2", "../gpt2", "a/b/c", "a/../b", "gpt2@", "gpt2@../main", ".hidden", ""):
        assert parse_hub_name(text) is None, text
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").mkdir()  # a mistyped run of an existing folder is not sent to the hub
    assert parse_hub_name("experiments/rnu") is None
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    files = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}", "evil.py": b"1"}
    with serve_hub({"acme/tiny": {**files, "pytorch_model.bin": b"pickle"}}) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        snapshot = open_hub_model("acme/tiny")
    assert snapshot == tmp_path / "hub" / "models--acme--tiny" / "snapshots" / COMMIT
    assert {path.name for path in snapshot.iterdir()} == set(files) - {"evil.py"}
    assert open_hub_model("acme/tiny") == open_hub_model(f"acme/tiny@{COMMIT}") == snapshot
    with pytest.raises(FileNotFoundError, match=r"^acme/none: .*no model of the hub .*HF_TOKEN"):
        open_hub_model("acme/none")
