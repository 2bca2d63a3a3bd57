"""The scripts with the names of the original study start this project's tools with the original's settings.

Each script is run by bash. A `python` in front of the path prints the words of a tool instead of running it,
and they are then read by the tool's own parser. The last test trains and scores for real.
"""

import os
import sys
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.config.presets import load_model_sizes
from megatron.config.read import read_config
from megatron.config.schema import RunConfig
from megatron.config.yaml_file import read_yaml
from tests.conftest import run_process
from tests.tool_modules import load_tool

ROWS = yaml.safe_load((Path(__file__).parents[2] / "utils" / "migration" / "scripts.yaml").read_text())
TRAINING, QUICKSTART = "examples_scaling/training", "examples_scaling/quickstart"
RECORDER = """#!/bin/bash
if [ "$1" = -c ]; then exec {python} "$@"; fi
printf '%s\\n' "$@"
"""


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bin")
    for name in ("python", "hf"):
        (folder / name).write_text(RECORDER.format(python=sys.executable))
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def record(root: Path, recorder: Path):
    """Return a function that runs a script and returns the words that its tool would receive."""

    def run(script: str, *words: str, **variables: str) -> list[str]:
        base = {"PATH": f"{recorder}:/usr/bin:/bin", "HOME": str(recorder), "GPUS": "1"}
        done = run_process(["bash", script, *words], root, {}, **base, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


@pytest.fixture
def planned(root: Path, record):
    """Return a function: training script -> the configuration of the run that it starts."""

    def read(script: str, *words: str, **variables: str) -> RunConfig:
        tool, config, *overrides = record(script, *words, **variables)
        assert (tool, config) == ("tools/pretrain.py", f"{TRAINING}/train.yaml")
        return read_config(root / config, [*overrides, "model.n_tokens=50257"])

    return read


def test_what_replaces_a_file_of_the_original_exists(root: Path) -> None:
    for row in ROWS:
        assert row.keys() == {"old", "new", "note"} and (row["new"] or row["note"]), row
        assert [path for path in row["new"] if not (root / path).is_file()] == []
        assert not row["old"].startswith("examples_") or os.access(root / row["old"], os.X_OK), row["old"]


def pick(config: RunConfig, keys: Iterable[str]) -> dict[str, Any]:
    """Return the values of dotted keys."""
    return {key: attrgetter(key)(config) for key in keys}


@pytest.mark.parametrize(
    ("script", "size", "epochs", "objective"),
    [("train_ar", "140M", 50, "autoregressive"), ("train_mdm", "425M", 500, "masked_diffusion")],
)
def test_the_headline_recipe_is_two_commands(planned, script, size, epochs, objective) -> None:
    expected = {
        "model.size": size, "lr_scheduler.total_epochs": epochs, "objective.name": objective,
        "dataset.path_train": "utils/datapaths/train_c4_100m.txt",
        # 99,952,399 tokens are 48,804 samples of 2,048 and their targets
        "dataset.unique_tokens": 48_804 * 2048,
        "dataset.seq_len": 2048, "dataset.batch_size": 256, "dataset.microbatch_size": 8,
        "optim.lr": 2e-4, "lr_scheduler.lr_min_ratio": 0.1, "lr_scheduler.warmup_fraction": 0.01,
        "optim.beta1": 0.9, "optim.beta2": 0.95, "optim.weight_decay": 0.1, "optim.grad_clip": 1.0,
        "dist.dtype": "bfloat16", "dist.sharding_stage": "zero0", "evaluation.max_samples": 10 * 256,
        # Megatron's default, which the original's command does not change
        "model.attention_dropout": 0.1, "model.hidden_dropout": 0.1,
    }  # fmt: skip
    assert pick(planned(f"{QUICKSTART}/{script}.sh"), expected) == expected


@pytest.mark.parametrize(
    ("kind", "size", "factor"), [("arm", "425M", 6), ("mdm", "7M", 100), ("arm", "1018M", 30)]
)
def test_a_chinchilla_run_has_the_original_tokens(planned, kind: str, size: str, factor: int) -> None:
    # the script of the original: N = 4 L d^2 + 3 L d f + 6 L d + V d, tokens = int(C / 6 * (1e9 / N)),
    # samples = round(tokens / 2048)
    d, layers = (load_model_sizes()[size][key] for key in ("d_model", "n_layers"))
    n = 4 * layers * d**2 + 3 * layers * d * (int((4 * d * 2 / 3) / 64) * 64) + 6 * layers * d + 50257 * d
    samples = round(int((factor * 10**9 / 6) * (10**9 / n)) / 2048)
    script = f"{TRAINING}/{kind}/example_training_chinchilla.sh"
    expected = {
        "lr_scheduler.total_tokens": samples * 2048, "model.size": size, "optim.lr": 2e-4,
        "dataset.unique_tokens": None, "lr_scheduler.total_epochs": None,
    }  # fmt: skip
    assert pick(planned(script, MODEL_PARAM=size, FLOPS_FACTOR=str(factor)), expected) == expected


@pytest.mark.parametrize("kind", ["arm", "mdm"])
def test_a_data_value_run_repeats_a_part_of_the_same_total(planned, kind: str) -> None:
    script = f"{TRAINING}/{kind}/example_training_data_value.sh"
    once, often = planned(script), planned(script, EPOCH_CNT="100")
    assert once.dataset.unique_tokens is None
    assert often.lr_scheduler.total_tokens == once.lr_scheduler.total_tokens
    published = read_yaml(Path(__file__).parents[2] / "utils/epoch_tokens.yaml")[
        "7B6_100ep" if kind == "arm" else "13B5_100ep"
    ]
    # the published subsets were cut by documents, with an average number of tokens per document
    assert often.dataset.unique_tokens == pytest.approx(published, rel=0.02)


VARIABLES = {  # variable: its value, and the key and value that it sets
    "MODEL_PARAM": ("217M", "model.size", "217M"), "EPOCH_CNT": ("7", "lr_scheduler.total_epochs", 7),
    "DATA_CNT": ("500M", "dataset.unique_tokens", (499_791_318 - 1) // 1024 * 1024),
    "TRAIN_DATA_PATH": ("a.txt", "dataset.path_train", "a.txt"), "SEQ_LEN": ("1024", "dataset.seq_len", 1024),
    "VALID_DATA_PATH": ("b.txt", "dataset.path_eval", "b.txt"), "LR": ("1e-3", "optim.lr", 1e-3),
    "MICRO_BATCH_SIZE": ("4", "dataset.microbatch_size", 4), "TP_SIZE": ("2", "dist.tensor_parallel", 2),
    "GLOBAL_BATCH_SIZE": ("64", "dataset.batch_size", 64), "PP_SIZE": ("3", "dist.pipeline_parallel", 3),
    "ZERO_STAGE": ("1", "dist.sharding_stage", "zero1"), "WANDB_PROJECT": ("p", "logging.wandb", "p"),
    "SAVE_INTERVAL": ("11", "checkpoint.chkpt_saving_iterations", 11), "WANDB_EXP_NAME": ("e", "name", "e"),
    "EVAL_INTERVAL": ("12", "evaluation.every_iterations", 12),
    "LOG_INTERVAL": ("13", "logging.every_iterations", 13),
    "EVAL_ITERS": ("14", "evaluation.max_samples", 14 * 64),
    "VARIANT": ("v", "logging.run_dir", "experiments/v"),
    "CHECKPOINT_PATH": ("c", "checkpoint.directory", "c"), "KILL_SWITCH_PATH": ("k", "misc.stop_file", "k"),
}  # fmt: skip


def test_variables_of_the_original_become_settings(planned) -> None:
    given = {name: value for name, (value, _, _) in VARIABLES.items()}
    expected = {key: value for _, key, value in VARIABLES.values()}
    # also with tensor parallelism, whose engine is torch
    expected |= {"optim.beta2": 0.99, "model.attention_dropout": 0.1, "model.hidden_dropout": 0.1}
    expected |= {"dist.engine": "torch"}
    config = planned(f"{TRAINING}/mdm/example_training.sh", "optim.beta2=0.99", **given)
    assert pick(config, expected) == expected
    rates = {"ATTENTION_DROPOUT": "0.3", "HIDDEN_DROPOUT": "0"}
    config = planned(f"{TRAINING}/arm/example_training.sh", **rates)
    assert (config.model.attention_dropout, config.model.hidden_dropout) == (0.3, 0)


SEVERAL_NODES = {
    "model.size": "2298M", "lr_scheduler.total_epochs": 363, "dist.sharding_stage": "zero1",
    "dist.offload_optimizer": True, "dataset.microbatch_size": 2, "dist.engine": "deepspeed",
}  # fmt: skip
PLAIN = {"model.size": "425M", "lr_scheduler.total_epochs": 100, "dist.engine": "torch", "dist.compile": None}


@pytest.mark.parametrize(
    ("script", "given", "expected"),
    [
        ("arm/example_multi_node_training", {}, SEVERAL_NODES | {"objective.name": "autoregressive"}),
        ("mdm/example_multi_node_training", {}, SEVERAL_NODES | {"objective.name": "masked_diffusion"}),
        ("arm/example_training", {}, PLAIN),
        ("mdm/example_training", {}, PLAIN),
        ("arm/example_training", {"ENGINE": "deepspeed"}, {"dist.engine": "deepspeed"}),
        ("arm/example_order_list", {"NUM_ORDER_LIST": "8", "ORDER_KIND": "noise_sorted"},
         {"objective.orders": 8, "objective.order_kind": "noise_sorted"}),
    ],
)  # fmt: skip
def test_the_other_training_scripts_set_what_their_originals_set(planned, script, given, expected) -> None:
    assert pick(planned(f"{TRAINING}/{script}.sh", **given), expected) == expected


@pytest.mark.parametrize(
    ("variables", "engine"),
    [
        ({"SLURM_JOB_NUM_NODES": "1"}, "torch"),
        ({"SLURM_JOB_NUM_NODES": "2"}, "deepspeed"),
        ({"SLURM_JOB_NUM_NODES": "2", "ENGINE": "torch"}, "torch"),
        ({"MPI_FLAGS": "--oversubscribe"}, "torch"),
        ({"MPI_FLAGS": "--hostfile hosts"}, "deepspeed"),
    ],
)
def test_the_engine_is_torch_on_one_node_and_deepspeed_on_several(root: Path, variables, engine) -> None:
    settings = f'source {TRAINING}/settings.sh; echo "${{words[0]}}"'
    done = run_process(["bash", "-euc", settings], root, {}, **variables)
    assert done.stdout == f"dist.engine={engine}\n"


SCORED = {
    f"{QUICKSTART}/eval_ar.sh": ("validate", {"batch_size": 16, "data": "utils/datapaths/val_c4.txt"}),
    f"{QUICKSTART}/eval_mdm.sh": ("validate", {"batch_size": 8, "num_mc": 8, "max_samples": None}),
    "examples_scaling/evaluation/arm/example_evaluation.sh": ("validate", {
        "models": [Path("experiments/example_arm")]}),
    "examples_scaling/evaluation/mdm/example_evaluation.sh": ("validate", {"num_mc": 16}),
    "examples_scaling/downstream/downstream_arm.sh": ("evaluate_downstream", {
        "tasks": "arc_easy,boolq,copa,hellaswag,piqa,race,winogrande,sciq,lambada_standard",
        "models": [Path("experiments/arm_best_on_100m")]}),
    "examples_scaling/downstream/downstream_mdm.sh": ("evaluate_downstream", {"method": "ar"}),
    "examples_scaling/downstream/downstream_mdm_mc.sh": ("evaluate_downstream", {
        "method": "mc", "only_mc_nll": True, "num_mc": 32,
        "tasks": "arc_easy,boolq,copa,hellaswag,piqa,race,winogrande,sciq"}),
    "examples_scaling/downstream/downstream_mdm_onlygen.sh": ("evaluate_downstream", {
        "only_generate": True, "tasks": "lambada_standard"}),
}  # fmt: skip


def read_scored(root: Path, tool: str, words: list[str]) -> dict:
    assert words[:3] == ["tools/start_ranks.py", "1", f"tools/{tool}.py"]
    return vars(load_tool(root / "tools" / f"{tool}.py").build_parser().parse_args(words[3:]))


@pytest.mark.parametrize("script", SCORED)
def test_a_script_of_evaluation_passes_the_original_settings(root: Path, record, script: str) -> None:
    tool, expected = SCORED[script]
    args = read_scored(root, tool, record(script, "--threads", "3"))
    assert {name: args[name] for name in expected} == expected
    assert args["threads"] == 3


def test_variables_of_evaluation_become_options(root: Path, record) -> None:
    words = record(f"{QUICKSTART}/eval_mdm.sh", EVAL_ITERS="10", NUM_MC="2", CHECKPOINT_PATH="c")
    args = read_scored(root, "validate", words)
    assert (args["max_samples"], args["num_mc"], args["models"]) == (2560, 2, [Path("c")])
    script = "examples_scaling/downstream/downstream_mdm_mc.sh"
    words = record(script, LOAD_TAG="step.1", TASKS="copa", MC_NUM="4", RESULT_PATH="results/a.json")
    args = read_scored(root, "evaluate_downstream", words)
    assert args["models"] == [Path("experiments/mdm_best_on_100m/checkpoints/step.1")]
    assert (args["tasks"], args["num_mc"], args["out"]) == ("copa", 4, Path("results/a"))
    words = record(script, LOAD_TAG="global_step5", CHECKPOINT_PATH="theirs")
    assert read_scored(root, "evaluate_downstream", words)["models"] == [Path("theirs/global_step5")]


def test_download_fetches_the_two_published_datasets(record) -> None:
    words = record("examples_scaling/download.sh", "--revision", "v1")
    prefixes = ("gpt2tok_c4_100_text_document", "gpt2tok_c4_val_text_document")
    names = [prefix + suffix for prefix in prefixes for suffix in (".bin", ".idx")]
    assert words[:6] == ["download", "ZahlenReal/diffusion_data_constraint_quickstart", *names]
    assert words[6:] == ["--repo-type", "dataset", "--local-dir", "data", "--revision", "v1"]


def test_install_uses_the_active_environment_or_makes_one(root: Path, recorder: Path, record) -> None:
    words = record("examples_scaling/install.sh", VIRTUAL_ENV="/somewhere")
    assert words[:6] == ["-m", "pip", "install", "--requirement", "requirements.txt", "--constraint"]
    assert words[7:10] == ["-m", "pip", "install"] and words[-1] == "tools/check_environment.py"
    make = recorder / "make"
    make.write_text('#!/bin/bash\nprintf "%s\\n" make "$@"\n')
    make.chmod(0o755)
    assert record("examples_scaling/install.sh", PYTHON="python3.12") == [
        "make", ".venv/ready", "PYTHON=python3.12"
    ]  # fmt: skip


def test_launch_passes_the_variables_of_slurm_to_torchrun(recorder: Path, record) -> None:
    (recorder / "scontrol").write_text("#!/bin/bash\necho n1\necho n2\n")
    (recorder / "scontrol").chmod(0o755)
    words = record(
        f"{TRAINING}/launch.sh", "tools/pretrain.py", "run.yaml", SLURM_JOB_NODELIST="n[1-2]",
        SLURM_JOB_NUM_NODES="2", SLURM_PROCID="1", SLURM_GPUS_ON_NODE="4",
    )  # fmt: skip
    assert words[:3] == ["-u", "-m", "torch.distributed.run"]
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(words[3:])
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "4", 1)
    assert (args.master_addr, args.master_port, args.training_script) == ("n1", 9999, "tools/pretrain.py")


def test_a_wrong_size_or_subset_is_reported(root: Path, recorder: Path) -> None:
    script = f"{TRAINING}/arm/example_training.sh"
    failed = run_process(["bash", script], root, {}, PATH=f"{recorder}:/usr/bin:/bin", DATA_CNT="99M")
    sentence = "error: DATA_CNT: got 99M, expected a number or a name of utils/epoch_tokens.yaml\n"
    assert (failed.returncode, failed.stderr) == (2, sentence)


def test_the_sourced_tables_have_the_originals_names(root: Path) -> None:
    script = 'source utils/epoch_tokens.sh; echo "${PARAM_425M[@]}" "${PARAM_16183M[4]}" "$DATA_100M"'
    assert run_process(["bash", "-c", script], root).stdout == "1280 5120 128 10 18 47 99952399\n"
