"""Prepare text for a small study, split into training documents and held-out documents.

python tools/prepare_corpus.py --out text
python tools/prepare_corpus.py --corpus my_documents.jsonl --out text
python tools/prepare_corpus.py --max-mb 24 --min-mb 24 --out text

corpus.json in the folder records the source, counts, and the sha256 of both files, to compare with
another machine's.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.cli import create_parser, positive_float, run_main
from megatron.text.corpus import HELD_OUT_SHARE, HELD_OUT_SHARE_RANGE, CorpusLimits, prepare_corpus


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("text").add_argument
    corpus = (
        "auto: C4 in $SCALING_DATA or from the hub, else local; c4; local: installed Python sources; or a "
        "path: .jsonl or .json files, plain or gzipped, a folder or a pattern of them"
    )
    add("--corpus", metavar="TEXT", default="auto", help=corpus)
    add("--max-mb", type=positive_float, default=8.0, metavar="MB", help="use at most this many MB of text")
    least = "require at least this many MB; auto and c4 are filled up with documents of the local text"
    add("--min-mb", type=positive_float, default=0.0, metavar="MB", help=least)
    add = parser.add_argument_group("output").add_argument
    low, high = HELD_OUT_SHARE_RANGE
    share = f"share of held-out documents, {low:g} to {high:g}; the sha256 of a text decides its side"
    add("--held-out-share", type=float, default=HELD_OUT_SHARE, metavar="SHARE", help=share)
    out = "output folder of train.jsonl and held_out.jsonl"
    add("--out", type=Path, required=True, metavar="FOLDER", help=out)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the text, and print which corpus was used."""
    args = build_parser().parse_args(argv)
    limits = CorpusLimits(int(args.max_mb * 1e6), int(args.min_mb * 1e6), args.held_out_share)
    content, is_new = prepare_corpus(args.corpus, args.out, limits)
    note = "" if is_new else " (already there)"
    print(f"{args.out}{note}: {content['corpus']}")
    print("\n".join(f"  {line}" for line in format_counts(content)))
    return 0


def format_counts(content: dict[str, Any]) -> Iterator[str]:
    """Format corpus.json line by line: added text, and the split."""
    if "added" in content:
        size = f"{content['added_documents']:,} documents ({content['added_bytes'] / 1e6:.1f} MB)"
        yield f"{size} added because the text is too small: {content['added']}"
    n_train, n_held_out = content["train_documents"], content["held_out_documents"]
    size = f"{(content['train_bytes'] + content['held_out_bytes']) / 1e6:.1f} MB"
    held_out = f"{content['held_out_bytes'] / 1e6:.2f} MB"
    yield f"{n_train:,} training documents, {n_held_out:,} held out ({held_out}), {size}"


if __name__ == "__main__":
    run_main(main)
