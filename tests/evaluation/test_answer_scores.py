"""Scores of the right answer, recomputed from the documents and from likelihoods that are known."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from scipy.special import softmax

from megatron.evaluation.harness import score_answer, score_task
from megatron.evaluation.harness_tasks import open_tasks
from tests.evaluation.conftest import ALONE

# the right choice of a document, from the fields of the data sets
RIGHT: dict[str, Callable[[dict[str, Any]], int]] = {
    "arc_easy": lambda doc: doc["choices"]["label"].index(doc["answerKey"]),
    "boolq": lambda doc: doc["label"],
    "hellaswag": lambda doc: int(doc["label"]),
    "lambada_openai": lambda doc: 0,
    "piqa": lambda doc: doc["label"],
    "winogrande": lambda doc: int(doc["answer"]) - 1,
}


def bits(context: str, answer: str) -> float:
    """Return -log2 p of the stub: 0.1 to 20 bits that depend on both texts."""
    return (1 + crc32(f"{context}|{answer}".encode()) % 200) / 10


def make_stub() -> Any:
    """Return a model for `score_task` whose likelihoods are 2^-bits; `requests` are those that it scored."""
    from lm_eval.api.model import LM

    class Stub(LM):
        reader, requests = SimpleNamespace(world=ALONE, n_truncated=0), []

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            self.requests += [request.args for request in requests]
            return [(-bits(*request.args) * float(np.log(2)), False) for request in requests]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            raise NotImplementedError

        def generate_until(self, requests: list[Any]) -> list[str]:
            return ["no"] * len(requests)

    return Stub()


def score(tasks: dict[str, Any], limit: int | None = None, **groups: Any) -> tuple[dict[str, Any], Any]:
    stub = make_stub()
    loaded = {"tasks": tasks, "groups": groups}
    return score_task(stub, loaded, limit=limit, num_fewshot=None, samples=True), stub


SLOW = {"hellaswag": pytest.mark.slow}  # lm-eval prepares all of its documents


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in RIGHT])
def test_the_scores_of_a_task_are_those_of_its_right_answers(name: str, task_folder: Path) -> None:
    results, stub = score(open_tasks([name], task_folder)[name].load()["tasks"], 6)
    samples, expected = results["samples"][name], []
    for sample in samples:
        right, requests = RIGHT[name](sample["doc"]), sample["arguments"]
        p = softmax([-bits(*request) * np.log(2) for request in requests])
        expected.append([bits(*requests[right]) / len(requests[right][1].encode()), p[right]])
        if name == "winogrande":  # the options are in the context, and what follows them is scored
            assert requests[0][1] == requests[1][1] and sample["doc"]["option1"] in requests[0][0]
    assert stub.requests == [request for sample in samples for request in sample["arguments"]]
    metrics = results["results"][name]
    assert ("choice_probability,none" in metrics) == (name != "lambada_openai")
    for values, metric in zip(np.transpose(expected), ("bits_per_byte", "choice_probability"), strict=True):
        if f"{metric},none" in metrics:
            assert [sample[metric] for sample in samples] == pytest.approx(list(values), rel=1e-12)
            se = np.std(values, ddof=1) / np.sqrt(6)
            pair = metrics[f"{metric},none"], metrics[f"{metric}_stderr,none"]
            assert pair == pytest.approx((values.mean(), se), rel=1e-12)


def test_arithmetic_of_one_answer() -> None:
    # a published record of OLMES for arc_challenge, answer " A"
    published = score_answer([-0.09184452891349792], 0, " A")
    assert published == {"bits_per_byte": pytest.approx(0.06625182319819083, rel=1e-12)}
    third = score_answer(np.log([0.1, 0.2, 0.1]).tolist(), 1, " é")  # 3 bytes of UTF-8
    assert third == pytest.approx({"bits_per_byte": np.log2(5) / 3, "choice_probability": 0.5})
    # far below the smallest float64
    small = score_answer([-2000.0, -2001.0], 0, "a")["choice_probability"]
    assert small == pytest.approx(1 / (1 + np.exp(-1)))
    assert score_answer([-1.0], 0, "")["bits_per_byte"] == pytest.approx(1 / np.log(2))


def make_task(folder: Path, **config: Any) -> Any:
    """Return lm-eval's task of three questions; the answer of the last is not among the choices."""
    from lm_eval.api.task import ConfigurableTask

    rows = [{"question": f"Q{i}", "label": label, "labels": [0, 1]} for i, label in enumerate((1, 2, 7))]
    (folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data_files": {"test": str(folder / "q.jsonl")}, "cache_dir": str(folder / "cache")}
    texts = {"doc_to_text": "question", "doc_to_target": "label", "doc_to_choice": ["x", "éé", "zzz"]}
    options = {"task": "quiz", "dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
    return ConfigurableTask(
        config={**options, **texts, "output_type": "multiple_choice", "metric_list": [{"metric": "acc"}]}
        | config
    )


@pytest.mark.parametrize(
    ("config", "n_bytes"),
    [
        ({}, (5, 4)),  # a space and éé, a space and zzz
        ({"target_delimiter": ""}, (4, 3)),
        # requests of the answers without the question follow those of the choices
        ({"metric_list": [{"metric": "acc"}, {"metric": "acc_mutual_info"}]}, (5, 4)),
        ({"doc_to_target": "labels"}, None),  # two right answers
        ({"process_results": lambda doc, results: {"acc": 1.0}}, None),
        ({"output_type": "generate_until", "doc_to_choice": None, "metric_list": [{"metric": "exact_match"}]},
         None),
    ],
)  # fmt: skip
def test_documents_with_one_right_answer_count(
    config: dict[str, Any], n_bytes: tuple[int, int] | None, tmp_path: Path
) -> None:
    task = make_task(tmp_path, **config)
    results, _ = score({"quiz": task})
    metrics = results["results"]["quiz"]
    assert "likelihood,none" not in metrics
    if n_bytes is None:
        assert not {"bits_per_byte,none", "choice_probability,none"} & set(metrics)
        return
    delimiter = config.get("target_delimiter", " ")
    answers = [bits("Q0", f"{delimiter}éé") / n_bytes[0], bits("Q1", f"{delimiter}zzz") / n_bytes[1]]
    assert metrics["bits_per_byte,none"] == pytest.approx(np.mean(answers))
    p = [softmax([-bits(q, delimiter + c) * np.log(2) for c in ("x", "éé", "zzz")]) for q in ("Q0", "Q1")]
    assert metrics["choice_probability,none"] == pytest.approx((p[0][1] + p[1][2]) / 2)


def test_a_group_has_the_mean_of_its_tasks_with_its_weights(task_folder: Path) -> None:
    from lm_eval.api.group import Group
    from lm_eval.config.group import AggMetricConfig

    group = Group("both", aggregate_metric_list=[AggMetricConfig("acc", weight_by_size=False)])
    opened = open_tasks(["copa", "piqa"], task_folder)
    tasks = {name: task.load()["tasks"][name] for name, task in opened.items()}
    for task in tasks.values():
        group.add(task)
    results = score(tasks, 3, both=group)[0]["results"]
    for metric in ("acc", "bits_per_byte", "choice_probability"):
        key = f"{metric},none"
        assert results["both"][key] == pytest.approx((results["copa"][key] + results["piqa"][key]) / 2)
