"""Preprocessing that is killed, that skips lines or stops early, with every kind of input."""

import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed import IndexedTokens
from megatron.text import preprocess as module
from megatron.text.preprocess import PreprocessOptions, preprocess
from megatron.tokenizer.bpe import load_hf_tokenizer
from megatron.tokenizer.train_bpe import train_bpe

# a piece takes at least 0.01 s, so that there is time for a kill
CHILD = """
import sys, time
from pathlib import Path
from megatron.text import preprocess as m
m.PIECE_BYTES = 60_000
join_ready = m.ShardJoiner.join_ready
def slow_join(joiner):
    join_ready(joiner)
    time.sleep(0.01)
m.ShardJoiner.join_ready = slow_join
print("begun", flush=True)
options = m.PreprocessOptions(append_eod=True, n_workers=2, quiet=True)
m.preprocess([sys.argv[1]], Path(sys.argv[2]), sys.argv[3], options)
"""
RECORDS = [{"text": f"document {i}: " + "red fish blue fish " * (i % 7), "n": i} for i in range(500)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe([record["text"] for record in RECORDS], 270, folder)
    return str(folder)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


def read_outputs(prefix: Path) -> list[bytes]:
    """Read the three files of the key `text`; the sidecar without the entries that name the input."""
    meta = json.loads(Path(f"{prefix}_text_document.json").read_text())
    meta.pop("sources"), meta.pop("job")
    files = [Path(f"{prefix}_text_document.{suffix}").read_bytes() for suffix in ("bin", "idx")]
    return [*files, json.dumps(meta).encode()]


def n_done(shards: Path) -> int:
    """Return the number of finished pieces."""
    with contextlib.suppress(FileNotFoundError):
        return sum(name.endswith(".done") for name in os.listdir(shards))
    return 0


def test_killed_at_any_moment_the_same_command_ends_with_the_same_bytes(
    tmp_path: Path, tokenizer: str
) -> None:
    source = tmp_path / "big.jsonl"
    rng = np.random.default_rng(0)
    words = np.array(["red", "fish", "blue", "document", "12", "one", "two\n"])
    with source.open("w") as file:
        for i in range(6000):
            file.write(json.dumps({"text": f"{i} " + " ".join(rng.choice(words, 200))}) + "\n")
    command = [sys.executable, "-c", CHILD, str(source)]
    whole = tmp_path / "whole"
    subprocess.run([*command, str(whole), tokenizer], check=True, timeout=240, stdout=subprocess.DEVNULL)
    killed = tmp_path / "killed"
    shards = tmp_path / ".killed.shards"
    moments = random.Random(0)
    n_killed = n_resumed = 0
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    for attempt in range(8):
        before = n_done(shards)
        with subprocess.Popen([*command, str(killed), tokenizer], **pipes) as child:
            assert child.stdout is not None and child.stdout.readline() == "begun\n"
            if attempt % 2:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(moments.uniform(0, 1.2))
            else:  # as soon as a piece is finished, however slow the machine is
                while child.poll() is None and n_done(shards) == before:
                    time.sleep(0.001)
            child.kill()
            _, log_text = child.communicate()
        n_killed += child.returncode == -signal.SIGKILL
        n_resumed += "pieces are done already" in log_text
        # the sidecar appears last: if it exists, all files are complete
        if Path(f"{killed}_text_document.json").exists():
            assert read_outputs(killed) == read_outputs(whole)
            for suffix in ("bin", "idx", "json"):
                Path(f"{killed}_text_document.{suffix}").unlink()
    done = subprocess.run(
        [*command, str(killed), tokenizer], check=True, timeout=240, capture_output=True, text=True
    )
    n_resumed += "pieces are done already" in done.stderr
    assert read_outputs(killed) == read_outputs(whole)
    assert n_killed and n_resumed
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith((".", "killed"))) == [
        f"killed_text_document.{suffix}" for suffix in ("bin", "idx", "json")
    ]


def test_partial_work_of_another_job_is_not_used(
    tmp_path: Path, plain: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module.ShardJoiner, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            preprocess([str(plain)], tmp_path / "out", tokenizer, PreprocessOptions())
    assert (tmp_path / ".out.shards").is_dir()
    preprocess([str(plain)], tmp_path / "out", tokenizer, PreprocessOptions(append_eod=True))
    preprocess([str(plain)], tmp_path / "fresh", tokenizer, PreprocessOptions(append_eod=True))
    assert read_outputs(tmp_path / "out") == read_outputs(tmp_path / "fresh")
    assert not (tmp_path / ".out.shards").exists()


@pytest.mark.parametrize("lost", [False, True])
def test_after_an_interrupt_it_resumes_from_the_joined_shards(
    tmp_path: Path,
    plain: Path,
    tokenizer: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lost: bool,
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 2000)
    monkeypatch.setattr("megatron.data.indexed_writer.BLOCK_BYTES", 500)
    monkeypatch.setattr("megatron.text.join.CHECKPOINT_S", 0)
    take, encode, n_taken, encoded = module.ShardJoiner.join_ready, module.encode_piece, [], []

    def take_three(joining: module.ShardJoiner) -> None:
        n_taken.append(1)
        if len(n_taken) == 4:
            raise KeyboardInterrupt
        take(joining)

    def counted(piece: object, number: int, *rest: object) -> object:
        encoded.append(number)
        return encode(piece, number, *rest)

    preprocess([str(plain)], tmp_path / "whole", tokenizer, PreprocessOptions())
    monkeypatch.setattr(module.ShardJoiner, "join_ready", take_three)
    with pytest.raises(KeyboardInterrupt):
        preprocess([str(plain)], tmp_path / "out", tokenizer, PreprocessOptions())
    partial = tmp_path / ".out.shards" / "out_text_document.bin.partial"
    assert 0 < partial.stat().st_size < (tmp_path / "whole_text_document.bin").stat().st_size
    monkeypatch.setattr(module.ShardJoiner, "join_ready", take)
    monkeypatch.setattr(module, "encode_piece", counted)
    if lost:
        partial.unlink()
    else:
        with partial.open("ab") as file:
            file.write(b"torn")  # written by a killed process, but not recorded
    preprocess([str(plain)], tmp_path / "out", tokenizer, PreprocessOptions())
    assert (0 in encoded) == lost == ("restarting from scratch" in caplog.text)
    assert read_outputs(tmp_path / "out") == read_outputs(tmp_path / "whole")
    assert not list(tmp_path.glob("**/*.partial"))


def test_partial_work_for_fewer_tokens_is_not_used(
    tmp_path: Path, plain: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module.ShardJoiner, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            preprocess([str(plain)], tmp_path / "out", tokenizer, PreprocessOptions(max_tokens=100))
    for name in ("out", "whole"):
        preprocess([str(plain)], tmp_path / name, tokenizer, PreprocessOptions())
    assert read_outputs(tmp_path / "out") == read_outputs(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["gz", "zst", "parquet", "arrow", "two files", "folder"])
def test_every_kind_of_input_gives_the_same_tokens(
    tmp_path: Path, plain: Path, tokenizer: str, kind: str
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    folder = tmp_path / "folder"
    folder.mkdir()
    lines = plain.read_bytes()
    if kind == "gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    elif kind == "zst":
        (folder / "a.jsonl.zst").write_bytes(pyarrow.compress(lines, codec="zstd", asbytes=True))
    elif kind == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(RECORDS), folder / "a.parquet", row_group_size=77
        )
    elif kind == "arrow":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(RECORDS).save_to_disk(str(folder))
    else:
        half = lines.index(b'{"text": "document 250:')
        (folder / "a.jsonl").write_bytes(lines[:half])
        (folder / "b.jsonl").write_bytes(lines[half:])
    preprocess([str(plain)], tmp_path / "plain", tokenizer, PreprocessOptions())
    words = [str(folder / "a.jsonl"), str(folder / "b.jsonl")] if kind == "two files" else [str(folder)]
    preprocess(words, tmp_path / "other", tokenizer, PreprocessOptions(n_workers=2))
    assert read_outputs(tmp_path / "other") == read_outputs(tmp_path / "plain")


def test_standard_input_is_read(root: Path, tmp_path: Path, plain: Path, tokenizer: str) -> None:
    preprocess([str(plain)], tmp_path / "plain", tokenizer, PreprocessOptions())
    command = [sys.executable, str(root / "tools" / "preprocess_data_many_cores.py"), "--input", "-"]
    command += ["--output-prefix", "piped", "--root", str(tmp_path), "--tokenizer-model", tokenizer]
    done = subprocess.run(command, input=plain.read_bytes(), capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert read_outputs(tmp_path / "piped") == read_outputs(tmp_path / "plain")


def test_bad_lines_are_skipped_counted_and_listed_on_request(
    tmp_path: Path, plain: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 5_000)
    lines = plain.read_text().splitlines(keepends=True)
    preprocess([str(plain)], tmp_path / "good", tokenizer, PreprocessOptions())
    bad = {3: "{half\n", 200: '{"body": 1}\n', 499: '{"text": 7}\n'}
    for at, line in sorted(bad.items(), reverse=True):
        lines.insert(at, line)
    plain.write_text("".join(lines))
    totals = preprocess(
        [str(plain)], tmp_path / "out", tokenizer, PreprocessOptions(skip_bad_lines=True, n_workers=2)
    )
    for suffix in ("bin", "idx"):
        good, out = (
            Path(tmp_path / f"{name}_text_document.{suffix}").read_bytes() for name in ("good", "out")
        )
        assert good == out
    assert totals.n_rejected == 3
    rejected = [json.loads(line) for line in (tmp_path / "out.rejects.jsonl").read_text().splitlines()]
    # line numbers of the file with the bad lines, from 1
    assert [record["line"] for record in rejected] == [4, 202, 502]
    assert "no key 'text'; it has 'body'" in rejected[1]["reason"]
    with pytest.raises(ValueError, match="line 4: not JSON"):
        preprocess([str(plain)], tmp_path / "strict", tokenizer, PreprocessOptions())
    assert not list(tmp_path.glob("*strict*"))


@pytest.mark.parametrize("max_tokens", [1, 1000, 4321, 10**9])
def test_max_tokens_keeps_the_fewest_first_documents_that_reach_it(
    tmp_path: Path, plain: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 3_000)
    preprocess([str(plain)], tmp_path / "all", tokenizer, PreprocessOptions())
    preprocess(
        [str(plain)], tmp_path / "some", tokenizer, PreprocessOptions(max_tokens=max_tokens, n_workers=2)
    )
    lengths = IndexedTokens(tmp_path / "all_text_document").document_tokens
    some = IndexedTokens(tmp_path / "some_text_document")
    n = min(len(lengths), int(np.searchsorted(np.cumsum(lengths), max_tokens)) + 1)
    assert some.document_tokens.tolist() == lengths[:n].tolist()


def test_special_text_becomes_its_id_or_stays_text(tmp_path: Path, tokenizer: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a<|endoftext|>b"}\n')
    reference = load_hf_tokenizer(tokenizer)
    for special, n_special in ((True, 1), (False, 0)):
        preprocess(
            [str(source)],
            tmp_path / "out",
            tokenizer,
            PreprocessOptions(special_text=special, overwrite=True),
        )
        ids = IndexedTokens(tmp_path / "out_text_document").get_document(0).tolist()
        assert ids.count(reference.eod_id) == n_special
        assert reference.decode(ids) == "a<|endoftext|>b"


def test_a_tokenizer_without_an_exact_cpp_encoder_uses_its_library_with_a_warning(
    tmp_path: Path,
    plain: Path,
    tokenizer: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    definition = json.loads((Path(tokenizer) / "tokenizer.json").read_text())
    definition["normalizer"] = {"type": "Lowercase"}
    other = tmp_path / "tokenizer.json"
    other.write_text(json.dumps(definition))
    monkeypatch.setattr(module.log.parent, "propagate", True)
    plain.write_text('{"text": "RED Fish"}\n{"text": "red fish"}\n')
    preprocess([str(plain)], tmp_path / "out", str(other), PreprocessOptions())
    tokens = IndexedTokens(tmp_path / "out_text_document")
    assert tokens.get_document(0).tolist() == tokens.get_document(1).tolist()
    assert "its normalizer is Lowercase" in caplog.text
