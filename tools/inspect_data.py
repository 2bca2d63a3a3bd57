"""Show the contents of a tokenized dataset, or verify its files.

python tools/inspect_data.py tokens/train_text_document
python tools/inspect_data.py tokens/train_text_document --document 3 --tokenizer-model gpt2
python tools/inspect_data.py tokens/train_text_document --verify
"""

import argparse
import sys
from collections.abc import Sequence

from megatron.cli import ProgressBar, create_parser, run_main
from megatron.data import open_dataset
from megatron.data.sidecar import strip_suffix
from megatron.text.inspect_dataset import LengthSummary, find_faults, summarize_lengths
from megatron.tokenizer.kinds import load_tokenizer

BAR = 40


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    prefix = "a dataset without its suffix: .bin/.idx, or .parts.json"
    parser.add_argument("prefix", metavar="PREFIX", help=prefix)
    what = parser.add_argument_group("action (default: counts, and a histogram of lengths)")
    add = what.add_mutually_exclusive_group().add_argument
    add("--document", type=int, metavar="I", help="print document I, counted from 0, as text")
    faults = "read both files completely, and check sums, counts, ids and the ends of documents"
    add("--verify", action="store_true", help=faults)
    name = "folder, tokenizer.json or hub name for --document; default: as in the sidecar"
    what.add_argument("--tokenizer-model", metavar="NAME", help=name)
    return parser


def format_summary(summary: LengthSummary) -> str:
    """Format the counts and a histogram of document lengths."""
    lines = [
        f"{summary.n_documents:,} documents, {summary.n_tokens:,} tokens ({summary.dtype})",
        f"tokens per document: {summary.shortest:,} to {summary.longest:,}, mean {summary.mean:,.1f}, "
        f"median {summary.median:,.1f}",
    ]
    most = max((n for _, n in summary.histogram), default=1)
    for least, n in summary.histogram:
        lines.append(f"{least:>10,} and up  {n:>12,}  {'#' * round(BAR * n / most)}")
    return "\n".join(lines)


def verify(prefix: str) -> int:
    """Print the faults of a dataset; return the exit status."""
    dataset = open_dataset(prefix)
    with ProgressBar("verifying", dataset.n_tokens * dataset.dtype.itemsize, "B") as bar:
        problems = list(find_faults(prefix, bar.update))
    for sentence in problems:
        print(f"error: {sentence}", file=sys.stderr)
    if not problems:
        print(f"{prefix}: complete and consistent")
    return int(bool(problems))


def read_document(prefix: str, index: int, tokenizer_model: str | None) -> str:
    """Return a document as text. Raise ValueError for an index or a tokenizer that does not fit."""
    pair = open_dataset(prefix)
    if not 0 <= index < pair.n_documents:
        raise ValueError(f"--document: got {index}, expected 0 to {pair.n_documents - 1}")
    tokenizer_meta = (pair.sidecar or {}).get("tokenizer") or {}
    name = tokenizer_model or tokenizer_meta.get("name")
    if name is None:
        raise ValueError(f"{prefix}: no sidecar that names the tokenizer. Give --tokenizer-model.")
    tokenizer = load_tokenizer(name)
    # ids of one tokenizer decode to arbitrary text with another, without an error
    if tokenizer_meta.get("sha256") not in (None, tokenizer.sha256):
        raise ValueError(
            f"{name}: not the tokenizer {tokenizer_meta.get('name')} of the dataset's "
            "sidecar. Its text would be different."
        )
    return tokenizer.decode(pair.get_document(index).tolist())


def main(argv: Sequence[str] | None = None) -> int:
    """Print a summary or a document, or verify the dataset."""
    args = build_parser().parse_args(argv)
    prefix = strip_suffix(args.prefix)
    if args.verify:
        return verify(prefix)
    if args.document is not None:
        print(read_document(prefix, args.document, args.tokenizer_model))
        return 0
    pair = open_dataset(prefix)
    print(format_summary(summarize_lengths(pair)))
    if pair.parts:
        print(f"{len(pair.parts):,} parts")
    return 0


if __name__ == "__main__":
    run_main(main)
