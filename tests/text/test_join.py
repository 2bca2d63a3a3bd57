"""Joining by blocks: kills around every record of the progress, hashes of sources, other versions."""

import gzip
import hashlib
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron.text.shards import JOURNAL_FILE, PLAN_FILE, ShardFolder
from megatron.text.sources import Part

from megatron.data.inspect import find_faults
from megatron.text import preprocess as module
from megatron.text import shards as shards_module
from megatron.text.preprocess import PreprocessOptions, preprocess
from megatron.tokenizer.kinds import TokenizerSpec

NUMBERS = TokenizerSpec("NullTokenizer", vocab_size=1000)
BLOCK = 100  # bytes of the output
OPTIONS = PreprocessOptions(keys=("text", "other"), append_eod=True, quiet=True, skip_bad_lines=True)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    monkeypatch.setattr("megatron.data.indexed_writer.BLOCK_BYTES", BLOCK)
    monkeypatch.setattr("megatron.text.join.CHECKPOINT_S", 0)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return lines whose two keys have very different lengths, with an empty stretch and bad lines."""
    rng, path = random.Random(0), tmp_path / "in.jsonl"
    lines = []
    for i in range(300):
        text = "" if 100 < i < 150 else " ".join(["7"] * rng.choice([0, 1, 30]))
        lines.append("no JSON" if i % 71 == 5 else json.dumps({"text": text, "other": "1 2 3" * (i % 2)}))
    path.write_text("\n".join(lines))
    return path


def read_outputs(prefix: Path) -> list[bytes]:
    """Read all outputs; the sidecars name the same input."""
    names = [f"{prefix}_{key}_document.{end}" for key in OPTIONS.keys for end in ("bin", "idx", "json")]
    return [Path(name).read_bytes() for name in (*names, f"{prefix}.rejects.jsonl")]


def status_of_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child; return its exit status."""
    child = os.fork()
    if not child:
        try:
            signal.alarm(240)
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("method", ["record_joined", "delete_shards", "write_result"])
@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("n_before", [0, 7])
def test_killed_around_any_record_the_same_call_ends_with_the_same_bytes(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, method: str, is_after: bool, n_before: int
) -> None:
    preprocess([str(source)], tmp_path / "whole", NUMBERS, OPTIONS)
    original, n_calls = getattr(ShardFolder, method), 0

    def dying(*words: object) -> object:
        nonlocal n_calls
        n_calls += 1
        if n_calls > n_before and not is_after:
            os._exit(9)  # without cleanup, as after SIGKILL
        result = original(*words)
        if n_calls > n_before:
            os._exit(9)
        return result

    def work() -> None:
        monkeypatch.setattr(ShardFolder, method, dying)
        preprocess([str(source)], tmp_path / "out", NUMBERS, OPTIONS)

    assert status_of_child(work) == 9
    preprocess([str(source)], tmp_path / "out", NUMBERS, OPTIONS)
    assert read_outputs(tmp_path / "out") == read_outputs(tmp_path / "whole")
    assert list(find_faults(tmp_path / "out_other_document")) == []
    assert not list(tmp_path.glob(".*"))


def interrupt(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, n_joins: int = 6) -> Path:
    """Interrupt a job at its `n_joins`-th join, and return its folder."""
    take, calls = module.ShardJoiner.join_ready, []

    def stop(joiner: module.ShardJoiner) -> None:
        take(joiner)
        calls.append(1)
        if len(calls) == n_joins:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module.ShardJoiner, "join_ready", stop)
        with pytest.raises(KeyboardInterrupt):
            preprocess([str(source)], tmp_path / "out", NUMBERS, OPTIONS)
    return tmp_path / ".out.shards"


def record_encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the numbers of all encoded pieces are added."""
    encode, encoded = module.encode_piece, []

    def counted(piece: object, number: int, *rest: object) -> object:
        encoded.append(number)
        return encode(piece, number, *rest)

    monkeypatch.setattr(module, "encode_piece", counted)
    return encoded


@pytest.mark.parametrize("n_joins", range(1, 16, 4))
def test_a_restart_reads_no_joined_piece_again(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, n_joins: int
) -> None:
    preprocess([str(source)], tmp_path / "whole", NUMBERS, OPTIONS)
    folder = interrupt(tmp_path, source, monkeypatch, n_joins)
    with (folder / JOURNAL_FILE).open("ab") as journal:
        journal.write(b'{"torn')  # of a record that a kill prevented
    record = ShardFolder(folder, OPTIONS.keys).read_join_record()
    n_joined = record.state.n_pieces if record else 0
    assert not any(int(path.stem[:8]) < n_joined for path in folder.glob("*.done"))
    encoded = record_encoded(monkeypatch)
    preprocess([str(source)], tmp_path / "out", NUMBERS, OPTIONS)
    assert not set(encoded) & set(range(n_joins - 1))
    assert read_outputs(tmp_path / "out") == read_outputs(tmp_path / "whole")


def test_shards_of_another_boot_are_written_again_but_joined_pieces_are_not(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocess([str(source)], tmp_path / "whole", NUMBERS, OPTIONS)
    folder = interrupt(tmp_path, source, monkeypatch, 9)
    record = ShardFolder(folder, OPTIONS.keys).read_join_record()
    assert record is not None and record.state.n_pieces > 0
    for path in folder.glob("*.ids"):  # a crash of the system lost their content, not their size
        path.write_bytes(bytes(path.stat().st_size))
    monkeypatch.setattr(shards_module, "read_boot_id", lambda: "other")
    encoded = record_encoded(monkeypatch)
    preprocess([str(source)], tmp_path / "out", NUMBERS, OPTIONS)
    assert min(encoded) == record.state.n_pieces
    assert read_outputs(tmp_path / "out") == read_outputs(tmp_path / "whole")


def test_work_of_another_version_is_refused_and_kept(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = interrupt(tmp_path, source, monkeypatch)
    plan = json.loads((folder / PLAN_FILE).read_text())
    (folder / PLAN_FILE).write_text(json.dumps({"sha256": plan["sha256"]}))  # as version 0.1 wrote it
    before = sorted(folder.iterdir())
    with pytest.raises(ValueError, match=r"out.shards: got unfinished work in format 1 of another version"):
        preprocess([str(source)], tmp_path / "out", NUMBERS, OPTIONS)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x93NUMPY"])
def test_a_damaged_record_of_the_progress_is_one_sentence(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    folder = interrupt(tmp_path, source, monkeypatch, 9)
    (folder / "joined.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"joined.npz: got invalid content \(.*Delete .*out.shards and run"):
        preprocess([str(source)], tmp_path / "out", NUMBERS, OPTIONS)


def hash_blocks(content: bytes, block_bytes: int = 300) -> str:
    digests = [
        hashlib.sha256(content[at : at + block_bytes]).digest() for at in range(0, len(content), block_bytes)
    ]
    return (hashlib.sha256(b"".join(digests)) if len(digests) > 1 else hashlib.sha256(content)).hexdigest()


@pytest.mark.parametrize("piece_bytes", [100, 299, 1 << 20])
def test_sources_have_the_hash_of_what_was_read_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr("megatron.text.sources.BLOCK_BYTES", 300)
    line = json.dumps({"text": "1 2 3"}) + "\n"
    ids = [random.Random(i).random() for i in range(50)]  # more than 300 bytes after compression
    contents = {
        "a.jsonl": line.encode() * 111,
        "b.jsonl.gz": gzip.compress(
            b"".join(json.dumps({"text": "5", "id": id}).encode() + b"\n" for id in ids)
        ),
        "c.jsonl": b"",
        "d.jsonl": (json.dumps({"text": "4 " * 700}) + "\n" + line).encode(),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    words = [str(tmp_path / name) for name in contents]

    def read_sources(name: str, **options: object) -> list[dict]:
        result = preprocess(words, tmp_path / name, NUMBERS, PreprocessOptions(**options))
        return json.loads(Path(f"{result.outputs[0].prefix}.json").read_text())["sources"]

    for source in read_sources("whole"):
        content = contents[source["path"]]
        is_packed = source["path"].endswith("gz")
        expected = hashlib.sha256(content).hexdigest() if is_packed else hash_blocks(content)
        assert (source["sha256"], source["bytes"]) == (expected, len(content))
        assert source.get("block_bytes") == (300 if len(content) > 300 and not is_packed else None)
    cut = read_sources("some", max_tokens=60)[0]  # in the middle of the first file
    assert cut["sha256"] == hash_blocks(contents["a.jsonl"][: cut["bytes"]])
    read = b""
    for number in (1, 2, 3):
        for source in read_sources("part", part=Part(number, 3)):
            begin = source.get("from_byte", 0)
            content = contents[source["path"]][begin : begin + source["bytes"]]
            if not source["path"].endswith("gz"):
                assert source["sha256"] == hash_blocks(content)
            read += content
    assert read == b"".join(contents.values())
