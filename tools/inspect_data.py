"""Look into a tokenised corpus.

python tools/inspect_data.py tokens/train_text_document
python tools/inspect_data.py tokens/train_text_document --document 3 --tokenizer-model gpt2
python tools/inspect_data.py tokens/train_text_document --verify
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from megatron.command import command, failed, run
from megatron.data.indexed import IndexedTokens, prefix_of
from megatron.data.inspect import Summary, faults, summarise
from megatron.tokenizer.kinds import load

BAR = 40


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument("prefix", metavar="PREFIX", help="a .bin/.idx pair without its suffix")
    what = parser.add_argument_group("what to do (default: count documents and tokens, draw their lengths)")
    one = what.add_mutually_exclusive_group()
    one.add_argument("--document", type=int, metavar="I", help="show document I, counted from 0, as text")
    what.add_argument(
        "--tokenizer-model",
        metavar="NAME",
        help="folder, tokenizer.json or hub name for --document; by itself the one that the sidecar names",
    )
    one.add_argument(
        "--verify",
        action="store_true",
        help="read both files through: sums and counts against the sidecar, ids against the vocabulary, ends "
        "of documents",
    )
    return parser


def table(summary: Summary) -> str:
    """Counts and a histogram of lengths, for people."""
    lines = [
        f"{summary.n_documents:,} documents, {summary.n_tokens:,} tokens ({summary.dtype})",
        f"tokens a document: {summary.shortest:,} to {summary.longest:,}, mean {summary.mean:,.1f}, "
        f"median {summary.median:,.1f}",
    ]
    most = max((n for _, n in summary.histogram), default=1)
    for least, n in summary.histogram:
        lines.append(f"{least:>10,} and up  {n:>12,}  {'#' * round(BAR * n / most)}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Look, and print."""
    args = build_parser().parse_args(argv)
    args.prefix = prefix_of(args.prefix)
    try:
        if args.verify:
            size = Path(f"{args.prefix}.bin")
            total = size.stat().st_size if size.is_file() else 0
            with tqdm(total=total, unit="B", unit_scale=True, disable=None, desc="verifying") as bar:
                found = list(faults(args.prefix, bar.update))
            for sentence in found:
                print(f"error: {sentence}", file=sys.stderr)
            if not found:
                print(f"{args.prefix}: whole")
            return 1 if found else 0
        pair = IndexedTokens(args.prefix)
        if args.document is None:
            print(table(summarise(pair)))
            return 0
        if not pair.n_documents:
            raise ValueError(f"{args.prefix}: holds no document")
        if not 0 <= args.document < pair.n_documents:
            raise ValueError(f"--document: found {args.document}, wanted 0 to {pair.n_documents - 1}")
        made_by = (pair.sidecar or {}).get("tokenizer") or {}
        name = args.tokenizer_model or made_by.get("name")
        if name is None:
            raise ValueError(
                f"{args.prefix}: has no sidecar that names its tokenizer; give --tokenizer-model"
            )
        tokenizer = load(name)
        if made_by.get("sha256") not in (None, tokenizer.sha256):
            raise ValueError(
                f"{name}: not the tokenizer {made_by.get('name')} that the pair was made with; "
                "its words would be others"
            )
        print(tokenizer.decode(pair.document(args.document).tolist()))
    except BrokenPipeError:
        raise  # `| head`: nothing is wrong
    except (OSError, ValueError) as error:
        return failed(error)
    return 0


if __name__ == "__main__":
    run(main)
