"""Tests of tools/fit_law.py from the command line."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from megatron.laws.law import Law
from megatron.study.selection import Columns, select_runs
from tests.tool_modules import CliResult


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """18 finished runs under a known law, one that failed, and three of another objective."""
    lines = ["run,status,objective,n_params,train_tokens,epochs,loss"]
    for i, n in enumerate(np.geomspace(1e7, 1e9, 6)):
        for j, d in enumerate(np.geomspace(1e9, 1e11, 3)):
            loss = float(1.8 + 300 / n**0.33 + 500 / d**0.3)
            lines.append(f"ar{i}{j},done,autoregressive,{n},{d},{1 + (j == 2)},{loss!r}")
    lines.append("bad,failed,autoregressive,1e7,1e9,1,")
    lines += [f"mdm{i},done,masked_diffusion,1e7,{d},1,4.0" for i, d in enumerate((1e9, 1e10, 1e11))]
    path = tmp_path / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_law_of_the_table_is_recovered_and_omitted_runs_are_reported(cli, table: Path) -> None:
    out = table.with_name("law.json")
    done = cli(
        "fit",
        table,
        "--form",
        "chinchilla",
        "--objective",
        "autoregressive",
        "--out",
        out,
        "--n-bootstrap",
        50,
    )
    law = json.loads(out.read_text())
    assert law["n_runs"] == 18
    assert law["params"]["alpha"] == pytest.approx(0.33, rel=1e-6)
    assert law["filter"] == {"status": "done", "objective": "autoregressive"}
    assert f"{out}: L = 1.8 + 300/N^0.33 + 500/D^0.3  (18 runs)" in done.output
    assert "1 of 22 runs in the table are not done" in done.output
    assert "6 runs saw some text more than once" in done.output


def test_published_points_are_fitted_from_their_own_columns(cli, laws: Path, tmp_path: Path) -> None:
    table = laws / "chinchilla_epoch" / "svg_extracted_data.csv"
    out = tmp_path / "law.json"
    cli("fit", table, "--n-column", "Model Size", "--flops-column", "Training FLOP", "--out", out,
               "--n-bootstrap", 0)  # fmt: skip
    expected = json.loads((laws / "expected.json").read_text())["chinchilla_epoch"]["all_245_points_huber"]
    assert json.loads(out.read_text())["objective"] == pytest.approx(expected["objective_sum"], rel=1e-8)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "got runs of autoregressive, masked_diffusion, expected one objective. Choose it with"),
        (["--objective", "autoregresive"], "did you mean 'autoregressive'?"),
        (["--objective", "masked_diffusion"], "got 3 distinct (N, D) for 5 constants"),
        (["--objective", "autoregressive", "--n-column", "n_param"], "did you mean 'n_params'?"),
        (
            ["--objective", "autoregressive", "--loss-column", "run"],
            "row 1, run: got 'ar00', expected a positive number",
        ),
    ],
)
def test_bad_input_is_reported_in_one_line_and_writes_no_law(
    cli, table: Path, words: list, sentence: str
) -> None:
    out = table.with_name("law.json")
    done = cli("fit", table, "--out", out, *words, status=None)
    assert (done.status, done.error.count("\n")) == (1, 1)
    assert sentence in done.error
    assert not out.exists()
    assert cli("fit", table.with_name("none.csv"), "--out", out, status=None).status == 1


@pytest.fixture
def marked(tmp_path: Path) -> Path:
    """20 runs under a known law; the two largest, marked held_out, are 5 % and 10 % above it."""
    lines = ["run,objective,n_params,train_tokens,loss,held_out"]
    for i, n in enumerate([*np.geomspace(1e7, 1e9, 6), 5e9]):
        for j, d in enumerate(np.geomspace(1e9, 1e11, 3) if i < 6 else (2e10, 2e11)):
            loss = float(1.8 + 300 / n**0.33 + 500 / d**0.3) * (1 if i < 6 else 1.05 + 0.05 * j)
            lines.append(f"r{i}{j},autoregressive,{n},{d},{loss!r},{int(i == 6)}")
    path = tmp_path / "marked.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_runs_marked_held_out_are_predicted_and_not_fitted(cli, marked: Path) -> None:
    out = marked.with_name("law.json")
    done = cli("fit", marked, "--out", out, "--n-bootstrap", 30)
    law = json.loads(out.read_text())
    assert law["n_runs"] == 18
    # neither the fit nor any replicate uses them: all recover the law of the other runs
    assert law["params"]["alpha"] == pytest.approx(0.33, rel=1e-6)
    assert np.array(law["replicates"]["beta"]) == pytest.approx(0.3, rel=1e-4)
    scores = law["held_out"]
    assert scores["runs"] == ["r60", "r61"] and scores["N"] == [5e9, 5e9]
    assert law["runs"] == [f"r{i}{j}" for i in range(6) for j in range(3)]
    assert np.array(scores["measured"]) / scores["predicted"] == pytest.approx([1.05, 1.10], rel=1e-6)
    assert scores["worst_percent"] == pytest.approx(100 * np.log(1.10), rel=1e-5)
    assert scores["n_inside"] == 0 and "2 runs held out" in done.output
    more = cli("fit", marked, "--out", out, "--n-bootstrap", 0, "--hold-out", 1, status=None)
    assert more.status == 0 and json.loads(out.read_text())["held_out"]["runs"] == ["r52", "r60", "r61"]
    cli("fit", marked, "--out", out, "--n-bootstrap", 0, "--fit-all")
    assert (json.loads(out.read_text())["n_runs"], json.loads(out.read_text())["held_out"]) == (20, {})


def test_a_comparison_omits_marked_runs(cli, marked: Path) -> None:
    done = cli("fit", marked, "--compare", "chinchilla", status=None)
    assert "2 held out" in done.output
    out, unmarked = marked.with_name("law.json"), marked.with_name("all.csv")
    lines = marked.read_text().splitlines()
    unmarked.write_text("\n".join(line.removesuffix(",0") + (",1" if i and line[-2:] == ",0" else "")
                              for i, line in enumerate(lines)) + "\n")  # fmt: skip
    none = cli("fit", unmarked, "--out", out, status=None)
    assert none.status == 1 and "got all runs marked as held out" in none.error


@pytest.fixture
def repeats(tmp_path: Path) -> Path:
    """60 runs under the law of over-repetition, with unique tokens and exact FLOPs."""
    lines = ["n_params,train_tokens,unique_tokens,train_flops,loss"]
    rng = np.random.default_rng(0)
    for n in np.geomspace(1e7, 1e9, 5):
        for u in np.geomspace(1e8, 1e10, 3):
            for e in (1, 3, 10, 40):
                loss = 1.8 + 300 / n**0.33 + 500 / (u * e) ** 0.3
                loss += 0.03 * (n / u) ** 0.5 * (e - 1) ** 0.8 if e > 1 else 0
                loss *= np.exp(0.002 * rng.standard_normal())
                lines.append(f"{n},{u * e},{u},{6.5 * n * u * e},{float(loss)!r}")
    path = tmp_path / "repeats.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_form_of_repetition_reads_unique_tokens_and_holds_runs_out(cli, repeats: Path) -> None:
    out = repeats.with_name("law.json")
    words = (
        "--form",
        "repeated_data",
        "--hold-out",
        5,
        "--out",
        out,
        "--n-bootstrap",
        20,
    )
    done = cli("fit", repeats, *words)
    law = json.loads(out.read_text())
    assert (law["form"], law["n_runs"], law["columns"]["U"]) == ("repeated_data", 55, "unique_tokens")
    assert law["held_out"]["n_runs"] == 5 and "5 runs held out: off by" in done.output


def test_the_forms_are_compared_and_nothing_is_written(cli, repeats: Path) -> None:
    out = repeats.with_name("law.json")
    done = cli("fit", repeats, "--compare", "chinchilla,over_repetition", "--hold-out", 6, "--out", out)
    assert [line.split()[0] for line in done.output.splitlines()[1:]] == ["over_repetition", "chinchilla"]
    assert not out.exists()


def test_a_different_flops_convention_gives_a_different_fit(cli, tmp_path: Path) -> None:
    lines = ["n_params,train_tokens,loss,exact"]
    for c in (1e18, 1e19, 1e20):
        for n in np.sqrt(c / 120) * np.geomspace(0.4, 2.5, 5):
            d = c / (6 * n)
            lines.append(f"{n},{d},{float(1.8 + 300 / n**0.3 + 735 / d**0.3)!r},{float(7 * n**0.99 * d)}")
    table = tmp_path / "isoflop.csv"
    table.write_text("\n".join(lines) + "\n")
    exponents = []
    for by in ("6nd", "exact"):
        out = tmp_path / f"{by}.json"
        cli("fit", table, "--approach", 2, "--flops-by", by, "--out", out)
        exponents.append(json.loads(out.read_text())["N"]["exponent"])
    # at equal C = 6 N D the surface is symmetric in log N, so with 6 N D the exponent is exactly 1/2
    assert exponents[0] == pytest.approx(0.5, abs=1e-3)
    assert exponents[1] != pytest.approx(exponents[0], abs=1e-5)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--form", "repeated_data", "--unique-column", "unique"], "no column 'unique'"),
        (["--hold-out", 60], "got 60 of 60"),
        (["--approach", 2, "--flops-by", "flops"], "no column 'flops'"),
        (["--compare", "chinchilla,moon", "--hold-out", 5], "form: got 'moon', expected one of"),
    ],
)
def test_invalid_options_are_reported_in_one_line(cli, repeats: Path, words: list, sentence: str) -> None:
    done = cli(
        "fit", repeats, *words, "--out", repeats.with_name("law.json"), "--n-bootstrap", 0, status=None
    )
    assert (done.status, done.error.count("\n")) == (1, 1)
    assert sentence in done.error


def grouped_table(path: Path, column: str) -> Path:
    """Write twelve models at eight checkpoints each, with noise shared by a model's rows."""
    n = np.repeat(np.geomspace(1e7, 1e9, 12), 8)
    d = n * np.tile(np.geomspace(4, 100, 8), 12)
    names = np.repeat([f"m{i}" for i in range(12)], 8)
    loss = (1.8 + 480 / n**0.348 + 2085 / d**0.366) * np.exp(
        0.004 * np.random.default_rng(0).standard_normal(12).repeat(8)
    )
    rows = "".join(
        f"{a:.0f},{b:.0f},{c!r},{x}\n" for a, b, c, x in zip(n, d, loss.tolist(), names, strict=True)
    )
    path.write_text(f"n_params,train_tokens,loss,{column}\n{rows}")
    return path


def test_rows_of_one_trunk_run_or_size_with_shared_noise_are_grouped_unless_none_is_given(
    cli, tmp_path: Path
) -> None:
    out = tmp_path / "law.json"

    def fit_grouped(column: str, *words: str) -> tuple[CliResult, Law]:
        table = grouped_table(tmp_path / "table.csv", column)
        done = cli("fit", table, "--out", out, "--n-bootstrap", 50, *words, status=None)
        return done, Law.load(out)

    assert fit_grouped("trunk")[1].noise["n_groups"] == 12
    assert fit_grouped("trunk", "--group", "none")[1].noise["n_groups"] is None
    done, law = fit_grouped("run")
    assert law.noise["n_groups"] == 12 and "84 rows repeat the name of another run" in done.output
    done, law = fit_grouped("run", "--group", "run")
    assert law.noise["n_groups"] == 12 and "repeat the name" not in done.output
    done, law = fit_grouped("seed")
    assert law.noise["n_groups"] == 12 and "rows that share N correlate" in done.output
    done, _ = fit_grouped("run", "--group", "model")
    assert done.status == 1 and "no column 'model'" in done.error


def test_one_file_holds_many_laws_and_each_is_fitted_on_its_own_rows(cli, tmp_path: Path) -> None:
    n, d = np.repeat(np.geomspace(1e7, 1e9, 5), 4), np.tile(np.geomspace(1e9, 1e11, 4), 5)
    lines = ["n_params,train_tokens,loss,dataset,layers"]
    for dataset, floor in (("c4", 1.8), ("code", 0.9)):
        loss = floor + 300 / n**0.33 + 500 / d**0.3
        lines += [
            f"{a},{b},{c!r},{dataset},{8 if a > 1e8 else 4}"
            for a, b, c in zip(n, d, loss.tolist(), strict=True)
        ]
    table = tmp_path / "table.csv.gz"
    table.write_bytes(gzip.compress("\n".join(lines).encode()))
    for dataset, floor in (("c4", 1.8), ("code", 0.9)):
        out = tmp_path / f"{dataset}.json"
        done = cli("fit", table, "--where", f"dataset == {dataset!r}", "--out", out, "--n-bootstrap", 0)
        law = Law.load(out)
        assert law.params["E"] == pytest.approx(floor, rel=1e-6) and law.n_runs == 20
        assert law.filter["where"] == [f"dataset == {dataset!r}"]
    counts = {"layers<8": 24, "layers != 4": 16, "layers>=4": 40, "dataset != 'c4'": 20}
    for condition, n_rows in counts.items():
        assert len(select_runs(table, Columns(), where=[condition]).N) == n_rows
    for condition, words in (
        ("dataset = c4", "Expected an expression of pandas"),
        ("data == 'c4'", "'data' is not defined"),
        ("dataset == 'pile'", "no finished run is left"),
        ("dataset < 3", "Expected an expression of pandas"),
    ):
        done = cli("fit", table, "--where", condition, "--out", tmp_path / "none.json", status=None)
        assert done.status == 1 and words in done.error
    table.write_bytes(table.read_bytes()[:200])
    done = cli("fit", table, "--out", tmp_path / "none.json", status=None)
    assert done.status == 1 and "not a CSV or parquet table" in done.error
    assert "Traceback" not in done.error


def test_for_a_missing_column_the_error_names_the_option_that_maps_it(cli, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("params,train_tokens,loss\n1,2,3\n")
    done = cli("fit", table, status=None)
    assert done.status == 1 and "no column 'n_params'" in done.error and "--n-column" in done.error


def test_a_column_of_billions_is_refused_as_tokens_and_weights_come_from_a_column(
    cli, tmp_path: Path
) -> None:
    n, d = np.repeat(np.geomspace(1e7, 1e9, 5), 4), np.tile(np.geomspace(1, 100, 4), 5)
    loss = 1.8 + 300 / n**0.33 + 500 / (1e9 * d) ** 0.3
    rows = "".join(f"{a},{b},{c!r},{1 + (a > 1e8)}\n" for a, b, c in zip(n, d, loss.tolist(), strict=True))
    table = tmp_path / "table.csv"
    table.write_text("n_params,tokens_b,loss,w\n" + rows)
    done = cli("fit", table, "--d-column", "tokens_b", "--out", tmp_path / "law.json", status=None)
    assert done.status == 1 and "got 100 at most, expected tokens" in done.error


def test_fixed_constants_and_removed_options_from_the_command_line(cli, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n, d = (a.ravel() for a in np.meshgrid(np.geomspace(1e7, 1e9, 5), np.geomspace(1e9, 1e11, 4)))
    loss = (1.7 + 400 / n**0.34 + 900 / d**0.34) * np.exp(0.003 * rng.standard_normal(20))
    rows = [f"{a},{b},{c}" for a, b, c in zip(n, d, loss, strict=True)]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["n_params,train_tokens,loss", *rows]) + "\n")

    fit = ("fit", table, "--n-bootstrap", 20, "--out", tmp_path / "law.json")
    cli(*fit, "--fix", "alpha=0.34")
    law = Law.load(tmp_path / "law.json")
    assert law.params["alpha"] == 0.34 and law.fixed == ["alpha"]
    for words, status, sentence in (
        (("--fix", "alpha=beta"), 2, "--fix: got alpha=beta, expected NAME=VALUE"),
        (("--fix", "alpha=0.3.1"), 2, "for example alpha=0.34"),
        (("--profile", "E"), 2, "Use the bootstrap interval of the constant"),
        (("--stack",), 2, "A fit measures the error"),
        (("--form", "kaplan"), 1, "is of published laws only"),
        (("--prior", "alpha=0.3+-0.1"), 2, "Use --fix NAME=VALUE"),
        (("--weights", "w"), 2, "Use --where to skip runs"),
        (("--approach", "1"), 2, "choose from"),
        (("--loss-se-column", "se"), 2, "Rename the column to loss_se"),
        (("--form", "bounded"), 1, "Pass its formula as a function"),
    ):
        error = cli(*fit, *words, status=status).error
        assert sentence in " ".join(error.split())


def test_the_error_of_extrapolation_is_measured_without_the_held_out_runs(cli, table: Path) -> None:
    text = table.read_text().splitlines()
    rng = np.random.default_rng(0)
    rows = [line.rsplit(",", 1) for line in text[1:19]]
    noisy = [
        f"{start},{float(float(loss) * np.exp(0.003 * rng.standard_normal()))!r},0.02" for start, loss in rows
    ]
    table.write_text("\n".join([text[0] + ",loss_se", *noisy]) + "\n")
    out = table.with_name("law.json")
    done = cli("fit", table, "--hold-out", 2, "--out", out, "--n-bootstrap", 20)
    stored = json.loads(out.read_text())
    sizes, tokens = (np.array(stored["held_out"][name]) for name in "ND")
    assert stored["extrapolation"]["compute"] < 6 * (sizes * tokens).min()
    assert "more deviation for each factor of e in compute" in done.output
    assert len(stored["runs"]) == 16 and not set(stored["runs"]) & set(stored["held_out"]["runs"])
    assert stored["text_error"]["loss_se"] == 0.02
