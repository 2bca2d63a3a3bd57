"""The commands that tools/bench/kills.py kills, by subsystem."""

import importlib.util
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from kill.inputs import Inputs, copy_folder, tool_command
from kill.outcomes import read_outcome
from kill.trials import ALL, CHILD, PARENT, Job

TASKS = "copa,sciq"
PYTHON = (sys.executable, "-c")


class SkippedError(Exception):
    """A library or data set that a subsystem requires is missing."""


def preprocess_job(inputs: Inputs, work: Path, n_workers: int) -> Job:
    """Job that tokenizes text into a dataset."""
    words = ("--input", inputs.lines, "--output-prefix", "out", "--root", work, "--workers", n_workers)
    words += ("--tokenizer-model", inputs.tokenizer, "--append-eod", "--quiet")
    targets = (ALL,) if n_workers == 1 else (ALL, PARENT, CHILD)
    # the sidecar is written last, and the folder of shards exists only until they are joined
    final, writing = ["out_text_document.json"], ["*.partial*", ".out.shards"]
    command = tool_command("preprocess_data_many_cores", *words)
    return Job(
        f"preprocess-{n_workers}", command, work, read_outcome, final, writing=writing, targets=targets
    )


def merge_job(inputs: Inputs, work: Path) -> Job:
    """Job that merges datasets."""
    words = (inputs.parts / "part-*", "--output", work / "joined")
    return Job("merge", tool_command("merge_datasets", *words), work, read_outcome, ["joined.json"])


def write_parts_job(inputs: Inputs, work: Path) -> Job:
    """Job that makes datasets one dataset of parts."""
    words = (inputs.parts / "part-*", "--parts", work / "all", "--hash")
    command = tool_command("merge_datasets", *words)
    return Job("write-parts", command, work, read_outcome, ["all.parts.json"])


def subset_text_job(inputs: Inputs, work: Path) -> Job:
    """Job that writes a compressed sample of the lines."""
    words = ("--input", inputs.lines, "--output", work / "part.jsonl.gz", "--sample", "0.5", "--quiet")
    return Job("subset-text", tool_command("subset_corpus", *words), work, read_outcome, ["part.jsonl.gz"])


def subset_dataset_job(inputs: Inputs, work: Path) -> Job:
    """Job that writes a sample of a dataset."""
    words = ("--input", inputs.tokens, "--output", work / "part", "--sample", "0.9", "--quiet")
    return Job("subset-dataset", tool_command("subset_corpus", *words), work, read_outcome, ["part.json"])


def train_job(inputs: Inputs, work: Path, name: str, n_ranks: int, *changes: str) -> Job:
    """Job of a training run."""
    words = inputs.train_words(work, *changes)
    command = tool_command("pretrain", *words)
    if n_ranks > 1:
        command = tool_command("start_ranks", n_ranks, command[1], *words)
    # with two ranks: PARENT is start_ranks, CHILD one of the ranks
    targets = (ALL,) if n_ranks == 1 else (ALL, PARENT, CHILD)
    return Job(name, command, work, read_outcome, ["result.json"], targets=targets)


def train_deepspeed_job(inputs: Inputs, work: Path) -> Job:
    """Job of a run with DeepSpeed on two ranks."""
    if importlib.util.find_spec("deepspeed") is None:
        raise SkippedError("deepspeed is not installed")
    return train_job(inputs, work, "train-deepspeed", 2, "dist.engine=deepspeed", "dist.sharding_stage=zero2")


def sweep_job(inputs: Inputs, work: Path, name: str, n_copies: int) -> Job:
    """Job of a study of six runs, two at a time."""
    command = tool_command("sweep", inputs.study(work), "--jobs", "2")
    # PARENT twice: the runs of a killed sweep continue for a while, and the next sweep must not start them
    # again
    targets = (PARENT,) if n_copies > 1 else (ALL, PARENT, PARENT, CHILD)
    return Job(
        name, command, work, read_outcome, ["runs/*/result.json"],
        targets=targets, n_copies=n_copies, at_once=True,
    )  # fmt: skip


def register_job(inputs: Inputs, work: Path) -> Job:
    """Job that registers text files in a catalog."""
    command = tool_command("register_corpus", work / "catalog", *inputs.register_words)
    return Job("register", command, work, read_outcome, ["catalog/commits/*.json"], writing=["*.partial"])


def prepare_mixture_job(inputs: Inputs, work: Path) -> Job:
    """Job that tokenizes a mixture's documents."""

    def write_spec(work: Path) -> None:
        inputs.write_mixture(work, f"count: tokens\ntokenizer: {inputs.tokenizer}\n")

    prepare_words = tool_command("prepare_mixture", work / "slim.yaml")
    _ = inputs.catalog
    return Job(
        "prepare-mixture", prepare_words, work, read_outcome, ["slim.mixture/resolved.json"], write_spec
    )


def validate_job(inputs: Inputs, work: Path) -> Job:
    """Job that scores the checkpoints of a run."""
    run = inputs.trained
    words = ("--data", inputs.corpora[1], "--save-per-document", "--device", "cpu", "--threads", "1")
    command = tool_command("validate", work, *words)
    final = ["validation/*/*.json"]
    return Job("validate", command, work, read_outcome, final, lambda work: copy_folder(run, work))


def downstream_job(inputs: Inputs, work: Path) -> Job:
    """Job that scores two downstream tasks with local data."""
    if "SCALING_DATA" not in os.environ:
        raise SkippedError(
            "SCALING_DATA is not set. It contains the tasks' data and a model with a tokenizer."
        )
    data = Path(os.environ["SCALING_DATA"])
    model = data / "stories260K"
    words = (model / "stories260K.bin", "--tokenizer", model / "tok512.bin", "--tasks", TASKS, "--limit", 20)
    words += ("--data-dir", data / "downstream", "--out", work, "--device", "cpu", "--threads", "1")
    command = tool_command("evaluate_downstream", *words, "--log-samples")
    return Job("downstream", command, work, read_outcome, ["**/results.json"])


def convert_job(inputs: Inputs, work: Path) -> Job:
    """Job that converts a checkpoint to the sharded layout."""
    command = tool_command("convert_checkpoint", inputs.trained, work / "sharded", "--to", "sharded")
    return Job("convert", command, work, read_outcome, ["sharded/meta.json"], refuses=True)


def report_job(inputs: Inputs, work: Path) -> Job:
    """Job that collects runs into a table, fits a law and writes the report."""
    study = inputs.swept
    steps = (
        tool_command("collect", work),
        tool_command(
            "fit_law",
            work / "table.csv",
            "--out",
            work / "law.json",
            "--n-bootstrap",
            "50",
            "--group",
            "none",
        ),
        tool_command("make_report", work),
    )
    # one command for the three, so that a kill may hit any of them and the restart repeats all
    command = ["bash", "-c", " && ".join(shlex.join(step) for step in steps)]
    return Job("report", command, work, read_outcome, ["report.html"], lambda work: copy_folder(study, work))


def frontier_job(inputs: Inputs, work: Path) -> Job:
    """Job that fits compute_law.json to a table."""
    command = tool_command(
        "fit_frontier", inputs.isoflops, "--flops-by", "6nd", "--out", work / "compute_law.json"
    )
    return Job("frontier", command, work, read_outcome, ["compute_law.json"])


Make = Callable[[Inputs, Path], Job]
JOBS: dict[str, Make] = {
    "preprocess-1": lambda inputs, work: preprocess_job(inputs, work, 1),
    "preprocess-2": lambda inputs, work: preprocess_job(inputs, work, 2),
    "merge": merge_job,
    "write-parts": write_parts_job,
    "subset-text": subset_text_job,
    "subset-dataset": subset_dataset_job,
    "train-full": lambda inputs, work: train_job(inputs, work, "train-full", 1),
    "train-diffusion": lambda inputs, work: train_job(
        inputs, work, "train-diffusion", 1, "objective.name=masked_diffusion"
    ),
    "train-sharded": lambda inputs, work: train_job(
        inputs, work, "train-sharded", 1, "checkpoint.state_dict_type=sharded", "checkpoint.asynchronous=true"
    ),
    "train-2-ranks": lambda inputs, work: train_job(
        inputs, work, "train-2-ranks", 2, "checkpoint.state_dict_type=sharded", "checkpoint.asynchronous=true"
    ),
    "train-deepspeed": train_deepspeed_job,
    "sweep": lambda inputs, work: sweep_job(inputs, work, "sweep", 1),
    "two-sweeps": lambda inputs, work: sweep_job(inputs, work, "two-sweeps", 2),
    "register": register_job,
    "prepare-mixture": prepare_mixture_job,
    "validate": validate_job,
    "downstream": downstream_job,
    "convert": convert_job,
    "report": report_job,
    "frontier": frontier_job,
}
