"""Convert a model from one format to another.

    python tools/convert_checkpoint.py experiments/run OUT --to huggingface --tokenizer TOKENIZER
    python tools/convert_checkpoint.py MODEL OUT --to native
    python tools/convert_checkpoint.py experiments/run OUT --to sharded

SOURCE is a run or a checkpoint of this project, a Hugging Face folder (Llama, Qwen3, GPT-2), a llama2.c
file, or a checkpoint folder of Megatron-LM or Megatron-DeepSpeed; what is there tells which.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.command import command, count, failed, run
from megatron.config.choices import OBJECTIVES, TARGET_DTYPES, TARGETS


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="a run, a checkpoint or a model of others"
    )
    parser.add_argument("target", type=Path, metavar="TARGET", help="what to write; must not exist")
    what = parser.add_argument_group("what to write")
    what.add_argument(
        "--to",
        required=True,
        choices=TARGETS,
        help="native: weights for checkpoint.init_from; full, sharded: a run's whole state, in that layout",
    )
    what.add_argument("--dtype", choices=TARGET_DTYPES, default="float32", help="of huggingface's")
    what.add_argument(
        "--strip-rows", action="store_true", help="huggingface: leave out the rows of [MASK] and padding"
    )
    source = parser.add_argument_group("what the source does not say")
    source.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="folder, tokenizer.json, .model of SentencePiece or .bin of llama2.c; by itself the source's",
    )
    source.add_argument(
        "--n-tokens",
        type=count,
        metavar="N",
        help="ids of the tokenizer, where a Megatron checkpoint is padded",
    )
    source.add_argument(
        "--objective",
        choices=OBJECTIVES,
        help="what a Megatron checkpoint was trained for, where its saved arguments do not tell",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Convert, and say where the result is."""
    args = build_parser().parse_args(argv)
    from megatron.checkpoint.convert import convert  # after the words: --help should not wait for torch

    try:
        told = convert(
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
        return failed(error)
    print(f"{args.target}: {told}")
    return 0


if __name__ == "__main__":
    run(main)
