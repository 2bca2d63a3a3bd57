"""Devices: peak performance, memory bandwidth and power, from their data sheets."""

import re
from dataclasses import dataclass


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


# From the vendors' data sheets. PCIe cards are slower than SXM modules of the
# same name. A100: 80 GB on SXM. GB200: one of its two GPUs; MI250X: one of its
# two dies, each a device for torch and Slurm. GeForce: with sums in float32.
# T4: float16, it has no bf16.
# Power limits that can be configured are the highest ones.
DEVICES = {
    "A100": DeviceSpec(312.0, 2.039, 400.0),
    "H100": DeviceSpec(989.0, 3.35, 700.0),
    "H100 PCIe": DeviceSpec(756.0, 2.0, 350.0),
    "H100 NVL": DeviceSpec(835.0, 3.9, 400.0),
    "H200": DeviceSpec(989.0, 4.8, 700.0),
    "GH200": DeviceSpec(989.0, 4.0, 1000.0),
    "H200 NVL": DeviceSpec(835.0, 4.8, 600.0),
    "B200": DeviceSpec(2250.0, 8.0, 1000.0),
    "GB200": DeviceSpec(2250.0, 8.0, 1200.0),
    "MI300X": DeviceSpec(1300.0, 5.3, 750.0),
    "MI250X": DeviceSpec(191.5, 1.6, 280.0),
    "RTX 3090": DeviceSpec(71.0, 0.936, 350.0),
    "RTX 4090": DeviceSpec(165.2, 1.008, 450.0),
    "RTX 5090": DeviceSpec(209.5, 1.792, 575.0),
    "L40S": DeviceSpec(362.05, 0.864, 350.0),
    "T4": DeviceSpec(65.0, 0.32, 70.0),
}


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
    matching_keys = [key for key in DEVICES if re.search(rf"(?<![A-Za-z0-9]){key}(?!{other})", device_name)]
    return DEVICES[max(matching_keys, key=len)] if matching_keys else None


def peak_tflops(device_name: str) -> float | None:
    """Return the peak of a device, or None if it is unknown; see `find_device`."""
    device = find_device(device_name)
    return None if device is None else device.peak_tflops


def compute_mfu(
    tokens_per_s: float, flops_per_token: float, peak: float | None
) -> tuple[float, float | None]:
    """Return (TFLOP/s of one device, model FLOPs utilization); the latter is None if the peak is unknown."""
    # example: 10,000 tokens/s x 6e9 FLOPs = 60 TFLOP/s, 6 % of an H100's 989
    tflops = tokens_per_s * flops_per_token / 1e12
    return tflops, None if peak is None else tflops / peak
