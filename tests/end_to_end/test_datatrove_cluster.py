"""EncodeToMegatron under datatrove's Slurm and Ray executors on two nodes, one of which is killed."""

import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron.text.merge import merge_datasets
from megatron.text.preprocess import PreprocessOptions, preprocess
from tests.end_to_end.conftest import Slurm, kill_processes, wait_until

pytest.importorskip("datatrove", reason="no datatrove: pip install 'megatron-scaling[datatrove]'")

N_TASKS = 8
LIMIT_S = 240
PROGRAM = "examples_scaling/training/prepare_datatrove.py"
# the program of the guide, slowed: each task takes about 8 seconds, and again in its second attempt
SCRIPT = """
import runpy, sys

def pace(data, rank, world_size):
    import time  # the function is pickled by value, without the names of this script
    for document in data:
        time.sleep(0.06)
        yield document

program = runpy.run_path(sys.argv[1])
words = ["text", "tokens/c4", "--logs", "logs", "--workers", "4", *sys.argv[2:]]
executor = program["build_executor"](program["build_parser"]().parse_args(words))
executor.pipeline.insert(1, pace)
"""
# two Ray nodes on this machine; the second one is killed while its tasks run
RAY_SCRIPT = (
    """
import glob, os, threading, time
import ray
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 10**8})
second = cluster.add_node(num_cpus=2, object_store_memory=10**8)
cluster.connect()
"""
    + SCRIPT
    + """
work = threading.Thread(target=executor.run)
work.start()
# two files a task: both nodes have unfinished ones
while work.is_alive() and not (
    glob.glob("logs/completions/*") and len(glob.glob("tokens/*.partial")) >= 4
):
    time.sleep(0.2)
cluster.remove_node(second, allow_graceful=False)
print("killed with completed:", len(glob.glob("logs/completions/*")), flush=True)
work.join()
print("completed:", len(glob.glob("logs/completions/*")), flush=True)
ray.shutdown()
cluster.shutdown()
"""
)


@pytest.fixture
def corpus(tmp_path: Path, scaling_data: Path) -> Path:
    """Folder with text/: the first documents of C4 in one file per task."""
    with (scaling_data / "c4" / "c4_en_shard00000_first1000.jsonl").open("rb") as file:
        lines = file.readlines()
    (tmp_path / "text").mkdir()
    for i in range(N_TASKS):
        (tmp_path / "text" / f"{i}.jsonl").write_bytes(b"".join(lines[i::N_TASKS]))
    return tmp_path


def check_equal_to_one_machine(corpus: Path) -> None:
    """Compare the merged parts with the output of the preprocessing tool, byte for byte."""
    parts = [
        str(corpus / "tokens" / f"c4-part-{i:05d}-of-{N_TASKS:05d}_text_document") for i in range(N_TASKS)
    ]
    merge_datasets(parts, corpus / "merged")
    preprocess(
        [str(corpus / "text")], corpus / "ours", "gpt2", PreprocessOptions(append_eod=True, quiet=True)
    )
    for suffix in (".bin", ".idx"):
        ours = (corpus / f"ours_text_document{suffix}").read_bytes()
        assert (corpus / f"merged{suffix}").read_bytes() == ours, suffix
    assert {path.suffix for path in (corpus / "tokens").iterdir()} == {".bin", ".idx", ".json"}


def list_completed(corpus: Path) -> list[str]:
    folder = corpus / "logs" / "completions"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@pytest.mark.slow
def test_slurm_on_two_nodes_with_one_killed_gives_the_bytes_of_one_machine(
    slurm: Slurm, corpus: Path, root: Path
) -> None:
    script = corpus / "run.py"
    script.write_text(SCRIPT + "executor.run()\n")
    second = f"{socket.gethostname().partition('.')[0]}-second"
    with Path(slurm.variables["SLURM_CONF"]).open("a") as conf:
        conf.write("SlurmdTimeout=10\n")
    slurm("scontrol", "reconfigure")
    words = (sys.executable, str(script), str(root / PROGRAM), "--executor", "slurm", "--partition", "all")
    slurm(*words, cwd=corpus, PYTHONPATH=str(root))

    def show() -> str:
        logs = "".join(path.read_text()[-2000:] for path in corpus.glob("logs/slurm_logs/*.out"))
        return f"{slurm('squeue')}\n{list_completed(corpus)}\n{logs}"

    def running_on_second() -> int:
        return len(slurm("squeue", "-h", "-t", "RUNNING", "-w", second, "-o", "%i").splitlines())

    wait_until(lambda: len(list_completed(corpus)) >= 1 and running_on_second() > 0, LIMIT_S, show)
    wait_until(lambda: len(list((corpus / "tokens").glob("*.partial"))) > 2, LIMIT_S, show)
    lost = running_on_second()
    slurm.kill_node(second)
    completed = list_completed(corpus)
    wait_until(lambda: "down" in slurm("sinfo", "-h", "-n", second, "-o", "%T"), LIMIT_S, show)
    wait_until(lambda: len(list_completed(corpus)) == N_TASKS, LIMIT_S, show)
    assert lost > 0 and len(completed) < N_TASKS, (lost, completed)
    check_equal_to_one_machine(corpus)
    # a second call finds every task completed and submits nothing
    jobs = slurm("squeue", "-h", "-o", "%F")
    slurm(*words, cwd=corpus, PYTHONPATH=str(root))
    assert set(slurm("squeue", "-h", "-o", "%F").split()) <= set(jobs.split())


@pytest.mark.slow
def test_ray_on_two_nodes_with_one_killed_gives_the_bytes_of_one_machine(corpus: Path, root: Path) -> None:
    pytest.importorskip("ray", reason="no ray: pip install 'datatrove[ray]'")
    script = corpus / "run.py"
    script.write_text(RAY_SCRIPT)
    # not tmp_path: the path of a socket is limited to 108 characters
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        variables = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        try:
            done = subprocess.run(
                [sys.executable, str(script), str(root / PROGRAM), "--executor", "ray"],
                cwd=corpus,
                env={**os.environ, **variables, "PYTHONPATH": path},
                timeout=LIMIT_S,
                capture_output=True,
                text=True,
            )
        finally:
            kill_processes(f"RAY_TMPDIR={folder}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    killed, completed = re.findall(r"completed: (\d+)", done.stdout)
    assert int(killed) < int(completed) == N_TASKS, done.stdout + done.stderr[-4000:]
    check_equal_to_one_machine(corpus)
