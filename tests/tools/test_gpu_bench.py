"""Tests of tools/bench/gpu.py on a CPU: every kind of cell, its records, the checks, the bundle of wheels."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from megatron.plan.hardware import DEVICES
from megatron.plan.roofline import RATES, predict_step

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
            with gpu_cells.use_kernels(cell, CPU, 32) if cell.attention is None else partial(nothing)():
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
    assert ours["settings"]["attention"] == "cpu" and ours["graph_replays"] == 0
    assert ours["kernels"] and sum(kernel["share"] for kernel in ours["kernels"]) <= 1.0001
    assert records["ours/tiny/AR/attention flash"]["skipped"] == "needs CUDA"
    table = (tmp_path / "table.md").read_text()
    ratio = ours["value"] / records["nanogpt/tiny/AR/default"]["value"]
    assert f"ours / nanogpt, tiny AR: {ratio:.2f} times" in table
    assert gpu.main([*words, "--only", "ours/tiny/AR/default"]) == 0
    assert (tmp_path / "cells.jsonl").read_text().splitlines() == lines


def test_a_worker_that_crashes_or_hangs_fails_one_cell_only(tmp_path: Path) -> None:
    worker_module = load("gpu_bench.worker")
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys, time\n"
        "for line in sys.stdin:\n"
        "    if line == 'crash\\n': os._exit(9)\n"
        "    if line == 'hang\\n': time.sleep(60)\n"
        '    print(\'{"cell": "fine", "value": 1}\', flush=True)\n'
    )
    worker = worker_module.Worker([sys.executable, str(script)])
    try:
        assert worker.measure("crash", 20.0) == {"cell": "crash", "failed": "the process ended with status 9"}
        assert worker.measure("hang", 0.5)["failed"].startswith("exceeded")
        assert worker.measure("fine", 20.0)["value"] == 1
    finally:
        worker.stop()


SERVE = """
import sys
sys.path.insert(0, sys.argv[1])
from gpu_bench.worker import serve
calls = []
def measure(name):
    calls.append(name)
    if name == "fault":
        try:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        except RuntimeError as error:
            raise ValueError("recording failed") from error
    if name == "wrong": raise ValueError("not of the device")
    return {"cell": name, "calls": len(calls)}
serve(measure)
"""


def test_a_cuda_error_ends_the_process_and_the_next_name_has_a_new_one(root: Path, tmp_path: Path) -> None:
    worker_module = load("gpu_bench.worker")
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    worker = worker_module.Worker([sys.executable, str(script), str(root / "tools" / "bench")])
    try:
        assert worker.measure("wrong", 20.0)["failed"] == "ValueError: not of the device"
        assert worker.measure("a", 20.0)["calls"] == 2
        failed = worker.measure("fault", 20.0)
        assert failed == {"cell": "fault", "failed": "ValueError: recording failed", "sticky": True}
        assert worker.process is None
        assert worker.measure("b", 20.0)["calls"] == 1
    finally:
        worker.stop()


def test_a_process_that_closed_its_input_is_replaced_once(tmp_path: Path) -> None:
    worker_module = load("gpu_bench.worker")
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys, time\n"
        "if sys.argv[1] == 'closed':\n"
        "    os.close(0); print('ready', flush=True); time.sleep(60)\n"
        "for line in sys.stdin: print('{\"value\": 1}', flush=True)\n"
    )
    worker = worker_module.Worker([sys.executable, str(script), "closed"])
    try:
        process = worker._start()
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        worker.command[-1] = "open"
        assert worker.measure("a", 20.0) == {"value": 1}
        assert worker.process is not process and process.poll() is not None
    finally:
        worker.stop()


def test_checks_are_written_one_by_one_and_stop_with_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu, parity = load("gpu"), load("gpu_bench.parity")
    names = ["MDM float32 against float64", "AR graph replay equals unrecorded steps"]
    assert set(names) <= set(parity.list_checks(CPU))
    monkeypatch.setattr(parity, "list_checks", lambda device: dict.fromkeys([*names, "no such check"]))
    written = []
    monkeypatch.setattr(
        parity,
        "describe_check",
        lambda check: written.append(len(json.loads((tmp_path / "parity.json").read_text()))),
    )
    words = ["--device", "cpu", "--no-cells", "--parity", "--out", str(tmp_path)]
    assert gpu.main(words) == 1
    checks = json.loads((tmp_path / "parity.json").read_text())
    assert [check["name"] for check in checks] == [*names, "no such check"] and written == [1, 2, 3]
    # the worker has the real list
    assert [check["status"] for check in checks] == ["passed", "skipped", "failed"]
    assert "failed: no such check" in capfd.readouterr().out
    assert gpu.main([*words, "--minutes", "0"]) == 1
    checks = json.loads((tmp_path / "parity.json").read_text())
    assert {check["status"] for check in checks} == {"not run"} and not (tmp_path / "cells.jsonl").exists()


def test_attention_is_recognized_by_its_kernels_and_another_one_is_an_error() -> None:
    measure, gpu_cells = load("gpu_bench.measure"), load("gpu_bench.cells")
    flash = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>"
    cudnn = "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x64"
    efficient = "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)"
    others = ["triton_poi_fused__scaled_dot_product_flash_attention_0", "ampere_bf16_s16816gemm"]
    for name, kernel in (("flash", flash), ("cudnn", cudnn), ("efficient", efficient)):
        assert measure.find_attention([kernel, *others]) == [name]
    cell = gpu_cells.force_attention("425M", gpu_cells.AR, "flash")
    measure.check_run(cell, 0, [flash, *others])
    for wrong, got in (([cudnn], "cudnn"), (others, "none"), ([flash, cudnn], "cudnn, flash")):
        with pytest.raises(RuntimeError, match=f"got attention kernels of {got}, expected flash"):
            measure.check_run(cell, 0, wrong)
    with pytest.raises(RuntimeError, match="got no replay of a CUDA graph"):
        measure.check_run(gpu_cells.ours("7M", gpu_cells.AR), 0, [flash])


def test_a_cell_has_its_own_compiled_code_and_attention_and_restores_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.kernels import attention_backend
    from megatron.train import build

    gpu_cells, config = load("gpu_bench.cells"), torch.compiler.config
    before = config.cache_key_tag
    assert gpu_cells.PROBED_SAMPLES == build.PROBED_SAMPLES
    shapes = []

    def choose(shape: Any, *_: Any) -> Any:
        shapes.append(shape)
        return attention_backend.AttentionChoice("efficient", "fastest measured", {"efficient": 1.0})

    monkeypatch.setattr(gpu_cells, "choose_attention_backend", choose)
    tags = set()
    for cell in (gpu_cells.ours("7M", gpu_cells.MD), gpu_cells.force_attention("7M", gpu_cells.AR, "flash")):
        with pytest.raises(KeyError), gpu_cells.use_kernels(cell, CPU, 64) as choice:
            tags.add(config.cache_key_tag)
            assert attention_backend._active == ([] if choice is None else ["efficient"])
            raise KeyError
        assert config.cache_key_tag == before and not attention_backend._active
    assert len(tags | {before}) == 3
    (shape,) = shapes
    model = gpu_cells.make_model("7M")
    assert (shape.n_samples, shape.n_heads, shape.n_positions) == (8, model.n_heads, 64) and not shape.causal


def test_cells_with_graphs_require_them_and_report_reserved_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_cells, measure, table = (load(f"gpu_bench.{name}") for name in ("cells", "measure", "table"))
    gpu_device = torch.device("cuda", 0)
    small, large = gpu_cells.ours("7M", gpu_cells.AR), gpu_cells.ours("425M", gpu_cells.AR)
    assert gpu_cells.choose_dist(small, gpu_device) == {"cuda_graphs": True}
    assert gpu_cells.choose_dist(small, CPU) == gpu_cells.choose_dist(large, gpu_device) == {}
    off = gpu_cells.switch_graph("7M", gpu_cells.AR)
    assert gpu_cells.choose_dist(off, gpu_device) == {"cuda_graphs": False} and not off.expects_graph
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 3 * 2**30)
    graph, eager = (measure.read_memory(gpu_device, has_graph) for has_graph in (True, False))
    assert (graph["memory_gib"], graph["memory_kind"]) == (3.0, "reserved")
    assert (eager["memory_gib"], eager["memory_kind"]) == (1.0, "allocated")
    record = {"cell": "a", "value": 1.0, "step_ms": 1.0, "kernels_per_step": 1.0, **graph}
    assert "3.0 reserved" in table.format_row(record)


def test_replays_are_plays_without_a_run() -> None:
    gpu_cells = load("gpu_bench.cells")
    step = gpu_cells.build_step(gpu_cells.list_cells(["tiny"])[0], CPU, 32, 2)
    assert step.count_replays() == 0
    step.engine.static_step = step.engine.build_static_step(record=False)
    for i in range(3):
        step(i)
    # 3 updates and 6 microbatches, all of them run
    assert sum(step.engine.static_step.n_runs.values()) == 9 and step.count_replays() == 0
    step.engine.static_step.n_runs["update"] -= 1
    assert step.count_replays() == 1


def test_predictions_are_printed_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    gpu, gpu_cells = load("gpu"), load("gpu_bench.cells")
    assert gpu.main(["--predict", "--hardware", "H200", "--sizes", "425M"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"H200: {RATES}")
    assert "unmeasured, probably high" in out and "79% of the peak in products" in out
    cell = gpu_cells.list_cells()[0]
    step = predict_step(
        gpu_cells.make_model("425M"), 2048, True, DEVICES["H200"], cell.predicted,
        microbatch_tokens=16384, tokens_per_step=32768,
    )  # fmt: skip
    line = next(line for line in out.splitlines() if line.startswith("ours/425M/AR/default"))
    assert line.split()[1:3] == [f"{step.tokens_per_s:,.0f}", f"{100 * step.mfu:.1f}"]
    assert gpu.main(["--predict", "--hardware", "V100"]) == 1
    assert "got V100, expected a GPU in" in capsys.readouterr().err


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


@pytest.mark.parametrize("objective", ["autoregressive", "masked_diffusion"])
def test_dropout_and_documents_match_float64_and_other_ones_fail(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parity = load("gpu_bench.parity")

    def check() -> str:
        return parity.check_gradients(objective, "float32", CPU, {}, parity.SPECIAL)["status"]

    assert check() == "passed"
    build = parity.build_engine
    for wrong in ({"hidden_dropout": 0.0}, {"attention_dropout": 0.0}, {"eod_id": 8}):
        changed = replace(parity.SPECIAL, **wrong)
        monkeypatch.setattr(
            parity,
            "build_engine",
            lambda objective, world, _, m=changed, **more: build(objective, world, m, **more),
        )
        assert check() == "failed", wrong


def test_resuming_is_compared_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    parity = load("gpu_bench.parity")
    assert parity.check_resume("autoregressive", CPU)["status"] == "passed"
    assert parity.check_graph("autoregressive", CPU)["detail"] == "needs CUDA"
    # an engine that loads nothing
    monkeypatch.setattr(parity.TorchEngine, "load_state_dict", lambda self, state: None)
    check = parity.check_resume("autoregressive", CPU)
    assert check["status"] == "failed" and "two uninterrupted runs are equal" in check["detail"]


@pytest.mark.parametrize("objective", ["autoregressive", "masked_diffusion"])
def test_replays_are_compared_with_padded_steps_bit_for_bit(objective: str) -> None:
    parity = load("gpu_bench.parity")
    world = parity.World(0, 1, 0, CPU)
    n_graphs, losses, weights = parity.take_static_steps(objective, world, record=False)
    assert n_graphs == 0 and len(losses) == parity.GRAPH_STEPS
    same = parity.compare_graph(3, losses, weights, n_graphs, losses, weights)
    assert same == {"status": "passed", "detail": "equal bits after 16 steps, 3 graphs"}
    # nothing but the update was recorded
    assert parity.compare_graph(1, losses, weights, 0, losses, weights)["status"] == "failed"
    other = {name: weight.clone() for name, weight in weights.items()}
    weight = next(iter(other.values()))
    weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(9.0))
    assert parity.compare_graph(3, losses, other, 0, losses, weights)["status"] == "failed"


@pytest.mark.slow
def test_two_ranks_equal_one() -> None:
    assert load("gpu_bench.parity").check_ranks(CPU)["status"] == "passed"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_all_checks_pass_on_a_gpu(tmp_path: Path) -> None:
    assert load("gpu").main(["--no-cells", "--parity", "--out", str(tmp_path)]) == 0


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
    # torch is a range there, and not bundled
    pins = bundle.read_pins()
    assert pins["omegaconf"].count(".") == 2 and "torch" not in pins


def test_the_bundle_installs_only_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bundle = load("gpu_bundle")
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(bundle, "run_pip", lambda *words: calls.append(words))
    monkeypatch.setattr(bundle, "is_installed", lambda name, module: name != "omegaconf")
    assert bundle.install_bundle(tmp_path, tmp_path / "site") == ["omegaconf"]
    ((command, *words),) = calls
    assert command == "install" and words[-1] == "omegaconf" and {"--no-index", "--no-deps"} <= set(words)
