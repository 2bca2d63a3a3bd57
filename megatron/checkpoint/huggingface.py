"""Models as Hugging Face's transformers keeps them: config.json, safetensors, tokenizer files.

Autoregressive models go out as LlamaForCausalLM, Qwen3ForCausalLM (norms on queries and keys) or
GPT2LMHeadModel, and these come in. Masked-diffusion models of Llama's or Qwen3's shape go out with the code
that runs them, `modeling_masked_diffusion.py`, for `trust_remote_code`.

Every row of the embedding goes out, with [MASK] and padding, so that what comes back is the same to the bit;
`Weights.without_spare_rows` leaves out those that are no token. config.json says under OWN how many rows are.
"""

import json
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.folder import whole_folder
from megatron.checkpoint.gpt2_names import from_gpt2, to_gpt2
from megatron.checkpoint.weights import Weights, own
from megatron.config.hf import GPT2, LLAMA
from megatron.config.read import resolve_model
from megatron.config.schema import ModelConfig
from megatron.log import get_logger

log = get_logger(__name__)

CONFIG, GENERATION, INDEX, SINGLE = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "model.safetensors",
)
SHARD = re.compile(r"(?!\.)[^/\\\0]+\.safetensors")
OWN = ("n_tokens", "objective")  # our keys in config.json, which transformers keeps and does not read
CODE = "modeling_masked_diffusion.py"
CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "gpt2": "GPT2LMHeadModel"}
DIFFUSION_TYPE = "megatron_masked_diffusion"
LLAMA_NAMES = (
    ("unembedding.", "lm_head."),
    ("attention.query_norm.", "self_attn.q_norm."),
    ("attention.key_norm.", "self_attn.k_norm."),
    ("attention.query.", "self_attn.q_proj."),
    ("attention.key.", "self_attn.k_proj."),
    ("attention.value.", "self_attn.v_proj."),
    ("attention.out.", "self_attn.o_proj."),
    ("mlp.gate.", "mlp.gate_proj."),
    ("mlp.up.", "mlp.up_proj."),
    ("mlp.down.", "mlp.down_proj."),
    ("attention_norm.", "input_layernorm."),
    ("mlp_norm.", "post_attention_layernorm."),
    ("embedding.", "model.embed_tokens."),
    ("blocks.", "model.layers."),
)


def read_huggingface(folder: Path) -> Weights:
    """The weights of a model folder, as float32.

    Raises FileNotFoundError for what is no such folder, ValueError for a model that this one cannot be.
    """
    told = _read_json(folder / CONFIG)
    own = {key: told.pop(key) for key in OWN if key in told}
    objective = own.get("objective", "autoregressive")
    kind = told.get("model_type", "llama")
    if kind == DIFFUSION_TYPE:
        told.pop("auto_map", None)
        kind = told["model_type"] = "qwen3" if told.pop("qk_norm", False) else "llama"
    try:
        shape = resolve_model({"hf_config": told}, None)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    rows = shape["n_tokens"]
    config = ModelConfig(**{**shape, "n_tokens": own.get("n_tokens", rows), "vocab_rows": rows})
    rename = from_gpt2 if kind == "gpt2" else _from_llama
    state = rename({name: of.float() for name, of in _read_tensors(folder).items()})
    if config.tied_embedding:
        state.pop("unembedding.weight", None)
    weights = Weights(
        config=config,
        objective=objective,
        state=state,
        seq_len=told.get("max_position_embeddings") or told.get("n_positions"),
        tokenizer=str(folder) if (folder / "tokenizer.json").is_file() else None,
        source=str(folder),
    )
    weights.model()  # ValueError where a tensor is missing or has another shape
    return weights


def write_huggingface(
    weights: Weights,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    write_tokenizer: Callable[[Path], dict[str, Any]] | None = None,
) -> None:
    """Write a model folder, whole or not at all.

    `write_tokenizer` writes a tokenizer's files into the folder, and gives keys for config.json.
    Raises ValueError for a model that transformers has no class for, or a name that is taken.
    """
    kind, reason = _kind_of(weights.config)
    if kind is None:
        raise ValueError(f"{weights.source}: transformers has no class for this model ({reason})")
    diffusion = weights.objective == "masked_diffusion"
    if diffusion and kind == "gpt2":
        raise ValueError(
            f"{weights.source}: diffusion models go out in Llama's or Qwen3's shape, this is GPT-2's"
        )
    from huggingface_hub import save_torch_state_dict  # slow to import

    rename = to_gpt2 if kind == "gpt2" else to_llama
    state = {name: own(of).to(dtype) for name, of in rename(weights.state).items()}
    told = _config_of(weights, kind, dtype)
    if diffusion:
        classes = {"AutoConfig": "Config", "AutoModel": "Lm", "AutoModelForMaskedLM": "Lm"}
        module = CODE.removesuffix(".py")
        told |= {
            "model_type": DIFFUSION_TYPE,
            "architectures": ["MaskedDiffusionLm"],
            "qk_norm": weights.config.qk_norm,
            "auto_map": {auto: f"{module}.MaskedDiffusion{name}" for auto, name in classes.items()},
        }
    with whole_folder(folder) as partial:
        save_torch_state_dict(state, partial, safe_serialization=True)
        if diffusion:
            code = resources.files("megatron.checkpoint") / "exported" / CODE
            (partial / CODE).write_text(code.read_text())
        ends = {} if write_tokenizer is None else write_tokenizer(partial)
        told |= ends
        if not diffusion:  # its `generate` writes no row that is none of the tokenizer's ids
            spare = list(range(weights.config.n_tokens, weights.config.vocab_rows))
            _write_json(partial / GENERATION, ends | ({"suppress_tokens": spare} if spare else {}))
        _write_json(partial / CONFIG, told)


def _kind_of(config: ModelConfig) -> tuple[str | None, str]:
    """(model_type, ""), or None and the reason why no class of transformers is this model."""
    if config.parametrization != "standard":
        return None, f"its multipliers are those of {config.parametrization}"
    shape = (config.norm, config.feed_forward, config.positions)
    if shape == ("rmsnorm", "swiglu", "rotary"):
        if config.qk_norm and config.biases:
            return None, "it has norms on queries and keys and biases too"
        return "qwen3" if config.qk_norm else "llama", ""
    if shape == ("layernorm", "gelu", "learned"):
        if not config.biases or config.qk_norm or config.kv_heads != config.n_heads:
            return None, "GPT-2 has biases, as many heads of keys as of queries, and no norms on them"
        if config.n_heads * config.d_head != config.d_model:
            return None, "GPT-2's heads fill the width"
        return "gpt2", ""
    return None, f"{', '.join(shape)} together are neither Llama's nor GPT-2's"


def _config_of(weights: Weights, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """config.json."""
    config = weights.config
    names = GPT2 if kind == "gpt2" else LLAMA
    told: dict[str, Any] = {"model_type": kind, "architectures": [CLASSES[kind]]}
    told |= {theirs: getattr(config, ours) for theirs, ours in names.items()}
    told |= {"vocab_size": config.vocab_rows, "dtype": str(dtype).removeprefix("torch.")}
    if kind == "gpt2":
        told |= {"activation_function": "gelu_new", "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    else:
        told |= {
            "num_key_value_heads": config.kv_heads,
            "hidden_act": "silu",
            "max_position_embeddings": weights.seq_len or 2048,
            "attention_bias": config.biases,
            # transformers 4 reads rope_theta, 5 reads this
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        }
    if kind == "llama":
        told["mlp_bias"] = config.biases
    told |= {
        "bos_token_id": None,
        "eos_token_id": None,
    }  # Llama's own would be 1 and 2, whatever those mean here
    return told | {"n_tokens": config.n_tokens, "objective": weights.objective}


def to_llama(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under the names of LlamaForCausalLM and Qwen3ForCausalLM."""
    named = {}
    for name, tensor in state.items():
        for ours, theirs in LLAMA_NAMES:
            name = name.replace(ours, theirs) if ours in name else name
        named[f"model.{name}" if name.startswith("norm.") else name] = tensor
    return named


def _from_llama(state: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {}
    for name, tensor in state.items():
        for ours, theirs in reversed(LLAMA_NAMES):
            name = name.replace(theirs, ours)
        if not name.endswith("rotary_emb.inv_freq"):  # older files keep a table that follows from the shape
            named[name.removeprefix("model.")] = tensor
    return named


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of one safetensors file, or of those that the index lists."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = [SINGLE]
    if not (folder / SINGLE).is_file() and (folder / INDEX).is_file():
        files = _listed_files(folder)
    state: dict[str, Tensor] = {}
    for i, name in enumerate(files):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: no such file; wanted a model with safetensors")
        if len(files) > 1:
            log.info("reading %s (%d of %d)", name, i + 1, len(files))
        try:
            state |= load_file(folder / name)
        except SafetensorError as error:
            raise ValueError(f"{folder / name}: not a safetensors file ({error}); fetch it again") from error
    return state


def _listed_files(folder: Path) -> list[str]:
    """Files that the index lists: of the folder itself, for an index from elsewhere may name any path."""
    path = folder / INDEX
    listed = _read_json(path).get("weight_map")
    names = list(listed.values()) if isinstance(listed, dict) else []
    odd = [name for name in names if not isinstance(name, str) or not SHARD.fullmatch(name)]
    if odd or not names:
        got = repr(odd[0])[:100] if odd else "nothing"
        raise ValueError(
            f"{path}: weight_map: got {got}, expected names of .safetensors files in the same folder. "
            "Download the model again, from its author"
        )
    return sorted(set(names))


def _write_json(path: Path, told: dict[str, Any]) -> None:
    path.write_text(json.dumps(told, indent=2) + "\n")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; wanted a folder as transformers saves it")
    try:
        told = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(told, dict):
        raise ValueError(f"{path}: holds {type(told).__name__}, wanted an object")
    return told
