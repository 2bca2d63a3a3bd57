"""A model's weights with its shape: what every format of the outside world is read into and written from."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
from omegaconf import OmegaConf
from torch import Tensor

from megatron.checkpoint import store
from megatron.checkpoint.folder import sha256_of, whole_folder
from megatron.checkpoint.layout import FILES, META, RESTORE, Found, find, read_meta_json
from megatron.checkpoint.torch_file import load_torch_file
from megatron.config.datapaths import read_corpora, read_sidecar
from megatron.config.schema import ModelConfig
from megatron.log import get_logger
from megatron.model.gpt import Gpt
from megatron.run_dir import CHECKPOINTS

log = get_logger(__name__)
ROWS = ("embedding.weight", "unembedding.weight")  # tensors with a row for each row of the vocabulary
START = "start.yaml"  # a configuration that goes on from the weights, but for data and length
FREE = (
    "size",
    "vocab_rows",
    "attention_dropout",
    "document_mask",
    "eod_id",
)  # what may differ between weights and the model that starts from them


@dataclass(frozen=True, kw_only=True)
class Weights:
    """One model outside any run.

    state      under the names of `Gpt.state_dict`, on the CPU
    objective  name of what it was trained for
    seq_len    positions it was trained on, None where nobody says
    tokenizer  folder or file of its tokenizer, None where nobody says
    tokenizer_sha256   the sum of the tokenizer that made its training corpus, None where nobody says
    rate_min   of masked diffusion, None where nobody says
    source     where it came from, for people
    """

    config: ModelConfig
    objective: str
    state: dict[str, Tensor]
    seq_len: int | None = None
    tokenizer: str | None = None
    tokenizer_sha256: str | None = None
    rate_min: float | None = None
    source: str = ""

    def model(self) -> Gpt:
        """The built model in evaluation mode, sharing these tensors. ValueError where they do not fit."""
        try:
            if self.config.positions == "learned" and not self.config.n_positions:
                raise ValueError("learned positions without n_positions, expected how many there are")
            if self.config.n_layers > len(self.state):  # a hostile shape would be built for ever
                raise ValueError(f"{self.config.n_layers} layers, {len(self.state)} tensors")
            with torch.device("meta"):
                model = Gpt(self.config)
            model.load_state_dict(self.state, assign=True)
        except (RuntimeError, ValueError, TypeError, ArithmeticError) as error:
            told = " ".join(str(error).split())
            raise ValueError(
                f"{self.source}: weights and shape do not fit each other ({told[:300]})"
            ) from error
        return model.eval().requires_grad_(False)

    def without_spare_rows(self) -> "Weights":
        """The same without [MASK] and padding: as many rows as the tokenizer has ids."""
        n = self.config.n_tokens
        state = {name: of[:n].clone() if name in ROWS else of for name, of in self.state.items()}
        return replace(self, config=replace(self.config, vocab_rows=n), state=state)


def save_weights(weights: Weights, folder: Path) -> None:
    """Write a checkpoint that holds weights alone, for `checkpoint.init_from`, scoring and generation.

    meta.json has the same shape as that of a run's checkpoint, and START is there for tools/pretrain.py.
    ValueError where the name is taken.
    """
    with whole_folder(folder) as partial:
        path = partial / FILES["model"]
        torch.save({name: own(of) for name, of in weights.state.items()}, path)
        meta = {
            "config": {
                "model": asdict(weights.config),
                "objective": {"name": weights.objective, "rate_min": weights.rate_min},
                "dataset": {"seq_len": weights.seq_len},
            },
            "tokenizer": weights.tokenizer,
            "source": weights.source,
            "torch": torch.__version__,
            "files": {path.name: {"sha256": sha256_of(path), "bytes": path.stat().st_size}},
        }
        (partial / META).write_text(json.dumps(meta, indent=1) + "\n")
        (partial / START).write_text(OmegaConf.to_yaml(_start_of(weights, folder)))


def _start_of(weights: Weights, folder: Path) -> dict[str, Any]:
    """The sections of a run's configuration that goes on from these weights."""
    default = ModelConfig()
    shape = {key: value for key, value in asdict(weights.config).items() if value != getattr(default, key)}
    sections: dict[str, Any] = {
        "model": shape,
        "objective": {"name": weights.objective},
        "checkpoint": {"init_from": str(folder.resolve())},
    }
    return sections | ({} if weights.seq_len is None else {"dataset": {"seq_len": weights.seq_len}})


def own(tensor: Tensor) -> Tensor:
    """The tensor with memory of its own: a view would be saved with all that it looks into."""
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def load_weights(path: Path) -> Weights:
    """The weights of a checkpoint: a run's or converted ones; of a run's folder, those of its newest.

    Raises FileNotFoundError where there is none, ValueError for one that is not as it was written.
    """
    path = newest_in(path)
    meta = _read_meta(path)
    config = _shape_of(meta, path)
    dataset = meta["config"].get("dataset") or {}
    return Weights(
        config=config,
        objective=meta["config"]["objective"]["name"],
        state=_read_state(path, meta["files"]),
        seq_len=dataset.get("seq_len"),
        rate_min=meta["config"]["objective"].get("rate_min"),
        tokenizer=meta.get("tokenizer") or _tokenizer_of_sidecar(dataset.get("path_train"), "name"),
        tokenizer_sha256=_tokenizer_of_sidecar(dataset.get("path_train"), "sha256"),
        source=str(path),
    )


def newest_in(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest in a folder of them or in a run's folder."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    if (path / META).is_file():
        return path
    for folder in (path, path / CHECKPOINTS):
        if found := [one for one in find(folder) if (one.path / META).is_file()]:
            return _newest(folder, found)
    raise FileNotFoundError(f"{path}: holds no checkpoint, and no {META} of one")


def _newest(folder: Path, found: list[Found]) -> Path:
    """The last of `found`, which are in order. ValueError where steps do not order them: of several runs."""
    prefixes = sorted({one.prefix for one in found})
    if len(prefixes) > 1:
        raise ValueError(
            f"{folder}: got checkpoints of {len(prefixes)} runs ({', '.join(prefixes[:4])}), expected those "
            "of one. Give the path of one checkpoint"
        )
    for one in found:
        if one.step is None and one != found[-1]:
            log.warning("%s: cannot be read; passed over, though it may be the newest", one.path / META)
    return found[-1].path


def start_from(model: Gpt, weights: Weights) -> None:
    """Give a built model the weights of another of its shape, in place.

    The model may have more rows of vocabulary: the first are taken over, the others keep what they have.
    Raises ValueError that names what differs.
    """
    mine, theirs = asdict(model.config), asdict(weights.config)
    mine["n_kv_heads"], theirs["n_kv_heads"] = model.config.kv_heads, weights.config.kv_heads
    differ = [
        f"model.{k} is {mine[k]!r}, there {theirs[k]!r}"
        for k in mine
        if k not in FREE and mine[k] != theirs[k]
    ]
    if theirs["vocab_rows"] > mine["vocab_rows"]:
        differ.append(f"model.vocab_rows is {mine['vocab_rows']}, there {theirs['vocab_rows']}")
    if differ:
        raise ValueError(
            f"checkpoint.init_from: {weights.source} is of another model ({'; '.join(differ[:4])})"
        )
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in weights.state.items():
            rows = len(tensor) if name in ROWS else None
            own[name][:rows].copy_(tensor)


def _read_meta(path: Path) -> dict[str, Any]:
    """meta.json with what is read from it. ValueError."""
    meta = read_meta_json(path)
    config = meta.get("config")
    sections = [config.get(key) for key in ("model", "objective")] if isinstance(config, dict) else []
    listed = meta.get("files")
    if (
        not all(isinstance(section, dict) for section in (config, *sections, listed))
        or not isinstance(config.get("dataset") or {}, dict)
        or not isinstance(sections[1].get("name"), str)
        or not all(store.is_listed(name, told) for name, told in listed.items())
    ):
        raise ValueError(f"{path / META}: got no files, shape and objective of a model; {RESTORE}")
    return meta


def _shape_of(meta: dict[str, Any], path: Path) -> ModelConfig:
    """The shape, each value of its key's type. ValueError."""
    shape = meta["config"]["model"]
    kinds = get_type_hints(ModelConfig)
    if extra := sorted(set(shape) - set(kinds)):
        raise ValueError(
            f"{path / META}: model has keys unknown here: {', '.join(extra)[:200]}; update this project"
        )
    for key, value in shape.items():
        kind = kinds[key] | int if kinds[key] in (float, float | None) else kinds[key]
        if not isinstance(value, kind) or isinstance(value, bool) and kind is not bool:
            raise ValueError(f"{path / META}: model.{key}: got {type(value).__name__}, expected {kind}")
    return ModelConfig(**shape)


def _read_state(path: Path, files: dict[str, Any]) -> dict[str, Tensor]:
    name = FILES["model"]
    if name not in files:
        store.verify(path)
        from megatron.checkpoint import sharded  # imports for a second; full checkpoints do without

        return sharded.read_whole(path)["model"]
    file = path / name
    if not file.is_file() or sha256_of(file) != files[name]["sha256"]:
        raise ValueError(f"{file}: not the file that was saved; the checkpoint is damaged")
    state = load_torch_file(file, map_file=True)
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ValueError(f"{file}: got something else than tensors by name, expected a model's weights")
    return state


def _tokenizer_of_sidecar(prefix: str | None, key: str) -> str | None:
    """What the training corpus was made with, if it is still there: name or sum of the tokenizer."""
    if prefix is None:
        return None
    try:
        found = read_sidecar(read_corpora(prefix)[0].prefix)["tokenizer"][key]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # moved away since, or made by another program: a tokenizer can be named
    return found if isinstance(found, str) else None
