"""Tables of code points, as `tokenizers` classifies them (csrc/derive_code_points.py)."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

N_CODE_POINTS = 0x110000
CATEGORIES = (
    *("Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No"),
    *("Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So"),
    *("Zs", "Zl", "Zp", "Cc", "Cf", "Cs", "Co", "Cn"),
)
UNSTABLE = 255  # in the table "combining": NFC may change a text with this character


@cache
def _load_json() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(__file__).with_name("code_points.json").read_text())
    return content


@cache
def load_table(name: str) -> np.ndarray:
    """Return a table of all code points, uint8 [0x110000].

    categories  position in CATEGORIES
    space       1 for white space in split patterns
    numeric     1 for characters that the pre-tokenizer Digits splits
    word        1 for characters that an added token with single_word must not touch
    strip       1 for white space that an added token with lstrip or rstrip removes
    combining   rank of the canonical combining class, 0 for starters, or UNSTABLE
    """
    runs = _load_json()[name]
    # runs [[0, 0], [9, 3], [14, 0], ...]: starts [0, 9, 14, ...],
    # lengths [9, 5, ...]
    starts, values = np.array(runs, dtype=np.int64).T
    lengths = np.diff(np.append(starts, N_CODE_POINTS))  # a run ends where the next one begins
    return np.repeat(values.astype(np.uint8), lengths)


def load_folds() -> dict[str, list[int]]:
    """Return the code points beyond ASCII that ASCII letters match without regard to case."""
    folds: dict[str, list[int]] = _load_json()["folds"]
    return folds


def load_property(name: str) -> np.ndarray | None:
    r"""Return the members of a general category, as in \p{L} or \p{Lu}; bool [0x110000], None if unknown."""
    is_member = np.array([category.startswith(name) for category in CATEGORIES])
    if not is_member.any() or len(name) not in (1, 2):
        return None
    members: np.ndarray = is_member[load_table("categories")]
    return members


@cache
def load_gpt2_classes() -> np.ndarray:
    """Return the classes of GPT-2's pre-tokenizer: 0 other, 1 letter, 2 number, 3 white space."""
    kinds = np.array([{"L": 1, "N": 2}.get(name[0], 0) for name in CATEGORIES], dtype=np.uint8)
    classes: np.ndarray = kinds[load_table("categories")]
    classes[load_table("space") == 1] = 3
    return classes


def clear_tables() -> None:
    """Free the loaded tables. Compiled patterns have copies of what they need."""
    for function in (_load_json, load_table, load_gpt2_classes):
        function.cache_clear()
