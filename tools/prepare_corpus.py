"""Get a text for a small study, split into documents to train on and documents to score on.

python tools/prepare_corpus.py --out text
python tools/prepare_corpus.py --corpus my_documents.jsonl --out text
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.command import command, count, failed, run
from megatron.data.corpus import prepare_corpus


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument(
        "--corpus",
        metavar="TEXT",
        default="auto",
        help="auto: the C4 sample in $SCALING_DATA, else the first documents of C4 from the Hugging Face "
        "hub, else the text of Python's standard library; c4; stdlib; or a path: .jsonl or .json files, "
        "plain or gzipped, .txt files (several: a document each; one: a document a paragraph), a folder or a "
        "pattern of either",
    )
    parser.add_argument("--max-mb", type=float, default=8.0, metavar="MB", help="take the first MB of text")
    parser.add_argument(
        "--max-documents",
        type=count,
        metavar="N",
        help="take the first N documents; by itself all",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where train.jsonl goes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Take a text, and say which and why."""
    args = build_parser().parse_args(argv)
    try:
        told, is_new = prepare_corpus(args.corpus, args.out, int(args.max_mb * 1e6), args.max_documents)
    except (OSError, ValueError) as error:
        return failed(error)
    there = "" if is_new else " (already there)"
    print(f"{args.out}{there}: {told['corpus']}, because {told['why']}")
    n_train, n_held_out = told["train_documents"], told["held_out_documents"]
    megabytes = (told["train_bytes"] + told["held_out_bytes"]) / 1e6
    print(f"  {n_train:,} documents to train on, {n_held_out:,} held out, {megabytes:.1f} MB")
    return 0


if __name__ == "__main__":
    run(main)
