"""Select a mixture's documents from the catalog, tokenize their text, and list the domains.

    python tools/prepare_mixture.py slim.yaml

The output is written to slim.mixture/ next to the file. tools/pretrain.py dataset.mixture=slim.yaml does this
automatically. When rerun, it only does what is missing.
"""

import argparse
from collections.abc import Sequence

from megatron.cli import create_parser, report_error, run_main
from megatron.mixture.prepare import prepare_mixture
from megatron.plan.mixture_use import ResolvedMixture, mixture_folder


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument(
        "mixture", metavar="MIXTURE.yaml", help="mixture file; megatron/mixture/spec.py lists its keys"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read all files and compare their content with the catalog's sums",
    )
    return parser


def format_domains(resolved: ResolvedMixture) -> str:
    """Format one line per domain."""
    width = max(map(len, resolved.domains))
    lines = [f"{'domain':<{width}}    documents           tokens   weight"]
    for name, documents, tokens, weight in zip(
        resolved.domains, resolved.documents, resolved.tokens, resolved.weights, strict=True
    ):
        lines.append(f"{name:<{width}} {documents:>12,} {tokens:>16,}  {weight:.2%}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the mixture, and print its domains."""
    args = build_parser().parse_args(argv)
    try:
        resolved = prepare_mixture(args.mixture, verify=args.verify)
    except (OSError, ValueError) as error:
        return report_error(error)
    print(format_domains(resolved))
    print(f"{mixture_folder(args.mixture)}: ready for dataset.mixture={args.mixture}")
    return 0


if __name__ == "__main__":
    run_main(main)
