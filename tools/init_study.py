"""Write a study to start from.

python tools/init_study.py study.yaml
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.cli import create_parser, report_error, run_main
from megatron.io import write_atomic

STUDY = """\
name: {name}
directory: experiments/{name}
run:
  dataset: {{path_train: data/train_text_document, path_eval: data/val_text_document, batch_size: 64}}
  optim: {{lr: steplaw, weight_decay: 0.1}}
  lr_scheduler: {{kind: cosine, warmup_fraction: 0.02, lr_min_ratio: 0.1}}
cells:
  - {{size: [7M, 14M, 20M], flops: [1.0e+15, 3.0e+15]}}
  - {{size: [14M, 20M, 35M, 57M], flops: [1.0e+16, 3.0e+16]}}
  - {{size: 14M, flops: 3.0e+15, seeds: [1, 2]}} # seeds 0, 1 and 2 show the scatter of a run
  - {{size: best, flops: 1.2e+17}} # forecast by tools/fit_frontier.py --predict, then trained
# next: python tools/sweep.py {path} --dry-run --hardware H100
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument("study", type=Path, metavar="STUDY.yaml", help="file to write; it must not exist")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write the study, and print where it is."""
    path = build_parser().parse_args(argv).study
    try:
        if path.exists():
            raise ValueError(f"{path}: got an existing file, expected a new one. Choose another name.")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, STUDY.format(name=path.stem, path=path))
    except (OSError, ValueError) as error:
        return report_error(error)
    print(f"{path}: a study of 16 runs and a forecast; adapt its data, sizes and budgets")
    return 0


if __name__ == "__main__":
    run_main(main)
