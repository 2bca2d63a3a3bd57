"""Results in lm-eval's form: merged parts, its table, and the files that its tools read."""

import copy
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.io import code_revision

Results = dict[str, Any]
SOURCE = "megatron"  # `--model` in lm-eval's files
BOOTSTRAP_ITERS, FEWSHOT_SEED = 100_000, 1234  # defaults of lm-eval


def merge_results(parts: Sequence[Results], about: Results) -> Results:
    """Merge the results of tasks that were scored separately into one document of lm-eval's form."""
    from lm_eval import __version__

    merged: Results = {}
    for result in parts:
        for part, values in result.items():
            if isinstance(values, dict) and part != "samples":
                merged.setdefault(part, {}).update(values)
    return {**merged, "config": about, "date": time.time(), "lm_eval_version": __version__}


def format_results(results: Results) -> str:
    """Format results as lm-eval's table of metrics and standard errors."""
    from lm_eval.utils import make_table

    text = make_table(results)
    return text + ("\n" + make_table(results, "groups") if "groups" in results else "")


def make_serializable(value: Any) -> Any:
    """Return what lm-eval writes for a value that JSON does not have, such as a numpy integer or a set."""
    from lm_eval.utils import handle_non_serializable

    return handle_non_serializable(value)


def has_harness_files(folder: Path) -> bool:
    """Return whether a folder has results written by `write_harness_files`."""
    return any(True for _ in folder.glob("*/results_*.json"))


def write_harness_files(
    results: Results, samples: dict[str, list[Any]], folder: Path, name: str, begin: float
) -> Path:
    """Write lm-eval's own files, with its own code, and return the file of the results.

    <folder>/<sanitized name>/results_<date>.json
    <folder>/<sanitized name>/samples_<task>_<date>.jsonl
    for each task with samples

    results   of `merge_results`; name: of the model;
              begin: time.perf_counter() when the evaluation began
    Raises OSError if they cannot be written.
    """
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.loggers.utils import add_env_info

    arguments = {"pretrained": name, "dtype": results["config"].get("dtype", "float32")}
    content = {key: value for key, value in results.items() if key != "n-cut"}
    content["config"] = {
        **results["config"],
        "model": SOURCE,
        "model_args": ",".join(f"{key}={value}" for key, value in arguments.items()),
        "bootstrap_iters": BOOTSTRAP_ITERS,
        "gen_kwargs": {},
        "random_seed": results["config"].get("seed"),
        "fewshot_seed": FEWSHOT_SEED,
    }
    content["git_hash"] = code_revision()
    add_env_info(content)
    folder.mkdir(parents=True, exist_ok=True)
    # lm-eval writes files in place and logs errors instead
    # of raising them: write elsewhere, check, rename
    with tempfile.TemporaryDirectory(prefix=".lm-eval-", dir=folder) as partial:
        tracker = EvaluationTracker(output_path=partial)
        tracker.general_config_tracker.log_experiment_args(SOURCE, arguments, None, None, False)
        tracker.general_config_tracker.start_time = begin
        samples = copy.deepcopy(samples)  # the tracker changes them
        tracker.save_results_aggregated(content, samples)
        for task, rows in samples.items():
            tracker.save_results_samples(task, rows)
        files = sorted(Path(partial).glob("*/*"))
        if len(files) != 1 + len(samples):
            raise OSError(f"{folder}: lm-eval wrote {len(files)} files, expected {1 + len(samples)}")
        target = folder / files[0].parent.name
        target.mkdir(exist_ok=True)
        # samples first: readers of lm-eval list the
        # results and then look for their samples
        for file in sorted(files, key=lambda file: file.name.startswith("results_")):
            os.replace(file, target / file.name)
    return next(target / file.name for file in files if file.name.startswith("results_"))
