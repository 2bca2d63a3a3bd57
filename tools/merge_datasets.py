"""Merge tokenized datasets into one, or make them one dataset without a copy.

python tools/merge_datasets.py tokens/a_text_document tokens/b_text_document --output tokens/joined
python tools/merge_datasets.py 'tokens/part-*_text_document' --parts tokens/c4

--parts writes tokens/c4.parts.json and .parts.idx. Training, blends and all tools then accept tokens/c4; the
parts stay where they are. A killed merge leaves no output; run the same command again.
"""

import argparse
from collections.abc import Sequence

import megatron.cli  # noqa: F401  # before slow imports, so that a signal during them is handled
from megatron.cli import create_parser, install_stop_handlers, run_main
from megatron.io import explain_disk_full
from megatron.text.arguments import parse_output_prefix
from megatron.text.merge import merge_datasets
from megatron.text.merge_inputs import expand_prefixes
from megatron.text.write_parts import write_parts_list

REMOVED = {
    "--hash": "Use --output for a dataset with the hash of all tokens",
    "--list": "Give the prefixes instead, as in $(cat FILE)",
    "--remove": "Delete the inputs after the merge, or use --parts, which copies no tokens",
}


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__, may_stop=True, removed=REMOVED)
    prefixes = "a .bin/.idx dataset without its suffix, or a quoted pattern of them in natural order"
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help=prefixes)
    eod = "accept datasets even if their documents end differently"
    parser.add_argument("--mixed-eod", action="store_true", help=eod)
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    output = "the merged dataset without its suffix"
    add("--output", type=parse_output_prefix, metavar="PREFIX", help=output)
    parts = "a dataset of parts: only a list and an index are written, the tokens stay in the inputs"
    add("--parts", type=parse_output_prefix, metavar="PREFIX", help=parts)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Merge, and print the size of the result."""
    args = build_parser().parse_args(argv)
    output = args.output or args.parts
    write = merge_datasets if args.parts is None else write_parts_list
    install_stop_handlers()
    with explain_disk_full(output.parent):
        joined = write(expand_prefixes(args.prefixes), output, args.mixed_eod, args.overwrite)
    note = "" if joined.is_new else " (already there)"
    name = f"{output}.bin" if args.parts is None else f"{output}.parts.json"
    print(f"{name}{note}: {joined.n_documents:,} documents, {joined.n_tokens:,} tokens")
    return 0


if __name__ == "__main__":
    run_main(main)
