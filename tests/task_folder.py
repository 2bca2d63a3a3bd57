"""Write an lm-eval task folder for `--include-path`: python tests/task_folder.py DATA FOLDER."""

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# task -> file of lm-eval, {split: data}
TASKS = {
    "arc_easy": ("arc/arc_easy", {"validation": "arc_easy_validation.jsonl", "test": "arc_easy_test.jsonl"}),
    "boolq": ("super_glue/boolq/default", {"validation": "boolq_validation.jsonl"}),
    "copa": ("super_glue/copa/default", {"validation": "copa_validation.jsonl"}),
    "hellaswag": ("hellaswag/hellaswag", {"validation": "hellaswag_validation.jsonl.gz"}),
    "piqa": ("piqa/piqa", {"validation": "piqa_valid.jsonl"}),
    "race": ("race/race", {"test": "race_high_test.jsonl.gz"}),
    "winogrande": ("winogrande/default", {"validation": "winogrande_xl_validation.jsonl"}),
    "sciq": ("sciq/sciq", {"validation": "sciq_validation.jsonl"}),
    "lambada_openai": ("lambada/lambada_openai", {"test": "lambada_test.jsonl"}),
}
SPLITS = ("train", "validation", "test")


def write_task_folder(data: Path, folder: Path) -> Path:
    """Write a YAML file and the data of every task in the form of the hub, and return the folder."""
    import lm_eval.tasks

    for name, (source, files) in TASKS.items():
        overlay: dict[str, Any] = {"include": f"{lm_eval.tasks.__path__[0]}/{source}.yaml", "task": name}
        paths = {split: str(folder / f"{name}.{split}.jsonl") for split in files}
        for split, file in files.items():
            records = list(read_records(name, data / file))
            Path(paths[split]).write_text("".join(json.dumps(record) + "\n" for record in records))
        overlay |= {"dataset_path": "json", "dataset_name": None}
        overlay["dataset_kwargs"] = {"data_files": paths, "cache_dir": str(folder / "cache")}
        overlay |= {
            key: split if split in files else None
            for key, split in zip(("training_split", "validation_split", "test_split"), SPLITS, strict=True)
        }
        (folder / f"{name}.yaml").write_text(json.dumps(overlay))  # JSON is YAML
    return folder


def read_records(name: str, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of an official release in the form of the hub's copy."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    labels = path.with_name("piqa_valid-labels.lst").read_text().split() if name == "piqa" else []
    for i, line in enumerate(text.splitlines()):
        record = json.loads(line)
        if name == "piqa":
            record["label"] = int(labels[i])
        elif name == "boolq":
            record = {**record, "label": int(record.pop("answer"))}
        elif name == "arc_easy" and isinstance(record["question"], dict):
            question = record["question"]
            choices = {key: [choice[key] for choice in question["choices"]] for key in ("text", "label")}
            answer = record["answerKey"]
            record = {"question": question["stem"], "choices": choices, "answerKey": answer}
        elif name == "arc_easy":
            record = {key: record[key] for key in ("question", "choices", "answerKey")}
        elif name == "race":
            rows = zip(record["questions"], record["answers"], record["options"], strict=True)
            problems = [{"question": q, "answer": a, "options": o} for q, a, o in rows]
            record = {"article": record["article"], "problems": repr(problems)}
        yield record


if __name__ == "__main__":
    target = Path(sys.argv[2]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    write_task_folder(Path(sys.argv[1]), target)
