"""Identity of a run: a hash of everything that affects its losses, and of nothing else."""

import hashlib
import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from megatron.config.option import ALWAYS, IF_CHANGED
from megatron.config.schema import RunConfig
from megatron.plan.datapaths import read_corpora, read_corpus_sidecar
from megatron.plan.mixture_use import read_resolved

# sections whose values are hashed under `section: {key: value}`; others
# under `key: value`
NESTED_SECTIONS = ("model", "objective", "optim", "lr_scheduler", "evaluation")


def _describe_corpora(path: str | None) -> Any:
    """Return the content of a dataset, independent of its path.

    Checksums for one corpus; for several,
    in order, their shares and checksums.
    """
    if path is None:
        return None
    corpora = read_corpora(path)
    limits = [corpus.unique_tokens for corpus in corpora]
    if len(corpora) == 1 and limits == [None]:
        return _read_checksums(corpora[0].prefix)
    # str(Fraction), as in "3/10": exact, so that the weights 0.3 and 0.7 give
    # the same hash as 3 and 7
    total = sum(corpus.weight for corpus in corpora)
    shares = [str(corpus.weight / total) for corpus in corpora]
    contents = [_read_checksums(corpus.prefix) for corpus in corpora]
    blend = [{"share": s, "content": c} for s, c in zip(shares, contents, strict=True)]
    return blend if not any(limits) else [blend, limits]


def _read_checksums(prefix: str) -> Any:
    """Return the checksums in the sidecar, or the prefix if they are missing."""
    return (read_corpus_sidecar(prefix) or {}).get("sha256", prefix)


def _read_checkpoint_checksums(path: str) -> Any:
    """Return the checksums in a checkpoint's meta.json, or the path if they are missing."""
    meta = Path(path) / "meta.json"
    try:
        return json.loads(meta.read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return path  # building the run reports the error


def _select_settings(section: Any) -> dict[str, Any]:
    """Return the settings of a section that are hashed by value; config/schema.py states which and how."""
    values = {}
    for key in fields(section):
        value, identity = getattr(section, key.name), key.metadata["identity"]
        # runs from before a setting was added keep their identity: its default
        # is not hashed
        if identity == ALWAYS or identity == IF_CHANGED and value != key.default:
            values[key.name] = value
    return values


def run_identity(config: RunConfig) -> str:
    """Return 64 hex digits, equal for two configs with the same losses. Names and paths do not count."""
    return _hash_settings(config)


def trunk_identity(config: RunConfig) -> str:
    """Return a hash that is equal for runs with the same steps as long as their learning rates are equal."""
    # Held-out data affects the reported losses, but no step of the training.
    # Megatron's sample order depends on the length of the run.
    schedule = ("lr_scheduler",) if config.dataset.order == "epoch" else ()
    return _hash_settings(config, "held_out", "evaluation", *schedule)


def cell_identity(config: RunConfig) -> str:
    """Return a hash that is equal for runs that differ only in their seed."""
    return _hash_settings(config, "seed")


def _hash_settings(config: RunConfig, *excluded: str) -> str:
    values = {name: value for name, value in _collect_hashed_values(config).items() if name not in excluded}
    # sort_keys: the order in which keys were set is not part of the identity
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _collect_hashed_values(config: RunConfig) -> dict[str, Any]:
    """Return the values that affect the losses. Their names are hashed too, so they must not change."""
    # not hashed, for example: the parallel layout, which changes the losses at
    # most by rounding
    hashed: dict[str, Any] = {}
    for part in fields(config):
        section = getattr(config, part.name)
        if is_dataclass(section):
            values = _select_settings(section)
            hashed |= {part.name: values} if part.name in NESTED_SECTIONS else values
    # float8 is a dtype of matrix products; two keys would change the identity
    # of all other runs
    if hashed.pop("float8", False):
        hashed["dtype"] = "float8"
    # Before it was a setting, the residual stream of one device was float32:
    # those runs keep their identity.
    residual = hashed.pop("residual_dtype") or config.dist.dtype
    if residual != "float32":
        hashed["residual_dtype"] = residual
    # keys with identity=CONTENT
    hashed["train"] = _describe_corpora(config.dataset.path_train)
    if config.dataset.mixture is not None:
        hashed["train"] = read_resolved(config.dataset.mixture).identity
    hashed["held_out"] = _describe_corpora(config.dataset.path_eval)
    if config.dataset.path_test is not None:
        hashed["test"] = _describe_corpora(config.dataset.path_test)
    if config.checkpoint.init_from is not None:
        hashed["init_from"] = _read_checkpoint_checksums(config.checkpoint.init_from)
    return hashed
