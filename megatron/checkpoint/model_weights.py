"""A model's weights and configuration: the common form that every converter reads into and writes from."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from megatron.checkpoint import store
from megatron.checkpoint.layout import (
    FILES,
    META,
    RESTORE,
    CheckpointInfo,
    compute_sha256,
    find_checkpoints,
    read_meta_json,
)
from megatron.checkpoint.torch_file import load_torch_file
from megatron.config.schema import ModelConfig
from megatron.config.section import read_section
from megatron.io import atomic_folder
from megatron.log import get_logger
from megatron.model.transformer import Gpt
from megatron.plan.datapaths import read_corpora, read_corpus_sidecar
from megatron.plan.run_dir import CHECKPOINTS

log = get_logger(__name__)
VOCABULARY_TENSORS = ("embedding.weight", "unembedding.weight")  # tensors with one row per vocabulary row
START_FILE = "start.yaml"  # a run configuration that starts from the weights, without data and length
# keys that may differ between the weights and the model initialized from them
FREE_KEYS = ("size", "vocab_rows", "attention_dropout", "hidden_dropout", "document_mask", "eod_id")


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights and configuration of one model, independent of any run.

    state      tensors under the names of `Gpt.state_dict`, on the CPU
    objective  name of the training objective
    seq_len    positions in training; None: unknown
    tokenizer  folder or file of the tokenizer; None: unknown
    tokenizer_sha256   sha256 of the tokenizer of its training corpus; None: unknown
    rate_min   smallest masking rate of masked diffusion; None: unknown
    source     origin, for messages
    """

    config: ModelConfig
    objective: str
    state: dict[str, Tensor]
    seq_len: int | None = None
    tokenizer: str | None = None
    tokenizer_sha256: str | None = None
    rate_min: float | None = None
    source: str = ""

    def build_model(self) -> Gpt:
        """Build the model in evaluation mode, sharing these tensors. Raises ValueError if they do not fit."""
        try:
            if self.config.positions == "learned" and not self.config.n_positions:
                raise ValueError("got learned positions without n_positions, expected their number")
            if self.config.n_layers > len(self.state):  # bounds the time to build an untrusted shape
                raise ValueError(f"{self.config.n_layers} layers, {len(self.state)} tensors")
            # On the meta device no parameter is allocated;
            # assign=True then uses the tensors of the state.
            with torch.device("meta"):
                model = Gpt(self.config)
            model.load_state_dict(self.state, assign=True)
        except (RuntimeError, ValueError, TypeError, ArithmeticError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{self.source}: weights do not match the model configuration ({reason[:300]})"
            ) from error
        return model.eval().requires_grad_(False)

    def strip_spare_rows(self) -> "Weights":
        """Return a copy without the rows of [MASK] and padding: one row per tokenizer id."""
        n = self.config.n_tokens
        state = {
            name: tensor[:n].clone() if name in VOCABULARY_TENSORS else tensor
            for name, tensor in self.state.items()
        }
        return replace(self, config=replace(self.config, vocab_rows=n), state=state)


def save_weights(weights: Weights, folder: Path) -> None:
    """Write a checkpoint of weights only, for `checkpoint.init_from`, scoring and generation.

    meta.json has the same structure as in a run's checkpoint.
    START_FILE is a configuration for tools/pretrain.py.
    Raises FileExistsError if the folder exists.
    """
    with atomic_folder(folder) as partial:
        path = partial / FILES["model"]
        torch.save({name: clone_if_view(tensor) for name, tensor in weights.state.items()}, path)
        meta = {
            "config": {
                "model": asdict(weights.config),
                "objective": {"name": weights.objective, "rate_min": weights.rate_min},
                "dataset": {"seq_len": weights.seq_len},
            },
            "tokenizer": weights.tokenizer,
            "source": weights.source,
            "torch": torch.__version__,
            "files": {path.name: {"sha256": compute_sha256(path), "bytes": path.stat().st_size}},
        }
        (partial / META).write_text(json.dumps(meta, indent=1) + "\n")
        (partial / START_FILE).write_text(OmegaConf.to_yaml(_build_start_config(weights, folder)))


def _build_start_config(weights: Weights, folder: Path) -> dict[str, Any]:
    """Return the sections of a run configuration that starts from these weights."""
    default = ModelConfig()
    shape = {key: value for key, value in asdict(weights.config).items() if value != getattr(default, key)}
    sections: dict[str, Any] = {
        "model": shape,
        "objective": {"name": weights.objective},
        "checkpoint": {"init_from": str(folder.resolve())},
    }
    return sections | ({} if weights.seq_len is None else {"dataset": {"seq_len": weights.seq_len}})


def clone_if_view(tensor: Tensor) -> Tensor:
    """Return the tensor, cloned if it is a view: torch.save would write a view's whole storage."""
    # Example: the query rows of a fused QKV are a view of a third of its storage.
    # A transposed matrix has as many bytes as its storage, but is not contiguous.
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def load_weights(path: Path) -> Weights:
    """Load the weights of a checkpoint of a run or of a conversion; for a run folder, of its newest one.

    Raises FileNotFoundError if there is no
    checkpoint, ValueError for a damaged one.
    """
    path = find_newest_checkpoint(path)
    meta = read_meta_json(path)
    config = meta.get("config")
    sections = config if isinstance(config, dict) else {}
    shape, objective, dataset = (sections.get(name) or {} for name in ("model", "objective", "dataset"))
    is_valid = all(isinstance(section, dict) for section in (shape, objective, dataset))
    if not is_valid or not isinstance(objective.get("name"), str):
        raise ValueError(f"{path / META}: expected `config.model` and `config.objective`; {RESTORE}")
    corpus_tokenizer = _read_corpus_tokenizer(dataset.get("path_train"))
    return Weights(
        config=read_section(ModelConfig, shape, f"{path / META}: model"),
        objective=objective["name"],
        state=_read_state(path, meta),
        seq_len=dataset.get("seq_len"),
        rate_min=objective.get("rate_min"),
        # a conversion records the tokenizer itself, a run only
        # its training data, whose sidecar names the tokenizer
        tokenizer=meta.get("tokenizer") or corpus_tokenizer.get("name"),
        tokenizer_sha256=corpus_tokenizer.get("sha256"),
        source=str(path),
    )


def find_newest_checkpoint(path: Path) -> Path:
    """Return the path itself if it is a checkpoint, else the newest checkpoint in a folder or run folder."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    if (path / META).is_file():
        return path
    for folder in (path, path / CHECKPOINTS):
        # meta.json is written last, before the rename:
        # a folder without it is not a checkpoint
        if infos := [info for info in find_checkpoints(folder) if (info.path / META).is_file()]:
            return _pick_newest(folder, infos)
    raise FileNotFoundError(f"{path}: contains no checkpoint and no {META}")


def _pick_newest(folder: Path, infos: list[CheckpointInfo]) -> Path:
    """Return the last of the sorted `infos`. Raises ValueError if they are of several runs."""
    prefixes = sorted({info.prefix for info in infos})
    if len(prefixes) > 1:
        raise ValueError(
            f"{folder}: got checkpoints of {len(prefixes)} runs ({', '.join(prefixes[:4])}). "
            "Give the path of one checkpoint."
        )
    for info in infos:
        # these sort first (see find_checkpoints), so they
        # are never picked as long as one is readable
        if info.step is None and info != infos[-1]:
            log.warning("%s: cannot be read; skipped, although it may be the newest", info.path / META)
    return infos[-1].path


def copy_weights(model: Gpt, weights: Weights) -> None:
    """Copy weights into a model of the same shape, in place.

    The model may have more vocabulary rows: the first rows are copied, the
    others keep their values. Raises ValueError that lists the differing keys.
    """
    model_config, source_config = asdict(model.config), asdict(weights.config)
    # None and n_heads mean the same model: compare the resolved numbers
    model_config["n_kv_heads"], source_config["n_kv_heads"] = model.config.kv_heads, weights.config.kv_heads
    differ = [
        f"model.{k} is {model_config[k]!r}, in the checkpoint {source_config[k]!r}"
        for k in model_config
        if k not in FREE_KEYS and model_config[k] != source_config[k]
    ]
    if source_config["vocab_rows"] > model_config["vocab_rows"]:
        differ.append(
            f"model.vocab_rows is {model_config['vocab_rows']}, "
            f"in the checkpoint {source_config['vocab_rows']}"
        )
    if differ:
        raise ValueError(
            f"checkpoint.init_from: {weights.source} has another model config ({'; '.join(differ[:4])})"
        )
    targets = model.state_dict()
    with torch.no_grad():
        for name, tensor in weights.state.items():
            # The model's table may be padded
            # further: [V_source, D] goes into rows 0
            # to V_source - 1. other tensors are
            # copied whole: [:None] selects all rows
            rows = len(tensor) if name in VOCABULARY_TENSORS else None
            targets[name][:rows].copy_(tensor)


def _read_state(path: Path, meta: dict[str, Any]) -> dict[str, Tensor]:
    if store.is_sharded_checkpoint(meta):
        store.verify_checkpoint(path)
        from megatron.checkpoint import sharded  # import takes a second; full checkpoints skip it

        return sharded.read_all_shards(path)["model"]
    # Only the weights are read and verified: verify_checkpoint
    # would also read the optimizer file, which is twice as large.
    file = path / FILES["model"]
    store.verify_file(file, meta["files"].get(file.name))
    state = load_torch_file(file, map_file=True)
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ValueError(f"{file}: expected a model's weights, a dictionary of tensors")
    return state


def _read_corpus_tokenizer(prefix: str | None) -> dict[str, Any]:
    """Return the tokenizer of a training corpus, as in its sidecar; empty if the corpus is missing."""
    try:
        sidecar = None if prefix is None else read_corpus_sidecar(read_corpora(prefix)[0].prefix)
    except (OSError, ValueError, TypeError):
        return {}  # moved, or written by another program; the user can give a tokenizer
    return (sidecar or {}).get("tokenizer") or {}
