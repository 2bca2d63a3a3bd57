"""Devices: peak performance, memory bandwidth and power, from their data sheets."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron.config.yaml_file import read_yaml


@dataclass(frozen=True)
class DeviceSpec:
    """One GPU.

    peak_tflops    dense bf16 matrix products
    bandwidth_tbs  TB/s of device memory
    watts          board power limit (TDP), without the host
    """

    peak_tflops: float
    bandwidth_tbs: float
    watts: float


@cache
def load_devices() -> dict[str, DeviceSpec]:
    """Return the devices of utils/devices.yaml by name."""
    file = Path(__file__).with_name("devices.yaml")  # a link to utils/, a copy in a wheel
    return {str(name): DeviceSpec(*map(float, row)) for name, row in read_yaml(file).items()}


def find_device(device_name: str) -> DeviceSpec | None:
    """Return the entry of a device, or None if it is unknown.

    The longest key of the table that occurs
    in the name as whole words is used.
    """
    # "NVIDIA GH200 480GB" matches GH200 but not H200, which does not begin a
    # word there. "NVIDIA H100 PCIe" matches both H100 and H100 PCIe; the
    # longer key is right. An RTX 3090 Ti, 4090 D or 5090 Laptop GPU is another
    # device than the RTX 3090, 4090 or 5090.
    other = r"[A-Za-z0-9]| (?:Ti|D|Laptop)\b"
    keys = [key for key in load_devices() if re.search(rf"(?<![A-Za-z0-9]){key}(?!{other})", device_name)]
    return load_devices()[max(keys, key=len)] if keys else None
