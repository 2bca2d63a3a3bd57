"""Turn text into tokens on disk.

    python tools/prepare_corpus.py --out text
    python tools/train_tokenizer.py text/train.jsonl --out tokenizer
    python tools/preprocess_data_many_cores.py --input text/train.jsonl --output-prefix train \\
        --dataset-impl mmap --tokenizer-type HFTokenizer --tokenizer-model tokenizer --append-eod \\
        --workers 2 --root tokens

writes tokens/train_text_document.bin, .idx (Megatron's MMIDIDX version 1) and .json (what they were made of).
Killed at any moment, the same command goes on from the last finished piece.
Exit status: 0 done, 1 failed, 2 wrong usage, 75 stopped by Ctrl-C or SIGTERM.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.data.preprocess import Options, preprocess
from megatron.tokenizer.kinds import KINDS, TokenizerSpec

EXIT_STOPPED = 75


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
        help=".jsonl or .json files, plain, .gz or .zst; .parquet; folders, also as datasets saves them; "
        "patterns; or - for standard input",
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="NAME", help="first part of the output's names"
    )
    parser.add_argument(
        "--root", type=Path, default=Path("."), metavar="DIR", help="folder of the output (.)"
    )
    parser.add_argument("--dataset-impl", choices=["mmap"], default="mmap", help="layout on disk (mmap)")
    parser.add_argument("--tokenizer-type", choices=KINDS, default=KINDS[0], help=f"({KINDS[0]})")
    parser.add_argument(
        "--tokenizer-model",
        metavar="NAME",
        help="HFTokenizer: folder with tokenizer.json or with vocab.json and merges.txt, or a name on the "
        "Hugging Face hub (gpt2 needs no network); SentencePieceTokenizer: .model file",
    )
    parser.add_argument("--vocab-file", metavar="PATH", help="GPT2BPETokenizer: vocab.json")
    parser.add_argument("--merge-file", metavar="PATH", help="GPT2BPETokenizer: merges.txt")
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="NullTokenizer: the text is numbers from 0 to N - 1"
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
    parser.add_argument(
        "--special-text",
        choices=["token", "text"],
        default="token",
        help="a special token's text such as <|endoftext|> within a document: token, its id, as the "
        "tokenizers library has it; text, ordinary characters, as tiktoken has it (token)",
    )
    parser.add_argument(
        "--on-error",
        choices=["fail", "skip"],
        default="fail",
        help="a line that is not JSON, lacks a key or has no string there: fail, say where and stop; skip, "
        "count it and write it down in <prefix>.rejects.jsonl (fail)",
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="keep the fewest first documents that reach N tokens"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="cores that tokenise (1)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Tokenise, and say what came out."""
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: workers are ended in good order
    try:
        totals = preprocess(
            args.input,
            args.root / args.output_prefix,
            TokenizerSpec(
                args.tokenizer_type, args.tokenizer_model, args.vocab_file, args.merge_file, args.vocab_size
            ),
            Options(
                keys=tuple(args.json_keys),
                append_eod=args.append_eod,
                special_text=args.special_text == "token",
                skip_bad_lines=args.on_error == "skip",
                max_tokens=args.max_tokens,
                n_workers=args.workers,
                quiet=args.quiet,
            ),
        )
    except KeyboardInterrupt:
        print("stopped; run the same command again to go on", file=sys.stderr)
        return EXIT_STOPPED
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for one in totals.outputs:
        print(
            f"{one.prefix}.bin: {one.n_tokens:,} tokens per epoch, {one.n_documents:,} documents "
            f"({one.n_empty:,} empty), the longest {one.longest_document:,} tokens"
        )
    if totals.rejects:
        print(f"{totals.rejects}: {totals.n_rejected:,} lines rejected")
    return 0


if __name__ == "__main__":
    sys.exit(main())
