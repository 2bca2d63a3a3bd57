"""Write the reference of every key of a run's configuration from the dataclasses that hold them.

python tools/config_reference.py
python tools/config_reference.py --check
python tools/config_reference.py --out reference.md
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.command import command, failed, run
from megatron.config.reference import PAGE, reference
from megatron.run_dir import write_whole

ROOT = Path(__file__).resolve().parents[1]


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument("--out", type=Path, metavar="PAGE.md", help=f"where it goes; by itself {PAGE}")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where the page is not current"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write, or compare."""
    args = build_parser().parse_args(argv)
    out = args.out or ROOT / PAGE
    try:
        text = reference()
        if args.check:
            if not out.is_file() or out.read_text() != text:
                raise ValueError(f"{out}: not what megatron/config/schema.py says now; run make docs")
            print(f"{out}: current")
            return 0
        write_whole(out, text)
    except (OSError, ValueError) as error:
        return failed(error)
    print(f"{out}: {text.count(chr(10) + '| `')} keys")
    return 0


if __name__ == "__main__":
    run(main)
