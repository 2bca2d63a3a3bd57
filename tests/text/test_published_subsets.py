"""Tests of `tools/download_assets.py subset` with a local hub: published datasets and their counts."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from megatron.config import presets
from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.sidecar import parse_eod_use, read_sidecar
from megatron.text.published_subsets import QUICKSTART_REPO, SUBSETS_REPO
from tests.data.fake_hub import FakeHub, serve_hub
from tests.tool_modules import load_tool

GPT2_END = 50256
N_DOCUMENTS = 300


def make_dataset(folder: Path, end: int = GPT2_END) -> dict[str, bytes]:
    """Return the .bin and .idx of 300 documents of 9 tokens, each closed by `end`: 3,000 tokens."""
    rng = np.random.default_rng(0)
    with IndexedWriter(folder / "made", np.dtype(np.uint16), {}) as writer:
        for _ in range(N_DOCUMENTS):
            writer.add_document(np.append(rng.integers(0, 50000, 9), end).astype(np.uint16))
    return {suffix: (folder / f"made{suffix}").read_bytes() for suffix in (".bin", ".idx")}


@pytest.fixture
def download(root: Path, tmp_path: Path, monkeypatch, capsys):
    """Return a function that runs the tool against a hub; 3,000 is the published count of 100M and 7B6."""
    tool = load_tool(root / "tools" / "download_assets.py")
    counts = dict.fromkeys(presets.load_epoch_tokens(), 12345) | {"100M": 3000, "7B6": 3000, "7B6_2ep": 3000}
    monkeypatch.setattr("megatron.text.published_subsets.load_epoch_tokens", lambda: counts)
    monkeypatch.setenv("HF_TOKEN", "")

    def run(hub: FakeHub, *words: str) -> tuple[int, str, str]:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        status = tool.main(["subset", *words, "--out", str(tmp_path / "data")])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def hub_with(repo: str, datasets: dict[str, dict[str, bytes]], **more: object) -> FakeHub:
    files = {prefix + suffix: part for prefix, parts in datasets.items() for suffix, part in parts.items()}
    return FakeHub({f"datasets/{repo}": {"README.md": b"text", **files}}, **more)


def test_the_published_tokens_arrive_with_a_sidecar_that_names_their_tokenizer_and_end(
    download, tmp_path: Path
) -> None:
    parts = make_dataset(tmp_path)
    with serve_hub(hub_with(QUICKSTART_REPO, {"gpt2tok_c4_100_text_document": parts})) as hub:
        status, out, err = download(hub, "100M")
        assert (status, err) == (0, "")
        assert out.endswith("data/gpt2tok_c4_100_text_document: 3,000 tokens\n")
        prefix = tmp_path / "data" / "gpt2tok_c4_100_text_document"
        assert Path(f"{prefix}.bin").read_bytes() == parts[".bin"]
        assert (IndexedTokens(prefix).n_tokens, IndexedTokens(prefix).n_documents) == (3000, 300)
        sidecar = read_sidecar(prefix)
        assert sidecar["tokenizer"]["n_tokens"] == 50257
        assert sidecar["sha256"]["bin"] == hashlib.sha256(parts[".bin"]).hexdigest()
        assert sidecar["sha256"]["idx"] == hashlib.sha256(parts[".idx"]).hexdigest()
        assert sidecar["sources"][0]["hub"] == QUICKSTART_REPO
        assert parse_eod_use(read_sidecar(prefix)).eod_id == GPT2_END
        n_requests = len(hub.requests)
        assert download(hub, "100M")[0] == 0
        # the second call asks for the commit and two listings of three pages, and for no content
        assert not [path for path, *_ in hub.requests[n_requests:] if "/resolve/" in path]


def test_an_index_of_another_count_is_refused_before_its_tokens_are_requested(
    download, tmp_path: Path
) -> None:
    with serve_hub(hub_with(SUBSETS_REPO, {"c4_12B_text_document": make_dataset(tmp_path)})) as hub:
        status, _, err = download(hub, "12B")
        assert status == 1
        assert "c4_12B_text_document.idx: got 3,000 tokens, expected 12,345 of 12B" in err
        assert not [path for path, *_ in hub.requests if path.endswith(".bin")]
        assert not list((tmp_path / "data").glob("*.idx"))


def test_a_subset_is_not_mistaken_for_its_part_of_several_epochs(download, tmp_path: Path) -> None:
    parts = make_dataset(tmp_path)
    names = ("c4_7B6_text_document", "c4_7B6_2ep_text_document", "c4_17B6_text_document")
    with serve_hub(hub_with(SUBSETS_REPO, dict.fromkeys(names, parts))) as hub:
        for name, expected in (("7B6", names[0]), ("7B6_2ep", names[1])):
            status, out, err = download(hub, name)
            assert status == 0 and f"{expected}: 3,000 tokens" in out, err


def test_a_repository_of_text_is_reported_with_the_command_that_fetches_text(
    download, tmp_path: Path
) -> None:
    files = {f"datasets/{SUBSETS_REPO}": {"c4_7B6.json": b"{}", "c4_7B6_2ep.json": b"{}"}}
    with serve_hub(FakeHub(files)) as hub:
        status, _, err = download(hub, "7B6")
    assert status == 1
    assert "got 0 .bin/.idx datasets of 7B6 among c4_7B6.json, c4_7B6_2ep.json, expected one" in err
    assert "download_assets.py c4 --repo REPO --files PATTERN" in err


def test_documents_without_an_end_token_are_recorded_as_such(download, tmp_path: Path) -> None:
    parts = make_dataset(tmp_path, end=7)
    with serve_hub(hub_with(QUICKSTART_REPO, {"gpt2tok_c4_val_text_document": parts})) as hub:
        assert download(hub, "validation")[0] == 0
    prefix = tmp_path / "data" / "gpt2tok_c4_val_text_document"
    assert json.loads(Path(f"{prefix}.json").read_text())["append_eod"] is False


def test_a_download_that_was_cut_is_resumed(download, tmp_path: Path) -> None:
    parts = make_dataset(tmp_path)
    hub = hub_with(QUICKSTART_REPO, {"gpt2tok_c4_100_text_document": parts}, drop_after=4000, drops=2)
    with serve_hub(hub):
        assert download(hub, "100M")[0] == 0
    assert [span for path, span, _ in hub.requests if path.endswith(".bin") and span]  # a range was requested
