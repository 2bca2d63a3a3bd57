"""Peak performance of devices, from their data sheets."""

import re

# Dense bf16 matrix products, TFLOP/s. PCIe cards are slower than SXM modules of the same name.
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
    """Return the peak of a device, or None if it is unknown.

    The longest key of the table that occurs in the name as whole words is used.
    """
    # "NVIDIA GH200 480GB" matches GH200 but not H200, which does not begin a word there. "NVIDIA H100 PCIe"
    # matches both H100 and H100 PCIe; the longer key is right.
    matching_keys = [
        key for key in PEAK_TFLOPS if re.search(rf"(?<![A-Za-z0-9]){key}(?![A-Za-z0-9])", device_name)
    ]
    return PEAK_TFLOPS[max(matching_keys, key=len)] if matching_keys else None


def compute_mfu(
    tokens_per_s: float, flops_per_token: float, peak: float | None
) -> tuple[float, float | None]:
    """Return (TFLOP/s of one device, model FLOPs utilization); the latter is None if the peak is unknown."""
    # example: 10,000 tokens/s x 6e9 FLOPs = 60 TFLOP/s, 6 % of an H100's 989
    tflops = tokens_per_s * flops_per_token / 1e12
    return tflops, None if peak is None else tflops / peak
