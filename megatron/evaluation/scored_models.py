"""Find the models under a path, the folders of their scores, and hashes that identify a score."""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.convert.formats import read_any
from megatron.checkpoint.convert.huggingface import CONFIG_FILE as HUGGINGFACE
from megatron.checkpoint.convert.huggingface import PROJECT_KEYS
from megatron.checkpoint.convert.megatron_layouts import is_megatron_checkpoint
from megatron.checkpoint.layout import META, find_checkpoints
from megatron.checkpoint.model_weights import Weights
from megatron.io import PARTIAL, read_json
from megatron.plan.run_dir import CHECKPOINTS
from megatron.text.hub import open_hub_model, parse_hub_name

CAUSAL_CLASSES = ("ForCausalLM", "LMHeadModel")  # ends of the names of transformers' classes
MEGATRON_STEP = re.compile(r"(?:iter_|global_step)(\d+)")  # names of Megatron's checkpoint folders


@dataclass(frozen=True)
class ScoredModel:
    """A model to score.

    path      path for `checkpoint.convert.read_any`
    run       folder of its run; None for a model that belongs to no run
    step      training step; None: unknown
    hub_name  its name on the hub, whose files are in the hub's cache; None: not of the hub
    """

    path: Path
    run: Path | None
    step: int | None
    hub_name: str | None = None

    @property
    def name(self) -> str:
        """Name for results: the hub's name, run/checkpoint, or the path."""
        if self.hub_name is not None:
            return self.hub_name
        return str(self.path) if self.run is None else f"{self.run.name}/{self.path.name}"

    def folder(self, kind: str) -> Path:
        """Return the folder of its scores of a kind.

        It is in the run folder, next to a model without one, or for
        a name of the hub in the working folder.
        """
        if self.run is not None:
            return self.run / kind / self.path.name
        if self.hub_name is not None:
            return Path(f"{self.hub_name.replace('/', '__')}.scores") / kind
        return self.path.resolve().with_name(f"{self.path.resolve().name}.scores") / kind


def find_models(paths: Iterable[Path], out: Path | None = None) -> list[ScoredModel]:
    """Return all models under the paths, in order, without duplicates.

    A path is a model (a checkpoint, a Hugging Face or Megatron
    folder, a file), a folder of checkpoints, a run, a folder that
    contains runs at any depth, such as a study, or, if no such path
    exists, a name of the hub. Of a Megatron folder with several
    steps it is the newest. `out` is a folder for the scores of one
    model. Raises FileNotFoundError if a path contains no model,
    ValueError for several models with one `out`.
    """
    result: dict[Path, ScoredModel] = {}
    for path in paths:
        if not path.exists() and parse_hub_name(str(path)) is not None:
            folder = open_hub_model(str(path))
            result.setdefault(folder.resolve(), ScoredModel(folder, None, None, str(path)))
            continue
        models = _find_models_in(path)
        if not models:
            raise FileNotFoundError(
                f"{path}: got no checkpoint in it or its subfolders, expected one or more"
            )
        for model in models:
            result.setdefault(model.resolve(), _describe_model(model))
    if out is not None and len(result) > 1:
        raise ValueError(f"--out: got {len(result)} models for the one folder {out}. Omit --out.")
    return list(result.values())


def _find_models_in(path: Path) -> list[Path]:
    """Return the path if it is a model, else the checkpoints in it, in `checkpoints`, or in subfolders."""
    if path.is_file() or (path / META).is_file() or (path / HUGGINGFACE).is_file():
        return [path]
    if not path.is_dir():
        return []
    for folder in (path, path / CHECKPOINTS):
        checkpoints = [entry.path for entry in find_checkpoints(folder) if (entry.path / META).is_file()]
        if checkpoints:
            return checkpoints
    # after the checkpoints of this project, which DeepSpeed's
    # files may accompany
    if is_megatron_checkpoint(path):
        return [path]
    # symbolic links are not followed: they could form a cycle
    folders = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.is_symlink())
    return [model for folder in folders if folder.suffix != PARTIAL for model in _find_models_in(folder)]


def _describe_model(path: Path) -> ScoredModel:
    meta = read_json(path / META) if path.is_dir() else None
    number = MEGATRON_STEP.fullmatch(path.name)
    step = (int(number[1]) if number else None) if meta is None else meta.get("step")
    parent = path.resolve().parent
    return ScoredModel(path, parent.parent if parent.name == CHECKPOINTS else None, step)


def read_weights(model: ScoredModel, tokenizer: str | None) -> Weights:
    """Read the weights of a model in any format of the converter.

    Raises FileNotFoundError or ValueError; for another architecture
    of transformers with lm-eval's command.
    """
    try:
        return read_any(model.path, tokenizer=tokenizer)
    except ValueError as error:
        hf_config = (read_json(model.path / HUGGINGFACE) if model.path.is_dir() else None) or {}
        classes = hf_config.get("architectures") or [""]
        is_export = any(key in hf_config for key in PROJECT_KEYS)
        # lm-eval would score a masked-diffusion model,
        # with code of its own, as autoregressive
        if is_export or not str(classes[0]).endswith(CAUSAL_CLASSES):
            raise
        name = model.hub_name or model.path
        raise ValueError(
            f"{str(error).partition('. ')[0].rstrip('.')}. Score it with lm-eval's own command: "
            f"lm_eval --model hf --model_args pretrained={name} --tasks NAMES"
        ) from error


def compute_fingerprint(path: Path) -> str:
    """Return a hash that changes with a model's files.

    It hashes the checksums in a checkpoint's meta.json, else the
    names, sizes and modification times.
    """
    if path.is_dir() and (meta := read_json(path / META)) is not None:
        return hash_json(meta.get("files"))
    # contents are not read: a model may have many gigabytes,
    # and writing to a file changes its modification time, which
    # is in nanoseconds
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return hash_json([[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files])


def hash_json(content: Any) -> str:
    """Return 16 hex digits of the sha256 of a JSON-serializable value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]
