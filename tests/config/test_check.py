"""Contradictions are refused in one sentence that names the keys, before the run starts."""

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from megatron.config.check import find_unmet_needs
from megatron.config.option import list_choices, split_type
from megatron.config.schema import RunConfig
from megatron.config.yaml_file import merge_sections, parse_overrides
from megatron.plan.resolve import resolve_config
from tests.datasets import read_rows
from tests.wrong_values import read_refusal

RUN = {
    "model": {"d_model": 48, "d_ff": 96, "n_heads": 6, "n_layers": 4, "n_tokens": 60, "vocab_rows": 64},
    "dataset": {"seq_len": 24},
    "lr_scheduler": {"total_iterations": 10},
}
DEEPSPEED, MDM, ZERO3 = "dist.engine=deepspeed", "objective.name=mdm", "dist.sharding_stage=zero3"


def read(words: str):
    return resolve_config(merge_sections(RUN, parse_overrides(words.split())))


REFUSED = read_rows(Path(__file__).with_name("refused_settings.tsv"))


@pytest.mark.parametrize(("words", "sentence"), REFUSED, ids=str)
def test_a_contradiction_is_one_sentence_that_names_the_keys(words: str, sentence: str) -> None:
    assert sentence in str(read_refusal(lambda: read(words)))


def list_needs() -> Iterator[tuple[str, str]]:
    """Yield (key, setting that it needs) of the whole schema."""
    for section in fields(RunConfig):
        for key in fields(section.type) if section.name != "name" else ():
            yield from ((f"{section.name}.{key.name}", need) for need in key.metadata["needs"].split())


def change_setting(config: RunConfig, name: str, unlike: str) -> RunConfig:
    """Return a configuration in which a key is neither its default nor one of the values `unlike`."""
    section, key = name.split(".")
    (field,) = [field for field in fields(getattr(config, section)) if field.name == key]
    kind, _ = split_type(field.type)
    values: tuple[Any, ...] = list_choices(field) or {bool: (True, False), str: ("x",)}.get(kind, (0.5, 2))
    value = next(v for v in values if v != field.default and str(v).lower() not in unlike.split("|"))
    return replace(config, **{section: replace(getattr(config, section), **{key: value})})


@pytest.mark.parametrize(("name", "need"), [*list_needs()])
def test_a_key_without_a_setting_that_it_needs_is_refused(name: str, need: str) -> None:
    other, sign, expected = re.split("([=>])", need)
    config = change_setting(RunConfig(), name, "")
    value = attrgetter(other)(config)
    met_by_default = "null" if value is None else str(value).lower()
    if sign == "=" and met_by_default in expected.split("|"):
        config = change_setting(config, other, expected)
    words = f"more than {expected}" if sign == ">" else expected.replace("|", " or ")
    value = attrgetter(other)(config)
    got = str(value).lower() if isinstance(value, bool) else "null" if value is None else value
    sentence = f"{name}: got {other}={got}, expected {words}. Remove {name} or change {other}."
    assert sentence in list(find_unmet_needs(config))


def test_a_supported_combination_is_read() -> None:
    for words in (
        "dist.tensor_parallel=2 dist.context_parallel=3",
        "dist.pipeline_parallel=2 dist.sharding_stage=zero1",
        f"{DEEPSPEED} {ZERO3} dist.offload_optimizer=true dist.offload_parameters=true",
        "dist.sharding_stage=zero3_hybrid dist.shard_size=2 dist.cpu_offload=true",
        f"{MDM} objective.low_noise_start=0.5 objective.low_noise_iterations=2 model.predicts_next=true",
    ):
        config = read(words)
        for key, _, value in (word.partition("=") for word in words.split()):
            written = str(attrgetter(key)(config)).lower()
            assert written == {"mdm": "masked_diffusion"}.get(value, value)


def test_a_configuration_of_an_earlier_run_keeps_its_meaning() -> None:
    assert read("dist.cuda_graphs=auto dist.attention_backend=auto dist.context_method=ulysses") == read("")
