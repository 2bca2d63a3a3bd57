"""Rules of Megatron's arguments that depend on several of them, and the translation of a command.

The table names the rule of an argument; each rule runs once, at the first row that names it.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megatron.config.megatron_args import (
    OUTCOMES,
    UNSUPPORTED,
    Draft,
    Row,
    load_table,
    parse_command,
)
from megatron.config.read import build_config
from megatron.io import PARTIAL, atomic_path

DIFFUSION_SCRIPTS = ("pretrain_diff_gpt.py", "finetune_diff_gpt.py")
# ids of the tokenizers that Megatron's users name without a vocabulary file
NAMED_TOKENIZERS = {"gpt2": 50257, "openai-community/gpt2": 50257}
SPLIT_KEYS = (
    "tensor_parallel", "pipeline_parallel", "pipeline_schedule", "pipeline_chunks", "context_parallel",
    "context_method",
)  # fmt: skip
ARGUMENT_WIDTH = 46


@dataclass(frozen=True)
class Translation:
    """A translated command.

    settings  sections of the configuration, as in YAML
    rows      a row for each argument, and for each default of Megatron that is another one here
    files     files to write beside the configuration: name -> content; settings name them so
    commands  commands that make the datasets that the settings name, to be run before training
    """

    settings: dict[str, Any]
    rows: list[Row]
    files: dict[str, str]
    commands: list[str]

    @property
    def refused(self) -> list[Row]:
        """Rows of arguments that cannot be met."""
        return [row for row in self.rows if row.outcome == UNSUPPORTED]


def translate_command(
    words: Sequence[str],
    objective: str | None = None,
    n_ranks: int | None = None,
    texts: Mapping[str, str] | None = None,
) -> Translation:
    """Translate a command, with or without launcher and script. Raises ValueError for a wrong use of it.

    objective  autoregressive or masked_diffusion; None: the script decides, autoregressive without one
    n_ranks    number of ranks; None: the launcher's words give it
    texts      absolute path -> content of files that the launch script writes, such as its DeepSpeed JSON
    """
    command = parse_command(words)
    is_diffusion = command.script.rpartition("/")[2] in DIFFUSION_SCRIPTS
    name = objective or ("masked_diffusion" if is_diffusion else "autoregressive")
    build_draft = partial(Draft, command, name, n_ranks or command.n_ranks, texts or {})
    draft = _apply_table(build_draft())
    if reason := _find_refused_split(draft.settings):
        draft = _apply_table(build_draft(unsplit=reason))
    path = os.path.abspath(draft.get("dist.deepspeed_config") or "")
    if path in draft.texts:
        # the script writes this file when it runs, so it comes with the configuration
        draft.files["deepspeed.json"] = draft.texts[path]
        draft.settings["dist"]["deepspeed_config"] = "deepspeed.json"
    return Translation(draft.settings, draft.list_rows(), draft.files, draft.commands)


def _apply_table(draft: Draft) -> Draft:
    if draft.objective != "autoregressive":
        draft.settings["objective"] = {"name": draft.objective}
    finished = set()
    split = {f"dist.{key}" for key in SPLIT_KEYS}
    for argument in load_table().values():
        rule = next((word for word in argument.conversion if word in RULES), None)
        if rule is not None and rule not in finished:
            RULES[rule](draft)
            finished.add(rule)
        elif rule is None and draft.unsplit and split & {key.partition("=")[0] for key in argument.keys}:
            _unsplit(draft, argument.name)
        elif rule is None and not {"ignored", "unsupported"} & set(argument.conversion):
            draft.apply(argument)
    return draft


def _find_refused_split(settings: dict[str, Any]) -> str:
    """Return why training refuses to split the model over ranks; empty if not, or if it refuses zero3 too."""

    def check(dist: dict[str, Any]) -> str:
        try:
            build_config({**settings, "dist": dist}, vocabulary=lambda key, data: int(key == "n_tokens"))
        except ValueError as error:
            return str(error).partition(": ")[2].partition(". ")[0]
        return ""

    dist = settings.get("dist", {})
    whole = {key: value for key, value in dist.items() if key not in SPLIT_KEYS}
    reason = check(dist) if whole != dist else ""
    return reason if reason and not check({**whole, "sharding_stage": "zero3"}) else ""


def _unsplit(draft: Draft, name: str) -> None:
    """Shard over all ranks instead of splitting the model as the argument says."""
    if draft.has(name) and draft.value(name) != 1:
        draft.set("dist.sharding_stage", "zero3", name)
        draft.notes[name] = f"unsplit, on ranks that divide a step's samples: {draft.unsplit}"


def set_positions(draft: Draft) -> None:
    """Set rotary positions with their base and rotated channels, or a table of learned ones."""
    names = ("position-embedding-type", "use-rotary-position-embeddings")
    kind = "rope" if draft.has("use-rotary-position-embeddings") else draft.value("position-embedding-type")
    if kind == "learned_absolute":
        if not draft.has("max-position-embeddings"):
            raise ValueError("--max-position-embeddings: missing. Learned positions require it.")
        draft.set("model.positions", "learned", *names)
        draft.set("model.n_positions", draft.value("max-position-embeddings"), "max-position-embeddings")
    elif kind == "rope":
        draft.set("model.positions", "rotary", *names)
        draft.set("model.rope_theta", float(draft.value("rotary-base")), "rotary-base")
        width = draft.get("model.d_head") or draft.get("model.d_model") // max(1, draft.get("model.n_heads"))
        rotated = int(width * min(1.0, draft.value("rotary-percent")))
        if rotated < width:
            draft.set("model.rotary_dims", rotated, "rotary-percent")
    else:
        draft.refusals["position-embedding-type"] = f"no {kind} positions; use rope or learned_absolute"


def set_vocabulary(draft: Draft) -> None:
    """Set the number of ids if the arguments give it, and the rows or their multiple."""
    is_null = draft.value("tokenizer-type") == "NullTokenizer"
    file, names = draft.value("vocab-file"), ["vocab-file"]
    n_ids = NAMED_TOKENIZERS.get(draft.value("tokenizer-model"))
    if draft.has("vocab-size"):
        # NullTokenizer has an end-of-document id after the others
        n_ids, names = draft.value("vocab-size") + is_null, ["vocab-size", *["tokenizer-type"] * is_null]
    elif file is not None and Path(file).is_file():
        n_ids = len(_read_object(file, {}, "--vocab-file"))
    elif n_ids is not None:
        names = ["tokenizer-model"]
    if n_ids is not None:
        draft.set("model.n_tokens", n_ids, *names)
    if not draft.has("padded-vocab-size"):
        parts = ("make-vocab-size-divisible-by", "tensor-model-parallel-size")
        draft.set("model.vocab_multiple", draft.value(parts[0]) * draft.value(parts[1]), *parts)


def set_batch(draft: Draft) -> None:
    """Set the batch sizes: samples of a step, and of a forward on one rank."""
    micro, size = draft.value("micro-batch-size"), draft.value("global-batch-size")
    if micro is not None and not draft.unsplit:  # it need not divide the share of a rank without the split
        draft.set("dataset.microbatch_size", micro, "micro-batch-size")
    if size is None:
        if micro is None or draft.n_ranks is None:
            raise ValueError(
                "--global-batch-size: missing. Give it, or --micro-batch-size and the number of ranks "
                "(--ranks, or the launcher's words)."
            )
        split = draft.value("tensor-model-parallel-size") * draft.value("pipeline-model-parallel-size")
        split *= draft.value("context-parallel-size") * draft.value("ds-sequence-parallel-size")
        size = micro * max(1, draft.n_ranks // split)
    draft.set("dataset.batch_size", size, "global-batch-size")
    ramp = draft.value("rampup-batch-size") or []
    try:
        start, _, n_samples = map(int, ramp or [size, 0, 0])
    except ValueError:
        raise ValueError(
            f"--rampup-batch-size: got {' '.join(ramp)!r}, expected start, increment and samples"
        ) from None
    if start == size or n_samples == 0:
        draft.set("dataset.batch_size", size, "rampup-batch-size", "global-batch-size")
    else:
        draft.refusals["rampup-batch-size"] = f"a step always has {size} samples; use the warm-up of the rate"


def set_length(draft: Draft) -> None:
    """Set length, warm-up and decay in steps, from iterations, samples or tokens."""
    batch = draft.get("dataset.batch_size")
    units = {"iters": 1, "samples": batch, "tokens": batch * draft.value("seq-length")}
    given = {unit: draft.value(f"train-{unit}") for unit in units if draft.has(f"train-{unit}")}
    if not given:
        raise ValueError("--train-iters: missing. Give it, --train-samples or --train-tokens.")
    # as in Megatron, samples are rounded down, tokens up, and the run ends with the first that is reached
    n_steps = min(-(-n // units[unit]) if unit == "tokens" else n // units[unit] for unit, n in given.items())
    names = [f"train-{unit}" for unit in given]
    if n_steps < 1:
        raise ValueError(f"--{names[0]}: got less than one step of {batch:,} samples")
    draft.set("lr_scheduler.total_iterations", n_steps, *names)
    decay, decay_names = n_steps, [f"lr-decay-{unit}" for unit in units if draft.has(f"lr-decay-{unit}")]
    for name in decay_names:
        # the whole run in samples is rounded down to steps, so its decay must be too
        decay = draft.value(name) // units[name.rpartition("-")[2]]
    warmup = _set_warmup(draft, units, decay, n_steps)
    kind = draft.get("lr_scheduler.kind")
    if decay != n_steps and kind in ("linear", "cosine"):
        draft.set("lr_scheduler.decay_iterations", max(1, decay - warmup), *decay_names)
    elif decay != n_steps and kind == "wsd":
        draft.refusals[decay_names[0]] = "WSD decays at the end of the run; omit it"


def _set_warmup(draft: Draft, units: Mapping[str, int], decay: int, n_steps: int) -> int:
    """Set the warm-up and return its steps."""
    share = draft.value("lr-warmup-fraction")
    if share is not None:
        # Megatron's fraction refers to the length of the decay
        steps = math.ceil(Fraction(str(share)) * decay)
        key, value = ("fraction", share) if decay == n_steps else ("iterations", steps)
        draft.set(f"lr_scheduler.warmup_{key}", value, "lr-warmup-fraction")
        return steps
    unit = next((unit for unit in ("tokens", "samples", "iters") if draft.value(f"lr-warmup-{unit}")), None)
    if unit is not None:
        steps = -(-draft.value(f"lr-warmup-{unit}") // units[unit])
        draft.set("lr_scheduler.warmup_iterations", steps, f"lr-warmup-{unit}")
        return int(steps)
    return 0


def set_data(draft: Draft) -> None:
    """Set training and held-out data that are given by prefixes, and Megatron's order of samples."""
    for kind, key in (("train", "dataset.path_train"), ("valid", "dataset.path_eval")):
        name = f"{kind}-data-path"
        if draft.has(name) and draft.get(key) is None:
            draft.set(key, _name_corpora(draft, draft.value(name), kind), name)
    if draft.has("data-path") and draft.get("dataset.path_train") is None:
        _set_split(draft, draft.value("data-path"))
    if draft.get("dataset.path_train") is None:
        # a fork may name its data by an argument of its own, which the report lists
        draft.refusals["data-path"] = "missing; give it, --train-data-path or --train-data-path-file"
    elif draft.get("dataset.path_train") != "synthetic":
        # Megatron shuffles the documents of all epochs together, and then their samples, from the seed
        draft.set("dataset.order", "megatron")
    if draft.has("eval-iters") and draft.value("eval-iters") == 0:
        draft.settings["dataset"].pop("path_eval", None)


def _set_split(draft: Draft, words: list[str]) -> None:
    """Set the datasets of --data-path, cut by --split such as 949,50,1, and the commands that cut them."""
    # published scripts pass it with quotes inside, as in '99,1,0'
    text, names = draft.value("split"), ("data-path", "split")
    shares = re.findall(r"[^,/'\" ]+", text)
    try:
        numbers = [float(share) for share in shares]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3 or min(numbers) < 0 or not numbers[0]:
        raise ValueError(f"--split: got {text!r}, expected up to three numbers such as 949,50,1")
    if not any(numbers[1:]):
        draft.set("dataset.path_train", _name_corpora(draft, words, "train"), *names)
        return
    tag = "_".join(shares)
    draft.set("dataset.path_train", _name_corpora(draft, words, "train", f"_{tag}_train"), *names)
    if numbers[1]:
        draft.set("dataset.path_eval", _name_corpora(draft, words, "valid", f"_{tag}_valid"), *names)
    for prefix in words[1::2] if len(words) > 1 else words:
        command = f"--input {prefix} --split {','.join(shares)} --output {prefix}_{tag}"
        draft.commands.append(f"python tools/subset_corpus.py {command}")


def _name_corpora(draft: Draft, words: list[str], kind: str, suffix: str = "") -> str:
    """Return the prefix of one corpus, or the name of a data-path file of several, which is to be written."""
    if len(words) == 1:
        return words[0] + suffix
    weights, prefixes = words[::2], words[1::2]
    if not words or len(words) % 2 or not all(re.fullmatch(r"[\d.]+(e-?\d+)?", word) for word in weights):
        got = " ".join(words[:4])
        raise ValueError(f"--data-path: got {got!r}, expected a prefix, or pairs of weight and prefix")
    if len(prefixes) == 1:
        return prefixes[0] + suffix
    name = f"{kind}_data.txt"
    draft.files[name] = "".join(f"{w} {p}{suffix}\n" for w, p in zip(weights, prefixes, strict=True))
    return name


def set_loading(draft: Draft) -> None:
    """Set the checkpoint from which the run starts."""
    load, tag = draft.value("load"), draft.value("load-tag")
    if load is not None and draft.has("finetune"):
        draft.set("checkpoint.init_from", load, "load", "finetune")
        return
    is_own = draft.has("save") and load == draft.value("save")
    resume = "never" if load is None else f"{load}/{tag}" if tag else "auto" if is_own else load
    draft.set("checkpoint.resume", resume, "load", "load-tag")


def set_profile(draft: Draft) -> None:
    """Set the steps that are profiled; they are counted from 1 here."""
    if draft.has("profile"):
        names = ("profile-step-start", "profile-step-end")
        draft.set("logging.profile_steps", [max(1, draft.value(name)) for name in names], "profile", *names)


def set_deepspeed(draft: Draft) -> None:
    """Set engine and stage of --deepspeed; its JSON decides, as in Megatron-DeepSpeed."""
    if not draft.has("deepspeed"):
        return
    path, stage, names = draft.value("deepspeed-config"), draft.value("zero-stage"), ["zero-stage"]
    has_file = path is not None and (os.path.abspath(path) in draft.texts or Path(path).is_file())
    if has_file:
        zero = _read_object(path, draft.texts, "--deepspeed-config").get("zero_optimization")
        of_file = zero.get("stage") if isinstance(zero, dict) else None
        if stage not in (None, of_file) and of_file is not None:
            draft.refusals["zero-stage"] = f"the DeepSpeed JSON has stage {of_file}; make them equal"
        if isinstance(of_file, int):
            stage, names = of_file, ["deepspeed-config", *names]
    if not draft.unsplit:
        draft.set("dist.sharding_stage", f"zero{stage or 0}", *names)
    sizes = [draft.get(f"dist.{axis}_parallel") for axis in ("tensor", "pipeline", "context")]
    if draft.unsplit or draft.get("dist.float8") or any(size not in (None, 1) for size in sizes):
        # only this engine supports the layout or float8
        draft.set("dist.engine", "torch", "deepspeed")
    else:
        draft.set("dist.engine", "deepspeed", "deepspeed")
        if has_file:
            draft.set("dist.deepspeed_config", path, "deepspeed-config")
    if draft.has("cpu-optimizer") and stage:
        is_torch = draft.get("dist.engine") == "torch"
        draft.set(f"dist.{'cpu_offload' if is_torch else 'offload_optimizer'}", True, "cpu-optimizer")


def _read_object(path: str, texts: Mapping[str, str], option: str) -> dict[str, Any]:
    """Return the content of a JSON file."""
    try:
        text = texts.get(os.path.abspath(path))
        content = json.loads(Path(path).read_text(encoding="utf-8") if text is None else text)
    except ValueError as error:  # also for numbers of thousands of digits
        raise ValueError(f"{option}: {path}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{option}: {path}: got {type(content).__name__}, expected a JSON object")
    return content


RULES: dict[str, Callable[[Draft], None]] = {
    rule.__name__: rule
    for rule in (
        set_positions, set_vocabulary, set_batch, set_length, set_data, set_loading, set_profile,
        set_deepspeed,
    )
}  # fmt: skip


def format_rows(rows: list[Row]) -> str:
    """Return the rows as a table, grouped by outcome, with a count of each."""
    lines = []
    for outcome in OUTCOMES:
        chosen = [row for row in rows if row.outcome == outcome]
        if chosen:
            width = min(ARGUMENT_WIDTH, max(len(row.argument) for row in chosen))
            lines += [f"{outcome}: {len(chosen)}", *(f"  {x.argument:<{width}}  {x.text}" for x in chosen)]
    return "\n".join(lines)


def write_translation(translation: Translation, path: Path | None, writer: int = 0) -> str:
    """Write the configuration, with its files beside it, and return its YAML.

    path    the YAML file; None: write nothing, and files are named as they would be beside run.yaml
    writer  number of this process among those that write the same content at the same time
    """
    target = path or Path("run.yaml")
    contents = {target.with_name(f"{target.stem}.{name}"): text for name, text in translation.files.items()}
    places = dict(zip(translation.files, map(str, contents), strict=True))
    settings = {
        name: {
            key: places.get(value, value) if isinstance(value, str) else value for key, value in part.items()
        }
        if isinstance(part, dict)
        else part
        for name, part in translation.settings.items()
    }
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    for file, content in {**contents, target: text}.items() if path is not None else ():
        # a temporary name for each writer: the ranks of a run write one file, and one would rename another's
        with atomic_path(file, partial_name=f"{file.name}.{writer}{PARTIAL}") as partial_file:
            partial_file.write_text(content, encoding="utf-8")
    return text
