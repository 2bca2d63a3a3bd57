"""Which models a path means, where their scores are kept, and what makes two scores the same."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.huggingface import CONFIG as HUGGINGFACE
from megatron.checkpoint.layout import META, PARTIAL, find
from megatron.run_dir import CHECKPOINTS, read_json


@dataclass(frozen=True)
class Scored:
    """A model that scores belong to.

    path   what `checkpoint.convert.read_any` reads
    run    the folder of the run it is of, None for models from elsewhere
    step   of the run, None where nobody says
    """

    path: Path
    run: Path | None
    step: int | None

    def folder(self, kind: str) -> Path:
        """Where its scores of a kind go: in the run's folder, or beside a model that has none."""
        if self.run is not None:
            return self.run / kind / self.path.name
        return self.path.resolve().with_name(f"{self.path.resolve().name}.scores") / kind


def models_of(paths: Iterable[Path], out: Path | None = None) -> list[Scored]:
    """Every model that paths mean, in order, none twice; `out` is a folder for the scores of a single one.

    A path is a model (a checkpoint, a Hugging Face folder, a file), a folder of checkpoints, a run, or a
    folder with runs somewhere below it: a study. FileNotFoundError where it is none of these, ValueError
    for several models with one `out`.
    """
    found: dict[Path, Scored] = {}
    for path in paths:
        models = _models(path)
        if not models:
            raise FileNotFoundError(f"{path}: no checkpoint there, nor in folders below it")
        for model in models:
            found.setdefault(model.resolve(), _scored(model))
    if out is not None and len(found) > 1:
        raise ValueError(f"--out: {len(found)} models would write to {out}; leave it out")
    return list(found.values())


def _models(path: Path) -> list[Path]:
    """The path, where it is a model; else checkpoints in it, in its `checkpoints`, or somewhere below."""
    if path.is_file() or (path / META).is_file() or (path / HUGGINGFACE).is_file():
        return [path]
    if not path.is_dir():
        return []
    for folder in (path, path / CHECKPOINTS):
        here = [one.path for one in find(folder) if (one.path / META).is_file()]
        if here:
            return here
    folders = sorted(one for one in path.iterdir() if one.is_dir() and not one.is_symlink())
    return [model for folder in folders if folder.suffix != PARTIAL for model in _models(folder)]


def _scored(path: Path) -> Scored:
    told = read_json(path / META) if path.is_dir() else None
    step = None if told is None else told.get("step")
    parent = path.resolve().parent
    return Scored(path, parent.parent if parent.name == CHECKPOINTS else None, step)


def fingerprint(path: Path) -> str:
    """Changes when a model's files do: their names, sizes and times, or the sums that a checkpoint keeps."""
    if path.is_dir() and (told := read_json(path / META)) is not None:
        return identity(told.get("files"))
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    return identity([[one.name, one.stat().st_size, one.stat().st_mtime_ns] for one in files])


def identity(content: Any) -> str:
    """A short hash of what JSON can say."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]
