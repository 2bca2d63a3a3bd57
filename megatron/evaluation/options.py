"""What the tools that score models ask about the machine, and the processes that follow from it."""

from argparse import ArgumentParser, Namespace
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from megatron.command import count
from megatron.config.choices import DEVICES

if TYPE_CHECKING:  # --help should not wait for torch
    from megatron.parallel.world import World


def add_machine_options(parser: ArgumentParser, batch_size: int, unit: str) -> None:
    """--batch-size (by itself `batch_size`, of `unit`), --device and --threads."""
    add = parser.add_argument_group("machine").add_argument
    add("--batch-size", type=count, default=batch_size, metavar="N", help=f"{unit} of a forward")
    add("--device", choices=DEVICES, help="by itself cuda where there is a GPU")
    add("--threads", type=count, metavar="N", help="CPU threads of a rank; by itself torch's choice")


def open_asked_world(args: Namespace) -> AbstractContextManager["World"]:
    """`open_world` on the device that was asked for. ValueError where it is not there."""
    import torch

    from megatron.config.schema import DistConfig
    from megatron.parallel.world import open_world

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU here; leave the option out, or say cpu")
    return open_world(DistConfig(cpu_only=args.device == "cpu"), args.threads)
