"""The commands that tools/bench/kills.py kills, by subsystem."""

import importlib.util
import os
import shlex
from collections.abc import Callable
from pathlib import Path

from kill.inputs import Inputs, copy_folder, tool
from kill.outcomes import read_outcome
from kill.trials import ALL, CHILD, PARENT, Job

TASKS = "copa,sciq"


class SkippedError(Exception):
    """What a subsystem requires is not there."""


def preprocess(inputs: Inputs, work: Path, n_workers: int) -> Job:
    """Text into a dataset."""
    words = ("--input", inputs.lines, "--output-prefix", "out", "--root", work, "--workers", n_workers)
    words += ("--tokenizer-model", inputs.tokenizer, "--append-eod", "--quiet")
    targets = (ALL,) if n_workers == 1 else (ALL, PARENT, CHILD)
    final, writing = ["out_text_document.json"], ["*.partial*", ".out.shards"]
    command = tool("preprocess_data_many_cores", *words)
    return Job(
        f"preprocess-{n_workers}", command, work, read_outcome, final, writing=writing, targets=targets
    )


def merge(inputs: Inputs, work: Path) -> Job:
    """Datasets into one."""
    command = tool("merge_datasets", *[inputs.tokens] * 4, "--output", work / "joined")
    return Job("merge", command, work, read_outcome, ["joined.json"])


def subset_text(inputs: Inputs, work: Path) -> Job:
    """A sample of the lines, packed."""
    words = ("--input", inputs.lines, "--output", work / "part.jsonl.gz", "--sample", "0.5", "--quiet")
    return Job("subset-text", tool("subset_corpus", *words), work, read_outcome, ["part.jsonl.gz"])


def subset_dataset(inputs: Inputs, work: Path) -> Job:
    """A sample of a dataset."""
    words = ("--input", inputs.tokens, "--output", work / "part", "--sample", "0.9", "--quiet")
    return Job("subset-dataset", tool("subset_corpus", *words), work, read_outcome, ["part.json"])


def train(inputs: Inputs, work: Path, name: str, n_ranks: int, *changes: str) -> Job:
    """A training run."""
    words = inputs.train_words(work, *changes)
    command = tool("pretrain", *words)
    if n_ranks > 1:
        command = tool("start_ranks", n_ranks, command[1], *words)
    targets = (ALL,) if n_ranks == 1 else (ALL, PARENT, CHILD)
    return Job(name, command, work, read_outcome, ["result.json"], targets=targets)


def train_deepspeed(inputs: Inputs, work: Path) -> Job:
    """A run of two ranks through DeepSpeed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise SkippedError("deepspeed is not installed")
    return train(inputs, work, "train-deepspeed", 2, "dist.engine=deepspeed", "dist.sharding_stage=zero2")


def sweep(inputs: Inputs, work: Path, name: str, n_copies: int) -> Job:
    """A study of six runs, two at a time."""
    command = tool("sweep", inputs.study(work), "--jobs", "2")
    targets = (PARENT,) if n_copies > 1 else (ALL, PARENT, PARENT, CHILD)
    return Job(
        name, command, work, read_outcome, ["runs/*/result.json"],
        targets=targets, n_copies=n_copies, at_once=True,
    )  # fmt: skip


def register(inputs: Inputs, work: Path) -> Job:
    """Text files into a catalog."""
    command = tool("register_corpus", work / "catalog.duckdb", *inputs.register_words)
    writing = ["*.partial*", "*.wal"]
    return Job("register", command, work, read_outcome, ["catalog.duckdb"], writing=writing)


def prepare_mixture(inputs: Inputs, work: Path) -> Job:
    """A mixture's documents tokenised."""

    def prepare(work: Path) -> None:
        inputs.write_mixture(work, f"count: tokens\ntokenizer: {inputs.tokenizer}\n")

    prepare_words = tool("prepare_mixture", work / "slim.yaml")
    _ = inputs.catalog
    return Job("prepare-mixture", prepare_words, work, read_outcome, ["slim.mixture/resolved.json"], prepare)


def validate(inputs: Inputs, work: Path) -> Job:
    """Held-out losses of the checkpoints of a run."""
    run = inputs.trained
    words = ("--data", inputs.corpora[1], "--save-per-document", "--device", "cpu", "--threads", "1")
    command = tool("validate", work, *words)
    final = ["validation/*/*.json"]
    return Job("validate", command, work, read_outcome, final, lambda work: copy_folder(run, work))


def downstream(inputs: Inputs, work: Path) -> Job:
    """Two tasks with local data."""
    if "SCALING_DATA" not in os.environ:
        raise SkippedError(
            "SCALING_DATA is not set: the tasks' data and a model with a tokenizer are read there"
        )
    data = Path(os.environ["SCALING_DATA"])
    model = data / "stories260K"
    words = (model / "stories260K.bin", "--tokenizer", model / "tok512.bin", "--tasks", TASKS, "--limit", 20)
    words += ("--data-dir", data / "downstream", "--out", work, "--device", "cpu", "--threads", "1")
    command = tool("evaluate_downstream", *words, "--log-samples")
    return Job("downstream", command, work, read_outcome, ["**/results.json"])


def convert(inputs: Inputs, work: Path) -> Job:
    """A checkpoint into the sharded layout."""
    command = tool("convert_checkpoint", inputs.trained, work / "sharded", "--to", "sharded")
    return Job("convert", command, work, read_outcome, ["sharded/meta.json"], refuses=True)


def report(inputs: Inputs, work: Path) -> Job:
    """Runs into a table, a law and a page."""
    study = inputs.swept
    steps = (
        tool("collect", work),
        tool(
            "fit_law",
            work / "table.csv",
            "--out",
            work / "law.json",
            "--n-bootstrap",
            "50",
            "--group",
            "none",
        ),
        tool("make_report", work),
    )
    command = ["bash", "-c", " && ".join(shlex.join(step) for step in steps)]
    return Job("report", command, work, read_outcome, ["report.html"], lambda work: copy_folder(study, work))


def frontier(inputs: Inputs, work: Path) -> Job:
    """A table into compute_law.json."""
    command = tool("fit_frontier", inputs.isoflops, "--flops-by", "6nd", "--out", work / "compute_law.json")
    return Job("frontier", command, work, read_outcome, ["compute_law.json"])


Make = Callable[[Inputs, Path], Job]
JOBS: dict[str, Make] = {
    "preprocess-1": lambda inputs, work: preprocess(inputs, work, 1),
    "preprocess-2": lambda inputs, work: preprocess(inputs, work, 2),
    "merge": merge,
    "subset-text": subset_text,
    "subset-dataset": subset_dataset,
    "train-full": lambda inputs, work: train(inputs, work, "train-full", 1),
    "train-diffusion": lambda inputs, work: train(
        inputs, work, "train-diffusion", 1, "objective.name=masked_diffusion"
    ),
    "train-sharded": lambda inputs, work: train(
        inputs, work, "train-sharded", 1, "checkpoint.state_dict_type=sharded", "checkpoint.asynchronous=true"
    ),
    "train-2-ranks": lambda inputs, work: train(
        inputs, work, "train-2-ranks", 2, "checkpoint.state_dict_type=sharded", "checkpoint.asynchronous=true"
    ),
    "train-deepspeed": train_deepspeed,
    "sweep": lambda inputs, work: sweep(inputs, work, "sweep", 1),
    "two-sweeps": lambda inputs, work: sweep(inputs, work, "two-sweeps", 2),
    "register": register,
    "prepare-mixture": prepare_mixture,
    "validate": validate,
    "downstream": downstream,
    "convert": convert,
    "report": report,
    "frontier": frontier,
}
