"""Convert a model from one format to another.

    python tools/convert_checkpoint.py experiments/run OUT --to huggingface --tokenizer TOKENIZER
    python tools/convert_checkpoint.py MODEL OUT --to native
    python tools/convert_checkpoint.py experiments/run OUT --to sharded

SOURCE is a run or a checkpoint of this project, a Hugging Face folder (Llama, Qwen, Mistral, OLMo 2,
GPT-NeoX, GPT-2), or a checkpoint folder of Megatron-LM or Megatron-DeepSpeed. Its files
determine the format.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.cli import create_parser, positive_int, report_error, run_main
from megatron.config.cli_choices import TARGET_DTYPES, TARGETS
from megatron.config.schema import OBJECTIVES


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="a run, a checkpoint or a model in another format"
    )
    parser.add_argument("target", type=Path, metavar="TARGET", help="output path; must not exist")
    what = parser.add_argument_group("output")
    what.add_argument(
        "--to",
        required=True,
        type=parse_target,
        metavar="{" + ",".join(TARGETS) + "}",
        help="native: weights for checkpoint.init_from; megatron: for Megatron-LM, one tensor rank; "
        "full, sharded: a run's whole state in that layout; also from earlier versions' sharded layout",
    )
    what.add_argument(
        "--dtype", choices=TARGET_DTYPES, default="float32", help="dtype of the Hugging Face weights"
    )
    what.add_argument(
        "--strip-rows", action="store_true", help="huggingface: omit the rows of [MASK] and of padding"
    )
    source = parser.add_argument_group("facts missing in the source")
    source.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="folder, tokenizer.json or SentencePiece .model; default: that of the source",
    )
    source.add_argument(
        "--n-tokens",
        type=positive_int,
        metavar="N",
        help="number of token ids, if the vocabulary of a Megatron checkpoint is padded",
    )
    source.add_argument(
        "--objective",
        choices=OBJECTIVES,
        help="training objective of a Megatron checkpoint, if its saved arguments do not contain it",
    )
    return parser


def parse_target(text: str) -> str:
    """Return a format. Raises argparse's error, which names a replacement for llama2c."""
    if text not in TARGETS:
        hint = " llama2.c's own export.py reads a Hugging Face folder." if text == "llama2c" else ""
        raise argparse.ArgumentTypeError(f"got {text}, expected {', '.join(TARGETS)}.{hint}")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Convert, and print the path and a summary of the result."""
    args = build_parser().parse_args(argv)
    from megatron.checkpoint.convert.formats import (
        convert_checkpoint,
    )  # imported after parsing, so that --help does not load torch

    try:
        summary = convert_checkpoint(
            args.source,
            args.target,
            to=args.to,
            tokenizer=args.tokenizer,
            n_tokens=args.n_tokens,
            objective=args.objective,
            dtype=args.dtype,
            strip_rows=args.strip_rows,
        )
    except (OSError, ValueError) as error:
        return report_error(error)
    print(f"{args.target}: {summary}")
    return 0


if __name__ == "__main__":
    run_main(main)
