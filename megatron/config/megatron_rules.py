"""Rules of Megatron's arguments that depend on several of them, and the translation of a command.

The table names the rule of an argument; each rule runs once, at the
first row that names it.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from megatron.config.megatron_args import PAGE, Translation, find_argument, load_table, parse_arguments
from megatron.config.read import build_config
from megatron.config.schema import RunConfig
from megatron.io import PARTIAL, atomic_path

DIFFUSION_SCRIPTS = ("pretrain_diff_gpt.py", "finetune_diff_gpt.py")
# an override such as optim.lr=1e-3, which a data path never looks like
OVERRIDE = re.compile(rf"({'|'.join(RunConfig.__dataclass_fields__)})\.\w+=")


def translate_command(
    words: Sequence[str], objective: str | None = None, texts: Mapping[str, str] | None = None
) -> Translation:
    """Translate a command, with or without launcher and script. Raises ValueError for a wrong use of it.

    objective  autoregressive or masked_diffusion;
               None: the script decides, autoregressive without one
    texts      absolute path -> content of files that the launch
               script writes, such as its DeepSpeed JSON
    """
    place = next((i for i, word in enumerate(words) if word.endswith(".py")), -1)
    is_diffusion = place >= 0 and Path(words[place]).name in DIFFUSION_SCRIPTS
    given = parse_arguments(split_overrides(words[place + 1 :])[1])
    draft = Translation(
        given, objective or ("masked_diffusion" if is_diffusion else "autoregressive"), texts or {}
    )
    _apply_table(draft)
    _sort_others(draft)
    if draft.ignored:
        draft.notes.append(f"no effect here: {' '.join(f'--{name}' for name in draft.ignored)}")
    _replace_split(draft)
    return draft


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (section.key=value words, other words)."""
    overrides = [word for word in words if OVERRIDE.match(word)]
    return overrides, [word for word in words if not OVERRIDE.match(word)]


def _apply_table(draft: Translation) -> None:
    if draft.objective != "autoregressive":
        draft.settings["objective"] = {"name": draft.objective}
    finished = set()
    for argument in load_table().values():
        rule = next((word for word in argument.conversion if word in RULES), None)
        if rule is None:
            draft.apply(argument)
        elif rule not in finished:
            RULES[rule](draft)
            finished.add(rule)


def _sort_others(draft: Translation) -> None:
    """Sort the given arguments that set nothing into ignored and refused ones."""
    for name in draft.given:
        argument = find_argument(name)
        if argument is None:
            draft.refused[name] = f"not supported, see {PAGE}"
        elif "unsupported" in argument.conversion:
            draft.refused[name] = f"not supported, {argument.note}"
        elif "ignored" in argument.conversion:
            draft.ignored.append(name)


def _replace_split(draft: Translation) -> None:
    """Shard by ZeRO 3 if training refuses to split the model over ranks."""
    settings = draft.settings
    dist = settings["dist"]
    whole = {key: value for key, value in dist.items() if not key.endswith("_parallel")}
    if whole == dist:
        return
    try:
        build_config(settings, vocabulary=lambda key, data: int(key == "n_tokens"))
    except ValueError as error:
        reason = str(error).partition(": ")[2].partition(". ")[0]
        draft.notes.append(f"dist.sharding_stage=zero3 replaces the split of the model over ranks: {reason}")
        settings["dist"] = {**whole, "sharding_stage": "zero3"}
        # a micro-batch need not divide
        # the share of a rank without the split
        settings["dataset"].pop("microbatch_size", None)


def set_vocabulary(draft: Translation) -> None:
    """Set the number of ids that a vocabulary file has, if it exists."""
    path = draft.value("vocab-file")
    if path is not None and Path(path).is_file():
        draft.set("model.n_tokens", len(_read_object(path, {})), "vocab-file")


def _read_lengths(draft: Translation, stem: str, ramp: Any) -> dict[str, Fraction]:
    """Return the given STEM-tokens, STEM-samples and STEM-iters, in steps, or with a ramp in tokens."""
    batch = draft.value("global-batch-size")
    sizes = {"tokens": batch * draft.value("seq-length"), "samples": batch, "iters": 1}
    names = {f"{stem}-{unit}": size for unit, size in sizes.items()}
    factor = sizes["tokens"] if ramp else 1
    return {name: Fraction(draft.value(name) * factor, n) for name, n in names.items() if draft.value(name)}


def set_length(draft: Translation) -> None:
    """Set length, warm-up and decay in steps, or in tokens if the batch size grows; and its ramp."""
    ramp = draft.value("rampup-batch-size")
    if ramp and draft.value("pipeline-model-parallel-size") > 1:
        draft.refused["rampup-batch-size"], ramp = "not supported with a pipeline", None
    train, decay, warmup = (_read_lengths(draft, stem, ramp) for stem in ("train", "lr-decay", "lr-warmup"))
    # tokens are whole here, and the run rounds them to steps of its sizes
    unit = "iterations" if ramp is None else "tokens"
    draft.set("dataset.rampup_batch_size", ramp and yaml.safe_load(f"[{', '.join(ramp)}]"))
    # with a ramp an iteration has no fixed number of samples: Megatron refuses it too
    if not train or ramp and draft.has("train-iters"):
        raise ValueError("--train-samples: missing. Give it, --train-tokens, or (no ramp) --train-iters.")
    # as in Megatron, samples are rounded down, tokens up, and the run
    # ends with the first that is reached
    n_steps = min(math.ceil(n) if name == "train-tokens" else math.floor(n) for name, n in train.items())
    draft.set(f"lr_scheduler.total_{unit}", n_steps, *train)
    # the whole run in samples is rounded down to steps, so its decay
    # must be too
    n_decay = math.floor(next(iter(decay.values()), n_steps))
    n_warmup = math.ceil(next(iter(warmup.values()), 0))
    share = draft.value("lr-warmup-fraction")
    if share is not None:  # Megatron's fraction refers to the length of the decay
        n_warmup = math.ceil(Fraction(str(share)) * n_decay)
    if share is not None and n_decay == n_steps:
        draft.set("lr_scheduler.warmup_fraction", share, "lr-warmup-fraction")
    elif n_warmup:
        draft.set(f"lr_scheduler.warmup_{unit}", n_warmup)
    if n_decay != n_steps and draft.get("lr_scheduler.kind") != "constant":
        draft.set(f"lr_scheduler.decay_{unit}", max(1, n_decay - n_warmup), *decay)


def set_data(draft: Translation) -> None:
    """Set training and held-out data, and Megatron's order of samples."""
    if draft.has("data-path") and draft.get("dataset.path_train") is None:
        _set_cut_corpus(draft)
    if draft.get("dataset.path_train") is None:
        # a fork may name its data by an argument
        # of its own, which is refused too
        draft.refused["data-path"] = "missing; give it or --train-data-path-file"
    elif draft.get("dataset.path_train") != "synthetic":
        # Megatron shuffles the documents of all epochs together, and
        # then their samples, from the seed
        draft.set("dataset.order", "megatron")
    if draft.value("eval-iters") == 0:
        draft.settings["dataset"].pop("path_eval", None)


def _set_cut_corpus(draft: Translation) -> None:
    """Set the parts of --data-path, cut by --split such as 949,50,1, and the command that cuts them."""
    *weight, prefix = draft.value("data-path") or [""]
    # the weight of a single prefix has no effect
    if not prefix or not re.fullmatch(r"[\d.]*", " ".join(weight)):
        raise ValueError(
            f"--data-path: got {' '.join([*weight, prefix])!r}, expected one prefix. Write lines of "
            "`weight prefix` to a .txt file, and give it as --train-data-path-file."
        )
    # published scripts pass it with quotes inside, as in '99,1,0'
    split = draft.value("split").translate(str.maketrans("/", ",", "'\" "))
    if not re.fullmatch(r"[\d.]+(,[\d.]+){0,2}", split):
        raise ValueError(f"--split: got {split!r}, expected up to three numbers such as 949,50,1")
    shares = [float(share) for share in split.split(",")]
    if not any(shares[1:]):
        draft.set("dataset.path_train", prefix)
        return
    part = f"{prefix}_{split.replace(',', '_')}"
    draft.set("dataset.path_train", f"{part}_train")
    if shares[1]:
        draft.set("dataset.path_eval", f"{part}_valid")
    options = f"--input {prefix} --split {split} --output {part}"
    draft.commands.append(f"python tools/subset_corpus.py {options}")


def set_loading(draft: Translation) -> None:
    """Set the checkpoint from which the run starts."""
    load, tag = draft.value("load"), draft.value("load-tag")
    is_own = draft.has("save") and load == draft.value("save")
    resume = "never" if load is None else f"{load}/{tag}" if tag else "auto" if is_own else load
    draft.set("checkpoint.resume", resume, "load")


def set_deepspeed(draft: Translation) -> None:
    """Set engine and stage of --deepspeed; its JSON decides, as in Megatron-DeepSpeed."""
    if not draft.has("deepspeed"):
        return
    path, stage = draft.value("deepspeed-config"), draft.value("zero-stage")
    text = draft.texts.get(os.path.abspath(path or ""))
    has_file = path is not None and (text is not None or Path(path).is_file())
    if has_file:
        zero = _read_object(path, draft.texts).get("zero_optimization")
        stage = zero.get("stage", stage) if isinstance(zero, dict) else stage
    draft.set("dist.sharding_stage", f"zero{stage or 0}", "zero-stage", "deepspeed-config")
    sizes = [draft.get(f"dist.{axis}_parallel") for axis in ("tensor", "pipeline", "context")]
    # only this engine supports the layout or float8
    is_torch = draft.get("dist.float8") or any(size not in (None, 1) for size in sizes)
    draft.set("dist.engine", "torch" if is_torch else "deepspeed", "deepspeed")
    if has_file and not is_torch:
        draft.set("dist.deepspeed_config", path)
        # the script writes this file when it runs,
        # so it comes with the configuration
        draft.deepspeed_json = text
    if draft.has("cpu-optimizer") and stage:
        draft.set(f"dist.{'cpu_offload' if is_torch else 'offload_optimizer'}", True)


def _read_object(path: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of a JSON file."""
    text = texts.get(os.path.abspath(path))
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8") if text is None else text)
    except ValueError as error:  # also for numbers of thousands of digits
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: got {type(content).__name__}, expected a JSON object")
    return content


RULES: dict[str, Callable[[Translation], None]] = {
    rule.__name__: rule for rule in (set_vocabulary, set_length, set_data, set_loading, set_deepspeed)
}


def write_translation(translation: Translation, path: Path | None, writer: int = 0) -> str:
    """Write the configuration, with its DeepSpeed JSON beside it, and return its YAML.

    path    the YAML file; None: write nothing, and files
            are named as they would be beside run.yaml
    writer  number of this process among those that write the same content at the same time
    """
    target, settings = path or Path("run.yaml"), dict(translation.settings)
    contents = {}
    if translation.deepspeed_json is not None:
        file = target.with_name(f"{target.stem}.deepspeed.json")
        settings["dist"] = {**settings["dist"], "deepspeed_config": str(file)}
        contents[file] = translation.deepspeed_json
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    for file, content in {**contents, target: text}.items() if path is not None else ():
        # a temporary name for each writer: the ranks of a run write one
        # file, and one would rename another's
        name = f"{file.name}.{writer}{PARTIAL}" if writer else None
        with atomic_path(file, partial_name=name) as partial_file:
            partial_file.write_text(content, encoding="utf-8")
    return text
