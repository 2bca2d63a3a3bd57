"""Tests of every command in the guides: its program accepts it, its files exist, and small ones are run."""

import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.guide_commands import (
    GUIDES,
    ROOT,
    Command,
    check_program,
    commands_of,
    inline_commands,
    list_options,
    tool_module,
)
from tests.report.synthetic_study import write_study

LIMIT_S = 300  # for one command, on a busy machine
TREE = ("examples_scaling/", "utils/", "tools/", "megatron/", "csrc/", "tests/")
FILES = (
    ".yaml",
    ".yml",
    ".csv",
    ".json",
    ".jsonl",
    ".txt",
    ".bin",
    ".idx",
    ".pem",
    ".duckdb",
    ".parquet",
    ".md",
)
OUTPUTS = ("--out", "--output", "--parts", "--local-dir", "--figures", "--root")
# files that a guide's reader has: written by another guide or an earlier run, or the reader's own
GIVEN = {
    "*": ["experiments/*", "../shared/data/*", "CONFIG.yaml", "STUDY.yaml", "MIXTURE.yaml", "run.yaml"],
    "DOWNSTREAM.md": ["EleutherAI/*", "data/held_out_neox_text_document", "facts.csv", "data/tasks*"],
    "EVAL.md": ["data/held_out_text_document", "c4/*", "PREFIX"],
    "DATA.md": ["c4/*", "slimpajama/*", "slimpajama_627B", "tokens/*", "text/*", "utils/datapaths/mine.txt"],
    "LAWS.md": ["logs/*", "runs/", "*.csv", "law*.json", "paper/*"],
    "MIXTURE.md": ["*.yaml", "*.pem", "1/16", "s3://*", "values.parquet", "served/token"],
    "STUDY.md": ["data/*", "logs/*"],
    "TRAIN.md": ["data/*", "tokens/*", "text/*"], "slurm.md": ["c4/*", "tokens/*"],
}  # fmt: skip
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
RUN: list[tuple[str, str, list[str], dict[str, str]]] = [
    ("TRAIN.md", "scaling train examples_scaling/training/small.yaml", TINY, {}),
    ("TRAIN.md", "torchrun --standalone --nproc-per-node 2 tools/pretrain.py CONFIG.yaml",
     [*TINY, "logging.run_dir=experiments/two_ranks"], {}),
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
    ("TRAIN.md", "bash examples_scaling/training/train.sh", [
        *TINY, "dist.engine=torch", "model.n_tokens=300", "lr_scheduler.total_epochs=null"], {}),
    ("TRAIN.md", "torchrun --nproc-per-node 8", [
        *TINY, "model.hf_config.num_hidden_layers=2", "model.hf_config.hidden_size=64",
        "model.hf_config.num_attention_heads=2", "model.n_tokens=300"], {"8": "1"}),
]  # fmt: skip
VARIABLES = {
    "MODEL": "7M",
    "DATA": "synthetic",
    "GPUS": "1",
}  # for a training script, in place of the guide's values
SLOW: list[tuple[str, str, list[str], dict[str, str]]] = [
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
def test_files_of_a_guides_commands_exist_or_are_written_by_an_earlier_command(guide: Path) -> None:
    given = [*GIVEN["*"], *GIVEN.get(guide.name, [])]
    outputs: list[str] = []
    for command in commands_of(guide):
        for path in paths_in(command):
            exists = any(fnmatch.fnmatchcase(path, pattern) for pattern in given)
            exists |= any(path == output or path.startswith(f"{output}/") for output in outputs)
            exists |= bool(list(ROOT.glob(path.rstrip("/")))) if not path.startswith("..") else False
            assert exists or path in outputs_of(command), (
                f"{command.where}: {path}: no earlier command writes it"
            )
        outputs += outputs_of(command)


def paths_in(command: Command) -> Iterator[str]:
    """Yield the words that name files: arguments of this project's commands, or words with a known suffix."""
    if command.words[:1] == ["hf"]:  # names of repositories on the hub
        return
    is_ours = command.words[:1] == ["scaling"] or any(word.startswith(TREE) for word in command.words)
    for word in [*command.words, *command.environment.values()]:
        value = word.partition("=")[2] if re.match(r"^[-\w.]+=", word) else word
        if "://" in value or "$" in value or value.startswith(("-", "/")) or " " in value or "," in value:
            continue
        if value.startswith(TREE) or (is_ours and "/" in value) or value.endswith(FILES):
            yield value


def outputs_of(command: Command) -> list[str]:
    """Return the files that a command writes, according to its arguments."""
    words, outputs = command.words, list(command.writes)
    value = dict(zip(words, words[1:], strict=False))
    outputs += [value[option] for option in OUTPUTS if option in value]
    if "--output-prefix" in value:
        outputs.append(
            f"{value.get('--root', '.')}/{value['--output-prefix']}_text_document".removeprefix("./")
        )
    if words[:2] == ["scaling", "convert"]:
        outputs.append(words[3])
    if words[:2] in (["scaling", "register"], ["scaling", "init"]):
        outputs.append(words[2])
    outputs += [
        word.partition("=")[2] for word in words if word.startswith(("logging.run_dir=", "directory="))
    ]
    return outputs + [command.environment[name] for name in ("RUN", "OUT") if name in command.environment]


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
    rows, theirs = [], []
    for n in np.geomspace(1e7, 1e9, 5):
        for d in np.geomspace(2e8, 2e10, 5):
            for unique in (d, d / 8):
                worth = unique * (1 + 15 * (1 - np.exp(-(d / unique - 1) / 15)))
                loss = 1.8 + 480 / n**0.35 + 2000 / worth**0.36
                score = 1 - 0.75 / (1 + np.exp(4 - 1.2 * loss))
                rows.append(f"autoregressive,done,{n:.0f},{d:.0f},{unique:.0f},{loss:.6f},{score:.6f}")
                theirs.append(f"{n:.0f},{d:.0f},{loss:.6f}")
    head = "objective,status,n_params,train_tokens,unique_tokens,loss,score_hellaswag\n"
    (folder / "table.csv").write_text(head + "\n".join(rows) + "\n")
    (folder / "optima.csv").write_text(
        "C,N_opt,SE\n1e18,1.1e8,1e7\n1e19,3e8,2e7\n1e20,1e9,9e7\n1e21,3e9,2e8\n"
    )
    (folder / "published.csv").write_text("params,train_tokens,val_loss\n" + "\n".join(theirs) + "\n")
    from megatron.laws.law import Law

    params = {"E": 1.8, "A": 480.0, "B": 2000.0, "alpha": 0.35, "beta": 0.36}
    diffusion = {**params, "E": 1.6, "R_D": 15.0}
    for name, form, constants in (
        ("law", "chinchilla", params), ("law_masked_diffusion", "repeated_data", diffusion),
    ):  # fmt: skip
        law = Law(form=form, params=constants, objective=0.0, huber_delta=1e-3, n_runs=50)
        law.save(folder / f"{name}.json")


@pytest.mark.parametrize("case", RUN, ids=lambda case: f"{case[0]}: {case[1]}")
def test_a_small_form_of_a_guides_command_runs(
    case: tuple[str, str, list[str], dict[str, str]], world: Path
) -> None:
    run_case(case, world)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda case: f"{case[0]}: {case[1]}")
def test_a_small_form_of_a_guides_slow_command_runs(
    case: tuple[str, str, list[str], dict[str, str]], world: Path, task_folder: Path
) -> None:
    run_case(case, world, {"{tasks}": str(task_folder)})


def run_case(
    case: tuple[str, str, list[str], dict[str, str]], world: Path, folders: dict[str, str] | None = None
) -> None:
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
    """Run a command and return its output; a failure fails the test with the output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    defaults = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(words), cwd=folder, env={**os.environ, **defaults, **(variables or {})},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def test_the_study_of_the_guide_is_the_study_that_init_writes(tmp_path: Path) -> None:
    guide = (ROOT / "examples_scaling" / "training" / "STUDY.md").read_text()
    shown = re.search(r"```yaml\n(.*?)```", guide, re.DOTALL)
    run_command(["scaling", "init", "study.yaml"], tmp_path)
    assert shown and f"{shown[1]}# next: " in (tmp_path / "study.yaml").read_text()


def test_a_guide_may_show_sub_commands_and_wrong_ones_are_refused() -> None:
    check_program(Command("a.md:1", ["scaling"]))
    check_program(Command("a.md:1", ["scaling", "merge", "a", "b", "--output", "c"]))
    for words in (["merge", "a", "--no-such"], ["mrege", "a"]):
        with pytest.raises(AssertionError):
            check_program(Command("a.md:1", ["scaling", *words]))
