"""Parts of the GPU bench, tools/bench/gpu.py."""
