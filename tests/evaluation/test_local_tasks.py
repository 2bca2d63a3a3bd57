"""Tests of tasks whose data files are small ones written here; prompts are those of lm-eval's own YAML."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.evaluation.harness_tasks import open_tasks
from megatron.laws.downstream_curve import chance_of_task

LABELS = ["A", "B", "C", "D", "E"]


def question(stem: str, texts: list[str], answer: str) -> dict[str, Any]:
    return {
        "id": stem, "question": stem, "question_stem": stem, "question_concept": "x",
        "choices": {"text": texts, "label": LABELS[: len(texts)]}, "answerKey": answer,
    }  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    four = [question("What is wet?", ["fire", "water", "sand", "air"], "B")] * 3
    files: dict[str, list[dict[str, Any]]] = {
        "arc_challenge_test.jsonl": four,
        "openbookqa_test.jsonl": four,
        "commonsense_qa_validation.jsonl": [question("Where?", ["a", "b", "c", "d", "e"], "E")],
        "mmlu_dev.jsonl": [],
        "mmlu_test.jsonl": [],
    }
    for i, subject in enumerate(("anatomy", "virology", "astronomy")):
        record = {"subject": subject, "question": f"{subject}?", "choices": ["1", "2", "3", "4"], "answer": 2}
        files["mmlu_dev.jsonl"].append({**record, "question": f"example of {subject}"})
        files["mmlu_test.jsonl"] += [record] * (i + 1)
    for name, records in files.items():
        with gzip.open(folder / f"{name}.gz", "wt") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    (folder / "lambada_test_plain_text.txt").write_text("it was , he said , a lamp\nthe end of the road\n")
    return folder


@pytest.mark.parametrize(
    ("name", "n", "text", "target", "chance"),
    [
        ("arc_challenge", 3, "Question: What is wet?\nAnswer:", 1, 0.25),
        ("openbookqa", 3, "What is wet?", 1, 0.25),
        (
            "commonsense_qa", 1, "Question: Where?\nA. a\nB. b\nC. c\nD. d\nE. e\nAnswer:", "E", 0.2,
        ),
        ("lambada_standard", 2, "it was , he said , a", " lamp", 0.0),
    ],
)  # fmt: skip
def test_a_task_has_its_prompts_answers_and_chance(
    data: Path, name: str, n: int, text: str, target: Any, chance: float
) -> None:
    with open_tasks([name], data) as tasks:
        task = tasks[name].load()["tasks"][name]
        documents = list(task.eval_docs)
        assert len(documents) == n
        assert (task.doc_to_text(documents[0]), task.doc_to_target(documents[0])) == (text, target)
    assert chance_of_task(f"{name}-first200") == chance


def test_a_subject_and_a_group_of_mmlu_have_the_records_of_their_subjects(data: Path) -> None:
    with open_tasks(["mmlu_virology"], data) as tasks:
        task = tasks["mmlu_virology"].load()["tasks"]["mmlu_virology"]
        assert len(list(task.eval_docs)) == 2
        first = next(iter(task.eval_docs))
        assert task.doc_to_text(first) == "virology?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:"
        assert task.doc_to_choice(first)[task.doc_to_target(first)] == "C"
        examples = list(task.fewshot_docs())
        assert [example["question"] for example in examples] == ["example of virology"]


def test_the_group_mmlu_requires_every_subject(data: Path) -> None:
    """57 subjects in four groups; a file that lacks one is an error, not a smaller test."""
    with pytest.raises(ValueError, match="got no record of abstract_algebra"), open_tasks(["mmlu"], data):
        pass
