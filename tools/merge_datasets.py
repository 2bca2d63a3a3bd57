"""Merge tokenized datasets into one, or make them one dataset without a copy.

python tools/merge_datasets.py tokens/a_text_document tokens/b_text_document --output tokens/joined
python tools/merge_datasets.py 'tokens/part-*_text_document' --parts tokens/c4

--parts writes tokens/c4.parts.json and .parts.idx. Training, blends and all tools then accept tokens/c4; the
parts stay where they are. A killed merge leaves no output; run the same command again.
"""

import argparse
import sys
from collections.abc import Sequence

import megatron.cli  # noqa: F401  # before slow imports, so that a signal during them is handled
from megatron.cli import STOPPED, create_parser, install_stop_handlers, report_error, run_main
from megatron.io import explain_disk_full
from megatron.text.arguments import parse_output_prefix
from megatron.text.merge import MergeResult, merge_datasets
from megatron.text.merge_inputs import expand_prefixes
from megatron.text.write_parts import write_parts_list


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__, may_stop=True)
    inputs = parser.add_argument_group("inputs")
    inputs.add_argument(
        "prefixes",
        nargs="+",
        metavar="PREFIX",
        help="a .bin/.idx dataset without its suffix, or a quoted pattern of them in natural order (part-2 "
        "before part-10); all of the same tokenizer and dtype",
    )
    inputs.add_argument("--list", type=refuse_list, metavar="FILE", help=argparse.SUPPRESS)  # removed option
    inputs.add_argument(
        "--mixed-eod", action="store_true", help="accept datasets even if their documents end differently"
    )
    outputs = parser.add_argument_group("output")
    target = outputs.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "--output", type=parse_output_prefix, metavar="PREFIX", help="the merged dataset without its suffix"
    )
    target.add_argument(
        "--parts",
        type=parse_output_prefix,
        metavar="PREFIX",
        help="a dataset of parts: only a list and an index are written, and the tokens stay in the inputs",
    )
    outputs.add_argument("--remove", action="store_true", help=argparse.SUPPRESS)  # removed option
    outputs.add_argument("--hash", action="store_true", help=argparse.SUPPRESS)  # removed option
    outputs.add_argument("--overwrite", action="store_true", help="replace an existing output")
    return parser


def refuse_list(word: str) -> str:
    """Raise argparse's error for the removed option."""
    raise argparse.ArgumentTypeError(f"no longer supported. Give the prefixes instead, as in $(cat {word})")


def merge(args: argparse.Namespace) -> MergeResult:
    """Write the dataset, or the list of parts."""
    prefixes = expand_prefixes(args.prefixes)
    if args.parts is not None:
        return write_parts_list(prefixes, args.parts, args.mixed_eod, args.overwrite)
    return merge_datasets(prefixes, args.output, args.mixed_eod, args.overwrite)


def main(argv: Sequence[str] | None = None) -> int:
    """Merge, and print the size of the result."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.remove:
        parser.error(
            "--remove: no longer supported. Delete the inputs after the merge, or use --parts, which copies "
            "no tokens"
        )
    if args.hash:
        parser.error("--hash: no longer supported. Use --output for a dataset with the hash of all tokens")
    output = args.output or args.parts
    install_stop_handlers()
    try:
        with explain_disk_full(output.parent):
            joined = merge(args)
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return STOPPED
    except (OSError, ValueError) as error:
        return report_error(error)
    note = "" if joined.is_new else " (already there)"
    name = f"{args.output}.bin" if args.parts is None else f"{args.parts}.parts.json"
    print(f"{name}{note}: {joined.n_documents:,} documents, {joined.n_tokens:,} tokens")
    return 0


if __name__ == "__main__":
    run_main(main)
