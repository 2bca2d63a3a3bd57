"""Score downstream tasks one by one. Each result is written when done, so a second call resumes."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.model_weights import Weights
from megatron.evaluation.harness import find_mismatch, harness_model, score_task
from megatron.evaluation.harness_files import (
    Results,
    has_harness_files,
    make_serializable,
    merge_results,
    write_harness_files,
)
from megatron.evaluation.harness_tasks import open_tasks
from megatron.evaluation.reader import Reader, Scoring
from megatron.evaluation.scored_models import ScoredModel, compute_fingerprint, hash_json, read_weights
from megatron.io import read_json, replace_nonfinite, write_atomic
from megatron.log import get_logger
from megatron.parallel.collectives import barrier
from megatron.parallel.world import World
from megatron.plan.count import n_params
from megatron.plan.run_dir import DOWNSTREAM, DOWNSTREAM_RESULTS

log = get_logger(__name__)

MODEL_INFO = ("model_num_parameters", "model_dtype", "batch_size", "device")  # names of lm-eval


@dataclass(frozen=True, kw_only=True)
class DownstreamRequest:
    """Tasks to score.

    include_path   folder of task files, beside lm-eval's own
    samples        store each document with its prompts and the model's answers too
    """

    tasks: tuple[str, ...]
    include_path: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    samples: bool = False


def evaluate_downstream(
    model: ScoredModel,
    request: DownstreamRequest,
    scoring: Scoring,
    world: World,
    *,
    tokenizer: str | None = None,
    out: Path | None = None,
) -> tuple[Results, list[str], Path]:
    """Score tasks. Return (results of all tasks, names of those scored before, folder of the results).

    The folder, `out` or a folder of the model, contains one JSON
    file per task, DOWNSTREAM_RESULTS in lm-eval's form, and
    lm-eval's own files (harness_files.py). Tasks to which the
    scoring does not apply (--only-generate, --only-mc-nll) are
    skipped with a warning and listed in the results' config. Raises
    ValueError if no task is left, ValueError or FileNotFoundError
    for invalid input. Finished tasks stay on disk and are not
    scored again.
    """
    begin = time.perf_counter()
    weights = read_weights(model, tokenizer)
    scoring = scoring.resolve(weights.objective)
    config = _describe_scoring(model, weights, request, scoring)
    folder = out or model.folder(DOWNSTREAM) / _build_label(scoring, request)
    identity = "model" if model.hub_name is None else "fingerprint"
    identity_of = {identity: compute_fingerprint(model.path), "tokenizer": weights.tokenizer}
    settings = hash_json(config | identity_of)
    parts = {name: _read_previous(folder, name, settings, request.samples) for name in request.tasks}
    before = [name for name, part in parts.items() if part is not None]
    missing = [name for name in request.tasks if name not in before]
    barrier(world)  # no rank may write before all have checked which files exist
    skipped: dict[str, str] = {}
    if missing:
        reader = Reader(weights, scoring, world)
        scored, skipped = _score_tasks(missing, reader, request, folder, settings)
        parts |= scored
    if len(skipped) == len(request.tasks):
        raise ValueError(f"--tasks: all tasks are skipped ({'; '.join(skipped.values())})")
    model_info = (n_params(weights.config), f"torch.{scoring.dtype}", scoring.batch_size, str(world.device))
    about = config | dict(zip(MODEL_INFO, model_info, strict=True)) | {"step": model.step}
    about |= {"skipped": skipped} if skipped else {}
    results = merge_results([part for part in parts.values() if part is not None], about)
    if world.is_first:
        write_atomic(folder / DOWNSTREAM_RESULTS, _dump_json(results))
        if missing or not has_harness_files(folder):
            samples: dict[str, list[Any]] = {}
            for part in filter(None, parts.values()) if request.samples else ():
                samples |= part["samples"]
            write_harness_files(results, samples, folder, model.name, begin)
    return results, before, folder


def _describe_scoring(
    model: ScoredModel, weights: Weights, request: DownstreamRequest, scoring: Scoring
) -> dict[str, Any]:
    """Return the settings that affect results, for the results' config."""
    config = {**asdict(scoring), "limit": request.limit, "num_fewshot": request.num_fewshot}
    config.pop("batch_size")  # affects results by rounding only
    if scoring.dtype == "float32":
        del config["dtype"]  # results from before this option have no such key, and are still valid
    return config | {
        "model": str(model.path) if model.hub_name is None else model.hub_name,
        "objective": weights.objective,
        "data": str(request.include_path or "download"),
    }


def _score_tasks(
    names: Sequence[str], reader: Reader, request: DownstreamRequest, folder: Path, settings: str
) -> tuple[dict[str, Results], dict[str, str]]:
    """Score tasks one by one and write each when done.

    Return the results by task, and {task: reason} of those to which
    the scoring does not apply.
    """
    parts: dict[str, Results] = {}
    skipped: dict[str, str] = {}
    lm, world = harness_model(reader), reader.world
    how: dict[str, Any] = {"limit": request.limit, "num_fewshot": request.num_fewshot}
    for name, task in open_tasks(names, request.include_path).items():
        loaded = task.load()
        if (reason := find_mismatch(loaded, reader.scoring)) is not None:
            skipped[name] = reason
            if world.is_first:
                log.warning("skipped %s", reason)
            continue
        log.info("%s: %s", reader.writer.weights.source, name)
        part = score_task(lm, loaded, **how, samples=request.samples) | {"settings": settings}
        if world.is_first:
            if reader.n_truncated:
                text = "%s: %d requests exceed the model's %d positions and were truncated on the left"
                log.warning(text, name, reader.n_truncated, reader.max_length)
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(_find_file(folder, name), _dump_json(part))
        parts[name] = part
    return parts, skipped


def _build_label(scoring: Scoring, request: DownstreamRequest) -> str:
    """Return a folder name of all settings that affect results, so that each scoring has its own folder."""
    words = [scoring.method if scoring.method != "mc" else f"mc{scoring.num_mc}"]
    if scoring.only_generate:
        words = ["generate"]
    words += ["nll"] if scoring.only_mc_nll else []
    words += [] if request.num_fewshot is None else [f"{request.num_fewshot}shot"]
    words += [] if request.limit is None else [f"first{request.limit}"]
    words += [f"seed{scoring.seed}"] if scoring.seed else []
    words += [] if scoring.dtype == "float32" else [scoring.dtype]
    return "-".join(str(word) for word in words)


def _read_previous(folder: Path, name: str, settings: str, samples: bool) -> Results | None:
    """Return a task's stored result for the same settings, or None if it must be scored."""
    path = _find_file(folder, name)
    part = read_json(path)
    if part is None:
        return None
    if part.get("settings") != settings:
        log.warning("%s: replaced; it was of other weights, data or another tokenizer", path)
        return None
    return part if not samples or "samples" in part else None


def _find_file(folder: Path, name: str) -> Path:
    """Return the file of a task, whose existence marks the task as done."""
    return folder / f"{name.replace('/', '__')}.json"


def _dump_json(content: Any) -> str:
    """Serialize to JSON, with null for NaN and Inf."""
    plain = json.loads(json.dumps(content, default=make_serializable))
    return json.dumps(replace_nonfinite(plain), indent=1, allow_nan=False) + "\n"
