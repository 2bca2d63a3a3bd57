"""Write a part of a corpus: the first documents, the first with a number of tokens, a random sample, a split.

    python tools/subset_corpus.py --input 'c4/train-*.json.gz' --tokens 100M --tokenizer-model gpt2 \\
        --append-eod --output c4_100M.jsonl
    python tools/subset_corpus.py --input tokens/c4_text_document --sample 0.1 --output tokens/c4_tenth
    python tools/subset_corpus.py --input tokens/c4_text_document --split 949,50,1 --output tokens/c4

Lines of text are copied unchanged; a .bin/.idx dataset gives a dataset. The output gets its name when
complete.
"""

import argparse
from collections.abc import Callable, Sequence
from fractions import Fraction

import megatron.cli  # noqa: F401  # before slow imports, so that a signal during them is handled
from megatron.cli import create_parser, install_stop_handlers, non_negative_int, run_main
from megatron.io import explain_disk_full
from megatron.text.arguments import parse_count, parse_count_or_fraction, parse_output_prefix
from megatron.text.split import SPLIT_NAMES, split_dataset
from megatron.text.subset import (
    Document,
    DocumentSelection,
    SubsetResult,
    find_dataset_prefix,
    subset_dataset,
    subset_text,
)
from megatron.text.workers import encoder_builder
from megatron.tokenizer.encoder import NO_EOD, build_fast_bpe, encode_with_location
from megatron.tokenizer.kinds import (
    TokenizerSpec,
    add_tokenizer_options,
    load_tokenizer,
    parse_tokenizer_spec,
)


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__, may_stop=True)
    add = parser.add_argument_group("files").add_argument
    inputs = ".jsonl, .json (also compressed), .parquet; folders, patterns; -; or one .bin/.idx dataset"
    add("--input", nargs="+", required=True, metavar="PATH", help=inputs)
    output = "for text: a .jsonl, .jsonl.gz or .jsonl.zst file; for a dataset: prefix of the new one"
    add("--output", type=parse_output_prefix, required=True, metavar="PATH", help=output)
    add("--overwrite", action="store_true", help="replace an existing output")
    add("--json-key", default="text", metavar="KEY", help="key of the text")
    add("--quiet", action="store_true", help="no progress bar")
    which = parser.add_argument_group("selection of documents (K, M, B, T are 10^3, 10^6, 10^9, 10^12)")
    add = which.add_mutually_exclusive_group(required=True).add_argument
    add("--documents", type=parse_count, metavar="N", help="the first N documents")
    tokens = "the fewest first documents that contain N tokens, for example 100M"
    add("--tokens", type=parse_count, metavar="N", help=tokens)
    sample = "each document with a probability, in input order; of a dataset also N random documents"
    add("--sample", type=parse_count_or_fraction, metavar="N|SHARE", help=sample)
    split = "of a dataset: cut as by Megatron's --split into OUTPUT_train, OUTPUT_valid and OUTPUT_test"
    add("--split", type=parse_shares, metavar="949,50,1", help=split)
    which.add_argument("--seed", type=non_negative_int, default=0, metavar="N", help="seed of the sample")
    add_tokenizer_options(parser)
    return parser


def parse_shares(word: str) -> tuple[Fraction, ...]:
    """Parse up to three shares with a sum above 0 (an argparse type)."""
    try:
        shares = tuple(Fraction(part.strip()) for part in word.split(","))
    except (ValueError, ZeroDivisionError):
        shares = ()
    if not 1 <= len(shares) <= len(SPLIT_NAMES) or min(shares) < 0 or not sum(shares):
        raise argparse.ArgumentTypeError(f"got '{word}', expected up to three numbers such as 949,50,1")
    return shares


def write_parts(args: argparse.Namespace) -> dict[str, SubsetResult]:
    """Write the selected part of the text or dataset; return its size, or the sizes of the parts, by name."""
    if args.split is not None:
        return write_split(args)
    selection = DocumentSelection(
        documents=args.documents, tokens=args.tokens, sample=args.sample, seed=args.seed
    )
    # an input is a dataset if its .idx exists; otherwise it is a text file, a folder or a pattern
    pairs = [pair for word in args.input if (pair := find_dataset_prefix(word)) is not None]
    spec = parse_tokenizer_spec(args)
    has_tokenizer = any([spec.model, spec.vocab_file, spec.vocab_size])
    if pairs:
        if len(args.input) > 1:
            raise ValueError(
                f"{pairs[0]}: got a dataset with other inputs, expected it alone. "
                "Merge datasets with merge_datasets.py."
            )
        if has_tokenizer or args.append_eod:
            raise ValueError(f"{pairs[0]}: already tokenized. Omit the tokenizer's options.")
        part = subset_dataset(pairs[0], args.output, selection, args.quiet, args.overwrite)
        return {str(args.output): part}
    count = build_counter(args, spec) if has_tokenizer else None
    words = (args.json_key, args.quiet, args.overwrite)
    return {str(args.output): subset_text(args.input, args.output, selection, count, *words)}


def build_counter(args: argparse.Namespace, spec: TokenizerSpec) -> Callable[[Document], int]:
    """Return the function that counts the tokens of a document."""
    tokenizer = load_tokenizer(spec)
    eod = tokenizer.eod_id if args.append_eod else NO_EOD
    encoder = encoder_builder(spec, build_fast_bpe(tokenizer)[0], args.special_text == "token")()
    return lambda d: len(encode_with_location(encoder, [d.text], [d.location], eod)[0])


def write_split(args: argparse.Namespace) -> dict[str, SubsetResult]:
    """Write the parts of a dataset, and return their sizes by name."""
    prefix = find_dataset_prefix(args.input[0])
    if prefix is None or len(args.input) > 1:
        raise ValueError(f"--split: got {' '.join(args.input)}, expected one .bin/.idx dataset")
    parts = split_dataset(prefix, args.output, args.split, args.quiet, args.overwrite)
    return {f"{args.output}_{name}": part for name, part in parts.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the part, and print its size."""
    args = build_parser().parse_args(argv)
    install_stop_handlers()  # a signal raises KeyboardInterrupt, which removes the partial output
    with explain_disk_full(args.output.parent):
        parts = write_parts(args)
    for name, part in parts.items():
        no_count = "tokens not counted (no tokenizer given)"
        tokens = no_count if part.n_tokens is None else f"{part.n_tokens:,} tokens"
        print(f"{name}: {part.n_documents:,} documents, {tokens}")
    return 0


if __name__ == "__main__":
    run_main(main)
