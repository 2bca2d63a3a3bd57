"""Write megatron/tokenizer/code_points.json: the class of every code point, as `tokenizers` sees it.

    python tools/derive_code_points.py

GPT-2's pre-tokeniser asks of a character whether it is a letter, a number or white space. Libraries
disagree on thousands of code points, as they follow different versions of Unicode; this asks `tokenizers`
itself, once.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import pre_tokenizers

from megatron.command import command, run

OUT = Path(__file__).resolve().parents[1] / "megatron" / "tokenizer" / "code_points.json"
NEIGHBOURS = ((1, "a"), (2, "1"), (0, "!"))  # a character joins those of its own class on both sides


def class_of(point: int, split: pre_tokenizers.ByteLevel) -> int:
    """0 other, 1 letter, 2 number, 3 white space."""
    for kind, letter in NEIGHBOURS:
        if len(split.pre_tokenize_str(letter + chr(point) + letter)) == 1:
            return kind
    return 3


def build_parser() -> argparse.ArgumentParser:
    """Command-line words: none."""
    return command(__doc__)


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, and write runs of [first code point, class]."""
    build_parser().parse_args(argv)
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    runs: list[list[int]] = []
    for point in range(0x110000):
        # surrogates are no characters and stand in no text
        kind = 0 if 0xD800 <= point < 0xE000 else class_of(point, split)
        if not runs or runs[-1][1] != kind:
            runs.append([point, kind])
    about = (
        f"classes of code points in tokenizers {tokenizers.__version__}: 0 other, 1 letter, 2 number, 3 space"
    )
    OUT.write_text(json.dumps({"about": about, "runs": runs}, separators=(",", ":")) + "\n")
    print(f"{OUT}: {len(runs)} runs")
    return 0


if __name__ == "__main__":
    run(main)
