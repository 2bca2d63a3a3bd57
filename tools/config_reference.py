"""Write the reference of all configuration keys from the dataclasses that define them.

python tools/config_reference.py
python tools/config_reference.py --check
python tools/config_reference.py --out reference.md
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.cli import create_parser, report_error, run_main
from megatron.config.reference import PAGE, render_reference
from megatron.io import write_atomic

ROOT = Path(__file__).resolve().parents[1]


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument("--out", type=Path, metavar="PAGE.md", help=f"output file; default: {PAGE}")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, or check that it is up to date."""
    args = build_parser().parse_args(argv)
    out = args.out or ROOT / PAGE
    try:
        text = render_reference()
        if args.check:
            if not out.is_file() or out.read_text() != text:
                raise ValueError(f"{out}: differs from megatron/config/schema.py. Run make docs.")
            print(f"{out}: current")
            return 0
        write_atomic(out, text)
    except (OSError, ValueError) as error:
        return report_error(error)
    print(f"{out}: {text.count(chr(10) + '| `')} keys")
    return 0


if __name__ == "__main__":
    run_main(main)
