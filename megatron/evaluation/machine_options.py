"""Options of the scoring tools for batch size, device and threads, and the processes they start."""

from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn

from megatron.cli import positive_int
from megatron.config.cli_choices import DEVICES, SCORING_DTYPES

if TYPE_CHECKING:  # --help should not wait for torch
    from megatron.parallel.world import World


def add_machine_options(parser: ArgumentParser, batch_size: int, unit: str) -> None:
    """Add --batch-size (default `batch_size`, counted in `unit`), --dtype, --device and --threads."""
    add = parser.add_argument_group("machine").add_argument
    add(
        "--batch-size",
        type=parse_batch_size,
        default=batch_size,
        metavar="N",
        help=f"{unit} per forward pass",
    )
    add(
        "--dtype",
        choices=SCORING_DTYPES,
        default=SCORING_DTYPES[0],
        help="of weights and activations in the forward pass",
    )
    add("--device", choices=DEVICES, help="default: cuda if there is a GPU, else cpu")
    add("--threads", type=positive_int, metavar="N", help="CPU threads per rank; default: torch's choice")
    add(
        "--backend",
        metavar="NAME",
        type=refuse_option("`lm_eval --model hf` for other models"),
        help=SUPPRESS,
    )


def refuse_option(replacement: str) -> Callable[[str], NoReturn]:
    """Return an argument type that refuses a removed option and names its replacement."""

    def refuse(value: str) -> NoReturn:
        raise ArgumentTypeError(f"this option was removed; use {replacement}")

    return refuse


def parse_batch_size(text: str) -> int:
    """Parse a count above 0; the removed `auto` is an error that names the replacement."""
    if text == "auto":
        raise ArgumentTypeError("auto was removed; give a number, such as 16")
    return positive_int(text)


def open_requested_world(args: Namespace) -> AbstractContextManager["World"]:
    """Call `open_world` with the requested device. Raises ValueError if it is not available."""
    import torch

    from megatron.config.schema import DistConfig
    from megatron.parallel.world import open_world

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU. Omit the option, or use cpu.")
    return open_world(DistConfig(cpu_only=args.device == "cpu"), args.threads)
