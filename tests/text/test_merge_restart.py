"""Merges that are killed, that remove their inputs, and their patterns and lists."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_writer import IndexedWriter
from megatron.data.inspect import find_faults
from megatron.data.parts import open_dataset
from megatron.text import merge as module
from megatron.text.merge import merge_datasets, read_unfinished_removal
from megatron.text.merge_inputs import expand_prefixes, natural_key
from megatron.text.write_parts import write_parts_list
from tests.tool_modules import load_tool

main = load_tool(Path(__file__).parents[2] / "tools" / "merge_datasets.py").main
SUFFIXES = (".bin", ".idx", ".json")
META = {"tokenizer": {"n_tokens": 500, "sha256": "same", "eod_id": 0}, "append_eod": False}


def write_parts_of(folder: Path, n: int, n_tokens: int = 300) -> list[str]:
    prefixes = []
    for i in range(n):
        rng = np.random.default_rng(i)
        prefixes.append(str(folder / f"part-{i}_text_document"))
        with IndexedWriter(prefixes[-1], np.dtype(np.uint16), META) as writer:
            for length in rng.multinomial(n_tokens, [0.2, 0.3, 0, 0.5]):
                writer.add_document(rng.integers(0, 500, length))
    return prefixes


def read_files(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in SUFFIXES]


class KilledError(BaseException):
    """Stands for SIGKILL in the same process: no handler of the merge catches it to clean up."""


@pytest.mark.parametrize("remove", [False, True])
def test_a_merge_killed_before_any_of_its_system_calls_ends_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remove: bool
) -> None:
    monkeypatch.setattr(module, "SYNC_BYTES", 1000)  # every other part
    whole = tmp_path / "whole"
    merge_datasets(write_parts_of(tmp_path / "w", 5), whole)
    expected = read_files(whole)
    folder, output = tmp_path / "in", tmp_path / "joined"
    unlink, rename, sync = Path.unlink, Path.rename, os.fsync
    calls: list[str] = []
    limit = [0]

    def count(name: str) -> None:
        calls.append(name)
        if len(calls) > limit[0]:
            raise KilledError

    monkeypatch.setattr(Path, "unlink", lambda path, **kw: (count("unlink"), unlink(path, **kw))[1])
    monkeypatch.setattr(Path, "rename", lambda path, to: (count("rename"), rename(path, to))[1])
    monkeypatch.setattr(os, "fsync", lambda file: (count("fsync"), sync(file))[1])
    n_killed = 0
    for kills in range(1, 400, 2):
        calls.clear()
        limit[0] = 10**9
        prefixes = write_parts_of(folder, 5)
        n_attempts, is_done = 0, False
        while not is_done:
            calls.clear()
            # a second kill three calls later, then a run to the end
            limit[0] = [kills, kills // 2 + 3, 10**9][min(n_attempts, 2)]
            try:
                merge_datasets(prefixes, output, remove=remove)
                is_done = True
            except KilledError:
                n_attempts, n_killed = n_attempts + 1, n_killed + 1
        assert read_files(output) == expected, kills
        assert not list(tmp_path.glob(".joined*")) and not list(tmp_path.glob("*.partial"))
        left = [Path(f"{prefix}{suffix}").exists() for prefix in prefixes for suffix in SUFFIXES]
        assert left == [not remove] * len(left)
        limit[0] = 10**9
        for suffix in SUFFIXES:
            Path(f"{output}{suffix}").unlink()
        if not n_attempts:
            break
    assert n_killed > 20 and not n_attempts  # every prefix of the calls was tried, to the last one


CHILD = """
import sys
from tools import merge_datasets
from megatron.text import merge
merge.SYNC_BYTES = 100_000
sys.exit(merge_datasets.main(sys.argv[1:]))
"""


def test_a_process_killed_at_any_moment_loses_nothing(root: Path, tmp_path: Path) -> None:
    merge_datasets(write_parts_of(tmp_path / "w", 40, 40_000), tmp_path / "whole")
    expected = read_files(tmp_path / "whole")
    write_parts_of(tmp_path / "in", 40, 40_000)
    pattern = str(tmp_path / "in" / "part-*")
    words = [sys.executable, "-c", CHILD, pattern, "--output", str(tmp_path / "joined"), "--remove"]
    progress = tmp_path / ".joined.merge" / "progress.json"
    random.seed(0)
    n_killed = 0
    environment = {**os.environ, "PYTHONPATH": str(root)}
    for _ in range(30):
        with subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as child:
            before = progress.read_bytes() if progress.exists() else b""
            end = time.monotonic() + 60
            while child.poll() is None and time.monotonic() < end:
                if n_killed < 5 and progress.exists() and progress.read_bytes() != before:
                    time.sleep(random.uniform(0, 0.01))
                    child.send_signal(signal.SIGKILL)
                    break
                time.sleep(0.0005)
            status = child.wait(60)
        n_killed += status == -signal.SIGKILL
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert n_killed >= 2 and status == 0
    assert read_files(tmp_path / "joined") == expected
    assert not list((tmp_path / "in").iterdir()) and not progress.parent.exists()
    assert main([pattern, "--output", str(tmp_path / "joined"), "--remove"]) == 0  # already there


def test_removal_needs_little_more_disk_than_the_largest_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SYNC_BYTES", 1)
    prefixes = write_parts_of(tmp_path, 20, 50_000)
    largest: list[int] = []

    def measure() -> None:
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        largest.append(sum(512 * path.stat().st_blocks for path in files))

    before = sum(path.stat().st_size for path in tmp_path.iterdir())
    write_json = module.write_json
    monkeypatch.setattr(module, "write_json", lambda *words: (measure(), write_json(*words)))
    merge_datasets(prefixes, tmp_path / "joined", remove=True)
    # blocks of 4 KiB for each of the small files
    assert max(largest) < before + 100_000 + 4096 * 70
    assert max(largest) < 1.5 * before


def test_an_unfinished_removal_is_only_continued_by_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SYNC_BYTES", 1)
    prefixes = write_parts_of(tmp_path, 4)
    other = write_parts_of(tmp_path / "other", 1)
    copy = module._copy_tokens

    def fail(dataset: object, *words: object, **options: object) -> None:
        if "part-2" in dataset.prefix:
            raise KeyboardInterrupt
        copy(dataset, *words, **options)

    with monkeypatch.context() as patched:
        patched.setattr(module, "_copy_tokens", fail)
        with pytest.raises(KeyboardInterrupt):
            merge_datasets(prefixes, tmp_path / "joined", remove=True)
    assert read_unfinished_removal(tmp_path / "joined") is not None
    assert not Path(f"{prefixes[1]}.bin").exists() and Path(f"{prefixes[2]}.bin").exists()
    for words, remove in (
        (prefixes, False),
        ([*prefixes, *other], True),
        (prefixes[3:], True),
        (other, True),
    ):
        with pytest.raises(ValueError, match="expected the command of its unfinished merge with --remove"):
            merge_datasets(words, tmp_path / "joined", remove=remove)
    Path(f"{prefixes[3]}.bin").touch()
    with pytest.raises(ValueError, match="has changed during the merge"):
        merge_datasets(prefixes[2:], tmp_path / "joined", remove=True)
    assert (tmp_path / ".joined.merge" / "joined.bin.partial").exists()
    partial = tmp_path / ".joined.merge" / "joined.bin.partial"
    content = partial.read_bytes()
    partial.write_bytes(content[:100])
    with pytest.raises(OSError, match="got 100 bytes, expected .* or more of"):
        merge_datasets(prefixes, tmp_path / "joined", remove=True)


def test_a_damaged_input_is_not_removed(tmp_path: Path) -> None:
    prefixes = write_parts_of(tmp_path, 3)
    data = Path(f"{prefixes[1]}.bin")
    content = bytearray(data.read_bytes())
    content[7] ^= 1
    data.write_bytes(content)
    with pytest.raises(ValueError, match=r"part-1_text_document\.bin: its hash differs .* not removed"):
        merge_datasets(prefixes, tmp_path / "joined", remove=True)
    assert all(Path(f"{prefix}.bin").exists() for prefix in prefixes)
    assert not list(tmp_path.glob("*joined*"))
    merge_datasets(prefixes, tmp_path / "joined")  # as documented: without --remove nothing is compared


def test_a_dataset_of_parts_is_merged_and_removed(tmp_path: Path) -> None:
    prefixes = write_parts_of(tmp_path, 5)
    write_parts_list(prefixes, tmp_path / "all")
    tokens = open_dataset(tmp_path / "all").tokens[:]
    merge_datasets([str(tmp_path / "all")], tmp_path / "joined", remove=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"joined{suffix}" for suffix in SUFFIXES]
    assert (open_dataset(tmp_path / "joined").tokens[:] == tokens).all()
    assert list(find_faults(tmp_path / "joined")) == []


def test_an_interrupted_merge_continues_unless_an_input_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SYNC_BYTES", 1)
    prefixes = write_parts_of(tmp_path, 4)
    copied, copy = [], module._copy_tokens

    def fail(dataset: object, *words: object, **options: object) -> None:
        copied.append(Path(dataset.prefix).name)
        if len(copied) == 3:
            raise KeyboardInterrupt
        copy(dataset, *words, **options)

    for change in (False, True):
        copied.clear()
        with monkeypatch.context() as patched:
            patched.setattr(module, "_copy_tokens", fail)
            with pytest.raises(KeyboardInterrupt):
                merge_datasets(prefixes, tmp_path / "joined")
            if change:
                os.utime(f"{prefixes[0]}.bin")
            merge_datasets(prefixes, tmp_path / "joined")
        numbers = [0, 1, 2, 3] if change else [2, 3]
        assert copied[3:] == [f"part-{number}_text_document" for number in numbers]
        assert list(find_faults(tmp_path / "joined")) == []
        for suffix in SUFFIXES:
            (tmp_path / f"joined{suffix}").unlink()


def test_a_missing_or_repeated_part_of_a_job_is_refused(tmp_path: Path) -> None:
    def write(name: str, number: object, of: object = 3, job: str = "a", key: str = "text") -> str:
        part = {"number": number, "of": of, "inputs_sha256": job}
        meta = META | {"part": part, "json_key": key}
        with IndexedWriter(tmp_path / name, np.dtype(np.uint16), meta) as writer:
            writer.add_document([1])
        return str(tmp_path / name)

    first, second, third = (write(str(i), i) for i in (1, 2, 3))
    for merge in (merge_datasets, write_parts_list):
        with pytest.raises(ValueError, match="got 2 of 3 parts of its job, not part 2"):
            merge([third, first], tmp_path / "out")
        with pytest.raises(ValueError, match="got part 1 of 3 again"):
            merge([first, second, write("copy", 1), third], tmp_path / "out")
        with pytest.raises(ValueError, match="got 1 of 3 parts of its job, not part 1"):
            merge([first, second, third, write("other", 2, job="b")], tmp_path / "out")
        with pytest.raises(ValueError, match="not part 1"):
            merge([write("odd", 7, of=2**62)], tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))
    keys = [write(f"{key}{i}", i, key=key) for key in ("title", "text") for i in (1, 2, 3)]
    plain = write_parts_of(tmp_path, 1)
    assert merge_datasets([first, third, second, *keys[:3], *plain, write("x", "1")], tmp_path / "out").is_new


def test_patterns_are_in_natural_order_and_lists_and_words_in_theirs(tmp_path: Path) -> None:
    prefixes = write_parts_of(tmp_path / "d", 12)
    (tmp_path / "d" / "part-3_text_document.rejects.jsonl").touch()
    for ending in ("", ".bin", ".idx"):
        assert expand_prefixes([str(tmp_path / "d" / f"part-*{ending}")]) == prefixes
    assert expand_prefixes([prefixes[5], str(tmp_path / "d" / "part-[12]_*")]) == [
        prefixes[i] for i in (5, 1, 2)
    ]
    listed = tmp_path / "d" / "list.txt"
    listed.write_text(f"# parts\n\npart-4_text_document  # beside the list\n{prefixes[2]}.bin\npart-1*\n")
    assert expand_prefixes([prefixes[0]], [listed]) == [prefixes[i] for i in (0, 4, 2, 1, 10, 11)]
    write_parts_list(prefixes, tmp_path / "d" / "all")
    assert expand_prefixes([str(tmp_path / "d" / "a*")]) == [str(tmp_path / "d" / "all")]
    assert sorted(["b10", "b9", "a", "10", "9"], key=natural_key) == ["9", "10", "a", "b9", "b10"]


def test_wrong_words_and_lists_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefixes = write_parts_of(tmp_path, 3)
    with pytest.raises(ValueError, match="twice, also as"):
        expand_prefixes([prefixes[0], str(tmp_path / "part-*")])
    (tmp_path / "link.bin").symlink_to(f"{prefixes[0]}.bin")
    (tmp_path / "link.idx").symlink_to(f"{prefixes[0]}.idx")
    with pytest.raises(ValueError, match="twice, also as"):
        expand_prefixes([prefixes[0], str(tmp_path / "link")])
    with pytest.raises(FileNotFoundError, match="absent-\\*: no dataset matches"):
        expand_prefixes([str(tmp_path / "absent-*")])
    with pytest.raises(FileNotFoundError, match="no such list"):
        expand_prefixes([], [tmp_path / "absent"])
    listed = tmp_path / "mix.txt"
    for line in (f"0.7 {prefixes[0]}", f'"1 {prefixes[0]}"', f"3e-1 {prefixes[0]}", f"1/3 {prefixes[0]}"):
        listed.write_text(f"{prefixes[1]}\n{line}\n")
        with pytest.raises(ValueError, match=r"mix\.txt:2: got weight .* dataset\.path_train instead"):
            expand_prefixes([], [listed])
    listed.write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match="not UTF-8"):
        expand_prefixes([], [listed])
    listed.write_text("# nothing\n")
    with pytest.raises(ValueError, match="empty lists"):
        expand_prefixes([], [listed])
    for words in (["--parts", "x", "--remove"], ["--output", "x", "--hash"], []):
        with pytest.raises(SystemExit) as stop:
            main([prefixes[0], *words])
        assert stop.value.code == 2
    capsys.readouterr()
    assert main([str(tmp_path / "none*"), "--parts", str(tmp_path / "x")]) == 1
    assert "no dataset matches" in capsys.readouterr().err
