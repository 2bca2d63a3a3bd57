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

from megatron.cli import create_parser, positive_int, run_main
from megatron.config.cli_choices import TARGET_DTYPES, TARGETS
from megatron.config.schema import OBJECTIVES


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    source = "a run, a checkpoint or a model in another format"
    parser.add_argument("source", type=Path, metavar="SOURCE", help=source)
    parser.add_argument("target", type=Path, metavar="TARGET", help="output path; must not exist")
    add = parser.add_argument_group("output").add_argument
    formats = "native: weights for checkpoint.init_from; full, sharded: the whole state in that layout"
    add("--to", required=True, choices=TARGETS, help=formats)
    dtype = "dtype of the Hugging Face weights"
    add("--dtype", choices=TARGET_DTYPES, default="float32", help=dtype)
    rows = "huggingface: omit the rows of [MASK] and of padding"
    add("--strip-rows", action="store_true", help=rows)
    add = parser.add_argument_group("facts missing in the source").add_argument
    tokenizer = "folder, tokenizer.json or SentencePiece .model; default: the source's"
    add("--tokenizer", metavar="PATH", help=tokenizer)
    n_tokens = "number of token ids, if the vocabulary of a Megatron checkpoint is padded"
    add("--n-tokens", type=positive_int, metavar="N", help=n_tokens)
    objective = "of a Megatron checkpoint, if its saved arguments do not contain it"
    add("--objective", choices=OBJECTIVES, help=objective)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Convert, and print the path and a summary of the result."""
    facts = vars(build_parser().parse_args(argv))
    # imported after parsing, so that --help does not load torch
    from megatron.checkpoint.convert.formats import convert_checkpoint

    source, target = facts.pop("source"), facts.pop("target")
    print(f"{target}: {convert_checkpoint(source, target, **facts)}")
    return 0


if __name__ == "__main__":
    run_main(main)
