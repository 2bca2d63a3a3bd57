"""The examples of examples_scaling/mixture, and the Python code of MIXTURE.md."""

import re
import sys
from pathlib import Path

import pytest

from megatron.plan.run_dir import read_metrics
from tests.conftest import run_process
from tests.guide_commands import commands_of
from tests.tool_modules import Cli


@pytest.fixture
def folder(tmp_path: Path, scaling_data: Path) -> Path:
    """Return a folder with the files that the guide starts from."""
    name = "derived_slimpajama_schema.jsonl.gz"
    (tmp_path / "slimpajama").mkdir()
    (tmp_path / "slimpajama" / name).symlink_to(scaling_data / "redpajama_sample" / name)
    (tmp_path / "gpt2").symlink_to(scaling_data / "gpt2_tokenizer")
    return tmp_path


def run_script(words: list[str], folder: Path, root: Path) -> str:
    command = [sys.executable, root / words[0], *words[1:]]
    done = run_process(command, folder, PYTHONPATH=str(root), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_of_the_guide_prints_what_the_guide_shows(cli: Cli, root: Path, folder: Path) -> None:
    guide = root / "examples_scaling" / "training" / "MIXTURE.md"
    cli(*commands_of(guide)[0].words[1:], cwd=folder)
    code = r"```python\n((?:(?!```).)*)```\n\n```\n(.*?)```"
    ((script, output),) = re.findall(code, guide.read_text(), re.DOTALL)
    (folder / "ask.py").write_text(script)
    assert run_script([str(folder / "ask.py")], folder, root) == output


@pytest.mark.slow
def test_the_examples_read_a_mixture_locally_and_from_a_server(root: Path, folder: Path) -> None:
    text = next((folder / "slimpajama").iterdir())
    (folder / "work").mkdir()
    output = run_script(["examples_scaling/mixture/local.py", str(text), "work"], folder, root)
    assert output.startswith("registered 4,262 documents, 0 broken lines\n")
    assert output.endswith("one group resumes with chunk 6\n")
    shares = re.findall(r"C4': '([\d.]+)', 'RedPajamaGithub': '([\d.]+)'", output)
    assert len(shares) == 6
    assert all(abs(float(c4) - 0.5) < 0.01 and abs(float(code) - 0.3) < 0.01 for c4, code in shares)
    output = run_script(["examples_scaling/mixture/server.py", "work/mixture.yaml"], folder, root)
    assert "8 chunks of 512 documents, the same" in output


@pytest.mark.slow
def test_a_static_then_an_ado_mixture_train_on_the_sample_and_show_their_weights(
    cli: Cli, root: Path, folder: Path, scaling_data: Path
) -> None:
    """The CPU run of the guide, an eighth as long.

    It observes at every step, so that ADO has laws after 150.
    """
    guide = (root / "examples_scaling" / "training" / "MIXTURE.md").read_text()
    blocks = dict(re.findall(r"```yaml\n# (\w+).yaml\n(.*?)```", guide, re.DOTALL))
    texts = {"static": blocks["static"], "ado": blocks["ado"].replace("every_steps: 4", "every_steps: 1")}
    (folder / "tiny").mkdir()
    for name, inside in (("vocab.json", "gpt2-tiny-vocab.json"), ("merges.txt", "gpt2-tiny-merges.txt")):
        (folder / "tiny" / name).symlink_to(scaling_data / "megatron_openwebtext" / inside)
    cli(*["register", "catalog", "add", "slim", "slimpajama", "--preset", "slimpajama"], cwd=folder)
    config, shares = root / "examples_scaling" / "training" / "mixture_cpu.yaml", {}
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
        words = [f"dataset.mixture={name}.yaml", f"logging.run_dir=study/runs/{name}",
                 "lr_scheduler.total_iterations=200", "lr_scheduler.warmup_iterations=20"]  # fmt: skip
        run_script(["tools/pretrain.py", str(config), *words], folder, root)
        lines = [line for line in read_metrics(folder / "study/runs" / name) if line["kind"] == "train"]
        shares[name] = [list(line["weights"].values()) for line in lines]
        assert lines[-1]["loss"] < lines[0]["loss"] - 1
    assert all(share == shares["static"][0] for share in shares["static"])
    assert shares["ado"][10] == pytest.approx(shares["static"][0])  # the prior, as long as there are no laws
    assert max(abs(a - b) for a, b in zip(shares["ado"][-1], shares["ado"][0], strict=True)) > 0.02
    cli("make_report.py", "study", cwd=folder)
    assert "Weights of the mixture" in (folder / "study" / "report.html").read_text()
