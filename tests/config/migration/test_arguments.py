"""The table of arguments against the lists of the code bases, which arguments.json has as names and defaults.

An entry is: code bases that have the argument, its kind in each, and its default in each.
"""

import json
from pathlib import Path

import pytest

from megatron.config.migration.argument import LIST, TRANSLATED
from megatron.config.migration.command_line import ARGUMENTS, find_argument, parse_command
from megatron.config.migration.megatron_table import SECTIONS
from megatron.config.reference import list_sections

PUBLISHED = json.loads(Path(__file__).with_name("arguments.json").read_text())["arguments"]
TABLE = [argument for group in SECTIONS.values() for argument in group]
# DeepSpeed adds these to every parser; Megatron-LM derives these from dataclasses
FROM_ELSEWHERE = {
    "deepspeed", "deepspeed_config", "padded-vocab-size", "save-retain-interval", "use-megatron-fsdp",
}  # fmt: skip
# a default that differs between the code bases, or is set after parsing
OTHER_DEFAULTS = {
    "normalization": "LayerNorm in Megatron-LM, read in any case",
    "data-parallel-sharding-strategy": "optim_grads_params in newer versions, with their FSDP",
    "ckpt-format": "torch_dist in Megatron-LM only, which always gives it",
    "eval-interval": "None in newer versions",
    "num-query-groups": "of newer versions: None",
    "split": "None in Megatron-LM, set to 969, 30, 1 after parsing",
    "zero-stage": "1.0 as a number of another type",
}


def test_every_published_argument_is_known() -> None:
    # one test for all: there are nearly 800
    assert len(PUBLISHED) > 700
    for option in PUBLISHED:
        argument = find_argument(option[2:])
        assert argument is not None, option
        assert argument.note or argument.keys, option


def test_at_least_120_arguments_are_translated_and_none_is_listed_twice() -> None:
    assert len(TABLE) == len({argument.name for argument in TABLE})
    assert len(TABLE) >= 120
    assert sum(argument.outcome == TRANSLATED for argument in ARGUMENTS.values()) == len(TABLE)


@pytest.mark.parametrize("argument", TABLE, ids=lambda argument: argument.name)
def test_kind_and_default_are_those_of_the_code_bases(argument) -> None:
    if argument.name in FROM_ELSEWHERE:
        assert argument.option not in PUBLISHED
        return
    _, kinds, defaults = PUBLISHED[argument.option]
    numbers = {"int", "float"}
    assert argument.kind in kinds or argument.kind == LIST or argument.kind in numbers & {*kinds, "float"}
    if argument.name not in OTHER_DEFAULTS:
        # an absent default and 0, False or "none" have the same effect for these arguments
        empty = (None, False, "", "none", [], 0)
        assert [value for value in defaults if value not in empty and value != argument.default] == []
        assert argument.default in (*empty, *defaults)


@pytest.mark.parametrize("argument", TABLE, ids=lambda argument: argument.name)
def test_every_key_of_the_table_is_a_key_of_the_configuration(argument) -> None:
    paths = {f"{name}.{key.name}" if name else key.name for name, _, keys in list_sections() for key in keys}
    assert argument.keys and set(argument.keys) <= paths


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-layers", "--num-layers: got no value, expected 1"),
        ("--num-layers 2 3", "got 2 values"),
        ("--num-layers two", "got 'two', expected a whole number"),
        ("--lr x", "--lr: got 'x', expected a number"),
        ("--swiglu yes", "--swiglu: got 1 values (yes), expected none"),
        ("12 --num-layers 2", "got '12' before the first argument"),
    ],
)
def test_a_value_of_a_wrong_form_is_refused_with_the_argument(words: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_command(words.split())
    assert message in str(refused.value)


def test_a_command_is_split_into_launcher_script_arguments_and_overrides() -> None:
    words = (
        "torchrun --nproc_per_node 4 --nnodes=2 x/pretrain_diff_gpt.py --lr=1e-3 optim.beta2=0.9 "
        "--num-layers 2"
    )
    command = parse_command(words.split())
    assert command.given == {"lr": 1e-3, "num-layers": 2}
    assert command.overrides == ["optim.beta2=0.9"]
    assert (command.n_ranks, command.trains_diffusion) == (8, True)
    assert parse_command(["--cpu-torch-adam", "--ds_fused_adam"]).given.keys() == {
        "cpu_torch_adam",
        "ds_fused_adam",
    }
    assert parse_command(["--nope", "1"]).unknown == {"nope": ["1"]}
