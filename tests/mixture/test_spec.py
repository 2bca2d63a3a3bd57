"""A mixture's YAML file: every key of a wrong type is refused in one sentence before any work."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.mixture.catalog.expression import field
from megatron.mixture.catalog.query import Query
from megatron.mixture.custom_rule import make_rule
from megatron.mixture.document_chunks import DocumentChunks
from tests.wrong_values import READ_S, generate_wrong_texts, read_refusal

N = 150
BASE: dict[str, Any] = {
    "catalog": "catalog", "corpora": ["code"], "where": "stars >= 0", "by": ["language", "stars"],
    "weights": {"C": {"weight": 1, "weights": {0: 1}}, "Go": 2}, "count": "documents", "dry": "repeat",
    "shuffle": True, "tokenizer": "gpt2",
}  # fmt: skip
SCHEDULE = {
    "unit": "steps",
    "change": "linear",
    "points": [{"at": 0, "weights": "inferred"}, {"at": 4, "weights": {"C": 1}}],
}
ADAPTIVE = {"rule": "loss", "every_steps": 2, "delay_steps": 2}
LISTED = [{"where": {"language": "C"}, "weight": 1}, {"where": {"language": ["Go"]}, "weight": 1}]
KEYS = {
    (): [*BASE, "schedule", "adaptive"],
    ("schedule",): list(SCHEDULE),
    ("schedule", "points"): ["at", "weights"],
    ("adaptive",): list(ADAPTIVE),
}


def read_chunk(path: Path) -> None:
    with DocumentChunks(path, chunk_size=8) as chunks:
        chunks.read(0, 1)


@pytest.mark.parametrize(
    "more",
    [{}, {"schedule": SCHEDULE}, {"adaptive": ADAPTIVE}, {"weights": LISTED}],
    ids=["weights", "schedule", "adaptive", "list"],
)
def test_a_mixture_is_read_or_refused_in_one_sentence(catalog: Path, more: dict[str, Any]) -> None:
    path = catalog.parent / "mixture.yaml"
    refused = []
    for text in generate_wrong_texts(BASE | more, KEYS, N, seed=len(str(more))):
        path.write_text(text)
        (catalog.parent / "mixture.mixture" / "logs" / "main.jsonl").unlink(missing_ok=True)
        begin = time.monotonic()
        refused.append(read_refusal(lambda: read_chunk(path)))
        assert time.monotonic() - begin < READ_S, text[:2000]
    assert N / 2 < sum(message is not None for message in refused) < N


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("by: 5", "by: got 5, expected a word or a list of words"),
        ("by: [language, language]", "by: got 'language' twice"),
        ("by: [[language]]", "by: got [['language']]"),
        ("corpora: [[1]]", "corpora: got [[1]]"),
        ("corpora: [code, code]", "corpora: got 'code' twice"),
        ("where: [1, 2]", "where: got [1, 2]"),
        ("where: ''", "where"),
        (f"where: '{'NOT ' * 900}true'", "nested levels"),
        (f"where: '{'(' * 900}true{')' * 900}'", None),
        ("shuffle: 1", "shuffle: got 1, expected one of True, False"),
        ("tokenizer: [1]", "tokenizer: got [1]"),
        ("adaptive: 5", "adaptive: got 5, expected the keys"),
        ("adaptive: {rule: ado, every_steps: true}", "every_steps: got True"),
        ("adaptive: {rule: 'os:system'}", "expected a class with observe"),
        ("adaptive: {rule: 'this:missing'}", "this.py, which has no class missing"),
        ("adaptive: {rule: 'no.such.module:Rule'}", "no module no.such.module"),
        ("adaptive: {rule: 'sys:Rule'}", "module 'sys' has no attribute 'Rule'"),
        ("adaptive: {rule: 'a b:c'}", "or your module:Class"),
        ("schedule: []", "schedule: got [], expected the keys"),
        ("schedule: {points: []}", "schedule.points: got []"),
        ("schedule: {points: [{at: .nan, weights: inferred}]}", "an integer from 0"),
        ("schedule: {points: [{at: .inf, weights: inferred}]}", "an integer from 0"),
        ("schedule: {points: [{at: true, weights: inferred}]}", "an integer from 0"),
        ("schedule: {points: [{at: 0.5, weights: inferred}]}", "an integer from 0"),
        ("schedule: {points: [{at: 1, weights: inferred}]}", "got at [1], expected 0 first"),
        ("weights: {C: 1.0e+308, Go: 1.0e+308}\nby: language", "sum to inf"),
        ("weights: [{where: 5, weight: 1}]\nby: language", "weights[0].where: got 5"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_message_names_the_invalid_key(catalog: Path, line: str, sentence: str | None) -> None:
    path = catalog.parent / "mixture.yaml"
    path.write_text(f"catalog: catalog\ncount: documents\n{line}\n")
    message = read_refusal(lambda: read_chunk(path))
    if sentence is None:  # parsing removes parentheses
        assert message is None
    else:
        assert message is not None and sentence in message


def test_the_depth_of_a_python_condition_is_limited_too(catalog: Path) -> None:
    from megatron.mixture.catalog.catalog import Catalog

    condition = field("stars") == 1
    for _ in range(20_000):
        condition = ~condition
    with Catalog(catalog, read_only=True) as opened, pytest.raises(ValueError, match="nested levels"):
        Query().where(condition).run(opened)


RULE = """
print("imported")
class Rule:
    def __init__(self, weights): self.weights = weights
    def observe(self, n, nats, counts): return self.weights
    def as_dict(self): return {}
    def restore(self, told): pass
class Half:
    def observe(self, n, nats, counts): return None
class Failing(Rule):
    def __init__(self, weights): raise KeyError("why")
def function(weights): return Rule(weights)
"""


@pytest.mark.parametrize(
    "name", ["own_a:Rulle", "own_a:function", "own_a:print", "own_b.inner:Rule", "this:s"]
)
def test_a_module_without_the_class_is_not_imported(root: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "own_a.py").write_text(RULE)
    (tmp_path / "own_b").mkdir()
    (tmp_path / "own_b" / "__init__.py").write_text("print('imported')")
    program = (
        "import sys, numpy; sys.path.insert(0, sys.argv[1])\n"
        "from megatron.mixture.custom_rule import make_rule\n"
        "try: make_rule(sys.argv[2], numpy.ones(2), 'mixture.yaml')\n"
        "except ValueError as error: print('refused', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), name],
        capture_output=True, text=True, timeout=120, check=True, cwd=root,
    )  # fmt: skip
    assert done.stdout.startswith(f"refused mixture.yaml: adaptive.rule {name}"), done.stdout
    assert "imported" not in done.stdout.replace("cannot be imported", "") and "Beautiful" not in done.stdout


def test_a_custom_rule_is_instantiated_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rule_of_test.py").write_text(RULE)
    (tmp_path / "named_again.py").write_text("from own_rule_of_test import Rule as Other\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    weights = np.array([0.25, 0.75])
    assert make_rule("own_rule_of_test:Rule", weights, "m").observe(1, weights, weights) is weights
    assert type(make_rule("named_again:Other", weights, "m")).__name__ == "Rule"
    with pytest.raises(ValueError, match="expected a class with observe, as_dict, restore"):
        make_rule("own_rule_of_test:Half", weights, "m")
    with pytest.raises(ValueError, match="KeyError .*, expected Class.weights."):
        make_rule("own_rule_of_test:Failing", weights, "m")
