"""Named model shapes, and defaults for omitted parts of a shape."""

import difflib
from functools import cache
from pathlib import Path

from megatron.config.yaml_file import read_yaml

# a link to utils/model_sizes.yaml; a copy of it in a wheel
SIZES_FILE = Path(__file__).with_name("model_sizes.yaml")

VOCAB_MULTIPLE = 128  # rows of the embedding: matrix units process multiples of 128


def suggest_nearest(word: str, choices: list[str]) -> str:
    """Return `did you mean 'x'?`, or the list of choices if none is similar."""
    if not choices:
        return "no name is defined"
    matches = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"did you mean '{matches[0]}'?" if matches else f"known: {', '.join(choices)}"


def padded_rows(n_tokens: int, n_masks: int = 1, multiple: int = VOCAB_MULTIPLE) -> int:
    """Return the embedding rows: the tokenizer's ids, then [MASK], then padding to a multiple."""
    # -(-a // b) is a / b rounded up: 50,257 ids and [MASK] -> 50,304 =
    # 393 x 128 rows
    return -(-(n_tokens + n_masks) // multiple) * multiple


def swiglu_width(d_model: int) -> int:
    """Return floor(8 d / 3 / 64) * 64: three matrices of this width are about as large as two of 4 d."""
    # 3 D F = 2 D (4 D) gives F = 8 D / 3: 768 -> 2,048; 512 -> 1,365.3,
    # rounded down to 1,344
    return max(8 * d_model // (3 * 64), 1) * 64


@cache
def load_model_sizes() -> dict[str, dict[str, int]]:
    """Return the named model shapes of utils/model_sizes.yaml."""
    return {str(name): dict(shape) for name, shape in read_yaml(SIZES_FILE).items()}


def load_named_shape(name: str) -> dict[str, int]:
    """Return the shape of a named size. Raises ValueError with the nearest name for an unknown one."""
    sizes = load_model_sizes()
    if name not in sizes:
        raise ValueError(
            f"model.size: '{name}' is not in {SIZES_FILE.name}; {suggest_nearest(name, list(sizes))}"
        )
    return sizes[name]
