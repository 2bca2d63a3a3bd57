"""Score downstream tasks one by one. Each result is written when done, so a second call resumes."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.convert.formats import read_any
from megatron.evaluation.harness import (
    Results,
    find_mismatch,
    harness_model,
    merge_results,
    open_tasks,
    score_task,
)
from megatron.evaluation.reader import Reader, Scoring
from megatron.evaluation.scored_models import ScoredModel, compute_fingerprint, hash_json
from megatron.io import read_json, replace_nonfinite, write_atomic
from megatron.log import get_logger
from megatron.parallel.collectives import barrier
from megatron.parallel.world import World
from megatron.run_dir import DOWNSTREAM, DOWNSTREAM_RESULTS

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class DownstreamRequest:
    """Tasks to score.

    data      folder of local files; None: lm-eval downloads them
    samples   write <task>.samples.jsonl too: each document with its prompts and the model's answers
    """

    tasks: tuple[str, ...]
    data: Path | None = None
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

    The folder, `out` or a folder of the model, contains one JSON file per task and DOWNSTREAM_RESULTS, in
    lm-eval's form. Tasks to which the scoring does not apply (--only-generate, --only-mc-nll) are skipped
    with a warning and listed in the results' config.
    Raises ValueError if no task is left, ValueError or FileNotFoundError for invalid input. Finished tasks
    stay on disk and are not scored again.
    """
    weights = read_any(model.path, tokenizer=tokenizer)
    scoring = scoring.resolve(weights.objective)
    config = {**asdict(scoring), "limit": request.limit, "num_fewshot": request.num_fewshot}
    config.pop("batch_size")  # affects results by rounding only
    config |= {
        "model": str(model.path),
        "objective": weights.objective,
        "data": str(request.data or "download"),
    }
    folder = out or model.folder(DOWNSTREAM) / _build_label(scoring, request)
    settings = hash_json({**config, "model": compute_fingerprint(model.path), "tokenizer": weights.tokenizer})
    parts = {name: _read_previous(folder, name, settings, request.samples) for name in request.tasks}
    before = [name for name, part in parts.items() if part is not None]
    skipped: dict[str, str] = {}  # task name -> reason why the scoring does not apply
    missing = [name for name in request.tasks if name not in before]
    barrier(world)  # no rank may write before all have checked which files exist
    if missing:
        reader = Reader(weights, scoring, world)
        with open_tasks(missing, request.data) as tasks:
            lm = harness_model(reader)
            for name, task in tasks.items():
                loaded = task.load()
                if (reason := find_mismatch(loaded, scoring)) is not None:
                    skipped[name] = reason
                    if world.is_first:
                        log.warning("skipped %s", reason)
                    continue
                log.info("%s: %s", model.path.name, name)
                part = score_task(
                    lm,
                    reader,
                    loaded,
                    limit=request.limit,
                    num_fewshot=request.num_fewshot,
                    samples=request.samples,
                )
                if reader.n_truncated and world.is_first:
                    log.warning(
                        "%s: %d requests exceed the model's %d positions and were truncated on the left",
                        name,
                        reader.n_truncated,
                        reader.max_length,
                    )
                if world.is_first:
                    folder.mkdir(parents=True, exist_ok=True)
                    _write_task(folder, name, part, settings)
                parts[name] = part
    if len(skipped) == len(request.tasks):
        raise ValueError(f"--tasks: all tasks are skipped ({'; '.join(skipped.values())})")
    about = {**config, "step": model.step} | ({"skipped": skipped} if skipped else {})
    results = merge_results([part for part in parts.values() if part is not None], about)
    if world.is_first:
        write_atomic(folder / DOWNSTREAM_RESULTS, _dump_json(results))
    return results, before, folder


def _build_label(scoring: Scoring, request: DownstreamRequest) -> str:
    """Return a folder name of all settings that affect results, so that each scoring has its own folder."""
    words = [scoring.method if scoring.method != "mc" else f"mc{scoring.num_mc}"]
    if scoring.only_generate:
        words = ["generate"]
    words += ["nll"] if scoring.only_mc_nll else []
    words += [] if request.num_fewshot is None else [f"{request.num_fewshot}shot"]
    words += [] if request.limit is None else [f"first{request.limit}"]
    words += [f"seed{scoring.seed}"] if scoring.seed else []
    return "-".join(str(word) for word in words)


def _read_previous(folder: Path, name: str, settings: str, samples: bool) -> Results | None:
    """Return a task's stored result for the same settings, or None if it must be scored."""
    part = read_json(folder / f"{_get_file_stem(name)}.json")
    if part is None:
        return None
    if part.get("settings") != settings:
        log.warning(
            "%s/%s.json: replaced; it was of other weights, data or another tokenizer",
            folder,
            _get_file_stem(name),
        )
        return None
    return part if not samples or (folder / f"{_get_file_stem(name)}.samples.jsonl").is_file() else None


def _write_task(folder: Path, name: str, part: Results, settings: str) -> None:
    """Write the samples, then the task's file, whose existence marks the task as done."""
    samples: dict[str, Sequence[Any]] = part.pop("samples", {})
    if samples:
        lines = (
            _dump_json({"task": task, **sample}, None) for task, rows in samples.items() for sample in rows
        )
        write_atomic(folder / f"{_get_file_stem(name)}.samples.jsonl", "".join(lines))
    write_atomic(folder / f"{_get_file_stem(name)}.json", _dump_json({**part, "settings": settings}))


def _get_file_stem(name: str) -> str:
    return name.replace("/", "__")


def _dump_json(content: Any, indent: int | None = 1) -> str:
    """Serialize to JSON, with null for NaN and Inf."""
    plain = json.loads(json.dumps(content, default=str))
    return json.dumps(replace_nonfinite(plain), indent=indent, allow_nan=False) + "\n"
