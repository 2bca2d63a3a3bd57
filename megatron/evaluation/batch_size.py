"""Automatic batch size: the largest that fits in memory and still increases the throughput."""

import time

import torch

from megatron.kernels.linear_cross_entropy import linear_log_p
from megatron.model.transformer import Gpt
from megatron.parallel.collectives import sum_over_ranks
from megatron.parallel.world import World

MAX_BATCH = 1024
GAIN = 1.05  # a doubled batch must read this many times the tokens per second
MAX_PASS_S = 20.0  # longer passes are not doubled: the search would take longer than it saves


def choose_batch_size(model: Gpt, length: int, causal: bool, world: World) -> int:
    """Return the rows per forward pass for rows of up to `length` ids, equal on all ranks.

    Doubles from 1 while a pass over full rows, with the log-likelihood of every id, fits in the memory of
    every rank and increases the tokens per second. Where memory ends the search, the result is half of the
    largest size that fits, because packed rows need more memory than these.
    """
    size, before = 1, 0.0
    _time_pass(model, 1, length, causal)  # the first pass loads kernels
    while True:
        seconds = _time_pass(model, size, length, causal)
        # the mean over ranks is the same number on all of them, so they take the same branch
        measured = torch.tensor([seconds is None, seconds or 0.0], device=world.device)
        failed, mean_s = (sum_over_ranks(measured, world) / world.n_ranks).tolist()
        if failed:
            return max(1, size // 4)
        speed = size / mean_s
        if speed < GAIN * before:
            return size // 2
        if size == MAX_BATCH or mean_s > MAX_PASS_S:
            return size
        size, before = 2 * size, speed


@torch.inference_mode()
def _time_pass(model: Gpt, size: int, length: int, causal: bool) -> float | None:
    """Return the seconds of a forward pass over `size` full rows; None if it does not fit in memory."""
    device = model.embedding.weight.device
    try:
        _synchronize(device)
        begin = time.perf_counter()
        tokens = torch.zeros(size, length, dtype=torch.int64, device=device)
        hidden = model.hidden_states(tokens, causal).flatten(0, 1)
        ids = torch.arange(size * length, device=device)
        linear_log_p(hidden, model.head_weight, ids, torch.zeros_like(ids))
        _synchronize(device)
        return time.perf_counter() - begin
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
