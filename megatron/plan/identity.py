"""Identity of a run: a hash of everything that affects its losses, and of nothing else."""

import hashlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.config.read import config_to_dict
from megatron.config.schema import RunConfig
from megatron.plan.datapaths import read_corpora, read_sidecar
from megatron.plan.mixture_use import read_resolved

HASHED_SECTIONS = ("model", "objective", "optim", "lr_scheduler")


def _describe_corpora(path: str | None) -> Any:
    """Return the content of a dataset, independent of its path.

    Checksums for one corpus; for several, in order, their shares and checksums.
    """
    if path is None:
        return None
    corpora = read_corpora(path)
    if len(corpora) == 1:
        return _read_checksums(corpora[0].prefix)
    # str(Fraction), as in "3/10": exact, so that the weights 0.3 and 0.7 give the same hash as 3 and 7
    total = sum(corpus.weight for corpus in corpora)
    return [
        {"share": str(corpus.weight / total), "content": _read_checksums(corpus.prefix)} for corpus in corpora
    ]


def _read_checksums(prefix: str) -> Any:
    """Return the checksums in the sidecar, or the prefix if there are none."""
    try:
        return read_sidecar(prefix)["sha256"]
    except (FileNotFoundError, KeyError):
        return prefix


def _read_checkpoint_checksums(path: str) -> Any:
    """Return the checksums in a checkpoint's meta.json, or the path if there are none."""
    meta = Path(path) / "meta.json"
    try:
        return json.loads(meta.read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return path  # building the run reports the error


def _select_settings(section: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a section without options added later that have their default value.

    Runs from before such an option was added keep their identity.
    """
    omitted = [f.name for f in fields(section) if f.metadata.get("later") and values[f.name] == f.default]
    return {key: value for key, value in values.items() if key not in omitted}


def run_identity(config: RunConfig) -> str:
    """Return 64 hex digits, equal for two configs with the same losses. Names and paths do not count."""
    return _hash_json(_collect_hashed_values(config))


def trunk_identity(config: RunConfig) -> str:
    """Return a hash that is equal for runs with the same steps as long as their learning rates are equal."""
    # held-out data affects the reported losses, but no step of the training
    excluded = ["held_out", "evaluation"]
    if config.dataset.order == "epoch":  # Megatron's sample order depends on the length of the run
        excluded.append("lr_scheduler")
    return _hash_json(
        {name: value for name, value in _collect_hashed_values(config).items() if name not in excluded}
    )


def cell_identity(config: RunConfig) -> str:
    """Return a hash that is equal for runs that differ only in their seed."""
    return _hash_json(
        {name: value for name, value in _collect_hashed_values(config).items() if name != "seed"}
    )


def _hash_json(values: dict[str, Any]) -> str:
    # sort_keys: the order in which keys were set is not part of the identity
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _collect_hashed_values(config: RunConfig) -> dict[str, Any]:
    """Return the values that affect the losses. Their names are hashed too, so they must not change."""
    # not hashed, for example: the parallel layout, which changes the losses at most by rounding
    whole = config_to_dict(config)
    hashed: dict[str, Any] = {
        name: _select_settings(getattr(config, name), whole[name]) for name in HASHED_SECTIONS
    }
    hashed["model"].pop("size")  # a label of the shape
    hashed["optim"].pop("kernel", None)  # another implementation of the same update
    hashed["dtype"] = "float8" if config.dist.float8 else config.dist.dtype
    hashed["seed"] = config.misc.seed
    hashed["seq_len"] = config.dataset.seq_len
    hashed["batch_size"] = config.dataset.batch_size
    # keys of later options are present only if not the default, so that older runs keep their identity
    if config.dataset.order != "epoch":
        hashed["order"] = config.dataset.order
    if config.dataset.unique_tokens is not None:
        hashed["unique_tokens"] = config.dataset.unique_tokens
    hashed["train"] = _describe_corpora(config.dataset.path_train)
    if config.dataset.mixture is not None:
        hashed["train"] = read_resolved(config.dataset.mixture).identity
    hashed["held_out"] = _describe_corpora(config.dataset.path_eval)
    if config.checkpoint.init_from is not None:
        hashed["init_from"] = _read_checkpoint_checksums(config.checkpoint.init_from)
    hashed["evaluation"] = {"max_samples": config.evaluation.max_samples, "num_mc": config.evaluation.num_mc}
    return hashed
