"""Configurations with the vocabulary of their corpus, read from its sidecar."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.config.read import build_config, read_config
from megatron.config.schema import RunConfig
from megatron.data.sidecar import HOW, locate_dataset
from megatron.plan.datapaths import read_corpora, read_corpus_sidecar
from megatron.plan.mixture_use import read_resolved


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's YAML file with overrides, and the vocabulary from its corpus. Raises as `read_config`."""
    return read_config(path, overrides, read_vocabulary)


def resolve_config(raw: Any, where: str = "configuration") -> RunConfig:
    """Build a RunConfig, with the vocabulary of its corpus. Raises as `config.read.build_config`."""
    return build_config(raw, where, read_vocabulary)


def read_vocabulary(key: str, data: Mapping[str, Any]) -> int:
    """Return `n_tokens` or `eod_id` of the corpus in section `dataset`. Raises ValueError if unknown."""
    mixture = data.get("mixture")
    # all datasets of a mixture have one tokenizer, so the first one's sidecar
    # gives the vocabulary
    prefix = data.get("path_train") if mixture is None else read_resolved(str(mixture)).pairs[0]
    return _read_eod_id(prefix) if key == "eod_id" else _read_vocab_size(prefix)


def _read_vocab_size(prefix: str | None) -> int:
    """Return the number of token ids recorded in the sidecar of a dataset."""
    if prefix is None:
        raise ValueError(
            "dataset.path_train: missing; set a .bin/.idx prefix, a data-path file or synthetic "
            "(DATA=... of the training scripts), or only model.n_tokens if no text is read"
        )
    try:
        prefix = read_corpora(prefix)[0].prefix  # all corpora of a blend have one tokenizer
        sidecar = read_corpus_sidecar(prefix)
        if sidecar is None and not locate_dataset(prefix).index.is_file():
            raise FileNotFoundError(f"{prefix}.idx: no such file, {HOW}")
    except OSError as error:
        raise ValueError(f"dataset.path_train: {error}") from error
    if sidecar is None:
        raise ValueError(
            f"dataset.path_train: {prefix} has no sidecar (.json) with the size of the vocabulary. "
            "Set it, as in model.n_tokens=50257."
        )
    n_tokens = (sidecar.get("tokenizer") or {}).get("n_tokens")
    if n_tokens is None:
        raise ValueError(f"{prefix}.json: tokenizer.n_tokens is missing. Set model.n_tokens.")
    return int(n_tokens)


def _read_eod_id(prefix: str | None) -> int:
    """Return the end-of-document id recorded in the sidecar of a dataset."""
    eod_id = None
    if prefix is not None:
        prefix = read_corpora(prefix)[0].prefix  # all corpora of a blend have one tokenizer
        eod_id = ((read_corpus_sidecar(prefix) or {}).get("tokenizer") or {}).get("eod_id")
    if not isinstance(eod_id, int):
        raise ValueError(
            "model.document_mask: no end-of-document id; set model.eod_id, "
            "or a dataset.path_train whose sidecar has tokenizer.eod_id"
        )
    return eod_id
