"""Launch scripts of Megatron are run with recorders in place of their launchers."""

import subprocess
from pathlib import Path

import pytest

from megatron.config import megatron_script
from megatron.config.megatron_rules import translate_command
from megatron.config.megatron_script import record_launch_script
from tests.wrong_values import read_refusal

# constructs of published scripts: arrays, arithmetic, here-documents, sourced files, values of python
SCRIPT = Path(__file__).with_name("megatron_launch.txt").read_text()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "shape.sh").write_text("SHAPE=(64 4)\n")
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    return path


def test_a_script_gives_its_words_and_the_files_that_it_writes(script: Path) -> None:
    words, texts = record_launch_script(script, ["old"])
    assert words[:3] == ["--nproc_per_node", "4", "--nnodes"]
    assert words[words.index("pretrain_gpt.py") :] == [
        "pretrain_gpt.py", "--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "2",
        "--seq-length", "128", "--max-position-embeddings", "128", "--clip-grad", "0.5", "--train-samples",
        "80", "--data-path", "data/a b", "--split", "100", "--lr", "1e-3",
        "--global-batch-size", "8", "--swiglu", "--save", "runs/trial", "--deepspeed", "--deepspeed_config",
        "./ds/config.json", "--load", f"{Path.cwd()}/old",
    ]  # fmt: skip
    translation = translate_command(words, texts=texts)
    assert translation.settings["dataset"]["path_train"] == "data/a b"
    assert '"train_batch_size": 8' in (translation.deepspeed_json or "")
    assert translation.settings["dist"]["sharding_stage"] == "zero1"


def test_variables_of_the_environment_reach_the_script(script: Path, monkeypatch) -> None:
    monkeypatch.setenv("GPUS", "2")
    words, _ = record_launch_script(script)
    assert words[1] == "2"


def test_what_cannot_be_recorded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_script, "LIMIT_S", 0.5)
    for line, message in (
        ("ssh host torchrun a.py", "it calls ssh, which runs elsewhere"),
        ("x=$(scp a b)", "it calls scp, which runs elsewhere"),
        ("sbatch job.sh", "it calls sbatch, which runs elsewhere"),
        ("/opt/bin/torchrun a.py --lr 1", "it calls /opt/bin/torchrun, a path"),
        ("exec $CONDA/bin/python a.py --lr 1", "it calls $CONDA/bin/python, a path"),
        ("~/venv/bin/deepspeed a.py --lr 1", "it calls ~/venv/bin/deepspeed, a path"),
        ("s''sh host; torchrun a.py", "no launcher got a .py file with arguments"),
        ("exit 1", "no launcher got a .py file with arguments"),
        ("torchrun a.py --lr 1; sleep 60", "did not end within 0.5 s"),
    ):
        (tmp_path / "ran").unlink(missing_ok=True)
        (tmp_path / "train.sh").write_text(f"touch {tmp_path}/ran\n{line}\n")
        message_of_error = read_refusal(lambda: record_launch_script(tmp_path / "train.sh"))
        assert message in str(message_of_error)
        # a script that is refused for its text has not begun
        assert (tmp_path / "ran").exists() == ("it calls" not in message)


def test_no_process_of_a_script_survives_it(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("sleep 50 & echo $! > $1; read line; torchrun a.py --lr 1 --x $line\n")
    words, _ = record_launch_script(tmp_path / "train.sh", [str(tmp_path / "pid")])
    assert words == ["a.py", "--lr", "1", "--x"]
    command = ["ps", "-o", "stat=", (tmp_path / "pid").read_text()]
    state = subprocess.run(command, capture_output=True, text=True).stdout
    assert state.strip() in ("", "Z")
