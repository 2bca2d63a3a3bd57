"""What devices can do, from their makers' data sheets."""

import re

# Dense bf16 matrix products, TFLOP/s. PCIe cards do less than modules of the same name.
PEAK_TFLOPS = {
    "A100": 312.0,
    "H100": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H200": 989.0,
    "GH200": 989.0,
    "H200 NVL": 835.0,
    "B200": 2250.0,
    "GB200": 2250.0,
    "MI300X": 1300.0,
}


def peak_tflops(device_name: str) -> float | None:
    """Peak of the device whose name holds a key of the table as words (the longest that fits), else None."""
    known = [key for key in PEAK_TFLOPS if re.search(rf"(?<![A-Za-z0-9]){key}(?![A-Za-z0-9])", device_name)]
    return PEAK_TFLOPS[max(known, key=len)] if known else None


def utilisation(
    tokens_per_s: float, flops_per_token: float, peak: float | None
) -> tuple[float, float | None]:
    """(TFLOP/s of one device, their part of its peak); the part is None where the peak is not known."""
    tflops = tokens_per_s * flops_per_token / 1e12
    return tflops, None if peak is None else tflops / peak
