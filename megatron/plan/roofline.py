"""Predicted time of a training step on one GPU, from counts of operations and bytes, before any run.

Seconds per token are the sum of parts: matrix products of blocks and head,
attention, elementwise passes over memory, loss, casts and sums of weights,
optimizer, and the time in which the GPU waits for launches. Each part is a
count divided by a rate. The rates are assumptions, not measurements, except
where a comment says so. No prediction was compared with a measurement:
published runs suggest that it is 8 to 12 points of MFU too high on a Hopper
GPU. Communication between GPUs is not counted.
"""

import bisect
import math
from dataclasses import dataclass, field

from megatron.config.schema import ModelConfig
from megatron.plan.count import flop_terms, flops_per_token_executed, flops_per_token_mfu, n_params
from megatron.plan.hardware import DeviceSpec

# Share of the peak in a block's and the head's matrix products, by d_model. A
# bf16 product of 8192^3 on random data was measured at 769 to 798 of an H200's
# 989 TFLOP/s. Assumed: 650 and 695 at d_model 1280 and 1792 with 16k rows, and
# less for narrow models, whose tiles and reductions are short.
GEMM_SHARE = ((128, 0.255), (512, 0.46), (640, 0.505), (1280, 0.657), (1792, 0.703), (8192, 0.79))
# Share of the peak in attention of the executed FLOPs, forward and backward:
# (causal, full), at S = 2048 and d_head = 128. All assumed: on a Hopper
# FlashAttention 2, which does not use its asynchronous matrix units (arXiv
# 2407.08608), 330 and 380 TFLOP/s; cuDNN and FlashAttention 3 430 and 500.
ATTENTION_SHARE = {"flash2": (0.334, 0.384), "cudnn": (0.435, 0.506)}
FLASH2_BEFORE_HOPPER = (0.50, 0.58)  # assumed for all slower devices; written for Ampere
HEAD_WIDTH_SHARE = ((32, 0.5), (64, 0.85), (128, 1.0))  # narrow heads: less arithmetic for each exponential
# Of the data sheet, in elementwise kernels. A copy was measured at 4.3 of an
# H200's 4.8 TB/s; assumed: 3.9.
BANDWIDTH_SHARE = 0.81
# Elementwise bytes per token and block, forward and backward: a D + b F, from
# traces of the step's operations
ELEMENTWISE_BYTES = {
    (False, "float32"): (320, 28),
    (False, "bfloat16"): (262, 28),
    (True, "float32"): (82, 18),
    (True, "bfloat16"): (60, 18),
}
# Bytes per logit: (autoregressive, masked diffusion, whose rows have weights),
# and the rows of a chunk. Each chunk adds a float32 gradient of the head: 12
# bytes per element (read, add, write).
LOSS_BYTES = {"chunked": (28, 36), "fused": (6, 6)}
CHUNK_LOGITS, FUSED_ROWS = 1 << 26, 16384  # elements of a chunk, and rows of a fused one
SUM_BYTES = 12
# A chunk of few rows leaves the gradient of its input, [rows, V] x [V, D],
# with too few tiles for all SMs.
SMALL_CHUNK_ROWS, SMALL_CHUNK_SHARE = 4096, 0.545
# Bytes per parameter and microbatch:
# casts of weights and gradients, sums of gradients
CAST_BYTES = {False: 13, True: 18}
ADAMW_BYTES = 32  # per parameter and step: 28 of the update, 4 of the norm
# Launches of a step: (fixed, per block, per chunk of the loss), counted in traces.
# Compiled counts are assumed: 21 products, 3 of attention,
# about 12 fused passes and 9 sums in a block.
LAUNCHES = {False: (82.0, 89.0, 14.7), True: (82.0, 45.0, 14.7)}
FUSED_LOSS_LAUNCHES = 6.0  # per chunk
LAUNCH_S, COMPILED_LAUNCH_S = 9.3e-6, 6.0e-6  # assumed: of Python and driver, per launch
# Published runs reach 40 to 47 % MFU,
# 8 to 12 points less than these rates give.
RATES = (
    f"predicted, unmeasured, probably high; assumed: up to {GEMM_SHARE[-1][1]:.0%} of the peak in products, "
    f"{ATTENTION_SHARE['cudnn'][0]:.0%} to {ATTENTION_SHARE['cudnn'][1]:.0%} in attention, "
    f"{BANDWIDTH_SHARE:.0%} of the bandwidth"
)
HALF = 0.5  # share of positions that masked diffusion predicts: the mean of a uniform masking rate


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Implementation of a training step.

    compiled    blocks are compiled
    loss        chunked: separate passes over chunks of 2^26 logits;
                fused: one pass, chunks of 16,384 rows
    stream      dtype of the residual stream
    attention   flash2, or cudnn, which includes FlashAttention 3
    graph       the whole step is replayed from a CUDA graph
    recompute   blocks are computed again in the backward
                pass (activation checkpointing "full")
    """

    compiled: bool = True
    loss: str = "fused"
    stream: str = "bfloat16"
    attention: str = "cudnn"
    graph: bool = False
    recompute: bool = False


EAGER = StepSettings(compiled=False, loss="chunked", stream="float32", attention="flash2")


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted seconds per token, by part, of one GPU."""

    parts: dict[str, float] = field(default_factory=dict)
    flops_mfu: float  # torchtitan's FLOPs per token
    flops_executed: float
    peak_flops: float

    @property
    def seconds_per_token(self) -> float:
        """Sum of all parts."""
        return math.fsum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        """Throughput."""
        return 1.0 / self.seconds_per_token

    @property
    def mfu(self) -> float:
        """Torchtitan's FLOPs per second as a fraction of the peak."""
        return self.flops_mfu * self.tokens_per_s / self.peak_flops

    @property
    def mfu_executed(self) -> float:
        """Executed FLOPs per second as a fraction of the peak."""
        return self.flops_executed * self.tokens_per_s / self.peak_flops


def predict_step(
    model: ModelConfig,
    seq_len: int,
    causal: bool,
    device: DeviceSpec,
    settings: StepSettings,
    *,
    microbatch_tokens: int = 16384,
    tokens_per_step: int = 524288,
) -> StepTime:
    """Predict the time per token of training steps in bf16 on one GPU.

    Example: 425M, autoregressive, S = 2048, H200, defaults: 3.25 us of block
    products, 0.59 of the head, 0.66 of attention, 0.64 elementwise, 0.09 loss,
    0.12 casts: 5.3 us, or 187,000 tokens a second and 58 % MFU.
    """
    predicted = 1.0 if causal else HALF
    terms = flop_terms(model, seq_len)
    peak, bandwidth = device.peak_tflops * 1e12, device.bandwidth_tbs * 1e12 * BANDWIDTH_SHARE
    gemm = peak * _interpolate(GEMM_SHARE, model.d_model)
    # causal: (S + 1) / 2 of S keys on average
    scores = terms["attention_scores"] * ((seq_len + 1) / (2 * seq_len) if causal else 1.0)
    # forward again: a third of forward plus backward
    again = 4 / 3 if settings.recompute else 1.0
    a, b = ELEMENTWISE_BYTES[settings.compiled, settings.stream]
    elementwise = (a * model.d_model + b * model.d_ff) * model.n_layers
    n, predicted_rows = n_params(model), max(1.0, microbatch_tokens * predicted)
    rows = min(_chunk_rows(model, settings.loss), predicted_rows)
    n_chunks = math.ceil(predicted_rows / rows)
    parts = {
        "block products": (terms["attention"] + terms["feed_forward"]) * again / gemm,
        "head": terms["head"] * predicted / gemm * _slow_down_chunks(rows, predicted_rows),
        "attention": scores * again / (peak * _attention_share(model, device, settings.attention, causal)),
        "elementwise": elementwise * again / bandwidth,
        "loss": _loss_bytes(model, settings.loss, causal, predicted, n_chunks, microbatch_tokens) / bandwidth,
        "casts": n * CAST_BYTES[settings.compiled] / microbatch_tokens / bandwidth,
        "optimizer": n * ADAMW_BYTES / tokens_per_step / bandwidth,
    }
    if not settings.graph:
        launch_s = COMPILED_LAUNCH_S if settings.compiled else LAUNCH_S
        host = count_launches(model, settings, n_chunks) * launch_s
        # launches overlap with the GPU's work:
        # it waits only if the host is slower
        parts["launches"] = max(0.0, host / microbatch_tokens - math.fsum(parts.values()))
    return StepTime(
        parts=parts,
        flops_mfu=flops_per_token_mfu(model, seq_len),
        flops_executed=flops_per_token_executed(model, seq_len, causal, predicted),
        peak_flops=peak,
    )


def count_launches(model: ModelConfig, settings: StepSettings, n_chunks: int) -> float:
    """Return the expected launches of a step with one microbatch."""
    fixed, per_block, per_chunk = LAUNCHES[settings.compiled]
    if settings.loss == "fused":
        per_chunk = FUSED_LOSS_LAUNCHES
    return fixed + per_block * model.n_layers + per_chunk * n_chunks


def _chunk_rows(model: ModelConfig, loss: str) -> float:
    """Return the rows of a chunk of the loss."""
    # a head of 50,304 rows: 2^26 / 50,304 = 1,334 rows
    return FUSED_ROWS if loss == "fused" else max(1, CHUNK_LOGITS // model.vocab_rows)


def _slow_down_chunks(rows: float, predicted_rows: float) -> float:
    """Return the factor of the head's time that small chunks cost; 1 if one chunk has all rows."""
    if rows >= min(SMALL_CHUNK_ROWS, predicted_rows):
        return 1.0
    # one of the head's three products has few tiles
    return 2 / 3 + 1 / 3 / SMALL_CHUNK_SHARE


def _loss_bytes(
    model: ModelConfig, loss: str, causal: bool, predicted: float, n_chunks: int, tokens: int
) -> float:
    """Return the bytes per token of softmax, gradient and the sum of the head's gradient over chunks."""
    per_logit = LOSS_BYTES[loss][0 if causal else 1]
    sums = SUM_BYTES * model.vocab_rows * model.d_model * n_chunks / tokens
    return per_logit * predicted * model.vocab_rows + sums


def _attention_share(model: ModelConfig, device: DeviceSpec, backend: str, causal: bool) -> float:
    """Return the share of the peak in attention."""
    shares = ATTENTION_SHARE[backend]
    if device.peak_tflops < 500:  # both names mean FlashAttention 2
        shares = FLASH2_BEFORE_HOPPER
    return shares[0 if causal else 1] * _interpolate(HEAD_WIDTH_SHARE, model.d_head)


def _interpolate(points: tuple[tuple[int, float], ...], x: float) -> float:
    """Interpolate linearly in log x; constant beyond both ends."""
    xs = [point[0] for point in points]
    if x <= xs[0]:
        return points[0][1]
    if x >= xs[-1]:
        return points[-1][1]
    i = bisect.bisect_right(xs, x)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (y1 - y0) * math.log(x / x0) / math.log(x1 / x0)
