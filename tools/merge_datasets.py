"""Join tokenised corpora into one.

python tools/merge_datasets.py tokens/a_text_document tokens/b_text_document --output tokens/joined
"""

import argparse
import sys
from collections.abc import Sequence

import megatron.early_stop  # noqa: F401  # before what takes long
from megatron.command import STOPPED, command, failed, run, stop_when_told
from megatron.data.merge import merge
from megatron.data.output_names import output_prefix
from megatron.run_dir import room_in


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__, may_stop=True)
    parser.add_argument(
        "prefixes",
        nargs="+",
        metavar="PREFIX",
        help="a .bin/.idx pair without its suffix; all of one tokenizer and dtype",
    )
    parser.add_argument(
        "--output",
        type=output_prefix,
        required=True,
        metavar="PREFIX",
        help="the joined pair without its suffix",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an output that is there")
    parser.add_argument(
        "--mixed-eod", action="store_true", help="join pairs although their documents end differently"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Join, and say what came out."""
    args = build_parser().parse_args(argv)
    stop_when_told()
    try:
        with room_in(args.output.parent):
            joined = merge(args.prefixes, args.output, args.mixed_eod, args.overwrite)
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return STOPPED
    except (OSError, ValueError) as error:
        return failed(error)
    there = "" if joined.is_new else " (already there)"
    print(f"{args.output}.bin{there}: {joined.n_documents:,} documents, {joined.n_tokens:,} tokens")
    return 0


if __name__ == "__main__":
    run(main)
