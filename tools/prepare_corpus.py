"""Get a text for a small study, split into documents to train on and documents to score on.

python tools/prepare_corpus.py --out text
python tools/prepare_corpus.py --corpus my_documents.jsonl --out text
python tools/prepare_corpus.py --max-mb 24 --min-mb 24 --out text

corpus.json in the folder says how many documents and bytes each source gave, and has sums to compare with
those of another machine.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.command import command, count, failed, run
from megatron.data.corpus import prepare_corpus
from megatron.data.corpus_split import HELD_OUT_SHARE, SHARES


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument(
        "--corpus",
        metavar="TEXT",
        default="auto",
        help="auto: the C4 sample in $SCALING_DATA, else the first documents of C4 from the Hugging Face "
        "hub, else local; c4; local: Python's standard library and the sources of some packages of "
        "requirements.txt, as installed; stdlib: the first of these; or a path: .jsonl or .json files, "
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
    parser.add_argument(
        "--min-mb",
        type=float,
        default=0.0,
        metavar="MB",
        help="where the corpus has less than this, add documents of the local text until it is reached",
    )
    parser.add_argument(
        "--held-out-share",
        type=float,
        default=HELD_OUT_SHARE,
        metavar="SHARE",
        help=f"share of the documents to score on, {SHARES[0]:g} to {SHARES[1]:g}; the sha256 of a text "
        "decides its side",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where train.jsonl goes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Take a text, and say which and why."""
    args = build_parser().parse_args(argv)
    try:
        content, is_new = prepare_corpus(
            args.corpus,
            args.out,
            megabytes(args.max_mb),
            args.max_documents,
            megabytes(args.min_mb),
            args.held_out_share,
        )
    except (OSError, ValueError) as error:
        return failed(error)
    there = "" if is_new else " (already there)"
    print(f"{args.out}{there}: {content['corpus']}, because {content['why']}")
    print("\n".join(f"  {line}" for line in counts(content)))
    return 0


def megabytes(number: float) -> int:
    """A size in MB as bytes. ValueError for NaN and Inf."""
    if not math.isfinite(number):
        raise ValueError(f"got {number} MB, expected a finite size")
    return int(number * 1e6)


def counts(content: dict[str, Any]) -> Iterator[str]:
    """What corpus.json says, line by line: added text, the split, each source, what gave no text."""
    if "added" in content:
        size = f"{content['added_documents']:,} documents ({content['added_bytes'] / 1e6:.1f} MB)"
        yield f"{size} added, because that text is too small: {content['added']}"
    n_train, n_held_out = content["train_documents"], content["held_out_documents"]
    size = f"{(content['train_bytes'] + content['held_out_bytes']) / 1e6:.1f} MB"
    held_out = f"{content['held_out_bytes'] / 1e6:.2f} MB"
    yield f"{n_train:,} documents to train on, {n_held_out:,} held out ({held_out}), {size}"
    for source in content["sources"]:
        name = f"{source['name']} {source['version'] or ''}".rstrip()
        skipped = ", ".join(f"{n:,} {why.replace('_', ' ')}" for why, n in source["skipped"].items() if n)
        size = f"{source['documents']:,} documents, {source['bytes'] / 1e6:.1f} MB"
        yield f"{name}: {size}, sha256 {source['sha256'][:16]}" + (
            f"; left out: {skipped}" if skipped else ""
        )
    for name, why in content["missing"].items():
        yield f"no text of {name}: {why}"


if __name__ == "__main__":
    run(main)
