"""The name of a run's numbers: a hash of all that affects them, and of nothing else."""

import hashlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.config.datapaths import read_corpora, read_sidecar
from megatron.config.mixture_use import read_resolved
from megatron.config.read import as_dict
from megatron.config.schema import RunConfig

AFFECTS = ("model", "objective", "optim", "lr_scheduler")


def _content(path: str | None) -> Any:
    """What is read, wherever it lies: the sums of a corpus; of several also their order and shares."""
    if path is None:
        return None
    corpora = read_corpora(path)
    if len(corpora) == 1:
        return _sums(corpora[0].prefix)
    total = sum(corpus.weight for corpus in corpora)
    return [{"share": str(corpus.weight / total), "content": _sums(corpus.prefix)} for corpus in corpora]


def _sums(prefix: str) -> Any:
    """The sums in the sidecar, else the path."""
    try:
        return read_sidecar(prefix)["sha256"]
    except (FileNotFoundError, KeyError):
        return prefix


def _weights(path: str) -> Any:
    """What is in a checkpoint's files, wherever it lies: the sums in its meta.json, else the path."""
    meta = Path(path) / "meta.json"
    try:
        return json.loads(meta.read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return path  # building the run says what is wrong with it


def _told(section: Any, values: dict[str, Any]) -> dict[str, Any]:
    """A section's settings, without later options at their default: a run that knew none keeps its name."""
    silent = [f.name for f in fields(section) if f.metadata.get("later") and values[f.name] == f.default]
    return {key: value for key, value in values.items() if key not in silent}


def run_identity(config: RunConfig) -> str:
    """64 hex digits, equal for two configs that must give the same losses; names and paths do not count."""
    return _hash(_affecting(config))


def trunk_identity(config: RunConfig) -> str:
    """Equal for runs whose steps are the same for as long as their learning rates are."""
    beside = ["held_out", "evaluation"]
    if config.dataset.order == "epoch":  # Megatron's order is another one for each length
        beside.append("lr_scheduler")
    return _hash({name: told for name, told in _affecting(config).items() if name not in beside})


def cell_identity(config: RunConfig) -> str:
    """Equal for runs that differ in their seed alone."""
    return _hash({name: value for name, value in _affecting(config).items() if name != "seed"})


def _hash(told: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _affecting(config: RunConfig) -> dict[str, Any]:
    whole = as_dict(config)
    told: dict[str, Any] = {name: _told(getattr(config, name), whole[name]) for name in AFFECTS}
    told["model"].pop("size")
    told["optim"].pop("kernel", None)
    told["dtype"] = "float8" if config.dist.float8 else config.dist.dtype
    told["seed"] = config.misc.seed
    told["seq_len"] = config.dataset.seq_len
    told["batch_size"] = config.dataset.batch_size
    if config.dataset.order != "epoch":  # said only where it is another, so that older runs keep their names
        told["order"] = config.dataset.order
    if config.dataset.unique_tokens is not None:
        told["unique_tokens"] = config.dataset.unique_tokens
    told["train"] = _content(config.dataset.path_train)
    if config.dataset.mixture is not None:
        told["train"] = read_resolved(config.dataset.mixture).identity
    told["held_out"] = _content(config.dataset.path_eval)
    if config.checkpoint.init_from is not None:
        told["init_from"] = _weights(config.checkpoint.init_from)
    told["evaluation"] = {"max_samples": config.evaluation.max_samples, "num_mc": config.evaluation.num_mc}
    return told
