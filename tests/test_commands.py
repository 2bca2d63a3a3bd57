"""Tests of every command in the guides: its program accepts it, its files exist, and small ones are run."""

import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from megatron.laws.law import Law
from tests.conftest import run_process
from tests.guide_commands import (
    GUIDES,
    ROOT,
    check_program,
    commands_of,
    inline_commands,
    list_options,
    tool_module,
)
from tests.report.synthetic_study import write_study
from tests.tool_modules import run_cli

WRITTEN = ("utils/datapaths/mine.txt",)  # by the reader
TREE = ("examples_scaling/", "utils/", "tools/", "megatron/", "csrc/", "tests/")
TINY = [
    "dist.cpu_only=true", "dist.dtype=float32", "misc.n_threads=1", "dataset.seq_len=32",
    "dataset.batch_size=4", "dataset.microbatch_size=null",
    "lr_scheduler.total_iterations=2", "lr_scheduler.total_tokens=null",
    "lr_scheduler.warmup_tokens=null", "checkpoint.chkpt_saving_iterations=null", "evaluation.max_samples=2",
    "logging.tensorboard=false",
]  # fmt: skip
QUICKSTART = "experiments/quickstart"
SMALL = "d_model: 32, n_heads: 2, n_layers: 2"
CPU = ["--device", "cpu", "--threads", "1"]
# guide, first words of the command, words to append, words to replace
Case = tuple[str, str, list[str], dict[str, str]]
RUN: list[Case] = [
    ("TRAIN.md", "scaling train examples_scaling/training/small.yaml", TINY, {}),
    ("EVAL.md", "scaling convert experiments/run exported", [], {}),
    ("EVAL.md", "scaling convert exported start", [], {}),
    ("EVAL.md", "scaling train start/start.yaml", TINY,
     {"PREFIX": "data/held_out_text_document"}),
    ("EVAL.md", "scaling generate experiments/run",
     [*CPU, "--max-new-tokens", "4", "--seed", "1"], {}),
    ("EVAL.md", "scaling generate experiments/diffusion",
     [*CPU, "--max-new-tokens", "8", "--steps", "2", "--block-tokens", "4"], {}),
    ("EVAL.md", "scaling validate experiments/run", [*CPU, "--max-samples", "4"], {}),
    ("EVAL.md", "scaling validate A B C", [*CPU, "--batch-size", "64", "--n-bootstrap", "50"], {}),
    ("LAWS.md", "scaling collect experiments/study", [], {}),
    ("LAWS.md", "scaling collect published.csv", ["--out", "their_table.csv"], {}),
    ("LAWS.md", "scaling fit table.csv --objective autoregressive", ["--n-bootstrap", "8"], {}),
    ("LAWS.md", "scaling fit table.csv --form repeated_data", ["--n-bootstrap", "4"], {}),
    ("LAWS.md", "scaling fit table.csv --compare", [], {}),
    ("LAWS.md", "scaling power-law", [], {}),
    ("LAWS.md", "scaling predict law.json", [], {}),
    ("LAWS.md", "scaling predict --list", [], {}),
    ("LAWS.md", "scaling predict muennighoff", [], {}),
    ("LAWS.md", "scaling predict step-law", [], {}),
    ("LAWS.md", "scaling crossover", [], {}),
    ("LAWS.md", "scaling downstream", [], {}),
    ("LAWS.md", "scaling plan --budget 1e20", ["--runs", "5"], {}),
    ("LAWS.md", "scaling plan --budget 3e19", [], {}),
    ("TRAIN.md", "scaling sizes 117M", [], {}),
    ("csv.md", "scaling collect examples_scaling/first_hour/quickstart_runs.csv", [], {}),
    ("csv.md", "scaling frontier study/table.csv", [], {}),
    ("csv.md", "scaling fit study/table.csv", ["--n-bootstrap", "50"], {}),
    ("csv.md", "scaling predict study/law.json", [], {}),
    ("STUDY.md", "scaling compare experiments/study --best", ["--best", "objective"], {}),
    ("STUDY.md", "scaling sweep examples_scaling/training/ladder_chinchilla.yaml --dry-run", [], {}),
]  # fmt: skip
# for a training script, in place of the guide's values
VARIABLES = {"MODEL": "7M", "DATA": "synthetic", "GPUS": "1"}
# tests/end_to_end/test_launch.py trains two ranks with the same script
SLOW: list[Case] = [
    ("TRAIN.md", "torchrun --nproc-per-node 8", [
        *TINY, "model.hf_config.num_hidden_layers=2", "model.hf_config.hidden_size=64",
        "model.hf_config.num_attention_heads=2", "model.n_tokens=300"], {"8": "1"}),
    ("TRAIN.md", "torchrun --standalone --nproc-per-node 2 tools/pretrain.py CONFIG.yaml",
     [*TINY, "logging.run_dir=experiments/two_ranks"], {}),
    ("TRAIN.md", "bash examples_scaling/training/train.sh", [
        *TINY, "dist.engine=torch", "model.n_tokens=300", "lr_scheduler.total_epochs=null"], {}),
    ("TRAIN.md", "python tools/bench/coordinate_check.py",
     ["--widths", "64", "128", "--depths", "2", "4", "--steps", "2", "--seeds", "1", "--threads", "1"], {}),
    ("DOWNSTREAM.md", "scaling evaluate experiments/run",
     [*CPU, "--limit", "2", "--include-path", "{tasks}"], {"arc_easy,copa,lambada_openai": "copa"}),
    ("EVAL.md", "examples_scaling/evaluation/validate.sh experiments/study data/held",
     [*CPU, "--max-samples", "2"], {"experiments/study": "experiments/run"}),
]  # fmt: skip
guides = pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)


@guides
def test_programs_accept_the_options_of_a_guides_commands(guide: Path) -> None:
    for command in commands_of(guide):
        check_program(command)
    for tool, options in inline_commands(guide):
        assert (ROOT / tool).is_file(), f"{guide.name}: no {tool}"
        unknown = set(options) - list_options(tool_module(tool).build_parser())
        assert not unknown, f"{guide.name}: {tool} has no option {unknown}"


@guides
def test_files_of_the_tree_in_a_guides_commands_exist(guide: Path) -> None:
    """Other files are the reader's own, or are written by the commands that RUN runs."""
    for command in commands_of(guide):
        values = [word.partition("=")[2] or word for word in command.words if not word.startswith("-")]
        for path in [*values, *command.environment.values()]:
            if path.startswith(TREE) and path not in WRITTEN and not re.search(r"[$ ,]", path):
                assert list(ROOT.glob(path.rstrip("/"))), f"{command.where}: no file {path}"


SESSIONS = [path for path in GUIDES if any(command.output is not None for command in commands_of(path))]


@pytest.mark.parametrize("guide", SESSIONS, ids=lambda path: path.name)
def test_sessions_of_a_guide_print_what_it_shows(guide: Path, tmp_path: Path, scaling_data: Path) -> None:
    shown = [command for command in commands_of(guide) if command.output is not None]
    for name, source in (("c4", "c4"), ("gpt2", "gpt2_tokenizer")):  # so that gpt2 is not downloaded
        (tmp_path / name).symlink_to(scaling_data / source)
    (tmp_path / "slimpajama").mkdir()
    name = "derived_slimpajama_schema.jsonl.gz"
    (tmp_path / "slimpajama" / name).symlink_to(scaling_data / "redpajama_sample" / name)
    for name, text in re.findall(r"```yaml\n# (\S+\.yaml)\n(.*?)```", guide.read_text(), re.DOTALL):
        (tmp_path / name).write_text(text)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    for command in shown:
        output = run_command(command.words, tmp_path)
        expected, is_cut, _ = command.output.partition("...")
        assert output.startswith(expected) if is_cut else output == expected, command.where


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with a corpus, two trained models and a study, as assumed by the guides."""
    folder = tmp_path_factory.mktemp("world")
    shutil.copytree(ROOT / "examples_scaling", folder / "examples_scaling")
    for name in ("tools", "utils", "megatron"):
        (folder / name).symlink_to(ROOT / name)
    tokens = folder / QUICKSTART / "tokens"
    lines = [
        "python tools/prepare_corpus.py --corpus local --max-mb 1.5 --out text",
        f"python tools/train_tokenizer.py text/train.jsonl --n-tokens 512 --out {QUICKSTART}/tokenizer",
    ]
    for part in ("train", "held_out"):
        lines.append(
            f"python tools/preprocess_data_many_cores.py --input text/{part}.jsonl --output-prefix {part} "
            f"--tokenizer-model {QUICKSTART}/tokenizer --append-eod --root {QUICKSTART}/tokens"
        )
    for line in lines:
        run_command(shlex.split(line), folder)
    prefix = f"{tokens / 'train_text_document'}"
    for name in ("CONFIG", "run"):
        text = (
            f"model: {{{SMALL}}}\ndataset: {{path_train: {prefix}}}\nlr_scheduler: {{total_iterations: 2}}\n"
        )
        (folder / f"{name}.yaml").write_text(text)
    for name, objective in (("run", "autoregressive"), ("diffusion", "masked_diffusion")):
        words = [*TINY, f"logging.run_dir=experiments/{name}", f"objective.name={objective}"]
        run_command(["python", "tools/pretrain.py", "CONFIG.yaml", *words], folder)
    for name in "ABC":
        shutil.copytree(folder / "experiments" / "run", folder / name)
    (folder / "data").mkdir()
    for path in tokens.glob("held_out_text_document.*"):
        (folder / "data" / path.name).symlink_to(path)
    write_study(folder / "experiments" / "study")
    write_tables(folder)
    return folder


def write_tables(folder: Path) -> None:
    """Write table.csv with a score, a table of another program, and the laws that LAWS.md assumes."""
    grid = np.meshgrid(np.geomspace(1e7, 1e9, 4), np.geomspace(2e8, 2e10, 4), [1, 8])
    n, d, epochs = (axis.ravel() for axis in grid)
    worth = d / epochs * (1 + 15 * (1 - np.exp(-(epochs - 1) / 15)))
    runs = pd.DataFrame({"n_params": n, "train_tokens": d, "unique_tokens": d / epochs}).round()
    runs["loss"] = 1.8 + 480 / n**0.35 + 2000 / worth**0.36
    runs["score_hellaswag"] = 1 - 0.75 / (1 + np.exp(4 - 1.2 * runs.loss))
    table = runs.assign(objective="autoregressive", status="done")
    table.to_csv(folder / "table.csv", index=False)
    theirs = runs.rename(columns={"n_params": "params", "loss": "val_loss"})
    theirs[["params", "train_tokens", "val_loss"]].to_csv(folder / "published.csv", index=False)
    optima = {"C": [1e18, 1e19, 1e20, 1e21], "N_opt": [1.1e8, 3e8, 1e9, 3e9], "SE": [1e7, 2e7, 9e7, 2e8]}
    pd.DataFrame(optima).to_csv(folder / "optima.csv", index=False)
    params = {"E": 1.8, "A": 480.0, "B": 2000.0, "alpha": 0.35, "beta": 0.36}
    diffusion = {**params, "E": 1.6, "R_D": 15.0}
    for name, form, constants in (
        ("law", "chinchilla", params), ("law_masked_diffusion", "repeated_data", diffusion),
    ):  # fmt: skip
        law = Law(form=form, params=constants, objective=0.0, huber_delta=1e-3, n_runs=50)
        law.save(folder / f"{name}.json")


@pytest.mark.parametrize("guide", dict.fromkeys(case[0] for case in RUN))
def test_small_forms_of_a_guides_commands_run(guide: str, world: Path) -> None:
    """In their order: a command may read what one before it wrote."""
    for case in RUN:
        if case[0] == guide:
            run_case(case, world)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda case: f"{case[0]}: {case[1]}")
def test_a_small_form_of_a_guides_slow_command_runs(case: Case, world: Path, task_folder: Path) -> None:
    run_case(case, world, {"{tasks}": str(task_folder)})


def run_case(case: Case, world: Path, folders: dict[str, str] | None = None) -> None:
    """Run a command of a guide with more arguments that make it small."""
    guide, start, more, others = case
    path = next(path for path in GUIDES if path.name == guide)
    command = next(
        (candidate for candidate in commands_of(path) if " ".join(candidate.words).startswith(start)), None
    )
    assert command is not None, f"{guide}: no command starts with '{start}'. Update RUN."
    words = list(command.words)
    for old, new in others.items():
        words = [word.replace(old, new) if old in word else word for word in words]
    words += [(folders or {}).get(word, word) for word in more]
    variables = {name: VARIABLES.get(name, value) for name, value in command.environment.items()}
    run_command(words, world, {"GPUS": "1", **variables} if words[0] != "python" else variables)


def run_command(words: Sequence[str], folder: Path, variables: dict[str, str] | None = None) -> str:
    """Run a command and return its output; a failure fails the test with the output.

    A program of this project runs in process, and what starts others in a process of its own.
    """
    variables = {"HF_HUB_OFFLINE": "1"} | (variables or {})
    program, *arguments = words
    if program == "scaling" or program == "python" and arguments[0].startswith("tools/"):
        return run_cli(arguments[0].removeprefix("tools/"), *arguments[1:], cwd=folder, env=variables).output
    done = run_process(words, folder, PYTHONPATH=str(ROOT), **variables)
    assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def test_the_study_of_the_guide_is_the_study_that_init_writes(tmp_path: Path) -> None:
    guide = (ROOT / "examples_scaling" / "training" / "STUDY.md").read_text()
    shown = re.search(r"```yaml\n(.*?)```", guide, re.DOTALL)
    run_command(["scaling", "init", "study.yaml"], tmp_path)
    assert shown and f"{shown[1]}# next: " in (tmp_path / "study.yaml").read_text()
