"""Tests of CLUSTER_DATA.md: its model, its programs and its Python, on the sample of C4."""

import doctest
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from megatron.text.cluster_time import (
    ClusterSize,
    CorpusSize,
    estimate_preparation,
    estimate_text_per_hour,
)

from megatron.data.indexed import IndexedTokens
from tests.guide_commands import commands_of

GUIDE = "examples_scaling/training/CLUSTER_DATA.md"
LIMIT_S = 240
# 3,600 GB at 2 x 5 cores x 100 MB/CPU-s = 1 GB/s take an hour
CORPUS = CorpusSize(text_gb=3600, stored_gb=1600, tokens_b=1000)
CLUSTER = ClusterSize(nodes=2, cores=5, node_gb_s=1.0, efficiency=1.0)


def run_script(folder: Path, root: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S,
        env={"PYTHONPATH": ":".join([str(root), *sys.path]), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    ("cluster", "options", "hours"),
    [
        (CLUSTER, {}, (1, 0.5, 0)),  # 1,600 GB of files and 2,000 GB of tokens at 2 GB/s take half an hour
        (replace(CLUSTER, node_gb_s=0.1), {}, (1, 5, 0)),
        (replace(CLUSTER, efficiency=0.5), {}, (2, 0.5, 0)),
        (CLUSTER, {"copy": True}, (1, 0.5, 4000 / 3600)),  # one node reads and writes 2,000 GB
        (CLUSTER, {"n_tasks": 20}, (1, 0.5, 0)),
        (CLUSTER, {"n_tasks": 15}, (4 / 3, 0.5, 0)),  # the second of two rounds uses 5 of 10 cores
        (CLUSTER, {"n_tasks": 5}, (2, 0.5, 0)),
    ],
)
def test_the_model_agrees_with_arithmetic(cluster: ClusterSize, options: dict, hours: tuple) -> None:
    time = estimate_preparation(CORPUS, cluster, 100, **options)
    assert (time.encode_h, time.transfer_h, time.join_h) == pytest.approx(hours)
    assert time.total_h == pytest.approx(max(hours[:2]) + hours[2])


def test_text_per_hour_is_limited_by_cores_or_by_files() -> None:
    assert estimate_text_per_hour(CORPUS, CLUSTER, 100) == pytest.approx(3.6)
    assert estimate_text_per_hour(CORPUS, CLUSTER, 1e9) == pytest.approx(7.2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, "nodes: got 0, expected above 0"),
        ({"efficiency": 1.5}, "efficiency: got 1.5, expected above 0 to 1"),
        ({"node_gb_s": float("nan")}, "node_gb_s: got nan"),
    ],
)
def test_impossible_numbers_are_errors(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_preparation(CORPUS, replace(CLUSTER, **change), 100)


def test_the_estimates_of_the_guide_are_those_of_the_model(root: Path) -> None:
    blocks = re.findall(r"```pycon\n(.*?)```", (root / GUIDE).read_text(), re.DOTALL)
    session = doctest.DocTestParser().get_doctest("".join(blocks), {}, GUIDE, GUIDE, 0)
    assert len(session.examples) > 8
    printed: list[str] = []
    assert doctest.DocTestRunner().run(session, out=printed.append).failed == 0, "".join(printed)


def test_the_session_of_the_guide_gives_the_joined_dataset(
    root: Path, tmp_path: Path, scaling_data: Path
) -> None:
    pytest.importorskip("datatrove", reason="no datatrove: pip install 'megatron-scaling[datatrove]'")
    (tmp_path / "c4").symlink_to(scaling_data / "c4")
    guide = (root / GUIDE).read_text()
    session = re.findall(r"```text\n(.*?)```", guide, re.DOTALL)[0]
    prepare, merge = [
        command.words[1:]
        for command in commands_of(root / GUIDE)
        if "--tasks 2 " in command.text or "-of-00002" in command.text
    ]
    run_script(tmp_path, root, str(root / prepare[0]), *prepare[1:])
    output = run_script(tmp_path, root, str(root / merge[0]), *merge[1:])
    assert session.endswith(output)
    words = [str(root / "tools/preprocess_data_many_cores.py"), "--input", "c4", "--output-prefix", "ours"]
    run_script(tmp_path, root, *words, "--tokenizer-model", "gpt2", "--append-eod", "--quiet")
    for suffix in (".bin", ".idx"):
        ours = (tmp_path / f"ours_text_document{suffix}").read_bytes()
        assert (tmp_path / "tokens" / f"c4_text_document{suffix}").read_bytes() == ours


def test_the_program_resumes_and_reports_a_folder_without_files(
    root: Path, tmp_path: Path, scaling_data: Path
) -> None:
    pytest.importorskip("datatrove", reason="no datatrove: pip install 'megatron-scaling[datatrove]'")
    program = str(root / "examples_scaling/training/prepare_datatrove.py")
    (tmp_path / "c4").symlink_to(scaling_data / "c4")
    words = [program, "c4", "tokens/c4", "--glob", "olmo*.json.gz"]
    run_script(tmp_path, root, *words)
    parts = sorted((tmp_path / "tokens").glob("*.bin"))
    assert [part.name for part in parts] == [f"c4-part-0000{i}-of-00003_text_document.bin" for i in range(3)]
    assert IndexedTokens(str(parts[0]).removesuffix(".bin")).n_documents == 10
    parts[0].unlink()
    run_script(tmp_path, root, *words)
    assert not parts[0].exists(), "a finished task ran again"
    with pytest.raises(AssertionError, match="error: c4: no file matches"):
        run_script(tmp_path, root, *words[:-1], "*.parquet")


@pytest.mark.slow
def test_filters_and_deduplication_of_the_guide_remove_copies(
    root: Path, tmp_path: Path, scaling_data: Path
) -> None:
    pytest.importorskip("datatrove", reason="no datatrove: pip install 'megatron-scaling[datatrove]'")
    pytest.importorskip("spacy", reason="no spacy, which datatrove's English filters require")
    script = re.findall(r"```python\n(# clean\.py\n.*?)```", (root / GUIDE).read_text(), re.DOTALL)[0]
    (tmp_path / "clean.py").write_text(script)
    (tmp_path / "c4").mkdir()
    with (scaling_data / "c4" / "c4_en_shard00000_first1000.jsonl").open("rb") as file:
        lines = [next(file) for _ in range(100)]
    for i, part in enumerate((lines[:50], lines[50:], lines[:10])):
        (tmp_path / "c4" / f"{i}.jsonl").write_bytes(b"".join(part))
    run_script(tmp_path, root, "clean.py")
    clean = [IndexedTokens(part.with_suffix("")) for part in sorted(tmp_path.glob("tokens/*.bin"))]
    with_copies = sum(dataset.n_documents for dataset in clean)
    shutil.rmtree(tmp_path / "clean")
    shutil.rmtree(tmp_path / "tokens")
    (tmp_path / "c4" / "2.jsonl").write_bytes(b"")
    run_script(tmp_path, root, "clean.py")
    without = [IndexedTokens(part.with_suffix("")) for part in sorted(tmp_path.glob("tokens/*.bin"))]
    assert len(clean) == len(without) == 4
    assert 50 < with_copies == sum(dataset.n_documents for dataset in without) < 100
