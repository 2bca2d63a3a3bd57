"""Samples of each step: constant, or a ramp over the first samples of a run."""

from bisect import bisect_right

from megatron.config.schema import DatasetConfig


class BatchSizes:
    """Batch size as a function of the position, and positions of the steps.

    With dataset.rampup_batch_size = [start, increment, samples] the size grows from `start` to
    dataset.batch_size by `increment`, each time after an equal share of `samples`, as with Megatron's
    --rampup-batch-size.
    """

    def __init__(self, data: DatasetConfig) -> None:
        """Raises ValueError for a ramp that does not reach dataset.batch_size in whole increments."""
        self.full, ramp = data.batch_size, data.rampup_batch_size or [data.batch_size, 1, 0]
        if len(ramp) != 3 or ramp[0] > self.full or (self.full - ramp[0]) % ramp[1]:
            expected = f"[start, increment, samples] that reach dataset.batch_size {self.full}"
            raise ValueError(f"dataset.rampup_batch_size: got {ramp}, expected {expected} exactly")
        self.start, self.increment, self.n_ramp_samples = ramp
        # first sample of each step up to the first full one
        self.first_samples = [0]
        while (size := self.size_at(self.first_samples[-1])) < self.full:
            self.first_samples.append(self.first_samples[-1] + size)

    def size_at(self, sample: int) -> int:
        """Return the samples of the step that begins at a sample."""
        n_increments = (self.full - self.start) // self.increment
        if sample > self.n_ramp_samples or not n_increments:
            return self.full
        # Megatron's floating-point numbers: an exact quotient could give
        # another size to a step that begins where the size grows
        return self.start + int(sample / (self.n_ramp_samples / n_increments)) * self.increment

    def samples_after(self, n_steps: int) -> int:
        """Return the samples of the first `n_steps` steps."""
        n_ramp_steps = len(self.first_samples) - 1
        return self.first_samples[min(n_steps, n_ramp_steps)] + max(0, n_steps - n_ramp_steps) * self.full

    def count_steps(self, n_samples: int) -> int:
        """Return the whole steps in the first `n_samples` samples."""
        # a step that only begins within the samples is not whole
        n_ramp_steps = bisect_right(self.first_samples, n_samples) - 1
        return n_ramp_steps + max(0, n_samples - self.first_samples[-1]) // self.full

    def list_sizes(self) -> list[int]:
        """Return all sizes, in ascending order."""
        return [*range(self.start, self.full, self.increment), self.full]
