"""Options of the scoring tools for batch size, device and threads, and the processes they start."""

from argparse import ArgumentParser, Namespace
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from megatron.cli import positive_int
from megatron.config.cli_choices import DEVICES, SCORING_DTYPES

if TYPE_CHECKING:  # --help should not wait for torch
    from megatron.parallel.world import World


def add_machine_options(parser: ArgumentParser, batch_size: int, unit: str) -> None:
    """Add --batch-size (default `batch_size`, counted in `unit`), --dtype, --device and --threads."""
    add = parser.add_argument_group("machine").add_argument
    rows = f"{unit} per forward pass"
    add("--batch-size", type=positive_int, default=batch_size, metavar="N", help=rows)
    dtype = "of weights and activations in the forward pass"
    add("--dtype", choices=SCORING_DTYPES, default=SCORING_DTYPES[0], help=dtype)
    add("--device", choices=DEVICES, help="default: cuda if there is a GPU, else cpu")
    add("--threads", type=positive_int, metavar="N", help="CPU threads per rank; default: torch's choice")


def open_requested_world(args: Namespace) -> AbstractContextManager["World"]:
    """Call `open_world` with the requested device. Raises ValueError if it is not available."""
    import torch

    from megatron.config.schema import DistConfig
    from megatron.parallel.world import open_world

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU. Omit the option, or use cpu.")
    return open_world(DistConfig(cpu_only=args.device == "cpu"), args.threads)
