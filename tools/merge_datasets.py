"""Merge tokenized datasets into one.

python tools/merge_datasets.py tokens/a_text_document tokens/b_text_document --output tokens/joined
"""

import argparse
import sys
from collections.abc import Sequence

import megatron.early_stop  # noqa: F401  # before slow imports, so that a signal during them is handled
from megatron.command import STOPPED, create_parser, install_stop_handlers, report_error, run_main
from megatron.io import explain_disk_full
from megatron.text.arguments import parse_output_prefix
from megatron.text.merge import merge_datasets


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__, may_stop=True)
    parser.add_argument(
        "prefixes",
        nargs="+",
        metavar="PREFIX",
        help="a .bin/.idx dataset without its suffix; all of the same tokenizer and dtype",
    )
    parser.add_argument(
        "--output",
        type=parse_output_prefix,
        required=True,
        metavar="PREFIX",
        help="the merged dataset without its suffix",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    parser.add_argument(
        "--mixed-eod", action="store_true", help="merge datasets even if their documents end differently"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Merge, and print the size of the result."""
    args = build_parser().parse_args(argv)
    install_stop_handlers()
    try:
        with explain_disk_full(args.output.parent):
            joined = merge_datasets(args.prefixes, args.output, args.mixed_eod, args.overwrite)
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return STOPPED
    except (OSError, ValueError) as error:
        return report_error(error)
    note = "" if joined.is_new else " (already there)"
    print(f"{args.output}.bin{note}: {joined.n_documents:,} documents, {joined.n_tokens:,} tokens")
    return 0


if __name__ == "__main__":
    run_main(main)
