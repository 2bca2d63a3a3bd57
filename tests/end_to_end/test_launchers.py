"""Every launcher option that the table calls tried starts a training of two ranks with the real launcher."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from megatron.io import read_json
from megatron.plan.run_dir import RESULT
from tests.conftest import free_port, run_process
from tests.end_to_end.conftest import SMALL

ROOT = Path(__file__).parents[2]
ROWS = yaml.safe_load((ROOT / "utils" / "migration" / "launchers.yaml").read_text())
TRIED = [row for row in ROWS if row["evidence"] == "tried"]
TRAINING = "examples_scaling/training"
WORDS = [
    *SMALL, "dataset.seq_len=16", "dataset.path_train=synthetic", "dataset.path_eval=null",
    "model.n_tokens=100", "model.d_model=16", "model.n_heads=2", "model.n_layers=1",
    "lr_scheduler.total_tokens=null", "lr_scheduler.warmup_tokens=null", "lr_scheduler.total_iterations=4",
]  # fmt: skip


def describe(row: dict) -> str:
    return f"{row['launcher']} {row['options']}"


def make_command(row: dict, folder: Path) -> str:
    """Return the row's command with its files, port and run filled in."""
    (folder / "hosts").write_text("localhost slots=2\n")
    (folder / "hosts3").write_text("localhost slots=3\n")
    (folder / "ranks").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    (folder / "hydra").write_text("127.0.0.1:2\n")
    (folder / "logs").mkdir()
    run = f"tools/pretrain.py {TRAINING}/small.yaml {' '.join(WORDS)} logging.run_dir={folder / 'run'}"
    return row["command"].format(
        run=run, port=free_port(), hostfile=folder / "hosts", hostfile3=folder / "hosts3",
        hydra=folder / "hydra",
        ranks=folder / "ranks", folder=folder / "logs", training=TRAINING,
    )  # fmt: skip


def check_result(folder: Path, output: str) -> None:
    result = read_json(folder / "run" / RESULT)
    assert result is not None, output
    assert (result["n_ranks"], result["step"]) == (2, 4), output


def test_every_row_has_evidence_and_those_tried_a_command() -> None:
    for row in ROWS:
        assert row.keys() <= {"launcher", "options", "evidence", "command", "note"}
        assert row["evidence"] in ("tried", "tried by hand", "read", "not tried")
        assert ("command" in row) == (row["evidence"] == "tried")
        assert row["evidence"] == "tried" or row["note"]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "row", [row for row in TRIED if not row["launcher"].startswith("srun")], ids=describe
)
def test_an_option_that_was_tried_trains_two_ranks(row: dict, tmp_path: Path) -> None:
    program = row["launcher"].split()[0]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if shutil.which(program, path=path) is None:
        pytest.skip(f"no {program}")
    if program == "mpirun" and "4.1" not in run_process(["mpirun", "--version"]).stdout:
        pytest.skip("the options are Open MPI 4's")
    variables = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "DS_ACCELERATOR": "cpu"}
    done = run_process(["bash", "-c", make_command(row, tmp_path)], ROOT, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    check_result(tmp_path, done.stdout + done.stderr)


@pytest.mark.slow
@pytest.mark.ranks
def test_the_options_of_srun_that_were_tried_train_two_ranks(slurm, tmp_path: Path) -> None:
    rows = [row for row in TRIED if row["launcher"].startswith("srun")]
    assert len(rows) >= 4
    for i, row in enumerate(rows):
        (tmp_path / str(i)).mkdir()
        output = slurm("bash", "-c", make_command(row, tmp_path / str(i)), cwd=ROOT, PYTHONPATH=str(ROOT))
        check_result(tmp_path / str(i), output)
