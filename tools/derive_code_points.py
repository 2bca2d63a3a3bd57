"""Write megatron/tokenizer/code_points.json: the class of every code point according to `tokenizers`.

    python tools/derive_code_points.py

GPT-2's pre-tokenizer classifies characters as letters, numbers or white space. Libraries disagree on
thousands of code points because they follow different versions of Unicode. This tool derives the classes from
`tokenizers` itself.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import pre_tokenizers

from megatron.command import create_parser, run_main

OUT = Path(__file__).resolve().parents[1] / "megatron" / "tokenizer" / "code_points.json"
NEIGHBOURS = (
    (1, "a"),
    (2, "1"),
    (0, "!"),
)  # the pre-tokenizer joins neighbouring characters of the same class


def classify_code_point(point: int, split: pre_tokenizers.ByteLevel) -> int:
    """Return the class of a code point: 0 other, 1 letter, 2 number, 3 white space.

    The code point is put between two characters of a known class. If the pre-tokenizer returns one piece, it
    has that class.
    """
    for kind, letter in NEIGHBOURS:
        if len(split.pre_tokenize_str(letter + chr(point) + letter)) == 1:
            return kind
    return 3


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser, which takes no options."""
    return create_parser(__doc__)


def main(argv: Sequence[str] | None = None) -> int:
    """Classify all code points and write them as runs of [first code point, class]."""
    build_parser().parse_args(argv)
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    runs: list[list[int]] = []
    for point in range(0x110000):
        # surrogates are not characters and cannot occur in valid text
        kind = 0 if 0xD800 <= point < 0xE000 else classify_code_point(point, split)
        # run-length code: [[0, 0], [9, 3], [14, 0], ...] means 0 to 8 other, 9 to 13 white space, other from
        # 14
        if not runs or runs[-1][1] != kind:
            runs.append([point, kind])
    about = (
        f"classes of code points in tokenizers {tokenizers.__version__}: 0 other, 1 letter, 2 number, 3 space"
    )
    OUT.write_text(json.dumps({"about": about, "runs": runs}, separators=(",", ":")) + "\n")
    print(f"{OUT}: {len(runs)} runs")
    return 0


if __name__ == "__main__":
    run_main(main)
