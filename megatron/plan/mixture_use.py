"""Reader of a resolved mixture, which megatron/mixture/prepare.py writes beside the mixture's YAML file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.io import read_json

RESOLVED = "resolved.json"


@dataclass(frozen=True, kw_only=True)
class ResolvedMixture:
    """Domains with their documents, tokens and first weights (shares of the tokens), and their datasets.

    identity   hash of everything that affects which tokens are read in which proportions
    pairs      prefixes of the .bin/.idx datasets
    snapshot   versions of the corpora of the catalog
    """

    identity: str
    tokenizer: dict[str, Any]
    domains: tuple[str, ...]
    documents: tuple[int, ...]
    tokens: tuple[int, ...]
    weights: tuple[float, ...]
    pairs: tuple[str, ...]
    snapshot: Any = None

    def count_windows(self, seq_len: int) -> list[int]:
        """Return the samples per epoch of each domain. Neighbouring samples share one token."""
        return [max(0, (n - 1) // seq_len) for n in self.tokens]


def mixture_folder(path: str | Path) -> Path:
    """Return the folder of all files generated from a mixture."""
    return Path(path).with_suffix(".mixture")


def read_resolved(path: str | Path) -> ResolvedMixture:
    """Read the resolved mixture of a YAML file. Raises FileNotFoundError if it was not prepared."""
    resolved_path = mixture_folder(path) / RESOLVED
    record = read_json(resolved_path)
    if record is None:
        raise FileNotFoundError(f"{resolved_path}: no such file. Run scaling mixture {path} first.")
    try:
        as_tuples: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in record.items()
        }
        return ResolvedMixture(**as_tuples)
    except TypeError as error:
        raise ValueError(
            f"{resolved_path}: got other keys than expected ({error}). Run scaling mixture {path}"
        ) from error


def split_by_weights(weights: Sequence[float], n: int) -> list[int]:
    """Divide `n` samples by weights, rounded down. The heaviest domain gets the remainder.

    This estimates what a run takes from each domain to within a few samples.
    """
    # example: 10 samples by 0.55, 0.25 and 0.2 are
    # [5, 2, 2]; the first domain gets the tenth
    counts = [int(weight * n) for weight in weights]
    # rounding down leaves at most one sample per domain unassigned
    counts[max(range(len(weights)), key=weights.__getitem__)] += n - sum(counts)
    return counts
