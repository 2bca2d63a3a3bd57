"""Show the contents of a tokenized dataset, or verify its files.

python tools/inspect_data.py tokens/train_text_document
python tools/inspect_data.py tokens/train_text_document --document 3 --tokenizer-model gpt2
python tools/inspect_data.py tokens/train_text_document --verify
"""

import argparse
import sys
from collections.abc import Sequence

from megatron.cli import ProgressBar, create_parser, report_error, run_main
from megatron.data import open_dataset
from megatron.data.sidecar import strip_suffix
from megatron.text.inspect_dataset import LengthSummary, find_faults, summarize_lengths
from megatron.tokenizer.kinds import load_tokenizer

BAR = 40


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument(
        "prefix", metavar="PREFIX", help="a dataset without its suffix: .bin/.idx, or .parts.json"
    )
    what = parser.add_argument_group(
        "action (default: count documents and tokens, and show a histogram of lengths)"
    )
    exclusive = what.add_mutually_exclusive_group()
    exclusive.add_argument(
        "--document", type=int, metavar="I", help="print document I, counted from 0, as text"
    )
    what.add_argument(
        "--tokenizer-model",
        metavar="NAME",
        help="folder, tokenizer.json or hub name for --document; default: the tokenizer named in the sidecar",
    )
    exclusive.add_argument(
        "--verify",
        action="store_true",
        help="read both files completely and check sums and counts against the sidecar, ids against the "
        "vocabulary, and the ends of documents",
    )
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


def verify(prefix: str) -> list[str]:
    """Return the faults of a dataset."""
    dataset = open_dataset(prefix)
    with ProgressBar("verifying", dataset.n_tokens * dataset.dtype.itemsize, "B") as bar:
        return list(find_faults(prefix, bar.update))


def main(argv: Sequence[str] | None = None) -> int:
    """Print a summary or a document, or verify the dataset."""
    args = build_parser().parse_args(argv)
    args.prefix = strip_suffix(args.prefix)
    try:
        if args.verify:
            problems = verify(args.prefix)
            for sentence in problems:
                print(f"error: {sentence}", file=sys.stderr)
            if not problems:
                print(f"{args.prefix}: complete and consistent")
            return 1 if problems else 0
        pair = open_dataset(args.prefix)
        if args.document is None:
            print(format_summary(summarize_lengths(pair)))
            if pair.parts:
                print(f"{len(pair.parts):,} parts")
            return 0
        if not pair.n_documents:
            raise ValueError(f"{args.prefix}: contains no documents")
        if not 0 <= args.document < pair.n_documents:
            raise ValueError(f"--document: got {args.document}, expected 0 to {pair.n_documents - 1}")
        tokenizer_meta = (pair.sidecar or {}).get("tokenizer") or {}
        name = args.tokenizer_model or tokenizer_meta.get("name")
        if name is None:
            raise ValueError(f"{args.prefix}: no sidecar that names the tokenizer. Give --tokenizer-model.")
        tokenizer = load_tokenizer(name)
        # ids of one tokenizer decode to arbitrary text with another, without an error
        if tokenizer_meta.get("sha256") not in (None, tokenizer.sha256):
            raise ValueError(
                f"{name}: not the tokenizer {tokenizer_meta.get('name')} of the dataset's "
                "sidecar. Its text would be different."
            )
        print(tokenizer.decode(pair.get_document(args.document).tolist()))
    # before OSError, of which it is a subclass
    except BrokenPipeError:
        raise  # a closed pipe (`| head`) is not an error of the dataset
    except (OSError, ValueError) as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    run_main(main)
