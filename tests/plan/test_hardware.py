"""Speeds relative to the peak of devices."""

from dataclasses import replace

import pytest

from megatron.config.schema import ModelConfig
from megatron.plan.count import flops_per_token_executed, flops_per_token_mfu, mfu_formula
from megatron.plan.hardware import find_device
from megatron.train.metrics_logger import compute_mfu

# by the name that the driver gives. MI250X: 383 for both dies, of which torch shows each as a device
PEAKS = {
    "NVIDIA A100-SXM4-80GB": 312, "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H200": 989,
    "NVIDIA B200": 2250, "NVIDIA GB200": 2250, "AMD Instinct MI300X": 1300, "NVIDIA GH200 480GB": 989,
    "AMD Instinct MI250X": 191.5, "NVIDIA GeForce RTX 3090": 71, "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5, "NVIDIA L40S": 362.05, "Tesla T4": 65,
    "NVIDIA GeForce RTX 3090 Ti": None, "NVIDIA GeForce RTX 4090 D": None,
    "NVIDIA GeForce RTX 5090 Laptop GPU": None, "NVIDIA L40": None, "H1000": None, "XH100": None,
}  # fmt: skip


def test_the_peak_is_found_by_the_name_that_the_driver_gives() -> None:
    devices = {name: find_device(name) for name in PEAKS}
    assert {name: device and device.peak_tflops for name, device in devices.items()} == PEAKS


def test_llama_3_8b_at_17581_tokens_a_second_uses_45_percent_of_a_b200() -> None:
    # 8,030,261,248 parameters, of which the embedding's 128,256 x 4,096 are only looked up
    flops = mfu_formula(8_030_261_248 - 128_256 * 4096, n_layers=32, width=32 * 128, seq_len=8192)
    assert flops / 1e9 == pytest.approx(57.914, abs=1e-3)
    tflops, mfu = compute_mfu(17_581, flops, PEAKS["NVIDIA B200"])
    # the published tokens per second are rounded: half a token is 0.03 TFLOP/s
    assert tflops == pytest.approx(1018.20, abs=0.03)
    assert f"{mfu:.2%}" == "45.25%"


def test_executed_flops_exclude_the_future_and_unpredicted_positions() -> None:
    model = ModelConfig(d_model=8, d_ff=16, d_head=4, n_heads=2, n_layers=3, n_tokens=100, vocab_rows=128)
    # forward FLOPs of ten tokens, counted position by position
    matrices = 3 * (4 * 64 + 3 * 128)
    seen_causal = sum(s + 1 for s in range(10))
    causal = 2 * sum(matrices + 1024 for _ in range(10)) + 2 * 3 * 2 * 8 * seen_causal
    assert flops_per_token_executed(model, 10, True, 1.0) == pytest.approx(3 * causal / 10)
    half = 2 * 10 * matrices + 2 * 5 * 1024 + 2 * 3 * 2 * 8 * 100
    assert flops_per_token_executed(model, 10, False, 0.5) == pytest.approx(3 * half / 10)
    # torchtitan's 6 N also counts the gains of norms
    whole = flops_per_token_executed(model, 10, False, 1.0) + 6 * 8 * (2 * 3 + 1)
    assert flops_per_token_mfu(model, 10) == pytest.approx(whole)
    assert flops_per_token_mfu(replace(model, tied_embedding=False), 10) == pytest.approx(whole)
