"""A shuffle without an array: where position i of an epoch goes, computed from a key.

A Feistel network permutes the numbers of 2b bits; walking along its cycle until the number is below n makes
it a permutation of 0..n-1 (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). b is the
least that fits, so that a walk takes fewer than 4 steps on average.
"""

from collections.abc import Sequence

import numpy as np

from megatron.keys import seed_sequence

ROUNDS = 6
MIX = np.uint64(0xFF51AFD7ED558CCD)  # multiplier of MurmurHash3's 64-bit finaliser
PLAIN_MIX, WORD = int(MIX), (1 << 64) - 1


class Permutation:
    """The permutation of 0..n-1 that belongs to a key of whole numbers."""

    def __init__(self, n: int, key: Sequence[int]) -> None:
        assert n >= 1, "nothing to permute"
        self.n = n
        half = max(1, ((n - 1).bit_length() + 1) // 2)
        self._half = np.uint64(half)
        self._mask = np.uint64((1 << half) - 1)
        self._keys = seed_sequence(*key).generate_state(ROUNDS, np.uint64)
        self._plain_keys = self._keys.tolist()

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Where positions (int64, any shape, 0 <= position < n) go; the same shape."""
        x = np.asarray(positions, dtype=np.uint64)
        shape = x.shape
        x = self._network(x.reshape(-1))
        outside = np.flatnonzero(x >= self.n)
        while len(outside):
            x[outside] = self._network(x[outside])
            outside = outside[x[outside] >= self.n]
        return x.astype(np.int64).reshape(shape)

    def one(self, position: int) -> int:
        """Where one position goes: the same as calling, twenty times faster than an array of one."""
        assert 0 <= position < self.n, "a position of the epoch"
        x = self._network_of_one(position)
        while x >= self.n:
            x = self._network_of_one(x)
        return x

    def _network(self, x: np.ndarray) -> np.ndarray:
        left, right = x >> self._half, x & self._mask
        for key in self._keys:
            mixed = (right ^ key) * MIX  # uint64 arithmetic wraps, as a hash wants
            mixed ^= mixed >> np.uint64(32)
            mixed *= MIX
            left, right = right, left ^ ((mixed >> np.uint64(29)) & self._mask)
        return (left << self._half) | right

    def _network_of_one(self, x: int) -> int:
        half, mask = int(self._half), int(self._mask)
        left, right = x >> half, x & mask
        for key in self._plain_keys:
            mixed = (right ^ key) * PLAIN_MIX & WORD
            mixed ^= mixed >> 32
            mixed = mixed * PLAIN_MIX & WORD
            left, right = right, left ^ (mixed >> 29 & mask)
        return left << half | right


class Epochs:
    """Positions 0, 1, 2, ... without end over n things: each n of them visit all, in their own order."""

    def __init__(self, n: int, key: Sequence[int]) -> None:
        self.n, self._key = n, list(key)
        self._order: tuple[int, Permutation] | None = None  # of the epoch last asked for

    def one(self, i: int) -> int:
        """Which of the things stands at position i."""
        epoch, position = divmod(i, self.n)
        return self._order_of(epoch).one(position)

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """`one` of positions int64 [n] of any epochs."""
        epochs, positions = np.divmod(numbers, self.n)
        found = np.empty_like(positions)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            found[of_epoch] = self._order_of(int(epoch))(positions[of_epoch])
        return found

    def _order_of(self, epoch: int) -> Permutation:
        held = self._order
        if held is None or held[0] != epoch:
            held = self._order = epoch, Permutation(self.n, [*self._key, epoch])
        return held[1]
