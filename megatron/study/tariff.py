"""Money and energy of device time."""

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from megatron.cli import positive_float
from megatron.plan.hardware import find_device
from megatron.study.format import format_digits


@dataclass(frozen=True)
class Tariff:
    """Price and power of one device; None: not known.

    price_per_hour  money for one hour of one device
    watts           power of one device
    """

    price_per_hour: float | None = None
    watts: float | None = None

    def describe(self, device_seconds: float, word: str = "GPU") -> str:
        """Return hours, money and energy of one or more devices, such as `3.2 GPU-hours, 8.0 at 2.5 an hour`.

        Energy is an upper bound if `watts` is a power limit. Empty without a
        price or a power, or for no known time.
        """
        if not math.isfinite(device_seconds) or self.price_per_hour is self.watts is None:
            return ""
        hours = device_seconds / 3600
        parts = [f"{format_digits(hours)} {word}-hours"]
        if self.price_per_hour is not None:
            parts.append(f"{format_digits(hours * self.price_per_hour)} at {self.price_per_hour:g} an hour")
        if self.watts is not None:
            # 700 W for 10 hours: 7 kWh
            parts.append(f"up to {format_digits(hours * self.watts / 1000)} kWh at {self.watts:g} W")
        return ", ".join(parts)


def add_tariff_options(group: argparse._ArgumentGroup) -> None:
    """Add --price-per-hour and --watts to a group of options."""
    watts = "power of one GPU; default: the power limit of a listed GPU"
    for name, about in (("--price-per-hour", "price of one GPU for an hour"), ("--watts", watts)):
        group.add_argument(name, type=positive_float, metavar="NUMBER", help=about)


def read_tariff(args: argparse.Namespace) -> Tariff:
    """Return the tariff of the options of `add_tariff_options`."""
    return Tariff(args.price_per_hour, args.watts)


def fill_watts(tariff: Tariff, hardware: str | None) -> Tariff:
    """Return the tariff with the power limit of a device, if it names none and the device is listed."""
    device = find_device(hardware) if hardware else None
    if tariff.watts is not None or device is None:
        return tariff
    return replace(tariff, watts=device.watts)


def sum_device_seconds(results: Iterable[dict[str, Any]]) -> tuple[float, str | None]:
    """Return (seconds times ranks of finished runs, their hardware); None for several kinds of hardware.

    `results` are contents of result.json. A branch counts the steps that it
    shares with its trunk.
    """
    seconds, names = 0.0, set()
    for result in results:
        wall_s, n_ranks = result.get("wall_s"), result.get("n_ranks") or 1
        if isinstance(wall_s, int | float) and math.isfinite(wall_s):
            seconds += wall_s * n_ranks
            names.add(str(result.get("hardware")))
    return seconds, names.pop() if len(names) == 1 else None
