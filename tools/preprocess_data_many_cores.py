"""Turn text into tokens on disk.

    python tools/preprocess_data_many_cores.py --input 'c4/train-*.json.gz' --output-prefix c4_100M \\
        --tokenizer-model gpt2 --append-eod --max-tokens 100M --workers 2 --root tokens

writes tokens/c4_100M_text_document.bin, .idx (Megatron's MMIDIDX version 1) and .json (what they were made
of). With a tokenizer of your own:

    python tools/prepare_corpus.py --out text
    python tools/train_tokenizer.py text/train.jsonl --out tokenizer
    python tools/preprocess_data_many_cores.py --input text/train.jsonl --output-prefix train \\
        --dataset-impl mmap --tokenizer-type HFTokenizer --tokenizer-model tokenizer --append-eod \\
        --workers 2 --root tokens

Killed at any moment, the same command goes on from the last finished piece.
"""

import argparse
import gc
import os
from collections.abc import Sequence
from pathlib import Path

# numpy's own threads would spin beside the workers; it reads this when it is imported
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
gc.set_threshold(100_000)  # by itself a tenth of the start goes into looking at modules over and over

import megatron.early_stop  # noqa: F401  # before what takes long
from megatron.command import command, count, failed, run, stop_when_told
from megatron.data.amounts import amount
from megatron.data.output_names import output_prefix
from megatron.data.preprocess import Options, preprocess
from megatron.run_dir import room_in
from megatron.tokenizer.options import add_tokenizer_options, tokenizer_of


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__, may_stop=True)
    files = parser.add_argument_group("files")
    files.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help=".jsonl or .json files, plain, .gz or .zst; .parquet; folders with all below them, also as "
        "datasets saves them; patterns; or - for standard input",
    )
    files.add_argument(
        "--output-prefix",
        type=output_prefix,
        required=True,
        metavar="NAME",
        help="first part of the output's names: NAME_text_document.bin, .idx and .json",
    )
    files.add_argument(
        "--overwrite", action="store_true", help="replace an output that was made of other files or settings"
    )
    files.add_argument("--root", type=Path, default=Path("."), metavar="DIR", help="folder of the output")
    files.add_argument("--dataset-impl", choices=["mmap"], default="mmap", help="layout on disk")
    files.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of the text, an output for each",
    )
    files.add_argument(
        "--on-error",
        choices=["fail", "skip"],
        default="fail",
        help="a line that is not JSON, lacks a key or has no string there, or a damaged .gz, .zst, .parquet "
        "or .arrow file: fail, print where and stop; skip, pass over the line or the whole file "
        "and list it in NAME.rejects.jsonl",
    )
    files.add_argument(
        "--max-tokens",
        type=amount,
        metavar="N",
        help="keep the fewest first documents that hold N tokens of the first key; K, M, B and T are 10^3, "
        "10^6, 10^9 and 10^12, as in 100M; by itself all",
    )
    add_tokenizer_options(parser)
    work = parser.add_argument_group("work")
    work.add_argument("--workers", type=count, default=1, metavar="N", help="cores that tokenise")
    work.add_argument("--quiet", action="store_true", help="no progress bar")
    work.add_argument("--timing", action="store_true", help="say where the CPU time went")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Tokenise, and say what came out."""
    args = build_parser().parse_args(argv)
    stop_when_told()  # workers are ended in good order
    gc.freeze()  # modules stay; nor are they looked at when the program ends
    try:
        with room_in(args.root):
            totals = preprocess(
                args.input,
                args.root / args.output_prefix,
                tokenizer_of(args),
                Options(
                    keys=tuple(args.json_keys),
                    append_eod=args.append_eod,
                    special_text=args.special_text == "token",
                    skip_bad_lines=args.on_error == "skip",
                    max_tokens=args.max_tokens,
                    n_workers=args.workers,
                    quiet=args.quiet,
                    overwrite=args.overwrite,
                ),
            )
    except (OSError, ValueError) as error:
        return failed(error)
    for one in totals.outputs:
        print(
            f"{one.prefix}.bin: {one.n_tokens:,} tokens per epoch, {one.n_documents:,} documents "
            f"({one.n_empty:,} empty), the longest {one.longest_document:,} tokens"
        )
    if args.timing:
        print("CPU seconds:", ", ".join(f"{stage} {s:.2f}" for stage, s in totals.cpu_s.items()))
    if totals.rejected.path:
        files = f", {totals.rejected.n_files:,} damaged files passed over" if totals.rejected.n_files else ""
        print(f"{totals.rejected.path}: {totals.rejected.n_lines:,} lines rejected{files}")
    return 0


if __name__ == "__main__":
    run(main)
