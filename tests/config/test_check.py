"""Contradictions are refused in one sentence that names the keys, before the run starts."""

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from megatron.config.check import find_unmet_needs
from megatron.config.option import list_choices, split_type
from megatron.config.schema import RunConfig
from megatron.config.yaml_file import merge_sections, parse_overrides
from megatron.plan.resolve import resolve_config
from tests.wrong_values import read_refusal

RUN = {
    "model": {"d_model": 48, "d_ff": 96, "n_heads": 6, "n_layers": 4, "n_tokens": 60, "vocab_rows": 64},
    "dataset": {"seq_len": 24},
    "lr_scheduler": {"total_iterations": 10},
}
DEEPSPEED, MDM, LLAMA3 = "dist.engine=deepspeed", "objective.name=mdm", "model.rope_scaling=llama3"
NO_LENGTH = "lr_scheduler.total_iterations="
ZERO3 = "dist.sharding_stage=zero3"


def read(words: str):
    return resolve_config(merge_sections(RUN, parse_overrides(words.split())))


REFUSED = [
    ("optm.lr=1", "unknown key 'optm'; did you mean 'optim'?"),
    ("optim.wieght_decay=1", "optim: unknown key 'wieght_decay'; did you mean 'weight_decay'?"),
    ("optim.beta1=1.0", "optim.beta1: got 1.0, expected 0 or more and less than 1"),
    ("optim.grad_clip=.nan", "optim.grad_clip: got nan, expected a finite number"),
    ("dataset.seq_len=2.5", "dataset.seq_len: got 2.5, expected int"),
    ("dist.dtype=fp16", "dist.dtype: got 'fp16', expected one of float32, bfloat16, float16"),
    ("objective.name=mdn", "got 'mdn', expected one of autoregressive, masked_diffusion"),
    ("objective.randmask_ratio=1.5", "ratio: got 1.5, expected 0 or more and 1 or less"),
    ("dist.compile=1", "dist.compile: got 1, expected auto, true or false"),
    *((f"{section}=3", f"{section}: got 3, expected keys") for section in ("optim", "dataset", "model")),
    # checkpoints and logs
    ("checkpoint.prefix=a/b", "Set folders with checkpoint.directory"),
    ("checkpoint.chkpt_at=[5,0]", "checkpoint.chkpt_at: got 0, expected 1 or more"),
    ("logging.profile_steps=[3,2]", "logging.profile_steps: got [3, 2], expected [first, last]"),
    # data and length
    ("lr_scheduler.total_tokens=9", "give the length as either total_iterations, total_tokens"),
    (NO_LENGTH, "give the length as either"),
    ("lr_scheduler.warmup_tokens=1 lr_scheduler.warmup_fraction=0.5", "give the warm-up as either"),
    (f"dataset.path_train=synthetic {NO_LENGTH} lr_scheduler.total_epochs=1", "have no epochs"),
    # shape
    ("model.n_heads=5", "got 5, expected a divisor of d_model 48"),
    ("model.n_kv_heads=4", "model.n_kv_heads: got 4, expected a divisor of model.n_heads 6"),
    ("model.d_head=7", "model.d_head: got 7, expected an even width"),
    ("model.vocab_multiple=64", "model.vocab_multiple: got model.vocab_rows too"),
    ("model.vocab_rows=59", "model.vocab_rows: got 59, expected 60 tokens. Remove it."),
    (f"model.vocab_rows=60 {MDM}", "got 60, expected 60 tokens and [MASK]. Remove it."),
    ("model.positions=learned model.n_positions=9", "got 9 learned positions, expected 24 or more"),
    ("model.positions=learned objective.orders=2", "got 24 learned positions, expected 25"),
    ("model.document_mask=true", "model.document_mask: no end-of-document id"),
    ("model.document_mask=true model.eod_id=60", "model.eod_id: got 60, expected 0 to 59"),
    ("model.document_mask=true model.eod_id=1 objective.orders=2", "objective.orders: got an order over"),
    ("model.parametrization=mup", "model.base_d_model: missing, expected for parametrization 'mup'"),
    (f"model.mask_id=60 {MDM}", "model.mask_id: got 60, expected an id below model.n_tokens 60"),
    ("model.rotary_dims=10", "model.rotary_dims: got 10, expected an even number up to 8"),
    ("model.rotary_dims=3", "model.rotary_dims: got 3, expected an even number"),
    (LLAMA3, "model.rope_original_positions: missing"),
    (f"{LLAMA3} model.rope_original_positions=8 model.rope_low_factor=4.0", "expected less than"),
    # objective
    (f"objective.low_noise_start=0.5 {MDM}", "expected both or neither"),
    # devices
    (f"{DEEPSPEED} dist.sharding_stage=zero3_hybrid", "got zero3_hybrid, expected zero0"),
    ("dist.tensor_parallel=4", "got 6, expected a multiple of 4 for dist.tensor_parallel 4"),
    ("dist.context_parallel=4", "model.n_heads: got 6, expected a multiple of 4"),
    ("dist.context_method=ring", "dist.context_method: got ring, but this key was removed. Omit it, and"),
    ("dist.cuda_graphs=true", "graphs: got True, but this key was removed. Omit it: dist.compile"),
    ("dist.attention_backend=flash", "dist.attention_backend: got flash, but this key was removed."),
    ("dist.tensor_parallel=3", "model.vocab_rows: got 64, expected a multiple of 3"),
    (f"dist.pipeline_parallel=2 {ZERO3}", "zero3 would gather the weights"),
    ("dist.pipeline_parallel=5", "5 stages for model.n_layers 4 blocks"),
    ("dist.pipeline_parallel=4 dist.pipeline_schedule=interleaved", "8 stages for model.n_layers 4"),
]


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
    section, key = other.split(".")
    value = getattr(getattr(config, section), key)
    met_by_default = "null" if value is None else str(value).lower()
    if sign == "=" and met_by_default in expected.split("|"):
        config = change_setting(config, other, expected)
    words = f"more than {expected}" if sign == ">" else expected.replace("|", " or ")
    value = getattr(getattr(config, section), key)
    got = str(value).lower() if isinstance(value, bool) else "null" if value is None else value
    sentence = f"{name}: got {other}={got}, expected {words}. Remove {name} or change {other}."
    assert sentence in list(find_unmet_needs(config))


@pytest.mark.parametrize(
    "words",
    [
        "dist.tensor_parallel=2 dist.context_parallel=3",
        "dist.pipeline_parallel=2 dist.sharding_stage=zero1",
        f"{DEEPSPEED} {ZERO3} dist.offload_optimizer=true dist.offload_parameters=true",
        "dist.sharding_stage=zero3_hybrid dist.shard_size=2 dist.cpu_offload=true",
        f"{MDM} objective.low_noise_start=0.5 objective.low_noise_iterations=2 model.predicts_next=true",
    ],
)
def test_a_supported_combination_is_read(words: str) -> None:
    config = read(words)
    for word in words.split():
        (section, key), value = word.partition("=")[0].split("."), word.partition("=")[2]
        written = str(getattr(getattr(config, section), key)).lower()
        assert written == {"mdm": "masked_diffusion"}.get(value, value)


def test_a_configuration_of_an_earlier_run_keeps_its_meaning() -> None:
    assert read("dist.cuda_graphs=auto dist.attention_backend=auto dist.context_method=ulysses") == read("")
