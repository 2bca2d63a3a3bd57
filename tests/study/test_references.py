"""Tests of published models beside a study: results of this project and of lm-eval, facts, and the file."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from megatron.study.downstream_scores import (
    REFERENCE_FACTS,
    load_references,
    read_references,
    write_scores,
)
from megatron.study.importers import read_facts


def write_results(path: Path, model: str, config: dict[str, Any] | None = None, **top: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    metrics = {"alias": "sciq", "acc,none": 0.5, "acc_norm,none": 0.625, "acc_norm_stderr,none": 0.1}
    content = {"results": {"sciq": metrics}, "config": {"model": model, "limit": 16, **(config or {})}, **top}
    path.write_text(json.dumps(content))


def test_results_of_both_programs_give_the_same_task(tmp_path: Path) -> None:
    ours = tmp_path / "a.scores" / "downstream" / "ar-first16" / "results.json"
    about = {"objective": "autoregressive", "model_num_parameters": 1000}
    write_results(ours, "EleutherAI/pythia-14m@step1000", about)
    # the copy in lm-eval's form is not read twice
    write_results(ours.parent / "a" / "results_2026-01-01T00-00-00.json", "copy")
    theirs = tmp_path / "b" / "results_2026-01-01T00-00-00.json"
    write_results(theirs, "hf", model_name="acme/other")
    first, second = read_references([tmp_path / "a.scores", tmp_path / "b"]).itertuples(index=False)
    assert tuple(first)[:7] == (
        "EleutherAI/pythia-14m@step1000", "sciq-first16", 0.625, "accuracy", 0.1, "acc_norm", 1000
    )  # fmt: skip
    assert (second.model, second.task) == ("acme/other", "sciq-first16")
    assert pd.isna(first.train_tokens) and pd.isna(second.n_params)
    with pytest.raises(FileNotFoundError, match="expected scores of a model"):
        read_references([tmp_path / "c"])


def test_facts_replace_what_the_results_lack(tmp_path: Path) -> None:
    write_results(tmp_path / "results_1.json", "hf", model_name="acme/other")
    table = tmp_path / "facts.csv"
    table.write_text("model,n_params,train_tokens,note\nacme/other,1e6,2e9,random weights\n")
    scores = read_references([tmp_path], read_facts(table, "model", REFERENCE_FACTS))
    (score,) = scores.itertuples()
    assert (score.n_params, score.train_tokens, score.note) == (1_000_000, 2_000_000_000, "random weights")
    assert write_scores(scores, tmp_path / "references.csv")
    assert (
        "acme/other,sciq-first16,0.625,accuracy,0.1,acc_norm,1000000,2000000000,random weights"
        in (tmp_path / "references.csv").read_text()
    )
    pd.testing.assert_frame_equal(load_references(tmp_path / "references.csv"), scores, check_dtype=False)
    table.write_text("model,colour\nacme/other,red\n")
    with pytest.raises(ValueError, match="got columns model, colour"):
        read_facts(table, "model", REFERENCE_FACTS)
    table.write_text("model,n_params\nacme/other,many\n")
    with pytest.raises(ValueError, match="n_params: got 'many'.* Expected numbers"):
        read_facts(table, "model", REFERENCE_FACTS)
