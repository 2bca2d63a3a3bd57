"""Downstream tasks from local files, in the format that lm-eval's prompts expect.

A task is that of lm-eval: its YAML is included, and only the data source is replaced.
"""

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TaskRecord = dict[str, Any]
SPLITS = {"training_split": "train", "validation_split": "validation", "test_split": "test"}


@dataclass(frozen=True)
class LocalTask:
    """A task of lm-eval with local data files.

    config_file  its YAML file in lm_eval/tasks
    files        split -> file in --data-dir, possibly gzipped: JSON lines, or with .txt one text per line
    convert      function that converts a record of the file to the form that the task's prompts expect
    labels       split -> file with one answer per line
    optional     splits whose files may be missing
    subject      for a task of a group: only records whose `subject` has this value
    """

    config_file: str
    files: dict[str, str]
    convert: Callable[[TaskRecord], TaskRecord] = lambda record: record
    labels: dict[str, str] | None = None
    optional: tuple[str, ...] = ()
    subject: str | None = None


def _convert_arc(record: TaskRecord) -> TaskRecord:
    """Convert an ARC record. The official release nests fields that the hub's copy has at the top level."""
    question = record["question"]
    if isinstance(question, str):
        return {key: record[key] for key in ("question", "choices", "answerKey")}
    choices = {key: [choice[key] for choice in question["choices"]] for key in ("text", "label")}
    return {"question": question["stem"], "choices": choices, "answerKey": record["answerKey"]}


def _convert_boolq(record: TaskRecord) -> TaskRecord:
    return {key: record[key] for key in ("question", "passage")} | {"label": int(record["answer"])}


def _convert_race(record: TaskRecord) -> TaskRecord:
    """Convert a RACE article with its questions. lm-eval evaluates `problems` as a Python literal."""
    rows = zip(record["questions"], record["answers"], record["options"], strict=True)
    problems = [{"question": q, "answer": a, "options": o} for q, a, o in rows]
    return {"article": record["article"], "problems": repr(problems)}


TASK_ALIASES = {"csqa": "commonsense_qa"}  # names of other evaluation suites
LOCAL_TASKS = {
    "arc_challenge": LocalTask(
        "arc/arc_challenge.yaml",
        {"validation": "arc_challenge_validation.jsonl", "test": "arc_challenge_test.jsonl"},
        _convert_arc,
        optional=("validation",),
    ),
    "arc_easy": LocalTask(
        "arc/arc_easy.yaml",
        {"validation": "arc_easy_validation.jsonl", "test": "arc_easy_test.jsonl"},
        _convert_arc,
    ),
    "boolq": LocalTask(
        "super_glue/boolq/default.yaml", {"validation": "boolq_validation.jsonl"}, _convert_boolq
    ),
    "commonsense_qa": LocalTask(
        "commonsense_qa/default.yaml", {"validation": "commonsense_qa_validation.jsonl"}
    ),
    "copa": LocalTask("super_glue/copa/default.yaml", {"validation": "copa_validation.jsonl"}),
    "hellaswag": LocalTask("hellaswag/hellaswag.yaml", {"validation": "hellaswag_validation.jsonl"}),
    "openbookqa": LocalTask(
        "openbookqa/openbookqa.yaml",
        {"validation": "openbookqa_validation.jsonl", "test": "openbookqa_test.jsonl"},
        optional=("validation",),
    ),
    "piqa": LocalTask(
        "piqa/piqa.yaml",
        {"validation": "piqa_valid.jsonl"},
        labels={"validation": "piqa_valid-labels.lst"},
    ),
    "race": LocalTask("race/race.yaml", {"test": "race_high_test.jsonl"}, _convert_race),
    "winogrande": LocalTask("winogrande/default.yaml", {"validation": "winogrande_xl_validation.jsonl"}),
    "sciq": LocalTask("sciq/sciq.yaml", {"validation": "sciq_validation.jsonl"}),
    "lambada_openai": LocalTask("lambada/lambada_openai.yaml", {"test": "lambada_test.jsonl"}),
    # the official archive's file; lambada_openai has the same passages with their case and punctuation
    "lambada_standard": LocalTask("lambada/lambada_standard.yaml", {"test": "lambada_test_plain_text.txt"}),
}
MMLU, MMLU_FOLDER = "mmlu", "mmlu/default"
MMLU_FILES = {"dev": "mmlu_dev.jsonl", "test": "mmlu_test.jsonl"}


def write_local_tasks(names: Sequence[str], data: Path, task_folder: Path, folder: Path) -> None:
    """Write one YAML file per task and its data as JSON lines into `folder`, for lm-eval.

    data         folder with the files named in LOCAL_TASKS
    task_folder  lm-eval's folder of tasks

    Raises ValueError for a task that is not in LOCAL_TASKS and for a malformed file, FileNotFoundError for a
    missing one.
    """
    if not data.is_dir():
        raise FileNotFoundError(f"{data}: no such folder; expected one with the tasks' data")
    for name in names:
        if name == MMLU or name.startswith(f"{MMLU}_"):
            tasks = _write_mmlu_groups(name, task_folder, folder)
        else:
            tasks = {name: LOCAL_TASKS[name]} if name in LOCAL_TASKS else {}
        if not tasks:
            raise ValueError(
                f"--data-dir: got {name}, expected one of {', '.join((*LOCAL_TASKS, MMLU))}. "
                "Omit --data-dir to let lm-eval download the data."
            )
        for task_name, task in tasks.items():
            _write_local_task(task_name, task, data, task_folder, folder)


def _write_mmlu_groups(name: str, task_folder: Path, folder: Path) -> dict[str, LocalTask]:
    """Copy the groups of MMLU into `folder`; return the subjects of `name`, a group or a subject."""
    subjects: dict[str, LocalTask] = {}
    for path in sorted((task_folder / MMLU_FOLDER).glob("*.yaml")):
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        if "group" in config:
            (folder / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
        # subjects of mmlu_stem have the tag mmlu_stem_tasks
        elif name in (MMLU, config["task"], config["tag"].removesuffix("_tasks")):
            base = f"{MMLU_FOLDER}/{path.name}"
            subjects[config["task"]] = LocalTask(base, MMLU_FILES, subject=config["dataset_name"])
    return subjects


def _write_local_task(name: str, task: LocalTask, data: Path, task_folder: Path, folder: Path) -> None:
    """Write the YAML file and the data of one task."""
    base = task_folder / task.config_file
    if not base.is_file():
        raise ValueError(f"{base}: not in this version of lm-eval; install that of requirements.txt")
    splits = [
        split
        for split, file in task.files.items()
        if split not in task.optional or _find_file(data, file) is not None
    ]
    paths = {split: folder / f"{name}.{split}.jsonl" for split in splits}
    for split, path in paths.items():
        with path.open("w", encoding="utf-8") as file:
            for record in _read_records(name, task, split, data):
                file.write(json.dumps(record) + "\n")
    overlay: TaskRecord = {
        "include": str(base),
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {split: str(path) for split, path in paths.items()},
            # otherwise every call would leave a copy of the data in the user's cache
            "cache_dir": str(folder / "cache"),
        },
    }
    # None removes a split of the included YAML for which there is no file
    for key, split in SPLITS.items():
        overlay[key] = split if split in paths else None
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(overlay))


def _read_records(name: str, task: LocalTask, split: str, data: Path) -> Iterator[TaskRecord]:
    """Yield the records of a split. Raises ValueError for a malformed file."""
    path = _require_file(data, task.files[split], name)
    answers = None
    if task.labels is not None:
        answers = _require_file(data, task.labels[split], name).read_text().split()
    n = n_of_subject = 0
    is_text = Path(task.files[split]).suffix == ".txt"
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        for n, line in enumerate(file, 1):
            try:
                record = {"text": line.strip()} if is_text else json.loads(line)
                if answers is not None:
                    record["label"] = int(answers[n - 1])
                if task.subject is None or record["subject"] == task.subject:
                    n_of_subject += 1
                    yield task.convert(record)
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise ValueError(
                    f"{path}, line {n}: not a record of {name} ({type(error).__name__}: {error})"
                ) from error
    if not n or (answers is not None and len(answers) != n):
        raise ValueError(
            f"{path}: got {n} records, {len(answers or [])} answers, expected equal numbers above 0. "
            "Download the files again."
        )
    if not n_of_subject:
        raise ValueError(f"{path}: got no record of {task.subject}, expected one. Download the files again.")


def _require_file(data: Path, name: str, task: str) -> Path:
    path = _find_file(data, name)
    if path is None:
        raise FileNotFoundError(
            f"{data / name}: no such file, plain or .gz, expected the data of {task}. "
            "Write it with `datasets` as in DOWNSTREAM.md, or omit --data-dir to let lm-eval download it."
        )
    return path


def _find_file(data: Path, name: str) -> Path | None:
    """Return the path of a file or of its .gz, or None."""
    return next((path for path in (data / name, data / f"{name}.gz") if path.is_file()), None)
