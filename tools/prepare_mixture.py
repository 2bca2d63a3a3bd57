"""Ask the catalog for a mixture's documents, tokenise what is text, and show what the domains hold.

    python tools/prepare_mixture.py slim.yaml

What it makes lies in slim.mixture/ beside the file; tools/pretrain.py dataset.mixture=slim.yaml does the same
by itself. Run again, it does only what is missing.
"""

import argparse
from collections.abc import Sequence

from megatron.command import command, failed, run
from megatron.config.mixture_use import Resolved, folder_of
from megatron.mixture.spec import prepare


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument("mixture", metavar="MIXTURE.yaml", help="see megatron/mixture/spec.py for its keys")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read all files and compare their content with the catalog's sums",
    )
    return parser


def table(resolved: Resolved) -> str:
    """A line for each domain."""
    width = max(map(len, resolved.domains))
    lines = [f"{'domain':<{width}}    documents           tokens   weight"]
    for name, documents, tokens, weight in zip(
        resolved.domains, resolved.documents, resolved.tokens, resolved.weights, strict=True
    ):
        lines.append(f"{name:<{width}} {documents:>12,} {tokens:>16,}  {weight:.2%}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare, and print."""
    args = build_parser().parse_args(argv)
    try:
        resolved = prepare(args.mixture, verify=args.verify)
    except (OSError, ValueError) as error:
        return failed(error)
    print(table(resolved))
    print(f"{folder_of(args.mixture)}: ready for dataset.mixture={args.mixture}")
    return 0


if __name__ == "__main__":
    run(main)
