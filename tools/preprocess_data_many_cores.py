"""Turn text into tokens on disk.

    python tools/preprocess_data_many_cores.py --input c4.jsonl --output-prefix c4 --dataset-impl mmap \\
        --tokenizer-type HFTokenizer --tokenizer-model gpt2 --append-eod --workers 8 --root tokens

writes tokens/c4_text_document.bin, .idx (Megatron's MMIDIDX version 1) and .json (what they were made of).
Exit status: 0 done, 1 failed, 2 wrong usage.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.data.preprocess import preprocess


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command-line words."""
    parser = argparse.ArgumentParser(
        description="Turn text into tokens on disk, in the order of the input for any number of workers.",
        epilog=__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help=".jsonl, .json, .jsonl.gz or .json.gz files, an object a line; folders of them; or patterns",
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="NAME", help="first part of the output's names"
    )
    parser.add_argument(
        "--root", type=Path, default=Path("."), metavar="DIR", help="folder of the output (.)"
    )
    parser.add_argument("--dataset-impl", choices=["mmap"], default="mmap", help="layout on disk (mmap)")
    parser.add_argument(
        "--tokenizer-type", choices=["HFTokenizer"], default="HFTokenizer", help="(HFTokenizer)"
    )
    parser.add_argument(
        "--tokenizer-model",
        required=True,
        metavar="NAME",
        help="folder with tokenizer.json or with vocab.json and merges.txt, or a Hugging Face hub name",
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with the end-of-document token"
    )
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of the text, an output for each (text)",
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes that tokenise (1)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Tokenise, and say what came out."""
    args = parse_args(argv)
    try:
        totals = preprocess(
            args.input,
            args.root / args.output_prefix,
            args.tokenizer_model,
            keys=args.json_keys,
            append_eod=args.append_eod,
            n_workers=args.workers,
        )
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for prefix in totals.prefixes:
        print(f"{prefix}.bin: {totals.n_documents:,} documents, {totals.n_tokens:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
