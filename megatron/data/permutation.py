"""Keyed permutation of 0..n-1 without an array.

A Feistel network permutes the numbers of 2b bits. Cycle walking, that is
applying it until the result is below n, makes it a permutation of 0..n-1 (Black
and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). b is the smallest
value with 2^(2b) >= n, so that a walk takes fewer than 4 steps on average.
"""

from collections.abc import Sequence

import numpy as np

from megatron.data.keys import seed_sequence

ROUNDS = 6
MIX = np.uint64(0xFF51AFD7ED558CCD)  # multiplier of MurmurHash3's 64-bit finaliser


class Permutation:
    """Permutation of 0..n-1 that a key of integers selects."""

    def __init__(self, n: int, key: Sequence[int]) -> None:
        assert n >= 1, "expected n >= 1"
        self.n = n
        # Walks are short: they visit disjoint parts of the 2^(2b) numbers. All n
        # walks together therefore have at most 2^(2b) < 4 n steps for n > 1.
        # b = half: bits per side of the Feistel
        # network, the smallest with 2^(2b) >= n
        half = max(1, ((n - 1).bit_length() + 1) // 2)
        self._half = np.uint64(half)
        self._mask = np.uint64((1 << half) - 1)
        self._keys = seed_sequence(*key).generate_state(ROUNDS, np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Map positions (int64, any shape, 0 <= position < n); the result has the same shape."""
        # uint64 throughout: an operation of int64
        # with uint64 arrays would give float64
        x = np.asarray(positions, dtype=np.uint64)
        shape = x.shape
        x = self._apply_rounds(x.reshape(-1))
        # The walk ends: repeated application returns
        # to its start at the latest, which is below n.
        outside = np.flatnonzero(x >= self.n)
        while len(outside):  # cycle walking, for the values that are still outside 0..n-1
            x[outside] = self._apply_rounds(x[outside])
            outside = outside[x[outside] >= self.n]
        return x.astype(np.int64).reshape(shape)

    def _apply_rounds(self, x: np.ndarray) -> np.ndarray:
        # One round maps (L, R) to (A, B) = (R, L xor F(R)). Its inverse is (B xor F(A), A).
        # With six rounds both halves are mixed three times.
        left, right = x >> self._half, x & self._mask
        for key in self._keys:
            mixed = (right ^ key) * MIX  # uint64 arithmetic wraps around, as intended
            # The low bits of a product depend on the low bits
            # of the input alone. This copies the high half into
            # the low half; bits 29 to 28 + b are well mixed.
            mixed ^= mixed >> np.uint64(32)
            mixed *= MIX
            # a Feistel round is invertible for any round
            # function, so the network is a permutation
            left, right = right, left ^ ((mixed >> np.uint64(29)) & self._mask)
        return (left << self._half) | right


class ShuffledEpochs:
    """Infinite sequence over n items in epochs: each epoch visits all items once, in its own order."""

    def __init__(self, n: int, key: Sequence[int]) -> None:
        self.n, self._key = n, list(key)
        self._order: tuple[int, Permutation] | None = None  # cache: (epoch, its permutation)

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """Return the items at positions int64 [n] of any epochs."""
        epochs, positions = np.divmod(numbers, self.n)
        indices = np.empty_like(positions)
        # a batch is usually in one epoch or in
        # two adjacent ones, so this loop is short
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            indices[in_epoch] = self._epoch_order(int(epoch))(positions[in_epoch])
        return indices

    def _epoch_order(self, epoch: int) -> Permutation:
        # Read the attribute once: another thread of `prefetch` may replace
        # the tuple meanwhile. Both values stay valid, so no lock is needed.
        cached = self._order
        if cached is None or cached[0] != epoch:
            cached = self._order = epoch, Permutation(self.n, [*self._key, epoch])
        return cached[1]
