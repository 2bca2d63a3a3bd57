"""What a command left in its folder, without times, memory and the clock in names of checkpoints."""

import csv
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
CHECKPOINT = re.compile(r"\d{8}-\d{6}-\d{6}")
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
OF_META = {"generation", "files", "sha256"}  # meta.json: restarts, and sums of files that hold times
NAMED_BY_CHANCE = (
    (CHECKPOINT, "TIME"),
    (re.compile(r"tasks-\w{8}"), "TASKS"),  # a folder of the system's for temporary files
    (re.compile(r"0x[0-9a-f]{8,}"), "ADDRESS"),  # of functions, which lm-eval prints
)
EVENTS = re.compile(r"events\.out\.tfevents\..*")  # TensorBoard's, a file for each start
PRESENT = ("log.txt", ".metadata", ".lock", "slurm_task")  # files of which the existence counts


def read_outcome(work: Path) -> dict[str, str]:
    """{relative path: hash of the content} of every file, 'folder' of every folder."""
    names = _checkpoint_names(work)
    outcome = {}
    for path in sorted(work.rglob("*")):
        parts = [names.get(work.joinpath(*path.relative_to(work).parts[: i + 1]), part)
                 for i, part in enumerate(path.relative_to(work).parts)]  # fmt: skip
        outcome[EVENTS.sub("events", "/".join(parts))] = "folder" if path.is_dir() else _summarize(path)
    return outcome


def _checkpoint_names(work: Path) -> dict[Path, str]:
    """Folders that are named after the clock, and a name after their step instead."""
    names: dict[Path, str] = {}
    for path in work.rglob("*"):
        if path.is_dir() and CHECKPOINT.search(path.name):
            meta = path / "meta.json"
            step = json.loads(meta.read_text())["step"] if meta.is_file() else "no meta.json"
            names[path] = CHECKPOINT.sub(f"step-{step}", path.name)
    return names


def _summarize(path: Path) -> str:
    if path.name in PRESENT or EVENTS.fullmatch(path.name):
        return "present"
    if path.name == "iter_state_dict.pt":
        import torch

        state = torch.load(path, weights_only=True)
        return _digest(
            repr([(key, _plain(value)) for key, value in sorted(state.items()) if key not in VOLATILE])
        )
    if path.suffix == ".yaml":
        return _digest(CHECKPOINT.sub("TIME", path.read_text()))
    if path.suffix in (".json", ".jsonl"):
        dropped = VOLATILE | OF_META if path.name == "meta.json" else VOLATILE
        text = path.read_text()
        for pattern, name in NAMED_BY_CHANCE:
            text = pattern.sub(name, text)
        entries = (
            [json.loads(line) for line in text.splitlines()]
            if path.suffix == ".jsonl"
            else [json.loads(text)]
        )
        kept = [
            strip(one, dropped)
            for one in entries
            if not (isinstance(one, dict) and one.get("kind") == "memory")
        ]
        return _digest(json.dumps(kept, sort_keys=True))
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return _digest(json.dumps([strip(row) for row in csv.DictReader(file)]))
    if path.suffix == ".duckdb":
        return _digest(_describe_catalog(path))
    return _digest(path.read_bytes())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _describe_catalog(path: Path) -> str:
    """What the catalog lists, counts and reports as broken."""
    tool = [sys.executable, str(ROOT / "tools" / "register_corpus.py"), str(path)]
    answers = []
    for words in (["list"], ["describe", "code"], ["broken", "code"]):
        done = subprocess.run([*tool, *words], cwd=ROOT, capture_output=True, text=True, timeout=240)
        answers.append(f"{words} {done.returncode}\n{done.stdout}{done.stderr if done.returncode else ''}")
    return "\n".join(answers)


def strip(content: Any, keys: Collection[str] = frozenset(VOLATILE)) -> Any:
    """The content of a JSON file without these keys."""
    if isinstance(content, dict):
        return {key: strip(value, keys) for key, value in content.items() if key not in keys}
    return [strip(value, keys) for value in content] if isinstance(content, list) else content


def _digest(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()
