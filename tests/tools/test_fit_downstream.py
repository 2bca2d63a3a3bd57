"""Tests of scaling downstream and scaling crossover from the command line."""

from pathlib import Path

import numpy as np

from megatron.laws.fit import fit_law
from megatron.laws.forms import FORM


def test_a_score_is_fitted_and_predicted_through_the_law(cli, tmp_path: Path) -> None:
    n, d = (a.ravel() for a in np.meshgrid(np.geomspace(1e7, 1e9, 5), np.geomspace(1e9, 1e11, 4)))
    loss = 1.7 + 400 / n**0.34 + 900 / d**0.31
    error = 0.9 - 2.0 * np.exp(-0.7 * loss)
    rows = [
        f"{float(a)},{float(b)},{float(c)!r},{float(e)!r}"
        for a, b, c, e in zip(n, d, loss, error, strict=True)
    ]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["n_params,train_tokens,loss,err", *rows]) + "\n")
    fit_law(n, d, loss, n_bootstrap=5).save(tmp_path / "law.json")
    done = cli("downstream", table, "--score-column", "err", "--law", tmp_path / "law.json",
               "--predict", 7e9, 1.4e12)  # fmt: skip
    assert "eps 0.9, k 2, gamma 0.7" in done.output
    at = 1.7 + 400 / 7e9**0.34 + 900 / 1.4e12**0.31
    assert f"predicted {0.9 - 2 * np.exp(-0.7 * at):.4f}" in done.output
    refused = cli("downstream", table, "--score-column", "er", status=None)
    assert refused.status == 1 and "did you mean 'err'?" in refused.error
    assert cli("downstream", table, "--score-column", "err", "--predict", 1, 2, status=None).status == 2


def test_the_crossover_of_two_laws_is_printed(cli, tmp_path: Path) -> None:
    n, u, e = np.meshgrid(np.geomspace(1e7, 1e9, 4), np.geomspace(1e8, 1e10, 3), [1, 4, 15, 60])
    n, d, u = n.ravel(), (u * e).ravel(), u.ravel()
    base = {"E": 1.7, "A": 400.0, "B": 900.0, "alpha": 0.34, "beta": 0.31, "R_D": 6.0}
    for name, params in (("ar", base), ("md", base | {"A": 480.0, "B": 1100.0, "R_D": 200.0})):
        loss = FORM["repeated_data"].loss(params, n, d, u)
        fit_law(n, d, loss, U=u, form="repeated_data", n_bootstrap=3).save(tmp_path / f"{name}.json")
    words = (tmp_path / "ar.json", tmp_path / "md.json", "--unique", 1e8, 1e9)
    done = cli("crossover", *words)
    assert done.output.count("C_crit ") == 2 and "95 % confidence [" in done.output
    assert cli("crossover", tmp_path / "ar.json", tmp_path / "none.json", status=None).status == 1
    assert "expected a number above 0" in cli("crossover", *words[:3], -1, status=None).error


def test_tasks_are_not_mixed_and_the_interval_is_labelled_with_its_kind(cli, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n, d = (a.ravel() for a in np.meshgrid(np.geomspace(1e7, 1e9, 5), np.geomspace(1e9, 1e11, 4)))
    loss = (1.7 + 400 / n**0.34 + 900 / d**0.31) * np.exp(0.003 * rng.standard_normal(20))
    lines = ["n_params,train_tokens,loss,task,accuracy"]
    for task, chance in (("piqa", 0.5), ("hellaswag", 0.25)):
        p = chance + 0.4 / (1 + np.exp(3 * (loss - 2.6)))
        scores = rng.binomial(900, p) / 900
        lines += [f"{a},{b},{c},{task},{e}" for a, b, c, e in zip(n, d, loss, scores, strict=True)]
    table = tmp_path / "scores.csv"
    table.write_text("\n".join(lines) + "\n")
    fit_law(n, d, loss, n_bootstrap=20).save(tmp_path / "law.json")
    words = (table, "--score-column", "accuracy", "--kind", "accuracy")
    mixed = cli("downstream", *words, status=None)
    assert mixed.status == 1 and "got hellaswag, piqa, expected one task" in mixed.error
    done = cli("downstream", *words, "--where", "task == 'piqa'", "--n-questions", 900,
               "--law", tmp_path / "law.json", "--predict", 2e9, 1e11)  # fmt: skip
    assert "20 runs: floor 0.5, " in done.output and "; top fixed at 1, floor at chance" in done.output
    assert "95 % predictive [" in done.output and "95 % confidence [" in done.output
    free = cli("downstream", *words, "--where", "task == 'piqa'", "--chance", "free",
                    "--ceiling", 0.9, status=None).output  # fmt: skip
    assert "floor 0.5," not in free and "; top fixed at 0.9\n" in free
    assert (
        "got 'half'"
        in cli("downstream", *words, "--where", "task == 'piqa'", "--chance", "half", status=None).error
    )
    assert cli("downstream", *words, "--where", "task == 'copa'", status=None).status == 1
