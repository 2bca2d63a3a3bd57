"""Tests of tools/download_assets.py and of models by name, with a hub on this machine."""

import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from megatron.config import presets
from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.sidecar import read_sidecar
from megatron.text import hub
from megatron.text.hub import open_hub_model, parse_hub_name
from megatron.text.published_subsets import QUICKSTART_REPO, SUBSETS_REPO
from tests.tool_modules import load_tool
from tests.tools.fake_hub import COMMIT, FakeHub, serve_hub

TOKEN = "hf_aVerySecretWord"
GPT2_END = 50256


@pytest.fixture
def run(root: Path, tmp_path: Path, monkeypatch, capsys):
    """Return a function that serves a hub and runs the tool in `tmp_path`: (status, output, errors)."""
    tool = load_tool(root / "tools" / "download_assets.py")
    counts = dict.fromkeys(presets.load_epoch_tokens(), 12345) | {"100M": 3000, "7B6": 3000, "7B6_2ep": 3000}
    monkeypatch.setattr("megatron.text.published_subsets.load_epoch_tokens", lambda: counts)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)

    def run_download(served: FakeHub, *words: str) -> tuple[int, str, str]:
        with serve_hub(served):
            monkeypatch.setenv("HF_ENDPOINT", served.address)
            status = tool.main(list(words))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_download


def make_documents(first: int, n: int) -> list[dict[str, str]]:
    return [{"text": f"document {i}: größe " + "x" * (i % 50)} for i in range(first, first + n)]


def make_lines(first: int, n: int) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in make_documents(first, n)).encode()


@pytest.fixture
def c4() -> FakeHub:
    shards = {
        f"en/c4-train.{i:05d}-of-00003.json.gz": gzip.compress(make_lines(100 * i, 100)) for i in range(3)
    }
    return FakeHub({"datasets/allenai/c4": {**shards, "en/c4-validation.00000-of-00001.json.gz": b"x"}})


def count_contents(served: FakeHub) -> int:
    return sum(request.startswith("GET") and "/resolve/" in request for request in served.requests)


def test_shards_are_stored_as_on_the_hub_and_downloaded_once(run, c4, tmp_path) -> None:
    words = ("c4", "--shards", "2", "--format", "packed", "--out", "c4")
    status, out, _ = run(c4, *words)
    assert status == 0
    for i, (path, content) in enumerate(list(c4.files["datasets/allenai/c4"].items())[:2]):
        assert out.splitlines()[i + 1] == f"c4/train-0000{i}.json.gz: {len(content)} bytes", path
        assert (tmp_path / "c4" / f"train-0000{i}.json.gz").read_bytes() == content
    assert len(list((tmp_path / "c4").iterdir())) == 3
    n_before = count_contents(c4)
    assert run(c4, *words)[1].count("already there") == 2 and count_contents(c4) == n_before
    status, _, errors = run(c4, "c4", "--files", "en/c4-{split}.0*", "--out", "c4")
    assert status == 1 and "got train with other files" in errors
    slim = {"data/train-00000-of-00001-ab.parquet": b"rows"}
    assert run(FakeHub({"datasets/DKYoon/SlimPajama-6B": slim}), "slimpajama", "--out", "b")[0] == 0
    assert (tmp_path / "b" / "train-00000.parquet").read_bytes() == b"rows"


def test_a_folder_gets_a_tokenizer_or_safetensors_and_no_pickle(run, tmp_path) -> None:
    files = {"vocab.json": b"{}", "merges.txt": b"#", "model.safetensors": b"big", "pytorch_model.bin": b"x"}
    served = FakeHub({"models/gpt2": files}, token=TOKEN)
    status, out, _ = run(served, "tokenizer", "gpt2", "--out", "t")
    assert status == 0 and out.splitlines()[0] == f"gpt2 at {COMMIT[:12]}"
    assert {path.name for path in (tmp_path / "t").glob("[!.]*")} == {"vocab.json", "merges.txt"}
    assert run(served, "weights", "gpt2", "--out", "w")[0] == 0
    assert (tmp_path / "w" / "model.safetensors").read_bytes() == b"big"
    assert not (tmp_path / "w" / "pytorch_model.bin").exists()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN in path.read_text("latin1")]


def test_what_the_hub_lacks_or_refuses_is_reported_in_one_line(run, monkeypatch) -> None:
    pickled = FakeHub({"models/p": {"pytorch_model.bin": b"pickle"}})
    for served, words, sentence in (
        (pickled, ("tokenizer", "nobody/none"), "nobody/none: not on the hub, or private"),
        (FakeHub({}, token="other"), ("tokenizer", "p"), "p: not on the hub, or private"),
        (pickled, ("weights", "p"), "expected *.safetensors, got pytorch_model.bin"),
        (FakeHub({"datasets/p": {}}), ("c4", "--repo", "p"), "p: no file en/c4-train"),
    ):
        status, _, errors = run(served, *words, "--out", "t")
        assert status == 1 and sentence in errors and errors.count("\n") == 1
    for words in (["c4", "--format", "jsonl"], ["c4", "--documents", "9"], ["tasks"]):
        with pytest.raises(SystemExit):
            run(pickled, *words, "--out", "t")


def make_dataset(folder: Path, prefix: str, end: int = GPT2_END) -> dict[str, bytes]:
    """Return the .bin and .idx of 300 documents of 9 tokens, each closed by `end`: 3,000 tokens."""
    rng = np.random.default_rng(0)
    with IndexedWriter(folder / "made", np.dtype(np.uint16), {}) as writer:
        for _ in range(300):
            writer.add_document(np.append(rng.integers(0, 50000, 9), end).astype(np.uint16))
    return {prefix + suffix: (folder / f"made{suffix}").read_bytes() for suffix in (".bin", ".idx")}


def test_published_tokens_arrive_with_a_sidecar_that_names_their_tokenizer_and_end(run, tmp_path) -> None:
    prefix = "gpt2tok_c4_100_text_document"
    files = make_dataset(tmp_path, prefix)
    served = FakeHub({f"datasets/{QUICKSTART_REPO}": files})
    status, out, errors = run(served, "subset", "100M", "--out", "data")
    assert status == 0 and out.endswith(f"data/{prefix}: 3,000 tokens\n"), errors
    sidecar = read_sidecar(tmp_path / "data" / prefix)
    assert sidecar["tokenizer"]["n_tokens"] == 50257 and sidecar["sources"][0]["hub"] == QUICKSTART_REPO
    for part in ("bin", "idx"):
        assert sidecar["sha256"][part] == hashlib.sha256(files[f"{prefix}.{part}"]).hexdigest()
    assert IndexedTokens(tmp_path / "data" / prefix).n_documents == 300
    assert (sidecar["append_eod"], sidecar["tokenizer"]["eod_id"]) == (True, GPT2_END)
    n_before = count_contents(served)
    assert run(served, "subset", "100M", "--out", "data")[0] == 0 and count_contents(served) == n_before
    served.damaged = f"{prefix}.bin"
    status, _, errors = run(served, "subset", "100M", "--out", "other")
    assert status == 1 and f"{prefix}.bin: got another sha256 than the hub lists" in errors
    other = make_dataset(tmp_path, "gpt2tok_c4_val_text_document", end=7)
    run(FakeHub({f"datasets/{QUICKSTART_REPO}": other}), "subset", "validation", "--out", "data")
    assert read_sidecar(tmp_path / "data" / "gpt2tok_c4_val_text_document")["append_eod"] is False


def test_a_subset_is_refused_before_its_tokens_by_its_count_and_text_by_its_name(run, tmp_path) -> None:
    served = FakeHub({f"datasets/{SUBSETS_REPO}": make_dataset(tmp_path, "mine")})
    words = ("--prefix", "mine", "--out", "d")
    assert "mine: 3,000 tokens" in run(served, "subset", "7B6", *words)[1]
    served.requests.clear()
    status, _, errors = run(served, "subset", "12B", *words, "--out", "e")
    assert status == 1 and "mine.idx: got 3,000 tokens, expected 12,345 of 12B" in errors
    assert count_contents(served) == 1 and not (tmp_path / "e" / "mine.idx").exists()
    assert "download_assets.py c4 --repo" in run(served, "subset", "7B6", "--out", "e")[2]


def test_models_by_name_are_opened_from_the_cache_or_downloaded_into_it(run, tmp_path, monkeypatch) -> None:
    assert parse_hub_name("EleutherAI/pythia-70m@step1000") == ("EleutherAI/pythia-70m", "step1000")
    for text in ("/tmp/gpt2", "./gpt2", "../gpt2", "a/b/c", "a/../b", "gpt2@", "gpt2@../main", ".hidden", ""):
        assert parse_hub_name(text) is None, text
    (tmp_path / "experiments").mkdir()  # a mistyped run of an existing folder is not sent to the hub
    assert parse_hub_name("experiments/rnu") is None
    files = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}", "evil.py": b"1"}
    with serve_hub(FakeHub({"models/acme/tiny": {**files, "pytorch_model.bin": b"pickle"}})) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        snapshot = open_hub_model("acme/tiny")
    assert snapshot == tmp_path / "hub" / "models--acme--tiny" / "snapshots" / COMMIT
    assert {path.name for path in snapshot.iterdir()} == set(files) - {"evil.py"}
    monkeypatch.setattr(hub, "find_hub_error", lambda: "no network")
    assert open_hub_model("acme/tiny") == open_hub_model(f"acme/tiny@{COMMIT}") == snapshot
    with pytest.raises(FileNotFoundError, match=r"^acme/none: .*no model in the hub.*\(no network\)"):
        open_hub_model("acme/none")
