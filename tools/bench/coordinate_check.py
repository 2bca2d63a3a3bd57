"""Measure whether activations change equally at every width and depth, and plot it for each parametrization.

    python tools/bench/coordinate_check.py --out coordinates.html
    python tools/bench/coordinate_check.py --widths 64 128 256 512 --lr 2e-3 --steps 10

Small models of each parametrization take a few AdamW steps at one learning rate. With mup the change of every
activation is the same at each width, with completep also at each depth. With standard it grows, so the
largest stable learning rate of a larger model is smaller. The tool prints the power of width and depth that
each change follows, and writes the page.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.command import create_parser, positive_int, run_main
from megatron.config.presets import padded_rows, swiglu_width
from megatron.config.schema import ModelConfig
from megatron.report.figures.plot_coordinates import CoordinateSweep, write_coordinate_page
from megatron.train.coordinates import QUANTITIES, measure_coordinates

PARAMETRIZATIONS = ("standard", "mup", "completep")


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("models").add_argument
    widths, depths = [64, 128, 256, 512], [2, 4, 8, 16, 32]
    add(
        "--widths",
        type=positive_int,
        nargs="+",
        default=widths,
        metavar="D",
        help="d_model; the first is the base",
    )
    add(
        "--depths",
        type=positive_int,
        nargs="+",
        default=depths,
        metavar="N",
        help="layers; the first is the base",
    )
    add("--d-head", type=positive_int, default=32, metavar="D", help="channels of an attention head")
    add("--n-tokens", type=positive_int, default=255, metavar="N", help="tokens of the vocabulary")
    add("--untied", action="store_true", help="untie the output head from the embedding")
    add = parser.add_argument_group("training").add_argument
    add("--lr", type=float, default=4e-3, metavar="RATE", help="learning rate of AdamW, for every size")
    add("--steps", type=positive_int, default=10, metavar="N", help="training steps of each model")
    add(
        "--seeds",
        type=positive_int,
        default=2,
        metavar="N",
        help="models per point; their root mean square is plotted",
    )
    add("--threads", type=positive_int, metavar="N", help="default: torch's choice")
    add("--out", type=Path, default=Path("coordinates.html"), metavar="PAGE.html", help="output page")
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments and check their combinations."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if min(len(args.widths), len(args.depths)) < 2:
        parser.error("--widths and --depths: got fewer than two sizes, expected at least two for a slope")
    if any(width % args.d_head for width in args.widths):
        parser.error(f"--widths: expected multiples of --d-head {args.d_head}")
    return args


def build_shape(args: argparse.Namespace, parametrization: str, width: int, depth: int) -> ModelConfig:
    """Build the model config of one point."""
    base: dict[str, Any] = {}
    # At the base size all three parametrizations are the same model. mup scales with d_model / base_d_model,
    # completep also with n_layers / base_n_layers.
    if parametrization != "standard":
        base["base_d_model"] = args.widths[0]
    if parametrization == "completep":
        base["base_n_layers"] = args.depths[0]
    return ModelConfig(
        d_model=width,
        d_ff=swiglu_width(width),
        d_head=args.d_head,
        n_heads=width // args.d_head,
        n_layers=depth,
        n_tokens=args.n_tokens,
        vocab_rows=padded_rows(args.n_tokens),
        tied_embedding=not args.untied,
        parametrization=parametrization,
        **base,
    )


def run_sweep(args: argparse.Namespace, parametrization: str, axis: str) -> CoordinateSweep:
    """Measure one parametrization over the widths at the base depth, or over the depths at the base width."""
    moved: dict[str, list[float]] = {name: [] for name in QUANTITIES}
    sizes = args.widths if axis == "width" else args.depths
    for size in sizes:
        width, depth = (size, args.depths[0]) if axis == "width" else (args.widths[0], size)
        model = build_shape(args, parametrization, width, depth)
        runs = [measure_coordinates(model, lr=args.lr, n_steps=args.steps, seed=i) for i in range(args.seeds)]
        for name in QUANTITIES:
            # root mean square over seeds of the change after the last step
            moved[name].append(float(np.sqrt(np.mean([run[name][-1] ** 2 for run in runs]))))
    return CoordinateSweep(parametrization, axis, sizes, moved)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the slopes and write the page."""
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    sweeps = []
    print(f"{'power of':8} {'':12}" + "".join(f"{name:>14}" for name in QUANTITIES))
    for axis in ("width", "depth"):
        for parametrization in PARAMETRIZATIONS:
            done = run_sweep(args, parametrization, axis)
            sweeps.append(done)
            slopes = "".join(f"{done.fit_slope(name):14.2f}" for name in QUANTITIES)
            print(f"{axis:8} {parametrization:12}{slopes}", flush=True)
    settings = (
        f"{args.steps} steps of AdamW at a rate of {args.lr:g}, {args.seeds} models per point. "
        f"Width varies at {args.depths[0]} blocks, depth at width {args.widths[0]}; these are the base sizes."
    )
    write_coordinate_page(sweeps, settings, args.out)
    print(f"{args.out}: written")
    return 0


if __name__ == "__main__":
    run_main(main)
