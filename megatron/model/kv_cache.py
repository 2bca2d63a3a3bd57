"""Key/value cache: generating the next position computes one position instead of the whole sequence."""

import torch
from torch import Tensor

from megatron.config.schema import ModelConfig
from megatron.model.masks import build_window_mask


class KvCache:
    """Preallocated keys and values of B sequences of equal length, up to `n_positions` positions.

    n_read     positions stored so far
    """

    def __init__(
        self,
        config: ModelConfig,
        n_sequences: int,
        n_positions: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        # one allocation for all layers: [L, 2, B, H, n_positions, K]
        # 12 layers, 8 sequences of 1024 positions, 12 heads
        # of 64 in float32: 12 * 2 * 8 * 12 * 1024 * 64 * 4
        # bytes = 576 MiB. Positions from n_read on are
        # uninitialized, and `extend` never returns them.
        self.storage = torch.empty(
            config.n_layers,
            2,
            n_sequences,
            config.kv_heads,
            n_positions,
            config.d_head,
            device=device,
            dtype=dtype,
        )
        self.layers = [LayerCache(keys, values) for keys, values in self.storage]
        self.n_positions, self.window = n_positions, config.attention_window
        self.n_read = 0

    def build_mask(self, n_new: int) -> Tensor | None:
        """Return the keys visible to each new position, bool [1, 1, n_new, n_read + n_new], or None.

        None: an empty cache needs plain causal attention, and a single new position attends to every key.
        """
        n_keys = self.n_read + n_new
        window = n_keys if self.window is None else self.window
        if (self.n_read == 0 or n_new == 1) and n_keys <= window:
            return None
        # row i is position n_read + i: it sees the
        # cached keys and the new ones up to itself
        # n_read = 2, n_new = 2: rows 1110 and 1111
        return build_window_mask(n_new, n_keys, window, self.storage.device)[None, None]

    def advance(self, n: int) -> None:
        """Add n positions to the count, after every block has written them."""
        assert self.n_read + n <= self.n_positions, f"the cache is limited to {self.n_positions} positions"
        self.n_read += n
        for layer in self.layers:
            layer.n_read = self.n_read


class LayerCache:
    """One block's keys and values, each [B, H, n_positions, K]."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.n_read = 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, H, S, K]; return all of them up to there, [B, H, n_read + S, K]."""
        end = self.n_read + keys.shape[2]
        self.keys[:, :, self.n_read : end] = keys
        self.values[:, :, self.n_read : end] = values
        # views, no copies; n_read itself is advanced
        # by KvCache once all layers have written
        return self.keys[:, :, :end], self.values[:, :, :end]
