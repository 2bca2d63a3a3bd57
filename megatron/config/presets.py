"""Model shapes by name, and in Hugging Face's words."""

import difflib
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

SIZES_FILE = Path(__file__).resolve().parents[2] / "utils" / "model_sizes.yaml"

VOCAB_MULTIPLE = 128  # rows of the embedding: matrix units work on multiples of 128

FROM_HF = {
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "head_dim": "d_head",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "vocab_size": "n_tokens",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "norm_eps",
}


def nearest(word: str, known: list[str]) -> str:
    """`; did you mean 'x'?`, or the whole list where nothing is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"


def padded_rows(n_tokens: int) -> int:
    """Rows of the embedding: the tokenizer's ids, then [MASK], then padding to a multiple of 128."""
    return -(-(n_tokens + 1) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def swiglu_width(d_model: int) -> int:
    """floor(8 d / 3 / 64) * 64: three matrices of this width weigh about as much as two of 4 d."""
    return max(8 * d_model // (3 * 64), 1) * 64


@cache
def model_sizes() -> dict[str, dict[str, int]]:
    """The named ladder, from utils/model_sizes.yaml."""
    if not SIZES_FILE.is_file():
        raise FileNotFoundError(f"{SIZES_FILE}: not found; install with `pip install -e .` in a checkout")
    sizes = OmegaConf.to_container(OmegaConf.load(SIZES_FILE))
    return {str(name): dict(shape) for name, shape in sizes.items()}


def shape_of_size(name: str) -> dict[str, int]:
    """The shape of a named size. ValueError offers the nearest name."""
    sizes = model_sizes()
    if name not in sizes:
        raise ValueError(f"model.size: '{name}' is not in {SIZES_FILE.name}; {nearest(name, list(sizes))}")
    return sizes[name]


def shape_from_hf(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Hugging Face's names for a Llama-shaped model, in ours. ValueError for what the model cannot be."""
    fixed = {
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "model_type": "llama",
        "num_key_value_heads": hf_config.get("num_attention_heads"),
    }
    shape: dict[str, Any] = {}
    for key, value in hf_config.items():
        if key in FROM_HF:
            shape[FROM_HF[key]] = value
        elif key in fixed:
            if value != fixed[key]:
                raise ValueError(f"model.hf_config.{key}: found {value!r}, this model has {fixed[key]!r}")
        elif key != "max_position_embeddings":
            raise ValueError(f"model.hf_config: unknown key '{key}'; {nearest(key, [*FROM_HF, *fixed])}")
    return shape
