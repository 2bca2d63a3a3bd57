"""Logs and exports of other programs: lines as those programs print them, with numbers computed by hand."""

import math
import re
from pathlib import Path

import pandas as pd
import pytest

from megatron.study.importers import read_external_logs, read_facts

TITAN = """\
[rank0]:[titan] 2025-08-01 10:00:00,000 - root - INFO - Model llama3 size: 6,139,136 total parameters
[rank0]:[titan] 2025-08-01 10:00:01,000 - root - INFO - Trainer is initialized with local batch size 8, \
global batch size 16, gradient accumulation steps 1, sequence length 2048, total steps {total} (warmup 2)
[rank0]:[titan] 2025-08-01 10:00:02,000 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss:  8.1234  \
\x1b[38;2;180;60;0mgrad_norm:  1.2  \x1b[33mmemory:  0.47GiB(0.50%)  \x1b[34mtps: 17,581  \x1b[39m
[rank0]:[titan] 2025-08-01 10:00:03,000 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  4.0500  \
\x1b[33mmemory:  0.47GiB(0.50%)  \x1b[34mtps: 17,581
"""
MEGATRON = """\
  seq_length ...................................... 1024
 iteration      100/     200 | consumed samples:        25600 | consumed tokens: 26214400 | elapsed time per \
iteration (ms): 1234.5 | learning rate: 1.500E-04 | global batch size:   256 | lm loss: 5.500000E+00 | \
loss scale: 1.0 | grad norm: 1.234 |
 iteration      200/     200 | consumed samples:        51200 | elapsed time per iteration (ms): 1200.0 | \
learning rate: 1.500E-05 | global batch size:   256 | lm loss: 4.500000E+00 | loss scale: 1.0 |
-----------------------------------------------------------------------------------------------
 validation loss at iteration 200 | lm loss value: 4.612345E+00 | lm loss PPL: 1.007E+02 |
"""


def read_one(path: Path, kind: str, facts: dict | None = None, columns: dict | None = None) -> pd.Series:
    table = read_external_logs([path], kind, facts or {}, columns or {})
    assert len(table) == 1
    return table.iloc[0]


def test_a_torchtitan_log_gives_size_tokens_and_its_last_training_loss(tmp_path: Path) -> None:
    path = tmp_path / "7M-run.log"
    path.write_text(TITAN.format(total=10))
    row = read_one(path, "torchtitan", {"": {"unique_tokens": 163_840}})
    assert (row.run, row.status, row.loss) == ("7M-run", "done", 4.05)
    assert row.n_params == 6_139_136
    assert row.train_tokens == 10 * 16 * 2048
    assert row.epochs == 2.0
    assert row.flops_6nd == 6 * 6_139_136 * 327_680
    assert "no held-out loss" in row.note


def test_validation_counts_before_training_and_a_run_that_stopped_early_has_failed(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(
        TITAN.format(total=100) + "root - INFO - \x1b[31mvalidate step: 10  loss:  4.2000  memory\n"
    )
    row = read_one(path, "torchtitan")
    assert (row.loss, row.status) == (4.2, "failed")
    assert row.note == "It ends at step 10 of 100."


def test_a_megatron_log_gives_validation_tokens_and_annealing(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(MEGATRON)
    row = read_one(path, "megatron")
    assert (row.loss, row.status) == (4.612345, "done")
    assert math.isnan(row.n_params) and "give --set n_params=N" in row.note
    assert row.train_tokens == 51200 * 1024
    assert row.annealed == 1
    path.write_text(MEGATRON.replace("1.500E-05", "1.400E-04"))
    assert read_one(path, "megatron").annealed == 0


def test_tensorboard_scalars_are_read_run_by_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for run, losses in (("a", [5.0, 4.0]), ("b", [6.0, 3.0])):
        writer = EventFileWriter(str(tmp_path / run / "tensorboard"))
        for step, loss in enumerate(losses, 1):
            for tag in ("train/loss", "validation/loss"):
                value = Summary.Value(tag=tag, simple_value=loss + (tag[0] == "v"))
                writer.add_event(Event(step=step, wall_time=step, summary=Summary(value=[value])))
        writer.close()
    rows = read_external_logs(
        [tmp_path], "tensorboard", {"": {"tokens_per_step": 100}, "b": {"n_params": 7}}, {}
    )
    columns = ["run", "loss", "train_tokens", "n_params"]
    assert rows[columns].fillna(0).to_numpy().tolist() == [["a", 5, 200, 0], ["b", 4, 200, 7]]


def test_an_exported_chart_has_one_run_per_column(tmp_path: Path) -> None:
    path = tmp_path / "export.csv"
    path.write_text(
        '"Step","small - val/loss","small - val/loss__MIN","small - val/loss__MAX","big - val/loss"\n'
        '"0","5.0","5.0","5.0",""\n"100","4.0","4.0","4.0","3.5"\n'
    )
    (tmp_path / "facts.csv").write_text("run,n_params,tokens_per_step\nsmall,1e6,1000\nbig,1e7,2000\n")
    rows = read_external_logs([path], "wandb", read_facts(tmp_path / "facts.csv"), {})
    assert rows[["run", "loss", "n_params", "train_tokens"]].to_numpy().tolist() == [
        ["small", 4.0, 1_000_000, 100_000],
        ["big", 3.5, 10_000_000, 200_000],
    ]


def test_bad_input_is_a_sentence(tmp_path: Path) -> None:
    table, chart = "name,val_loss\na,3.0\n", '"Step","a - train/loss"\n"5","4.5"\n"{}","{}"\n'
    no_numbers = "x.csv: got no numbers in Step and a - train/loss, expected a chart"
    cells = [("10", "3.5="), ("x", "3.5"), ("inf", "3.5"), ("nan", "3.5")]
    for text, kind, facts, columns, sentence in (
        (table, "torchtitan", {}, {}, "got no loss, expected the output of torchtitan"),
        (table, "megatrn", {}, {}, "--from: got 'megatrn', expected one of"),
        (table, "megatron", {"": {"n_param": 3}}, {}, "did you mean 'n_params'?"),
        (table, "csv", {}, {"loss": "val_los"}, "did you mean 'val_loss'?"),
        (table, "csv", {}, {}, "no column 'loss'; did you mean 'val_loss'?"),
        (table, "wandb", {}, {}, "got no numbers in Step and val_loss"),
        *((chart.format(*row), "wandb", {}, {}, no_numbers) for row in cells),
    ):
        (tmp_path / "x.csv").write_text(text)
        with pytest.raises(ValueError, match=re.escape(sentence)):
            read_external_logs([tmp_path / "x.csv"], kind, facts, columns)


def test_a_run_that_diverged_has_failed(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text("step:  1  loss:  8.0  x\nstep:  2  loss:  nan  x\n")
    row = read_one(path, "torchtitan")
    assert row.status == "failed" and math.isnan(row.loss) and "diverged" in row.note
