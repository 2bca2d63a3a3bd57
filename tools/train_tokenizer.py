"""Train a byte-level BPE tokenizer on a text.

python tools/train_tokenizer.py text/train.jsonl --n-tokens 4096 --out tokenizer
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.cli import create_parser, positive_int, run_main
from megatron.text.corpus import train_tokenizer


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument
    add("text", type=Path, metavar="TEXT.jsonl", help="text file with one JSON object per line")
    add("--key", metavar="KEY", default="text", help="key of the text")
    add("--n-tokens", type=positive_int, default=4096, metavar="N", help="size of the vocabulary")
    add("--out", type=Path, required=True, metavar="FOLDER", help="output folder of tokenizer.json")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Train the tokenizer, and print its path."""
    args = build_parser().parse_args(argv)
    is_new = train_tokenizer(args.text, args.key, args.n_tokens, args.out)
    print(f"{args.out}/tokenizer.json: {args.n_tokens} tokens" + ("" if is_new else ", already there"))
    return 0


if __name__ == "__main__":
    run_main(main)
