"""Tests of models by their name. Those in the hub's cache are in evaluation/test_hub_models.py."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from megatron.text.hub import open_hub_model, parse_hub_name


def test_a_name_of_the_hub_is_not_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_hub_name("EleutherAI/pythia-70m@step1000") == ("EleutherAI/pythia-70m", "step1000")
    for text in ("/tmp/gpt2", "./gpt2", "../gpt2", "a/b/c", "a/../b", "gpt2@", "gpt2@../main", ".hidden", ""):
        assert parse_hub_name(text) is None, text
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").mkdir()  # a mistyped run of an existing folder is not sent to the hub
    assert parse_hub_name("experiments/rnu") is None


def test_a_model_is_downloaded_without_code_and_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the port of `discard`: refused
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(FileNotFoundError, match=r"^acme/none: .*no model of the hub .*HF_TOKEN"):
        open_hub_model("acme/none")
    files = ["config.json", "model.safetensors", "tokenizer.json"]
    downloads: list[dict[str, Any]] = []

    def download(repo: str, allow_patterns: list[str], **options: Any) -> str:
        downloads.append({"repo": repo, **options})
        others = ["evil.py", "pytorch_model.bin"]
        assert [*filter_repo_objects(files + others, allow_patterns=allow_patterns)] == files
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert open_hub_model("acme/tiny@v2") == tmp_path
    place = {"endpoint": "http://127.0.0.1:9", "cache_dir": str(tmp_path / "hub")}
    assert downloads == [{"repo": "acme/tiny", "revision": "v2", **place}]
