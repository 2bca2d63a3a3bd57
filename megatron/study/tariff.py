"""Money and energy of device time."""

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron.cli import positive_float
from megatron.plan.hardware import find_device
from megatron.study.format import format_digits


@dataclass(frozen=True)
class Tariff:
    """Price and power of one device; None: not known.

    price_per_hour  money for one hour of one device
    watts           power of one device; default: the power limit of `hardware`, if it is
                    a listed GPU
    """

    price_per_hour: float | None = None
    watts: float | None = None
    hardware: str | None = None

    def describe(self, device_seconds: float) -> str:
        """Return hours, money and energy of one or more devices, such as `3.2 GPU-hours, 8.0 at 2.5 an hour`.

        Energy is an upper bound if the power is a limit. Empty without a
        price or a power, or for no known time.
        """
        device = find_device(self.hardware) if self.hardware else None
        watts = self.watts or (device.watts if device else None)
        if not math.isfinite(device_seconds) or self.price_per_hour is watts is None:
            return ""
        hours = device_seconds / 3600
        word = "device" if (self.hardware or "CPU").startswith("CPU") else "GPU"
        parts = [f"{format_digits(hours)} {word}-hours"]
        if self.price_per_hour is not None:
            parts.append(f"{format_digits(hours * self.price_per_hour)} at {self.price_per_hour:g} an hour")
        if watts is not None:
            # 700 W for 10 hours: 7 kWh
            parts.append(f"up to {format_digits(hours * watts / 1000)} kWh at {watts:g} W")
        return ", ".join(parts)


def add_tariff_options(group: argparse._ArgumentGroup) -> None:
    """Add --price-per-hour and --watts to a group of options."""
    watts = "power of one GPU; default: the power limit of a listed GPU"
    for name, about in (("--price-per-hour", "price of one GPU for an hour"), ("--watts", watts)):
        group.add_argument(name, type=positive_float, metavar="NUMBER", help=about)


def sum_device_seconds(results: Iterable[dict[str, Any]]) -> tuple[float, str | None]:
    """Return (seconds times ranks of finished runs, their hardware); None for several kinds of hardware.

    `results` are contents of result.json. A branch counts the steps that it
    shares with its trunk.
    """
    timed = [result for result in results if isinstance(result.get("wall_s"), int | float)]
    names = {str(result.get("hardware")) for result in timed}
    seconds = sum(result["wall_s"] * (result.get("n_ranks") or 1) for result in timed)
    return seconds, names.pop() if len(names) == 1 else None
