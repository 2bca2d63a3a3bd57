"""Fuzz targets of studies: run folders, laws, tables, scores, logs of other programs."""

import csv
import gzip
import io
import json
import math
from pathlib import Path
from typing import Any

from fuzzing.cases import FileCase
from fuzzing.harness import FuzzTarget, WrongAnswerError
from fuzzing.mutate import mutate_bytes, mutate_json, mutate_json_lines, mutate_text

TRUTH = {"E": 1.9, "A": 120.0, "B": 900.0, "alpha": 0.33, "beta": 0.42}
LAW = {
    "form": "chinchilla", "params": TRUTH, "objective": 1e-4, "huber_delta": 1e-3, "n_runs": 15,
    "columns": {"N": "n_params", "D": "train_tokens", "L": "loss"}, "filter": {"objective": "autoregressive"},
    "ranges": {"N": [2e5, 5e6], "D": [5e5, 5e6], "L": [4.0, 7.6]},
    "interval": {"level": 0.95, "method": "bootstrap", "n_bootstrap": 3, "seed": 0,
                 "params": {name: [value * 0.9, value * 1.1] for name, value in TRUTH.items()},
                 "derived": {"a_exponent": [0.4, 0.6]}},
    "standard_error": {name: 0.03 * value for name, value in TRUTH.items()},
    "derived": {"a_exponent": 0.56, "b_exponent": 0.44}, "spread": 0.01,
    "noise": {"sigma": 0.01, "dof": 10, "n_groups": 15},
    # one list per constant, each as long as n_bootstrap
    "replicates": {name: [value * scale for scale in (0.97, 1.0, 1.02)] for name, value in TRUTH.items()},
    "warnings": ["few runs"], "table": {"path": "table.csv", "sha256": ""}, "residual": "log", "fixed": [],
    "identified": True, "not_identified": {}, "held_out": {}, "lack_of_fit": {},
}  # fmt: skip
# Logs of other programs with what is hard in them: separators in numbers, a validation line, a loss of NaN.
TITAN = """[titan] size: 1,234,567 total parameters
[titan] sequence length 2048, global batch size 8, total steps 30
[titan] step:  1  loss:  9.42770  grad_norm: 1.2
[titan] step:  10  loss:  6.42770  grad_norm: 1.2
[titan] validate step:  20  loss:  5.1
[titan] step:  30  loss:  nan
"""
MEGATRON = """ > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 1234567
  seq_length ...................................... 128
 iteration        1/      30 | consumed samples:            8 | learning rate: 1E-04 | lm loss: 9.7E+00 |
 iteration       30/      30 | consumed samples:          240 | learning rate: 1E-05 | lm loss: 5.7E+00 |
 validation loss at iteration 30 | lm loss value: 5.4E+00 | lm loss PPL: 2.2E+02 |
"""
WANDB = """"Step","a - train/loss","a - train/loss__MIN","b - train/loss"
"10","5.5","5.5",""
"20","4.5","4.4","3.5"
"""
TABLE = "run,val_loss,n_params,train_tokens,unique_tokens\na,5.5,1e6,2e7,\nb,4.5,2e6,4e7,1e7\n"
FACTS = "run,n_params,seq_len,objective\na,1e6,256,autoregressive\nb,2e6,,ar\n"


def write_run(folder: Path, name: str, n_params: int, train_tokens: int, objective: str) -> None:
    """Write a finished run directory."""
    plan = {
        "identity": f"{n_params:012x}", "name": name, "size": f"{n_params / 1e6:.1f}M",
        "objective": objective,
        "seed": 0, "n_params": n_params, "n_non_embedding": n_params // 2, "train_tokens": train_tokens,
        "n_steps": 10, "tokens_per_step": train_tokens // 10, "seq_len": 256, "unique_tokens": 983_040,
        "epochs": train_tokens / 983_040, "flops_per_token": 6.0 * n_params,
        "train_flops": 6.0 * n_params * train_tokens, "flops_6nd": 6.0 * n_params * train_tokens,
        "flops_convention": "exact matmuls, forward and backward",
    }  # fmt: skip
    # on the law exactly, so that a report of the valid study can fit and draw it
    loss = TRUTH["E"] + TRUTH["A"] / n_params ** TRUTH["alpha"] + TRUTH["B"] / train_tokens ** TRUTH["beta"]
    result = {
        "identity": plan["identity"], "loss": loss, "loss_se": 0.012, "n_tokens_scored": 65_536, "step": 10,
        "train_tokens": train_tokens, "wall_s": 60.0, "train_flops": plan["train_flops"],
        "tps_mean": 17_000.0,
        "hardware": "2 CPU cores", "torch": "2.13.0", "git": "0123abc",
    }  # fmt: skip
    lines: list[dict[str, Any]] = []
    # losses fall to the final one as 1 / step
    for step in range(1, 11):
        point = {"step": step, "tokens": step * plan["tokens_per_step"], "loss": loss + 3 / step}
        lines.append(
            {"kind": "train", **point, "lr": 1e-3, "grad_norm": 1.0, "tps": 17e3, "elapsed_s": 6.0 * step}
        )
    lines.append({"kind": "validation", **point, "loss_se": 0.012, "n_tokens": 65_536, "num_mc": None})
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    scores = folder / "downstream" / "bench" / "ar"
    scores.mkdir(parents=True)
    (scores / "results.json").write_text(json.dumps({
        "config": {"step": 10, "objective": "autoregressive"}, "group_subtasks": {},
        "results": {"copa": {"alias": "copa", "acc,none": 0.6, "acc_stderr,none": 0.05}},
    }))  # fmt: skip


def write_study(folder: Path) -> list[str]:
    """Write the runs of a small study; return the names of some of their files."""
    for n_params in (200_000, 800_000, 3_000_000):
        for train_tokens in (500_000, 2_000_000):
            name = f"ar-{n_params}-{train_tokens}"
            write_run(folder / "runs" / name, name, n_params, train_tokens, "autoregressive")
    write_run(folder / "runs" / "md", "md", 200_000, 500_000, "masked_diffusion")
    (folder / "corpus.json").write_text(json.dumps({
        "corpus": "C4", "why": "near", "documents": 2000, "train_tokens": 983_040, "held_out_tokens": 65_536,
        "unigram_entropy_nats": 6.91, "bytes_per_token": 3.6,
    }))  # fmt: skip
    (folder / "law.json").write_text(json.dumps(LAW))
    (folder / "scores.csv").write_text("run,task,score,kind\nmd,copa,0.5,accuracy\n")
    return ["runs/md/plan.json", "runs/md/result.json", "runs/ar-200000-500000/plan.json"]


def open_run_folders(folder: Path) -> FileCase:
    """Open run folders as collect.py reads them."""
    from megatron.study.downstream_scores import add_score_columns, read_scores
    from megatron.study.launchers.launch import read_last_metrics
    from megatron.study.table import read_runs, read_table, write_table, write_table_parquet

    names = write_study(folder)
    scores = "runs/ar-200000-500000/downstream/bench/ar/results.json"

    def read() -> None:
        rows = read_runs(folder)
        rows = add_score_columns(rows, read_scores(folder, rows))
        write_table(rows, folder / "table.csv")
        write_table_parquet(rows, folder / "table.parquet")
        read_last_metrics(folder / "runs/md")
        # the table must return each loss bit for bit: the CSV has enough digits
        losses = [float(cell) for cell in read_table(folder / "table.csv")["loss"] if cell]
        expected = [row.loss for row in rows if row.loss is not None]
        # NaN differs from itself
        if losses != expected and not any(map(math.isnan, losses)):
            raise WrongAnswerError(f"table.csv: got the losses {losses}, expected {expected}")

    mutators = {
        **dict.fromkeys(names, mutate_json),
        "runs/md/metrics.jsonl": mutate_json_lines,
        scores: mutate_json,
    }
    return FileCase(folder, mutators, read)


def open_reports(folder: Path) -> FileCase:
    """Open a study as the report reads it."""
    from megatron.report.report import render_page
    from megatron.report.study_data import read_study

    names = write_study(folder)
    # scripts of the page itself; the mutated files contain <script> as text
    n_scripts = render_page(read_study(folder)).count("<script>")

    def read() -> None:
        text = render_page(read_study(folder))
        if text.count("<script>") > n_scripts or len(text) < 1000:
            raise WrongAnswerError("the page contains a script from an input file")

    mutators: dict[str, Any] = {
        **dict.fromkeys(names, mutate_json),
        "runs/md/metrics.jsonl": mutate_json_lines,
    }
    mutators |= {"law.json": mutate_json, "corpus.json": mutate_json, "scores.csv": mutate_text}
    return FileCase(folder, mutators, read)


def open_frontiers(folder: Path) -> FileCase:
    """Open compute_law.json and blind.json, and values computed from them."""
    import numpy as np

    from megatron.laws.compute_law import ComputeLaw, fit_compute_law
    from megatron.study.blind import check_blind
    from megatron.study.blind_record import BlindPrediction, load_blind

    # 5 budgets x 4 sizes around the optimum of each, with D = C / 6N: [20] each
    C = np.repeat(np.geomspace(1e10, 1e12, 5), 4)
    N = np.sqrt(C) / 5 * np.tile([0.5, 0.9, 1.4, 2.5], 5)
    L = 1.9 + 120 / N**0.33 + 900 / (C / (6 * N)) ** 0.42
    path = folder / "compute_law.json"
    fit_compute_law(N, C / (6 * N), L, C).save(path)
    blind = BlindPrediction(
        objective="autoregressive", run="ar-blind-0a", size="2M", seed=0, identity="0a",
        flops_convention="exact", compute=4.0, budget=4e12, N=100_000, D=6_000_000, C=4e12, predicted=3.1,
        level=0.95, interval=(3.0, 3.2), N_optimum=1.1e5, N_optimum_interval=(9e4, 1.3e5),
        time="2026-01-02T03:04:05.678+00:00", commit=None, n_runs=20, rows_sha256="0b",
    )  # fmt: skip
    blind.save(folder)

    def read() -> None:
        law = ComputeLaw.load(path)
        C = 0.5 * law.C[1]
        optimum = law.optimum(C)
        law.predict_run(optimum.N, C), law.interval("size_exponent")
        # a mutation of the white space only is accepted, and the content is equal
        if load_blind(folder) != blind:
            raise WrongAnswerError("a modified blind.json was accepted")
        if "not trained yet" not in check_blind(folder).summary:
            raise WrongAnswerError("a run that does not exist was measured")

    return FileCase(folder, {"compute_law.json": mutate_json, "blind.json": mutate_json}, read)


def open_laws(folder: Path) -> FileCase:
    """Open law.json, and values computed from it."""
    import numpy as np

    from megatron.laws.frontier import frontier_bands, optimal_frontier
    from megatron.laws.law import Law

    path = folder / "law.json"
    path.write_text(json.dumps(LAW))

    def read() -> None:
        law = Law.load(path)
        # float64 scalars: an extreme exponent gives Inf or NaN, where Python's floats raise OverflowError
        p = {name: np.float64(value) for name, value in law.params.items()}
        is_chinchilla = law.form == "chinchilla"
        expected = p["E"] + p["A"] / 1e6 ** p["alpha"] + p["B"] / 1e7 ** p["beta"] if is_chinchilla else None
        loss = float(law.loss(1e6, 1e7))
        if expected is not None and not np.isclose(loss, expected, equal_nan=True):
            raise WrongAnswerError(f"got a loss of {loss}, expected {expected}")
        law.formula(), law.predict(1e6, 1e7), law.predict(1e6, 1e7, kind="confidence"), law.n_replicates()
        if law.form == "chinchilla":
            optimal_frontier(law, 1e18), frontier_bands(law, [1e18])

    return FileCase(folder, {"law.json": mutate_json}, read)


def _reference_table(content: bytes, is_packed: bool) -> dict[str, list[str]] | None:
    """Read the columns of a table with Python's csv module."""
    # newline="" below: csv itself must see the line ends inside quoted cells
    text = (gzip.decompress(content) if is_packed else content).decode("utf-8-sig")
    header, *lines = [line for line in csv.reader(io.StringIO(text, newline="")) if line]
    return {name: [line[i] for line in lines] for i, name in enumerate(header)}


def open_tables(folder: Path) -> FileCase:
    """Open plain and compressed CSV tables, with facts and renamed columns."""
    from megatron.study.importers import read_external_logs, read_facts
    from megatron.study.table import read_table

    (folder / "t.csv").write_text(TABLE)
    (folder / "u.csv.gz").write_bytes(gzip.compress(TABLE.encode()))
    (folder / "f.csv").write_text(FACTS)
    (folder / "w.csv").write_text(WANDB)

    def read() -> None:
        for name in ("t.csv", "u.csv.gz"):
            if read_table(folder / name) != _reference_table(
                (folder / name).read_bytes(), name.endswith("gz")
            ):
                raise WrongAnswerError(f"{name}: differs from Python's csv")
        facts = read_facts(folder / "f.csv")
        renamed = {"loss": "val_loss"}
        read_external_logs([folder / "t.csv", folder / "u.csv.gz"], "csv", facts, renamed)
        read_external_logs([folder / "w.csv"], "wandb", facts, {})

    mutators = {
        "t.csv": mutate_text, "f.csv": mutate_text, "w.csv": mutate_text,
        "u.csv.gz": lambda rng, content: mutate_bytes(rng, content) if rng.random() < 0.5
        else gzip.compress(mutate_text(rng, TABLE.encode())),
    }  # fmt: skip
    return FileCase(folder, mutators, read)


def open_logs(folder: Path) -> FileCase:
    """Open logs of torchtitan and Megatron, and TensorBoard events."""
    from torch.utils.tensorboard import SummaryWriter

    from megatron.study.importers import read_external_logs
    from megatron.study.table import write_table, write_table_parquet

    (folder / "titan.log").write_text(TITAN)
    (folder / "megatron.log").write_text(MEGATRON)
    writer = SummaryWriter(str(folder / "board"))
    for step in (1, 5, 10):
        writer.add_scalar("lm loss", 9.0 - 0.1 * step, step)
    writer.close()
    (events,) = (folder / "board").iterdir()

    def read() -> None:
        facts = {"": {"n_params": 10, "tokens_per_step": 100}}
        rows = read_external_logs([folder / "titan.log"], "torchtitan", {}, {})
        rows += read_external_logs([folder / "megatron.log"], "megatron", {}, {})
        rows += read_external_logs([folder / "board"], "tensorboard", facts, {})
        write_table(rows, folder / "table.csv")
        write_table_parquet(rows, folder / "table.parquet")

    mutators = {"titan.log": mutate_text, "megatron.log": mutate_text, f"board/{events.name}": mutate_bytes}
    return FileCase(folder, mutators, read)


TARGETS = (
    FuzzTarget("run folders", 2, open_run_folders),
    FuzzTarget("reports", 0.7, open_reports),
    FuzzTarget("law.json", 3, open_laws),
    FuzzTarget("compute_law.json", 1, open_frontiers),
    FuzzTarget("tables", 3, open_tables),
    FuzzTarget("logs", 1.5, open_logs),
)
