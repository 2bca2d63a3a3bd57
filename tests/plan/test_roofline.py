"""Predicted step times, compared with tables computed by hand and with arithmetic."""

import pytest

from megatron.config.presets import load_named_shape
from megatron.config.schema import ModelConfig
from megatron.plan.count import n_params
from megatron.plan.hardware import load_devices
from megatron.plan.roofline import EAGER, StepSettings, predict_step

H200 = load_devices()["H200"]


def make_model(size: str) -> ModelConfig:
    return ModelConfig(size=size, **load_named_shape(size), n_tokens=50257, vocab_rows=50304)


# torchtitan's MFU in percent, from an independent hand computation of the same budget: eager with
# FlashAttention 2, eager with cuDNN, then cumulatively compiled blocks, fused loss, bf16 stream, 32k tokens
COLUMNS = (
    (EAGER, 16384),
    (StepSettings(compiled=False, loss="chunked", stream="float32"), 16384),
    (StepSettings(loss="chunked", stream="float32"), 16384),
    (StepSettings(stream="float32"), 16384),
    (StepSettings(), 16384),
    (StepSettings(), 32768),
)
WATERFALL = {
    ("425M", True): (39.8, 40.9, 51.2, 56.6, 58.0, 58.7),
    ("425M", False): (39.6, 41.5, 52.1, 55.3, 56.6, 57.2),
    ("1143M", True): (46.1, 47.2, 58.1, 61.2, 62.5, 63.3),
    ("1143M", False): (44.6, 46.6, 57.1, 58.8, 60.0, 60.7),
    ("106M", True): (27.5, 28.6, 36.3, 44.2, 45.4, 45.8),
    ("106M", False): (27.7, 29.6, 38.0, 42.9, 44.1, 44.5),
    ("44M", True): (22.9, 23.6, 28.0, 39.6, 40.5),
    ("44M", False): (26.1, 27.6, 33.9, 43.4, 44.5),
    ("7M", True): (7.9, 8.0, 8.3, 18.2, 18.4),
    ("7M", False): (11.7, 12.0, 12.8, 27.9, 28.2),
}


@pytest.mark.parametrize(("size", "causal"), WATERFALL)
def test_the_waterfall_of_mfu_matches_a_budget_computed_by_hand(size: str, causal: bool) -> None:
    tolerance = 1.0 if size in ("425M", "1143M") else 3.0
    got = []
    for (settings, tokens), expected in zip(COLUMNS, WATERFALL[size, causal], strict=False):
        # the small sizes of that budget are without gaps between launches
        settings = settings if tolerance == 1.0 else StepSettings(**{**vars(settings), "graph": True})
        step = predict_step(make_model(size), 2048, causal, H200, settings, microbatch_tokens=tokens)
        got.append((100 * step.mfu, expected))
    assert all(abs(mfu - expected) <= tolerance for mfu, expected in got), got


def test_a_part_is_its_count_divided_by_its_rate() -> None:
    shape = {"d_model": 1280, "d_ff": 2560, "d_head": 128, "n_heads": 10, "n_layers": 2}
    model = ModelConfig(**shape, n_tokens=8191, vocab_rows=8192)
    sizes = {"microbatch_tokens": 8192, "tokens_per_step": 81920}
    step = predict_step(model, 1024, False, H200, StepSettings(), **sizes)
    weights = 2 * (4 * 1280 * 1280 + 3 * 1280 * 2560)
    rate, bytes_per_s = 0.657 * 989e12, 0.81 * 4.8e12
    assert step.parts["block products"] == pytest.approx(6 * weights / rate)
    # half of the positions are predicted
    assert step.parts["head"] == pytest.approx(3 * 8192 * 1280 / rate)
    assert step.parts["attention"] == pytest.approx(12 * 2 * 1280 * 1024 / (0.506 * 989e12))
    assert step.parts["elementwise"] == pytest.approx(2 * (60 * 1280 + 18 * 2560) / bytes_per_s)
    # one chunk of 4,096 rows
    assert step.parts["loss"] == pytest.approx((3 * 8192 + 12 * 8192 * 1280 / 8192) / bytes_per_s)
    assert step.parts["casts"] == pytest.approx(18 * n_params(model) / 8192 / bytes_per_s)
    assert step.parts["optimizer"] == pytest.approx(32 * n_params(model) / 81920 / bytes_per_s)


def test_a_small_model_waits_for_launches_unless_its_step_is_a_graph() -> None:
    model = make_model("7M")
    # 4,096 tokens: 82 + 89 x 3 + 14.7 x 4 launches of 9.3 us take 3.8 ms
    eager = StepSettings(compiled=False, loss="chunked", stream="float32")
    step = predict_step(model, 2048, True, H200, eager, microbatch_tokens=4096)
    assert step.seconds_per_token * 4096 == pytest.approx((82 + 89 * 3 + 14.7 * 4) * 9.3e-6)
    graph = StepSettings(graph=True)
    replayed = predict_step(model, 2048, True, H200, graph, microbatch_tokens=4096)
    assert "launches" not in replayed.parts and replayed.tokens_per_s > 2 * step.tokens_per_s


def test_recomputed_blocks_take_longer_at_equal_mfu_flops() -> None:
    model = make_model("1143M")
    plain = predict_step(model, 2048, True, H200, StepSettings())
    again = predict_step(model, 2048, True, H200, StepSettings(recompute=True))
    assert again.parts["block products"] == pytest.approx(4 / 3 * plain.parts["block products"])
    assert again.flops_mfu == plain.flops_mfu and again.mfu < plain.mfu
