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
from megatron.checkpoint.gpt2_names import BUFFER, from_gpt2, to_gpt2
from megatron.checkpoint.redundant import check_inverse_frequencies, check_tied_head
from megatron.checkpoint.weights import Weights, own
from megatron.config.hf import GPT2, LLAMA
from megatron.config.hf_checkpoint import DIFFUSION_TYPE, read_hf_config
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

    Keys that config.json leaves out have transformers' defaults. Keys without influence on the logits are
    logged; every tensor is used, or is left out because it repeats what is known (a tied head, rotary
    frequencies, causal masks).
    Raises FileNotFoundError for what is no such folder, ValueError for a model that this one cannot be.
    """
    hf_config = _read_json(folder / CONFIG)
    own = {key: hf_config.pop(key) for key in OWN if key in hf_config}
    try:
        shape, n_positions, ignored = read_hf_config(hf_config)
        objective = _objective_of(own, hf_config)
        rows = shape["n_tokens"]
        n_tokens = own.get("n_tokens", rows)
        if type(n_tokens) is not int or not 0 < n_tokens <= rows:
            raise ValueError(f"n_tokens: got {n_tokens!r}, expected 1 to vocab_size {rows}")
        config = ModelConfig(**{**shape, "n_tokens": n_tokens, "vocab_rows": rows})
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    if ignored:
        log.warning("%s: without influence on the logits, not read: %s", folder / CONFIG, ", ".join(ignored))
    tensors = _read_tensors(folder)
    try:
        state = _own_names(tensors, config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    weights = Weights(
        config=config,
        objective=objective,
        state={name: tensor.float() for name, tensor in state.items()},
        seq_len=n_positions,
        tokenizer=_tokenizer_in(folder),
        source=str(folder),
    )
    weights.model()  # ValueError where a tensor is missing or has another shape
    return weights


def _tokenizer_in(folder: Path) -> str | None:
    """The tokenizer beside a model, as `kinds.load_by_name` takes it; None: there is none."""
    if (folder / "tokenizer.json").is_file():
        return str(folder)
    is_of_gpt2 = (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    return str(folder) if is_of_gpt2 else None


def _objective_of(own_keys: dict[str, Any], hf_config: dict[str, Any]) -> str:
    """What an export says; other models are autoregressive. ValueError where type and objective disagree."""
    diffusion = hf_config.get("model_type") == DIFFUSION_TYPE
    expected = "masked_diffusion" if diffusion else "autoregressive"
    objective = own_keys.get("objective", expected)
    if objective != expected:
        raise ValueError(f"objective: got {objective!r}, expected {expected!r} of this model_type")
    return expected


def _own_names(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Tensors under our names, without those that repeat others. ValueError names what does not fit."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() and not BUFFER.search(name):
            raise ValueError(
                f"{name}: got {tensor.dtype}, expected floating point; quantised models are not read"
            )
    gpt2 = config.positions == "learned"
    state = from_gpt2(tensors) if gpt2 else _from_llama(tensors, config)
    head = state.get("unembedding.weight")
    if config.tied_embedding and head is not None and "embedding.weight" in state:
        check_tied_head(head, state["embedding.weight"], "lm_head.weight")
        del state["unembedding.weight"]
    if not config.tied_embedding and head is None:
        raise ValueError(
            "lm_head.weight: missing, but tie_word_embeddings is false, which is transformers' default for "
            "Llama and Qwen3. Set it to true in config.json if the embedding is the head."
        )
    return state


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
        ids = {} if write_tokenizer is None else write_tokenizer(partial)
        # a padding id past the rows, which a tokenizer may have, is none that the model can read
        ends = {key: i for key, i in ids.items() if i < weights.config.vocab_rows}
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


def _from_llama(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Undo `to_llama`. ValueError for two tensors of one name, and rotary frequencies that are others."""
    named: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("rotary_emb.inv_freq"):  # older files keep a table that follows from the shape
            check_inverse_frequencies(name, tensor, config.d_head, config.rope_theta)
            continue
        full = name if name.startswith(("model.", "lm_head.")) else f"model.{name}"  # of the bare LlamaModel
        ours = full
        for own_part, their_part in reversed(LLAMA_NAMES):
            ours = ours.replace(their_part, own_part)
        ours = ours.removeprefix("model.")
        if list(to_llama({ours: tensor})) != [full]:
            raise ValueError(f"{name}: got a tensor that Llama and Qwen3 do not have")
        if ours in named:
            raise ValueError(f"{name}: is there twice, with and without 'model.'")
        named[ours] = tensor
    return named


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of one safetensors file, or of those that the index lists."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files, listed = [SINGLE], None
    if not (folder / SINGLE).is_file() and (folder / INDEX).is_file():
        listed = _read_index(folder / INDEX)
        files = sorted(set(listed.values()))
    state: dict[str, Tensor] = {}
    for i, name in enumerate(files):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: no such file; wanted a model with safetensors")
        if len(files) > 1:
            log.info("reading %s (%d of %d)", name, i + 1, len(files))
        try:
            tensors = load_file(folder / name)
        except SafetensorError as error:
            raise ValueError(f"{folder / name}: not a safetensors file ({error}); fetch it again") from error
        if listed is not None:
            stray = set(tensors) ^ {tensor for tensor, file in listed.items() if file == name}
            if stray:
                raise ValueError(
                    f"{folder / name}: {sorted(stray)[0]} is in this file or in {INDEX}, not in both; "
                    "fetch both again"
                )
        state |= tensors
    return state


def _read_index(path: Path) -> dict[str, str]:
    """{tensor: name of its file} of an index: of the folder itself, for an index may name any path.

    ValueError for others.
    """
    files = _read_json(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{path}: weight_map: got nothing, expected tensors with the names of their files")
    for file in files.values():
        if not isinstance(file, str) or not SHARD.fullmatch(file):
            raise ValueError(
                f"{path}: weight_map: got {file!r:.80}, expected .safetensors files of the same folder. "
                "Download the model again, from its author."
            )
    return files


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
