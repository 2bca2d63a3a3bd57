"""Translation of Megatron's arguments: the table against published lists, examples, and rules.

megatron_arguments.json has the kinds and defaults of the arguments in Megatron-LM core_v0.12.0 and d98e8a6,
Megatron-DeepSpeed 4efb479 and diffusion-data-constraint d31c167: argument -> [kinds, defaults].
"""

import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from megatron.config.megatron_args import Translation, load_table, parse_arguments
from megatron.config.megatron_rules import RULES, split_overrides, translate_command, write_translation
from megatron.config.parallelism import build_layout
from megatron.config.read import build_config
from megatron.config.schema import RunConfig
from megatron.plan.resolve import load_config
from megatron.plan.run_plan import plan_run
from megatron.train.microbatch import list_microbatches
from tests.datasets import read_rows
from tests.tool_modules import Cli
from tests.wrong_values import read_refusal

PUBLISHED = json.loads(Path(__file__).with_name("megatron_arguments.json").read_text())
TABLE = load_table()
SUPPORTED = [row for row in TABLE.values() if not {"ignored", "unsupported"} & set(row.conversion)]
KINDS = ("needs", "requires", "ignored", "unsupported")
LLAMA = "--use-rotary-position-embeddings --swiglu --normalization RMSNorm --disable-bias-linear"
BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 100 --lr 1e-3 --data-path d --split 100 "
    f"--vocab-size 1000 --hidden-dropout 0 --attention-dropout 0 {LLAMA}"
)
# words added to BASE (-name: taken away first; MDM: masked diffusion) -> settings that must follow
EXAMPLES = Path(__file__).with_name("megatron_examples.txt").read_text().splitlines()


def translate(words: str, **options: Any) -> Translation:
    base, extra = BASE.split(), words.split()
    for name in [word[1:] for word in extra if word.startswith("-") and not word.startswith("--")]:
        first = base.index(f"--{name}")
        end = next((i for i in range(first + 1, len(base)) if base[i].startswith("--")), len(base))
        base = base[:first] + base[end:]
    if "MDM" in extra:
        options["objective"] = "masked_diffusion"
    chosen = [word for word in extra if word != "MDM" and (word.startswith("--") or not word.startswith("-"))]
    return translate_command(base + chosen, **options)


def read_setting(translation: Translation, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return (translation.settings[section] if section else translation.settings)[name]


@pytest.mark.parametrize("line", EXAMPLES)
def test_an_argument_sets_its_keys_in_a_valid_configuration(line: str, tmp_path: Path) -> None:
    words, _, expected = line.partition(" -> ")
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "c": 2}')
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    for name, file in (("VOCAB", "vocab.json"), ("JSON", "ds.json")):
        words = words.replace(name, str(tmp_path / file))
    translation = translate(words)
    for key, _, value in (pair.partition("=") for pair in expected.split()):
        assert read_setting(translation, key) == yaml.safe_load(value), key
    assert not translation.refused
    build_config(translation.settings, vocabulary=lambda key, data: 100)


def test_an_argument_without_a_conversion_is_copied_to_its_keys() -> None:
    for row in (row for row in SUPPORTED if not row.conversion):
        value: Any = {"int": 2, "float": 0.125, "text": "torch", "switch": True}[row.form]
        translation = translate(f"--bf16 --{row.name} {'' if value is True else value}")
        for key, equals, constant in (key.partition("=") for key in row.keys):
            assert read_setting(translation, key) == (yaml.safe_load(constant) if equals else value)
        assert row.name not in (*translation.refused, *" ".join(translation.notes).split("--"))


def test_kind_and_default_are_those_of_the_code_bases() -> None:
    rows = [row for row in SUPPORTED if row.name in PUBLISHED]
    assert len(rows) > 50
    # defaults that differ between code bases, or are derived after parsing
    others = ("split", "save", "tensorboard-dir", "eval-interval", "normalization")
    for row in rows:
        kinds, defaults = PUBLISHED[row.name]
        assert row.form in kinds or row.form == "list" or "float" in (row.form, *kinds), row
        if row.default and row.default != "required" and row.name not in others:
            assert row.default_value in defaults or row.default in map(str, defaults), row


def test_the_table_names_keys_rules_and_arguments_that_exist() -> None:
    parts = [part for part in fields(RunConfig) if is_dataclass(part.type)]
    keys = {"name", *(f"{part.name}.{key.name}" for part in parts for key in fields(part.type))}
    assert len(SUPPORTED) > 90
    for row in TABLE.values():
        assert {key.partition("=")[0] for key in row.keys} <= keys, row
        for word in row.conversion:
            kind, _, condition = word.partition(":")
            assert kind in (*RULES, *KINDS) or "->" in word or word[0] in "*/", row
            assert not condition or condition.partition("=")[0] in keys | set(TABLE), row
        assert row.keys or row.note or row.conversion, row
        assert len(row.note.split()) <= 5 or "unsupported" not in row.conversion, row


def test_ignored_arguments_change_nothing_and_unsupported_ones_are_refused() -> None:
    plain = translate("").settings
    for name, row in TABLE.items():
        if "ignored" in row.conversion:
            translation = translate(f"--{name} 1")
            assert (translation.settings, translation.refused) == (plain, {}), name
            assert f"--{name}" in " ".join(translation.notes).split()
        elif "unsupported" in row.conversion:
            assert translate(f"--{name} 77").refused == {name: f"not supported, {row.note}"}


def test_defaults_of_megatron_that_are_others_here_are_set() -> None:
    words = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 128 --lr 1e-3 --data-path d "
        "--max-position-embeddings 128 --global-batch-size 8 --train-iters 10 --split 100"
    )
    assert translate_command(words.split()).settings == yaml.safe_load("""
        model: {n_layers: 2, d_model: 64, n_heads: 2, n_positions: 128, norm: layernorm, biases: true,
            feed_forward: gelu, positions: learned, attention_dropout: 0.1, hidden_dropout: 0.1,
            vocab_multiple: 128}
        dataset: {seq_len: 128, batch_size: 8, path_train: d, order: megatron}
        optim: {lr: 1.0e-3, weight_decay: 0.01, beta2: 0.999}
        lr_scheduler: {kind: linear, lr_min_ratio: 0.0, total_iterations: 10}
        checkpoint: {resume: never}
        logging: {every_iterations: 100, run_dir: experiments/megatron, tensorboard: false}
        dist: {dtype: float32}
        misc: {seed: 1234}
    """)


def test_a_split_gives_the_command_that_cuts_it() -> None:
    for words, train, held_out in (
        ("--split 949,50,1", "d_949_50_1_train", "d_949_50_1_valid"),
        ("--split 100,0,0", "d", None),
        ("-data-path --data-path 1 ./d --split '90/10'", "./d_90_10_train", "./d_90_10_valid"),
        ("--split 90,0,10", "d_90_0_10_train", None),
        ("--split 9,1 --eval-iters 0", "d_9_1_train", None),
    ):
        translation = translate(words)
        data = translation.settings["dataset"]
        assert (data["path_train"], data.get("path_eval")) == (train, held_out)
        parts = train.removesuffix("_train")
        if parts != train:
            prefix, _, split = parts.partition("_")
            options = f"--input {prefix} --split {split.replace('_', ',')} --output {parts}"
            assert translation.commands == [f"python tools/subset_corpus.py {options}"]


def test_a_command_that_cannot_be_met_is_an_error_or_says_what_to_do() -> None:
    for words, *cells in read_rows(Path(__file__).with_name("megatron_refused.tsv")):
        if len(cells) == 1:  # Megatron would refuse it too
            assert cells[0] in str(read_refusal(lambda: translate(words)))  # noqa: B023
        else:
            argument, advice = cells
            assert advice in translate(words).refused[argument.removeprefix("--")]


def test_launcher_and_script_are_skipped_and_overrides_are_kept() -> None:
    words = f"torchrun --nproc_per_node 4 x/pretrain_gpt.py {BASE} optim.beta2=0.9 --num_layers=2"
    translation = translate_command(words.split())
    assert translation.settings["model"]["n_layers"] == 2
    assert split_overrides(["a/b.py=1", "optim.beta2=0.9"]) == (["optim.beta2=0.9"], ["a/b.py=1"])
    assert parse_arguments(["--lr=1e-3", "--nope", "-1"]) == {"lr": 1e-3, "nope": ["-1"]}


def test_the_embedding_has_the_rows_of_megatron() -> None:
    for words, n_tokens, rows in (
        ("--vocab-size 32000", 0, 32000),  # 250 x 128
        ("--vocab-size 32000 --tensor-model-parallel-size 8", 0, 32768),  # 32 x 1024
        ("-vocab-size", 50257, 50304),  # the corpus gives the ids
        ("MDM -vocab-size", 32000, 32128),  # a row for [MASK]: 251 x 128
    ):
        settings = translate(words).settings
        config = build_config(settings, vocabulary=lambda key, data, n_tokens=n_tokens: n_tokens)
        assert (config.model.vocab_rows, config.model.vocab_multiple) == (rows, None)


# published scripts that split the model over ranks
SPLIT = read_rows(Path(__file__).with_name("megatron_published.tsv"))


@pytest.mark.parametrize(("script", "n_ranks", "words", "refused"), SPLIT, ids=[row[0] for row in SPLIT])
def test_training_accepts_a_published_split_of_the_model(
    script: str, n_ranks: str, words: str, refused: str, tmp_path: Path
) -> None:
    translation = translate_command(words.split())
    assert (" ".join(translation.refused), len(SPLIT)) == (refused, 12)
    write_translation(translation, tmp_path / "run.yaml")
    no_files = ["dataset.path_train=synthetic", "dataset.path_eval=null", "dataset.order=epoch"]
    config = load_config(tmp_path / "run.yaml", [*no_files, "model.n_tokens=50257"])
    layout = build_layout(config.dist, int(n_ranks))
    list_microbatches(config, cast(Any, SimpleNamespace(dp_size=layout.data, layout=layout)))
    sizes = [re.search(rf"--{axis}-model-parallel-size (\d+)|$", words)[1] for axis in ("tensor", "pipeline")]
    tensor, pipeline = (int(size or 1) for size in sizes)
    assert (layout.tensor, layout.pipeline) == (tensor, pipeline) and tensor * pipeline > 1
    assert config.model.vocab_rows == -(-50257 // (128 * tensor)) * 128 * tensor  # as Megatron pads
    plan_run(config)


def test_a_split_that_training_refuses_is_replaced_by_zero3() -> None:
    dropout = "-attention-dropout --attention-dropout 0.1 --context-parallel-size 2"
    for words, reason in (
        (dropout, "dist.context_parallel: got model.attention_dropout=0.1, expected 0.0"),
        ("--tensor-model-parallel-size 8", "model.n_heads: got 4, expected a multiple of 8"),
    ):
        translation = translate(words)
        assert translation.settings["dist"] == {"dtype": "float32", "sharding_stage": "zero3"}
        assert "microbatch_size" not in translation.settings["dataset"]
        (note,) = (note for note in translation.notes if "zero3" in note)
        assert reason in note


def test_unsupported_arguments_are_omitted_on_request(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "run.yaml"
    words = ["--out", out, "--", *BASE.split(), "--num-experts", "8", "--use-flash-attn"]
    output = cli("megatron", "--omit-unsupported", *words).output
    assert "--use-flash-attn\nomitted: --num-experts: not supported, no mixture of experts" in output
    assert yaml.safe_load(out.read_text())["model"]["d_model"] == 64
