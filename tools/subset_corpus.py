"""Take a part of a corpus: the first documents, as many as hold some tokens, or a random sample.

    python tools/subset_corpus.py --input 'c4/train-*.json.gz' --tokens 100M --tokenizer-model gpt2 \\
        --append-eod --output c4_100M.jsonl
    python tools/subset_corpus.py --input tokens/c4_text_document --sample 0.1 --output tokens/c4_tenth

Lines stay as they are; a .bin/.idx pair gives a pair. The output appears when it is whole.
"""

import argparse
import sys
from collections.abc import Sequence

import megatron.early_stop  # noqa: F401  # before what takes long
from megatron.command import STOPPED, command, failed, run, stop_when_told
from megatron.data.amounts import amount, amount_or_share
from megatron.data.output_names import output_prefix
from megatron.data.subset import Counter, Selection, Subset, pair_of, subset_pair, subset_text
from megatron.run_dir import room_in
from megatron.tokenizer.encoder import NO_EOD, FastEncoder, LibraryEncoder, fast_of
from megatron.tokenizer.kinds import load
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
        "datasets saves them; patterns; - for standard input; or one .bin/.idx pair without its suffix",
    )
    files.add_argument(
        "--output",
        type=output_prefix,
        required=True,
        metavar="PATH",
        help="of text: a .jsonl, .jsonl.gz or .jsonl.zst; of a pair: the prefix of the new one",
    )
    files.add_argument("--overwrite", action="store_true", help="replace an output that is there")
    files.add_argument("--json-key", default="text", metavar="KEY", help="key of the text")
    files.add_argument(
        "--on-error",
        choices=["fail", "skip"],
        default="fail",
        help="a line that is not JSON, lacks the key or has no string there, or a damaged packed file or "
        "file of columns: fail, print where and stop; skip, pass over line or file and count it",
    )
    files.add_argument("--quiet", action="store_true", help="no progress bar")
    which = parser.add_argument_group("which documents (K, M, B, T are 10^3, 10^6, 10^9, 10^12)")
    one = which.add_mutually_exclusive_group(required=True)
    one.add_argument("--documents", type=amount, metavar="N", help="the first N")
    one.add_argument(
        "--tokens", type=amount, metavar="N", help="the fewest first documents that hold N tokens; 100M"
    )
    one.add_argument(
        "--sample",
        type=amount_or_share,
        metavar="N|SHARE",
        help="N at random, or each with a chance between 0 and 1, in the order of the input",
    )
    which.add_argument("--seed", type=int, default=0, metavar="N", help="of the sample")
    add_tokenizer_options(parser)
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Words that go together."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.seed < 0:
        parser.error(f"--seed: found {args.seed}, wanted 0 or more")
    return args


def take(args: argparse.Namespace) -> Subset:
    """Do what was said."""
    selection = Selection(documents=args.documents, tokens=args.tokens, sample=args.sample, seed=args.seed)
    pairs = [pair for word in args.input if (pair := pair_of(word)) is not None]
    spec = tokenizer_of(args)
    has_tokenizer = any([spec.model, spec.vocab_file, spec.vocab_size])
    if pairs:
        if len(args.input) > 1:
            raise ValueError(
                f"{pairs[0]}: is a pair, which is taken alone; join pairs with merge_datasets.py"
            )
        if has_tokenizer or args.append_eod:
            raise ValueError(f"{pairs[0]}: is a pair, already tokenised; leave out the tokenizer's options")
        return subset_pair(pairs[0], args.output, selection, args.quiet, args.overwrite)
    counter = None
    if has_tokenizer:
        known, special = load(spec), args.special_text == "token"
        fast, _ = fast_of(known)
        encoder = LibraryEncoder(known, special) if fast is None else FastEncoder(fast, special)
        counter = Counter(encoder, known.eod_id if args.append_eod else NO_EOD)
    return subset_text(
        args.input, args.output, selection, counter, args.json_key, args.on_error == "skip", args.quiet,
        args.overwrite,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Take the part, and say what it holds."""
    args = parse_args(argv)
    stop_when_told()  # what is half written goes
    try:
        with room_in(args.output.parent):
            subset = take(args)
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return STOPPED
    except (OSError, ValueError) as error:
        return failed(error)
    tokens = "tokens not counted (no tokenizer given)"
    if subset.n_tokens is not None:
        tokens = f"{subset.n_tokens:,} tokens"
    print(f"{args.output}: {subset.n_documents:,} documents, {tokens}")
    if subset.n_rejected:
        print(f"{subset.n_rejected:,} bad lines left out")
    if subset.n_damaged:
        print(f"{subset.n_damaged:,} damaged files passed over")
    return 0


if __name__ == "__main__":
    run(main)
