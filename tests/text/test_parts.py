"""Parts of a job: any number of them together are byte for byte one job, and each runs alone."""

import gzip
import json
import random
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from megatron.text.sources import Part, parse_part, select_part

from megatron.data.indexed import IndexedTokens
from megatron.data.inspect import find_faults
from megatron.io import open_exclusive
from megatron.text import preprocess as module
from megatron.text.merge import merge_datasets
from megatron.text.preprocess import PreprocessOptions, preprocess
from megatron.text.text_readers import iter_lines, split_into_pieces
from megatron.tokenizer.kinds import TokenizerSpec

NUMBERS = TokenizerSpec("NullTokenizer", vocab_size=1000)
WRITERS: dict[str, Callable[[bytes], bytes]] = {"jsonl": bytes, "jsonl.gz": gzip.compress}


def make_files(folder: Path, seed: int, n_files: int) -> list[Path]:
    """Write plain and packed files of random sizes, with empty files, long lines and no last line end."""
    rng = random.Random(seed)
    paths, number = [], 0
    folder.mkdir()
    for i in range(n_files):
        lines = []
        for _ in range(rng.choice([0, 1, 3, 40])):
            text = " ".join([str(number % 1000)] * rng.choice([0, 1, 5, 400]))
            lines.append(json.dumps({"text": text, "id": number}).encode())
            number += 1
        kind = rng.choice(sorted(WRITERS))
        content = rng.choice([b"\n", b"\r\n"]).join(lines) + rng.choice([b"", b"\n", b"\n\n"])
        path = folder / f"{i}.{kind}"
        path.write_bytes(WRITERS[kind](content))
        paths.append(path)
    return paths


@pytest.mark.parametrize("seed", range(40))
def test_every_document_is_in_exactly_one_part_and_in_order(tmp_path: Path, seed: int) -> None:
    paths = make_files(tmp_path / "in", seed, 1 + seed % 6)
    whole = [line for piece in split_into_pieces(paths, 1 << 62) for _, line in iter_lines(piece)]
    for count in (1, 2, 3, 7, 61):
        lines, read = [], []
        for number in range(1, count + 1):
            sources = select_part(paths, Part(number, count))
            read += sources.paths
            for piece in split_into_pieces(sources.paths, 300, sources.ranges):
                lines += [line for _, line in iter_lines(piece)]
        assert [line for line in lines if line] == [line for line in whole if line]
        assert list(dict.fromkeys(read)) == paths  # in order, none missing
        packed = [path for path in read if path.suffix == ".gz"]
        assert len(set(packed)) == len(packed)


def test_parts_of_a_plain_file_have_equal_bytes_to_within_a_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": "1 " * (i % 50)}) + "\n" for i in range(2000)))
    ranges = [select_part([path], Part(number, 7)).ranges[path] for number in range(1, 8)]
    assert [end for _, end in ranges[:-1]] == [begin for begin, _ in ranges[1:]]
    assert (ranges[0][0], ranges[-1][1]) == (0, path.stat().st_size)
    assert all(abs(end - begin - path.stat().st_size / 7) < 130 for begin, end in ranges)


@pytest.mark.parametrize(("count", "n_workers"), [(1, 1), (3, 2), (13, 1)])
def test_the_parts_in_order_are_byte_for_byte_one_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, n_workers: int
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 4000)
    paths = [str(path) for path in make_files(tmp_path / "in", 3, 9)]
    options = {"append_eod": True, "quiet": True}
    preprocess(paths, tmp_path / "whole", NUMBERS, PreprocessOptions(**options))
    prefixes = []
    for number in range(count, 0, -1):  # in any order
        part = Part(number, count)
        result = preprocess(
            paths, tmp_path / "c4", NUMBERS, PreprocessOptions(n_workers=n_workers, part=part, **options)
        )
        prefixes.insert(0, str(result.outputs[0].prefix))
        assert list(find_faults(prefixes[0])) == []
        meta = json.loads(Path(f"{prefixes[0]}.json").read_text())
        assert (meta["part"]["number"], meta["part"]["of"]) == (number, count)
    assert prefixes == sorted(prefixes)
    assert prefixes[0] == str(tmp_path / f"c4-part-00001-of-{count:05d}_text_document")
    whole = tmp_path / "whole_text_document"
    joined = b"".join(Path(f"{prefix}.bin").read_bytes() for prefix in prefixes)
    assert joined == Path(f"{whole}.bin").read_bytes()
    merge_datasets(prefixes, tmp_path / "joined")
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"joined.{suffix}").read_bytes() == Path(f"{whole}.{suffix}").read_bytes()
    records = [json.loads(Path(f"{prefix}.json").read_text()) for prefix in prefixes]
    assert len({record["part"]["inputs_sha256"] for record in records}) == 1
    n_bytes = sum(source["bytes"] for record in records for source in record["sources"])
    assert n_bytes == sum(Path(path).stat().st_size for path in paths)


def test_rejected_lines_of_a_part_have_their_number_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 500)
    source = tmp_path / "in.jsonl"
    bad = {5, 290, 291, 399}
    lines = ["no JSON" if i in bad else json.dumps({"text": "1 2 3"}) for i in range(400)]
    source.write_text("\n".join(lines))
    rejected = []
    for number in (1, 2, 3):
        options = PreprocessOptions(skip_bad_lines=True, part=Part(number, 3))
        preprocess([str(source)], tmp_path / "out", NUMBERS, options)
        rejects = tmp_path / f"out-part-0000{number}-of-00003.rejects.jsonl"
        if rejects.exists():
            rejected += [json.loads(line)["line"] for line in rejects.read_text().splitlines()]
    assert rejected == [i + 1 for i in sorted(bad)]
    with pytest.raises(ValueError, match=r"in.jsonl, line 291: "):
        preprocess([str(source)], tmp_path / "x", NUMBERS, PreprocessOptions(part=Part(3, 4)))


def test_a_part_is_done_once_and_locked_and_its_input_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "1 2"}\n' * 50)
    words, options = [str(tmp_path / "*.jsonl")], PreprocessOptions(part=Part(1, 2))
    folder = tmp_path / ".out-part-00001-of-00002.shards"
    folder.mkdir()
    with (
        open_exclusive(folder / ".lock"),
        pytest.raises(ValueError, match="out-part-00001-of-00002: in use by another process"),
    ):
        preprocess(words, tmp_path / "out", NUMBERS, options)
    preprocess(words, tmp_path / "out", NUMBERS, options)
    monkeypatch.setattr(module, "encode_piece", None)  # a call would fail
    # the file of the other part is written again with the same size, as a download would: no new work
    (tmp_path / "b.jsonl").write_text('{"text": "1 3"}\n' * 50)
    preprocess(words, tmp_path / "out", NUMBERS, options)
    assert "exists already, from the same files and settings" in caplog.text
    (tmp_path / "c.jsonl").write_text('{"text": "1 2"}\n')  # now the parts are others
    with pytest.raises(ValueError, match="exists already, from other files or settings"):
        preprocess(words, tmp_path / "out", NUMBERS, options)


def test_more_parts_than_packed_files_leave_empty_datasets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(b'{"text": "7 8"}\n'))
    words = [str(tmp_path / "in.jsonl.gz")]
    for number in (1, 2, 3):
        preprocess(words, tmp_path / "out", NUMBERS, PreprocessOptions(part=Part(number, 3)))
    prefixes = [str(tmp_path / f"out-part-0000{number}-of-00003_text_document") for number in (1, 2, 3)]
    assert [IndexedTokens(Path(prefix)).n_documents for prefix in prefixes] == [0, 1, 0]
    assert "part 3/3 has no document" in caplog.text
    assert all(list(find_faults(prefix)) == [] for prefix in prefixes)
    merge_datasets(prefixes, tmp_path / "joined")
    assert np.array_equal(IndexedTokens(tmp_path / "joined").tokens, [7, 8])


@pytest.mark.parametrize("word", ["0/4", "5/4", "1", "1/0", "a/b", "-1/4", "1/4/2", "1/1000000", "", "²/3"])
def test_a_part_is_two_numbers(word: str) -> None:
    with pytest.raises(ArgumentTypeError, match="expected I/N with I from 1 to N, such as 3/16"):
        parse_part(word)


def test_bad_combinations_are_one_sentence(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "1"}\n')
    tool = [sys.executable, str(root / "tools" / "preprocess_data_many_cores.py"), "--output-prefix", "x"]
    tool += ["--root", str(tmp_path), "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    for words, sentence in (
        (["--input", "-", "--part", "1/2"], "--part: got standard input, expected files"),
        (["--input", str(source), "--part", "1/2", "--max-tokens", "9"], "--max-tokens: got it with --part"),
        (["--input", "-", "--dry-run"], "--dry-run: got standard input, expected files"),
    ):
        done = subprocess.run(
            [*tool, *words], input="", capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 1 and done.stderr.startswith(f"error: {sentence}"), done.stderr
        assert done.stderr.count("\n") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
