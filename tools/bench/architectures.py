"""Compare the logits of random models of transformers with those of this project, in and out.

    python tools/bench/architectures.py
    python tools/bench/architectures.py --d-model 128 --layers 4

For each architecture a random model of transformers is saved, read here, converted to the native format and
back. The columns: parameters, the standard deviation of the logits, the largest difference of the logits here
(in) and of the model that was written (out), and the size of the three files in bytes.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.cli import create_parser, positive_int, run_main

ROPE31 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
# name -> class of transformers, and keys of its configuration besides sizes
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama 3.1": ("Llama", {"rope_parameters": ROPE31}),
    "llama, linear": ("Llama", {"rope_parameters": LINEAR}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, window": ("Mistral", {"sliding_window": 16}),
    "olmo2": ("Olmo2", {}),
    "pythia": ("GPTNeoX", {}),
    "gpt2": ("GPT2", {}),
}


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument("--d-model", type=positive_int, default=64, metavar="N", help="width")
    parser.add_argument("--layers", type=positive_int, default=2, metavar="N", help="blocks")
    parser.add_argument("--positions", type=positive_int, default=64, metavar="N", help="length of the text")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row per architecture."""
    args = build_parser().parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    columns = f"{'in':>8} {'out':>8} {'hub':>10} {'native':>10} {'back':>10}"
    print(f"{'architecture':16} {'N':>9} {'std':>6} {columns}")
    for name in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            print(compare_architecture(name, Path(folder), args.d_model, args.layers, args.positions))
            sys.stdout.flush()
    return 0


def compare_architecture(name: str, folder: Path, d_model: int, n_layers: int, n_positions: int) -> str:
    """Save, read, convert and write one architecture; return its row."""
    import torch
    import transformers

    from megatron.checkpoint.convert.formats import convert_checkpoint, read_any

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind, keys = ARCHITECTURES[name]
    torch.manual_seed(0)
    theirs = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    model = theirs(_make_config(transformers, kind, keys, d_model, n_layers, n_positions)).eval()
    model.save_pretrained(folder / "hub")
    convert_checkpoint(folder / "hub", folder / "native", to="native")
    convert_checkpoint(folder / "native", folder / "back", to="huggingface")
    tokens = torch.randint(0, 500, (2, n_positions))
    with torch.no_grad():
        expected = model(tokens).logits
        inside = read_any(folder / "hub").build_model()(tokens, causal=True)
        back = theirs.from_pretrained(folder / "back").eval()(tokens).logits
    sizes = [folder / "hub" / "model.safetensors", folder / "native" / "model_state_dict.pt"]
    sizes.append(folder / "back" / "model.safetensors")
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    differences = ((other - expected).abs().max() for other in (inside, back))
    return (
        f"{name:16} {n_parameters:9,} {expected.std():6.2f} "
        + " ".join(f"{difference:8.1e}" for difference in differences)
        + "".join(f" {path.stat().st_size:10,}" for path in sizes)
    )


def _make_config(library: Any, kind: str, keys: dict[str, Any], d_model: int, n_layers: int, n: int) -> Any:
    shared = {"vocab_size": 500, "initializer_range": 0.1}
    if kind == "GPT2":
        sizes = {"n_embd": d_model, "n_layer": n_layers, "n_head": 4, "n_positions": n}
    else:
        sizes = {"hidden_size": d_model, "num_hidden_layers": n_layers, "num_attention_heads": 4}
        sizes |= {"intermediate_size": 3 * d_model, "max_position_embeddings": n}
        sizes |= {} if kind == "GPTNeoX" else {"num_key_value_heads": 2}
    return getattr(library, f"{kind}Config")(**shared, **sizes, **keys)


if __name__ == "__main__":
    run_main(main)
