"""Entry of the translation: the words of a Megatron command, or a launch script, to a Translation."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.config.migration.command_line import parse_command
from megatron.config.migration.rules_devices import set_devices
from megatron.config.migration.rules_model import set_objective, set_precision, set_shape
from megatron.config.migration.rules_run import set_batch, set_data, set_length, set_optimizer, set_run
from megatron.config.migration.translate import Draft, Translation
from megatron.config.read import build_config

MAX_FILE_BYTES = 64 << 20  # a vocabulary has a few MB
SPLIT_KEYS = (
    "tensor_parallel", "pipeline_parallel", "pipeline_schedule", "pipeline_chunks", "context_parallel",
    "context_method",
)  # fmt: skip


def translate_command(
    words: Sequence[str],
    objective: str | None = None,
    n_ranks: int | None = None,
    written: Mapping[str, str] | None = None,
) -> Translation:
    """Translate a command, with or without launcher and script. Raises ValueError for a wrong use of it.

    objective  autoregressive or masked_diffusion; None: that of the script, autoregressive without one
    n_ranks    number of ranks; None: that of the launcher's words
    written    path -> content of files that the launch script writes, such as its DeepSpeed JSON
    """
    command = parse_command(words)
    name = objective or ("masked_diffusion" if command.trains_diffusion else "autoregressive")
    files = dict(written or {})
    build_draft = partial(
        Draft,
        command=command,
        objective=name,
        n_ranks=n_ranks or command.n_ranks,
        count_ids=_count_vocabulary,
        read_words=lambda path: _read_text(path, files, "--data-args-path").split(),
        read_deepspeed=lambda path: _read_json(path, files),
    )
    draft = _apply_rules(build_draft())
    if reason := _find_refused_split(draft.settings):
        draft = _apply_rules(build_draft(unsplit=reason))
    path = draft.get("dist.deepspeed_config")
    if path in files:
        # the script writes this file when it runs, so it comes with the configuration
        draft.files["deepspeed.json"] = files[path]
        draft.settings["dist"]["deepspeed_config"] = "deepspeed.json"
    return Translation(draft.settings, draft.list_rows(), draft.files, draft.commands)


def _apply_rules(draft: Draft) -> Draft:
    set_precision(draft)
    set_shape(draft)
    set_objective(draft)
    set_optimizer(draft)
    batch = set_batch(draft)
    set_length(draft, batch)
    set_data(draft, batch)
    set_devices(draft)
    set_run(draft)
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


def _read_text(path: str, written: Mapping[str, str], option: str) -> str:
    if path in written:
        return written[path]
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{option}: {path}: no such file")
    if file.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{option}: {path}: got more than {MAX_FILE_BYTES >> 20} MB, expected a small file")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option}: {path}: got bytes that are not UTF-8 ({error})") from error


def _read_json(path: str, written: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the DeepSpeed JSON, or None if the file is not there."""
    if path not in written and not Path(path).is_file():
        return None
    try:
        config = json.loads(_read_text(path, written, "--deepspeed_config"))
    except ValueError as error:  # also for numbers of thousands of digits
        raise ValueError(f"--deepspeed_config: {path}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"--deepspeed_config: {path}: got {type(config).__name__}, expected a JSON object")
    return config


def _count_vocabulary(path: str) -> int | None:
    """Return the number of ids of a vocabulary file: JSON of token -> id, or a token per line."""
    if not Path(path).is_file():
        return None
    text = _read_text(path, {}, "--vocab-file")
    try:
        entries = json.loads(text)
    except json.JSONDecodeError:
        return sum(1 for line in text.splitlines() if line)
    return len(entries) if isinstance(entries, dict) else None
