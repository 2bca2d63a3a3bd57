"""Summary of the files that a command left, without times, memory and timestamps in checkpoint names."""

import csv
import hashlib
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
CHECKPOINT = re.compile(r"\d{8}-\d{6}-\d{6}")
# Keys that differ from run to run although the results are equal: times, and what is derived from them,
# memory, and the commit and date of the code. Losses and gradient norms are not among them.
VOLATILE = {
    "elapsed_s",
    "wall_s",
    "git",
    "date",
    "tps",
    "tps_mean",
    "tflops",
    "mfu",
    "mfu_executed",
    "memory_gib",
    "peak_gib",
}
VOLATILE_META = {
    "generation",
    "files",
    "sha256",
}  # meta.json: number of restarts, and hashes of files that contain times
# patterns that are replaced in JSON before it is parsed
RANDOM_NAMES = (
    (CHECKPOINT, "TIME"),
    (re.compile(r"tasks-\w{8}"), "TASKS"),  # a temporary folder
    (re.compile(r"0x[0-9a-f]{8,}"), "ADDRESS"),  # addresses of functions, which lm-eval prints
)
EVENTS = re.compile(r"events\.out\.tfevents\..*")  # TensorBoard writes one file per start
# files that are only checked for existence
PRESENT = ("log.txt", ".metadata", ".lock", "slurm_task")


def read_outcome(work: Path) -> dict[str, str]:
    """Return {relative path: hash of the content} for every file, and 'folder' for every folder."""
    names = _checkpoint_names(work)
    outcome = {}
    for path in sorted(work.rglob("*")):
        parts = [names.get(work.joinpath(*path.relative_to(work).parts[: i + 1]), part)
                 for i, part in enumerate(path.relative_to(work).parts)]  # fmt: skip
        # A run that was restarted twice has three event files, which all become "events" in the key, so the
        # number of starts is not a difference.
        outcome[EVENTS.sub("events", "/".join(parts))] = "folder" if path.is_dir() else _summarize_file(path)
    return outcome


def _checkpoint_names(work: Path) -> dict[Path, str]:
    """Map folders that are named after the time to a name after their step."""
    names: dict[Path, str] = {}
    for path in work.rglob("*"):
        if path.is_dir() and CHECKPOINT.search(path.name):
            meta = path / "meta.json"
            # the name contains the time of the write; the step identifies the same checkpoint in both runs
            step = json.loads(meta.read_text())["step"] if meta.is_file() else "no meta.json"
            names[path] = CHECKPOINT.sub(f"step-{step}", path.name)
    return names


def _summarize_file(path: Path) -> str:
    if path.name in PRESENT or EVENTS.fullmatch(path.name):
        # logs and event files contain one part for each start, so their content cannot be equal
        return "present"
    if path.name == "iter_state_dict.pt":
        import torch

        # this file stores the training time next to the step and the random states, so its bytes always
        # differ
        state = torch.load(path, weights_only=True)
        return _hash_content(
            repr([(key, _to_plain(value)) for key, value in sorted(state.items()) if key not in VOLATILE])
        )
    if path.suffix == ".yaml":
        # a stored configuration may contain the path of a checkpoint
        return _hash_content(CHECKPOINT.sub("TIME", path.read_text()))
    if path.suffix in (".json", ".jsonl"):
        dropped = VOLATILE | VOLATILE_META if path.name == "meta.json" else VOLATILE
        text = path.read_text()
        for pattern, name in RANDOM_NAMES:
            text = pattern.sub(name, text)
        entries = (
            [json.loads(line) for line in text.splitlines()]
            if path.suffix == ".jsonl"
            else [json.loads(text)]
        )
        stripped = [
            strip_keys(entry, dropped)
            for entry in entries
            # the number of these lines depends on how often the run was started
            if not (isinstance(entry, dict) and entry.get("kind") == "memory")
        ]
        return _hash_content(json.dumps(stripped, sort_keys=True))
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return _hash_content(json.dumps([strip_keys(row) for row in csv.DictReader(file)]))
    return _hash_content(path.read_bytes())


def _to_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def strip_keys(content: Any, keys: Collection[str] = frozenset(VOLATILE)) -> Any:
    """Remove keys from the content of a JSON file, recursively."""
    if isinstance(content, dict):
        return {key: strip_keys(value, keys) for key, value in content.items() if key not in keys}
    return [strip_keys(value, keys) for value in content] if isinstance(content, list) else content


def _hash_content(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()
