"""Arguments that preprocessing refuses, and commands that are interrupted during their imports."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.text.inputs import find_inputs


def run_tool(root: Path, name: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "tools" / f"{name}.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("prefix", ["out/", "out/.", "out/..", ""])
def test_an_output_prefix_that_names_a_folder_is_refused(root: Path, tmp_path: Path, prefix: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "out").mkdir()
    word = f"{tmp_path}/{prefix}" if prefix else ""
    done = run_tool(
        root, "preprocess_data_many_cores", "--input", tmp_path / "in.jsonl", "--tokenizer-model", "gpt2",
        "--output-prefix", word,
    )  # fmt: skip
    assert done.returncode == 2
    assert f"--output-prefix: got '{word}', expected the first part of a file name" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out"]
    assert list((tmp_path / "out").iterdir()) == []


def test_a_finished_dataset_is_replaced_only_with_overwrite(root: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')

    def make(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        return run_tool(
            root, "preprocess_data_many_cores", "--input", tmp_path / f"{name}.jsonl", "--tokenizer-model",
            "gpt2", "--output-prefix", tmp_path / "x", *words,
        )  # fmt: skip

    assert make("a").returncode == 0
    data = tmp_path / "x_text_document.bin"
    before = data.read_bytes()
    again = make("a")
    assert (again.returncode, "exists already" in again.stderr) == (0, True)
    refused = make("b")
    assert refused.returncode == 1
    assert f"error: {data}: exists already" in refused.stderr and "--overwrite" in refused.stderr
    assert data.read_bytes() == before
    assert not list(tmp_path.glob(".x*"))
    assert make("b", "--overwrite").returncode == 0
    assert data.read_bytes() != before


@pytest.mark.parametrize("word", ["ftp://host/a.jsonl", "ssh://b/a.json.gz", "file:///a.jsonl"])
def test_an_unknown_kind_of_url_is_reported_as_not_supported(word: str) -> None:
    with pytest.raises(ValueError, match="unsupported kind of URL, expected s3://, .* or a file on this"):
        find_inputs([word])


@pytest.mark.parametrize("suffix", [".lz4", ".7z", ".zip"])
def test_another_compression_is_reported_as_not_supported(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in.jsonl{suffix}"
    for _ in range(2):  # missing, then existing
        with pytest.raises(ValueError, match=rf"got \{suffix}, expected one of .jsonl, .*Unpack it first"):
            find_inputs([str(path)])
        path.write_bytes(b"")


def test_a_loop_of_links_is_followed_once(tmp_path: Path) -> None:
    inner = tmp_path / "data" / "inner"
    inner.mkdir(parents=True)
    (inner / "a.jsonl").write_text("")
    (inner / "up").symlink_to(tmp_path / "data")
    (inner / "here").symlink_to(inner)
    assert find_inputs([str(tmp_path / "data")]) == [inner / "a.jsonl"]
    (tmp_path / "data" / "other").symlink_to(inner)  # no loop: the file would be read twice
    with pytest.raises(ValueError, match="got this file twice"):
        find_inputs([str(tmp_path / "data")])


@pytest.mark.parametrize("name", ["preprocess_data_many_cores", "merge_datasets", "subset_corpus"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_interrupted_during_its_imports_ends_in_order(
    root: Path, tmp_path: Path, name: str, number: signal.Signals
) -> None:
    (tmp_path / "slow").mkdir()
    # a slow import that prints a line at its start
    (tmp_path / "slow" / "numpy.py").write_text(
        "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(root / "tools" / f"{name}.py"), "--help"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "slow")},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    time.sleep(0.05)
    process.send_signal(number)
    _, words = process.communicate(timeout=30)
    assert (process.returncode, words) == (75, "stopped; run the same command again\n")
