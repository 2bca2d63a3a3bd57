"""Model shapes by name, and the rules that fill in what a shape leaves out."""

import difflib
from functools import cache
from pathlib import Path

from megatron.config.yaml_file import read_yaml

SIZES_FILE = Path(__file__).resolve().parents[2] / "utils" / "model_sizes.yaml"

VOCAB_MULTIPLE = 128  # rows of the embedding: matrix units work on multiples of 128


def nearest(word: str, known: list[str]) -> str:
    """`did you mean 'x'?`, or the whole list where nothing is near."""
    if not known:
        return "there are none"
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"


def padded_rows(n_tokens: int) -> int:
    """Rows of the embedding: the tokenizer's ids, then [MASK], then padding to a multiple of 128."""
    return -(-(n_tokens + 1) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def swiglu_width(d_model: int) -> int:
    """floor(8 d / 3 / 64) * 64: three matrices of this width weigh about as much as two of 4 d."""
    return max(8 * d_model // (3 * 64), 1) * 64


@cache
def model_sizes() -> dict[str, dict[str, int]]:
    """The named ladder, from utils/model_sizes.yaml."""
    if not SIZES_FILE.is_file():
        raise FileNotFoundError(f"{SIZES_FILE}: not found; install with `pip install -e .` in a checkout")
    return {str(name): dict(shape) for name, shape in read_yaml(SIZES_FILE).items()}


def shape_of_size(name: str) -> dict[str, int]:
    """The shape of a named size. ValueError offers the nearest name."""
    sizes = model_sizes()
    if name not in sizes:
        raise ValueError(f"model.size: '{name}' is not in {SIZES_FILE.name}; {nearest(name, list(sizes))}")
    return sizes[name]
