"""Tasks scored one after another, each written down when it is done, so that a second call goes on."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.convert import read_any
from megatron.evaluation.harness import Results, harness_model, merged, open_tasks, score_task, why_not
from megatron.evaluation.reader import Reader, Scoring
from megatron.evaluation.scores import Scored, fingerprint, identity
from megatron.log import get_logger
from megatron.parallel.reduce import wait_for_all
from megatron.parallel.world import World
from megatron.run_dir import DOWNSTREAM, DOWNSTREAM_RESULTS, read_json, with_null, write_whole

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is scored. `data` is a folder of local files, None: lm-eval downloads.

    samples   write <task>.samples.jsonl too: each document with its prompts and what the model said
    """

    tasks: tuple[str, ...]
    data: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    samples: bool = False


def evaluate_downstream(
    model: Scored,
    asked: Asked,
    scoring: Scoring,
    world: World,
    *,
    tokenizer: str | None = None,
    out: Path | None = None,
) -> tuple[Results, list[str], Path]:
    """(results of all tasks asked for, names of those that had been scored before, the folder of both).

    The folder, `out` or one of the model's own, has a JSON file a task and DOWNSTREAM_RESULTS, in lm-eval's
    form.
    Tasks of another kind than the scoring (--only-generate, --only-mc-nll) are skipped, with a warning, and
    named in the results' config. Raises ValueError where none is left.
    Raises ValueError or FileNotFoundError; what was finished by then stays, and is not scored again.
    """
    weights = read_any(model.path, tokenizer=tokenizer)
    scoring = scoring.resolved(weights.objective)
    told = {**asdict(scoring), "limit": asked.limit, "num_fewshot": asked.num_fewshot}
    told.pop("batch_size")  # changes no figure beyond rounding
    told |= {"model": str(model.path), "objective": weights.objective, "data": str(asked.data or "download")}
    folder = out or model.folder(DOWNSTREAM) / _label(scoring, asked)
    settings = identity({**told, "model": fingerprint(model.path), "tokenizer": weights.tokenizer})
    parts = {name: _held(folder, name, settings, asked.samples) for name in asked.tasks}
    before = [name for name, part in parts.items() if part is not None]
    skipped: dict[str, str] = {}  # of another kind than the scoring: name -> why
    missing = [name for name in asked.tasks if name not in before]
    wait_for_all(world)  # all ranks have seen the same files before one writes another
    if missing:
        reader = Reader(weights, scoring, world)
        with open_tasks(missing, asked.data) as tasks:
            lm = harness_model(reader)
            for name, task in tasks.items():
                loaded = task.load()
                if (reason := why_not(loaded, scoring)) is not None:
                    skipped[name] = reason
                    if world.is_first:
                        log.warning("skipped %s", reason)
                    continue
                log.info("%s: %s", model.path.name, name)
                part = score_task(
                    lm,
                    reader,
                    loaded,
                    limit=asked.limit,
                    num_fewshot=asked.num_fewshot,
                    samples=asked.samples,
                )
                if reader.n_cut and world.is_first:
                    log.warning(
                        "%s: %d requests are longer than the model's %d positions and lost their beginning",
                        name,
                        reader.n_cut,
                        reader.max_length,
                    )
                if world.is_first:
                    folder.mkdir(parents=True, exist_ok=True)
                    _write(folder, name, part, settings)
                parts[name] = part
    if len(skipped) == len(asked.tasks):
        raise ValueError(f"--tasks: none is left ({'; '.join(skipped.values())})")
    about = {**told, "step": model.step} | ({"skipped": skipped} if skipped else {})
    results = merged([part for part in parts.values() if part is not None], about)
    if world.is_first:
        write_whole(folder / DOWNSTREAM_RESULTS, _json(results))
    return results, before, folder


def _label(scoring: Scoring, asked: Asked) -> str:
    """A folder's name for what makes figures differ, so that one way of scoring spares another's."""
    words = [scoring.method if scoring.method != "mc" else f"mc{scoring.num_mc}"]
    if scoring.only_generate:
        words = ["generate"]
    words += ["nll"] if scoring.only_mc_nll else []
    words += [] if asked.num_fewshot is None else [f"{asked.num_fewshot}shot"]
    words += [] if asked.limit is None else [f"first{asked.limit}"]
    words += [f"seed{scoring.seed}"] if scoring.seed else []
    return "-".join(str(word) for word in words)


def _held(folder: Path, name: str, settings: str, samples: bool) -> Results | None:
    """What was found for a task under the same settings; None where it has to be scored."""
    part = read_json(folder / f"{_file(name)}.json")
    if part is None:
        return None
    if part.get("settings") != settings:
        log.warning(
            "%s/%s.json: replaced; it is of other weights, data or another tokenizer", folder, _file(name)
        )
        return None
    return part if not samples or (folder / f"{_file(name)}.samples.jsonl").is_file() else None


def _write(folder: Path, name: str, part: Results, settings: str) -> None:
    """The samples first: the task's own file says that it is done."""
    samples: dict[str, Sequence[Any]] = part.pop("samples", {})
    if samples:
        lines = (_json({"task": task, **one}, None) for task, told in samples.items() for one in told)
        write_whole(folder / f"{_file(name)}.samples.jsonl", "".join(lines))
    write_whole(folder / f"{_file(name)}.json", _json({**part, "settings": settings}))


def _file(name: str) -> str:
    return name.replace("/", "__")


def _json(content: Any, indent: int | None = 1) -> str:
    """JSON, with null for what was not asked for and so is no number."""
    plain = json.loads(json.dumps(content, default=str))
    return json.dumps(with_null(plain), indent=indent, allow_nan=False) + "\n"
