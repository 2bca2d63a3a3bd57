"""Tests of tools/bench/gpu.py on a CPU: every kind of cell, its records, the checks, the bundle of wheels."""

import importlib
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from megatron.plan.hardware import DEVICES
from megatron.plan.roofline import predict_step

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def bench_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(root / "tools" / "bench"))


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_the_most_important_cells_come_first_and_differ_in_one_setting() -> None:
    cells = load("gpu_bench.cells").list_cells()
    names = [cell.name for cell in cells]
    assert names[:4] == [
        "ours/425M/AR/default", "ours/425M/MDM/default", "ours/1143M/AR/default", "ours/1143M/MDM/default",
    ]  # fmt: skip
    assert len(set(names)) == len(names) and 24 <= len(names) <= 32
    assert {cell.size for cell in cells} == {"425M", "1143M", "106M", "44M", "7M"}
    for cell in cells:
        changed = [bool(cell.dist), cell.attention is not None, cell.unfused_loss, cell.rows != 8]
        assert sum(changed) == (cell.setting != "default"), cell.name
    # all cells fit into two commands of 9 minutes by the prediction for an H100
    args = SimpleNamespace(device="cuda", seq_len=2048, accumulate=2, steps=50)
    gpu = load("gpu")
    n_largest = sum(gpu.expect_seconds(cell, args) for cell in cells[:4])
    assert n_largest < 9 * 60


def test_every_kind_of_cell_takes_a_step_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_cells = load("gpu_bench.cells")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    losses, skipped = {}, {}
    for cell in gpu_cells.list_cells(["tiny"]):
        try:
            with gpu_cells.use_kernels(cell) if cell.attention is None else partial(nothing)():
                step = gpu_cells.build_step(cell, CPU, 32, 2)
                losses[cell.name] = float(step(0))
        except gpu_cells.SkippedCellError as reason:
            skipped[cell.name] = str(reason)
    torch._dynamo.reset()
    # weights of std 0.02: the loss is that of a uniform distribution over 256 rows, or of its bound
    assert all(4.0 < loss < 8.0 for loss in losses.values()), losses
    sides = {"ours", "nanogpt", "nanogpt-compiled", "transformers"}
    assert {name.split("/")[0] for name in losses} == sides
    attention = [reason for name, reason in skipped.items() if "attention" in name or "graph" in name]
    assert attention and set(attention) == {"needs CUDA"}
    missing = set(skipped.values()) - {"needs CUDA"}
    assert all("this code has no" in reason for reason in missing)


class nothing:  # noqa: N801
    """A context that does nothing."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


def test_the_other_sides_compute_the_logits_of_our_model() -> None:
    gpu_cells, baselines = load("gpu_bench.cells"), load("gpu_bench.baselines")
    model = gpu_cells.make_model("tiny")
    ours = Gpt(model).eval()
    init_weights(ours, 0)
    tokens = torch.from_numpy(gpu_cells.draw_tokens(model, 2, 31, 0))
    expected = ours(tokens, causal=True)
    for network in (baselines.NanoGpt(model), baselines.build_llama(model, 32)):
        baselines.load_our_weights(network, ours)
        out = network(tokens)
        logits = out if isinstance(out, torch.Tensor) else out.logits
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


def test_a_record_is_stored_per_cell_and_the_next_command_measures_the_rest(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu = load("gpu")
    words = ["--device", "cpu", "--sizes", "tiny", "--steps", "2", "--out", str(tmp_path)]
    assert gpu.main([*words, "--minutes", "0", "--only", "ours/tiny/AR/default"]) == 0
    assert "not measured" in capfd.readouterr().out and not (tmp_path / "cells.jsonl").exists()
    assert gpu.main([*words, "--only", "ours/tiny/AR/default", "nanogpt/", "attention flash"]) == 0
    lines = (tmp_path / "cells.jsonl").read_text().splitlines()
    records = {record["cell"]: record for record in map(json.loads, lines)}
    ours = records["ours/tiny/AR/default"]
    # 2 rows of 32 tokens, 2 microbatches
    assert ours["tokens_per_step"] == 128 and len(ours["repeats"]) == 2 and ours["unit"] == "tokens/s"
    assert ours["value"] == pytest.approx(128 / ours["step_ms"] * 1e3)
    assert ours["kernels"] and sum(kernel["share"] for kernel in ours["kernels"]) <= 1.0001
    assert records["ours/tiny/AR/attention flash"]["skipped"] == "needs CUDA"
    table = (tmp_path / "table.md").read_text()
    ratio = ours["value"] / records["nanogpt/tiny/AR/default"]["value"]
    assert f"ours / nanogpt, tiny AR: {ratio:.2f} times" in table
    assert gpu.main([*words, "--only", "ours/tiny/AR/default"]) == 0
    assert (tmp_path / "cells.jsonl").read_text().splitlines() == lines


def test_a_worker_that_crashes_or_hangs_fails_one_cell_only(tmp_path: Path) -> None:
    gpu = load("gpu")
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys, time\n"
        "for line in sys.stdin:\n"
        "    if line == 'crash\\n': os._exit(9)\n"
        "    if line == 'hang\\n': time.sleep(60)\n"
        '    print(\'{"cell": "fine", "value": 1}\', flush=True)\n'
    )
    worker = gpu.Worker([])
    worker.argv = [sys.executable, str(script)]
    try:
        assert worker.measure("crash", 20.0) == {"cell": "crash", "failed": "the process ended with status 9"}
        assert worker.measure("hang", 0.5)["failed"].startswith("exceeded")
        assert worker.measure("fine", 20.0)["value"] == 1
    finally:
        worker.stop()


def test_predictions_are_printed_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    gpu, gpu_cells = load("gpu"), load("gpu_bench.cells")
    assert gpu.main(["--predict", "--hardware", "H200", "--sizes", "425M"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("predicted, not measured: H200")
    cell = gpu_cells.list_cells()[0]
    step = predict_step(
        gpu_cells.make_model("425M"), 2048, True, DEVICES["H200"], cell.predicted,
        microbatch_tokens=16384, tokens_per_step=32768,
    )  # fmt: skip
    line = next(line for line in out.splitlines() if line.startswith("ours/425M/AR/default"))
    assert line.split()[1:3] == [f"{step.tokens_per_s:,.0f}", f"{100 * step.mfu:.1f}"]
    assert gpu.main(["--predict", "--hardware", "T4"]) == 1
    assert "got T4, expected a GPU in" in capsys.readouterr().err


@pytest.mark.parametrize("objective", ["autoregressive", "masked_diffusion"])
def test_gradients_match_float64_and_a_wrong_weight_fails(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parity = load("gpu_bench.parity")
    assert parity.check_gradients(objective, "float32", CPU, {})["status"] == "passed"
    build = parity.build_engine

    def build_wrong(*args: Any, **more: Any) -> Any:
        engine = build(*args, **more)
        with torch.no_grad():
            engine.passes.model.blocks[1].mlp.up.weight.mul_(1.05)
        return engine

    monkeypatch.setattr(parity, "build_engine", build_wrong)
    assert parity.check_gradients(objective, "bfloat16", CPU, {})["status"] == "failed"


def test_resuming_is_compared_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    parity = load("gpu_bench.parity")
    assert parity.check_resume("autoregressive", CPU)["status"] == "passed"
    assert parity.check_graph("autoregressive", CPU)["detail"] == "needs CUDA"
    # an engine that loads nothing
    monkeypatch.setattr(parity.TorchEngine, "load_state_dict", lambda self, state: None)
    check = parity.check_resume("autoregressive", CPU)
    assert check["status"] == "failed" and "two uninterrupted runs are equal" in check["detail"]


@pytest.mark.slow
def test_two_ranks_equal_one() -> None:
    assert load("gpu_bench.parity").check_ranks(CPU)["status"] == "passed"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_all_checks_pass_on_a_gpu() -> None:
    checks = load("gpu_bench.parity").run_checks("cuda")
    assert not [check for check in checks if check["status"] == "failed"]


# imports only packages of torch, of the bundle and of this project, and takes a step
WITH_BUNDLE_ONLY = """
import importlib.metadata as m, sys
allowed = set(sys.argv[1:])
class Refuse:
    owners = m.packages_distributions()
    def find_spec(self, name, path=None, target=None):
        owners = self.owners.get(name.partition(".")[0], ())
        if owners and not allowed & {owner.lower() for owner in owners}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Refuse())
sys.path.insert(0, "tools/bench")
import gpu, torch
from gpu_bench import cells, parity, table
assert float(cells.build_step(cells.list_cells(["tiny"])[0], torch.device("cpu"), 32, 1)(0)) > 0
"""
OF_TORCH = ("torch", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec")


@pytest.mark.slow
def test_the_bundle_contains_what_the_bench_imports_besides_torch(root: Path) -> None:
    bundle = load("gpu_bundle")
    bundled = [name.lower() for name in (*bundle.PACKAGES, *bundle.SOURCES)]
    names = [*OF_TORCH, *bundled, "megatron-scaling"]
    run = partial(subprocess.run, cwd=root, capture_output=True, text=True, timeout=200, check=False)
    full = run([sys.executable, "-c", WITH_BUNDLE_ONLY, *names])
    assert full.returncode == 0, full.stderr
    for missing in ("omegaconf", "antlr4-python3-runtime"):
        less = run([sys.executable, "-c", WITH_BUNDLE_ONLY, *(name for name in names if name != missing)])
        assert "ModuleNotFoundError" in less.stderr
    pins = bundle.read_pins()
    assert pins["omegaconf"].count(".") == 2 and "torch" in pins


def test_the_bundle_installs_only_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bundle = load("gpu_bundle")
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(bundle, "run_pip", lambda *words: calls.append(words))
    monkeypatch.setattr(bundle, "is_installed", lambda name, module: name != "omegaconf")
    assert bundle.install_bundle(tmp_path, tmp_path / "site") == ["omegaconf"]
    ((command, *words),) = calls
    assert command == "install" and words[-1] == "omegaconf" and {"--no-index", "--no-deps"} <= set(words)
