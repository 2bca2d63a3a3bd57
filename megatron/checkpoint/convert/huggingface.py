"""Read and write models in the format of Hugging Face's transformers: config.json, safetensors, tokenizer.

Autoregressive models are exported as LlamaForCausalLM, Qwen3ForCausalLM (norms on queries and keys) or
GPT2LMHeadModel; the same classes are imported. Masked-diffusion models of Llama's or Qwen3's shape are
exported with the code that runs them, `modeling_masked_diffusion.py`, for `trust_remote_code`.

All rows of the embedding are exported, including [MASK] and padding, so that a round trip is bitwise exact.
`Weights.strip_spare_rows` drops the rows that are no token. config.json records the number of token rows and
the objective under PROJECT_KEYS.
"""

import json
import re
from collections.abc import Callable
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.convert.gpt2_names import BUFFER, export_gpt2_names, import_gpt2_names
from megatron.checkpoint.convert.redundant_tensors import check_inverse_frequencies, check_tied_head
from megatron.checkpoint.model_weights import Weights, clone_if_view
from megatron.config.hf import GPT2, LLAMA
from megatron.config.hf_checkpoint import DIFFUSION_TYPE, read_hf_config
from megatron.config.schema import ModelConfig
from megatron.io import atomic_folder
from megatron.log import get_logger

log = get_logger(__name__)

CONFIG_FILE, GENERATION, INDEX, SINGLE = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "model.safetensors",
)
# one name in the same folder: no "/", no NUL, and no leading dot, as in "../model.safetensors"
SHARD = re.compile(r"(?!\.)[^/\\\0]+\.safetensors")
PROJECT_KEYS = (
    "n_tokens",
    "objective",
)  # keys of this project in config.json; transformers preserves and ignores them
CODE = "modeling_masked_diffusion.py"
# options of a model that a folder describes, or that change only its training; the others are refused
EXPORTED_KEYS = {
    "size", "d_model", "d_ff", "d_head", "n_heads", "n_layers", "n_tokens", "vocab_rows", "rope_theta",
    "norm_eps", "n_kv_heads", "norm", "feed_forward", "positions", "n_positions", "biases", "tied_embedding",
    "qk_norm", "document_mask", "eod_id", "attention_dropout", "hidden_dropout", "init_std",
    "parametrization", "base_d_model", "base_n_layers", "base_d_head",
}  # fmt: skip
CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "gpt2": "GPT2LMHeadModel"}
# The replacements are applied in this order, each to the result of the one before. "unembedding." contains
# "embedding.", so it must come first. Import applies them in reverse.
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
    """Load the weights of a model folder as float32.

    Keys missing in config.json have transformers' defaults. Keys that do not affect the logits are logged.
    Every tensor is used, or dropped after a check that it is redundant (a tied head, rotary frequencies,
    causal masks).
    Raises FileNotFoundError if it is not a model folder, ValueError for an unsupported model.
    """
    hf_config = _read_json(folder / CONFIG_FILE)
    project_values = {key: hf_config.pop(key) for key in PROJECT_KEYS if key in hf_config}
    try:
        # vocab_size counts all rows, with [MASK] and padding; only PROJECT_KEYS record how many are ids
        shape, n_positions, ignored = read_hf_config(hf_config)
        objective = _read_objective(project_values, hf_config)
        rows = shape["n_tokens"]
        n_tokens = project_values.get("n_tokens", rows)
        if type(n_tokens) is not int or not 0 < n_tokens <= rows:
            raise ValueError(f"n_tokens: got {n_tokens!r}, expected 1 to vocab_size {rows}")
        config = ModelConfig(**{**shape, "n_tokens": n_tokens, "vocab_rows": rows})
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_FILE}: {error}") from error
    if ignored:
        log.warning(
            "%s: ignored keys that do not affect the logits: %s", folder / CONFIG_FILE, ", ".join(ignored)
        )
    tensors = _read_tensors(folder)
    try:
        state = _convert_names(tensors, config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    weights = Weights(
        config=config,
        objective=objective,
        state={name: tensor.float() for name, tensor in state.items()},
        seq_len=n_positions,
        tokenizer=_find_tokenizer(folder),
        source=str(folder),
    )
    weights.build_model()  # raises ValueError for a missing tensor or a wrong shape
    return weights


def _find_tokenizer(folder: Path) -> str | None:
    """Return the path of the folder's tokenizer, for `kinds.load_tokenizer_by_name`, or None."""
    if (folder / "tokenizer.json").is_file():
        return str(folder)
    is_of_gpt2 = (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    return str(folder) if is_of_gpt2 else None


def _read_objective(own_keys: dict[str, Any], hf_config: dict[str, Any]) -> str:
    """Return the objective by model_type. Raises ValueError if an exported `objective` contradicts it."""
    diffusion = hf_config.get("model_type") == DIFFUSION_TYPE
    expected = "masked_diffusion" if diffusion else "autoregressive"
    objective = own_keys.get("objective", expected)
    if objective != expected:
        raise ValueError(f"objective: got {objective!r}, expected {expected!r} for this model_type")
    return expected


def _convert_names(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return tensors under this model's names, without redundant ones. Raises ValueError for others."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() and not BUFFER.search(name):
            raise ValueError(
                f"{name}: got {tensor.dtype}, expected floating point; quantised models are not supported"
            )
    gpt2 = config.positions == "learned"
    state = import_gpt2_names(tensors) if gpt2 else _import_llama_names(tensors, config)
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
    """Write a model folder atomically.

    `write_tokenizer` writes the tokenizer's files into the folder and returns keys for config.json.
    Raises ValueError if transformers has no class for the model, and FileExistsError if the folder exists.
    """
    kind, reason = _choose_model_type(weights.config)
    if kind is None:
        raise ValueError(f"{weights.source}: transformers has no class for this model ({reason})")
    diffusion = weights.objective == "masked_diffusion"
    if diffusion and kind == "gpt2":
        raise ValueError(
            f"{weights.source}: diffusion models can be exported in Llama's or Qwen3's shape, got GPT-2's"
        )
    from huggingface_hub import save_torch_state_dict  # slow import

    rename = export_gpt2_names if kind == "gpt2" else export_llama_names
    state = {name: clone_if_view(tensor).to(dtype) for name, tensor in rename(weights.state).items()}
    hf_config = _build_hf_config(weights, kind, dtype)
    if diffusion:
        classes = {"AutoConfig": "Config", "AutoModel": "Lm", "AutoModelForMaskedLM": "Lm"}
        module = CODE.removesuffix(".py")
        hf_config |= {
            "model_type": DIFFUSION_TYPE,
            "architectures": ["MaskedDiffusionLm"],
            "qk_norm": weights.config.qk_norm,
            "auto_map": {auto: f"{module}.MaskedDiffusion{name}" for auto, name in classes.items()},
        }
    # config.json is written after the tensors and the tokenizer, because it contains keys of the latter
    with atomic_folder(folder) as partial:
        save_torch_state_dict(state, partial, safe_serialization=True)
        if diffusion:
            code = resources.files("megatron.checkpoint.convert") / "exported" / CODE
            (partial / CODE).write_text(code.read_text())
        ids = {} if write_tokenizer is None else write_tokenizer(partial)
        # a tokenizer's padding id may be past the embedding's rows, where transformers rejects it
        ends = {key: i for key, i in ids.items() if i < weights.config.vocab_rows}
        hf_config |= ends
        if not diffusion:  # `generate` must not sample rows that are no token
            # rows from n_tokens on are [MASK] and padding
            spare = list(range(weights.config.n_tokens, weights.config.vocab_rows))
            _write_json(partial / GENERATION, ends | ({"suppress_tokens": spare} if spare else {}))
        _write_json(partial / CONFIG_FILE, hf_config)


def _choose_model_type(config: ModelConfig) -> tuple[str | None, str]:
    """Return (model_type, ""), or (None, reason) if no class of transformers matches the model."""
    # a new option of the model is refused here until it is exported, so that it is never dropped
    unknown = [
        key.name
        for key in fields(config)
        if key.name not in EXPORTED_KEYS and getattr(config, key.name) != key.default
    ]
    if unknown:
        return None, f"it sets {', '.join(unknown)}"
    if config.parametrization != "standard":
        return None, f"it has the multipliers of {config.parametrization}"
    shape = (config.norm, config.feed_forward, config.positions)
    if shape == ("rmsnorm", "swiglu", "rotary"):
        if config.qk_norm and config.biases:
            return None, "it has both biases and norms on queries and keys"
        return "qwen3" if config.qk_norm else "llama", ""
    if shape == ("layernorm", "gelu", "learned"):
        if not config.biases or config.qk_norm or config.kv_heads != config.n_heads:
            return None, "GPT-2 has biases, n_kv_heads = n_heads, and no norms on queries and keys"
        if config.n_heads * config.d_head != config.d_model:
            return None, "GPT-2 has n_heads x d_head = d_model"
        return "gpt2", ""
    return None, f"{', '.join(shape)} are a combination of neither Llama nor GPT-2"


def _build_hf_config(weights: Weights, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of config.json."""
    config = weights.config
    names = GPT2 if kind == "gpt2" else LLAMA
    hf_config: dict[str, Any] = {"model_type": kind, "architectures": [CLASSES[kind]]}
    hf_config |= {theirs: getattr(config, ours) for theirs, ours in names.items()}
    # all rows of the embedding are exported, so vocab_size must be their number
    hf_config |= {"vocab_size": config.vocab_rows, "dtype": str(dtype).removeprefix("torch.")}
    if kind == "gpt2":
        hf_config |= {"activation_function": "gelu_new", "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    else:
        hf_config |= {
            "num_key_value_heads": config.kv_heads,
            "hidden_act": "silu",
            "max_position_embeddings": weights.seq_len or 2048,
            "attention_bias": config.biases,
            # read by transformers 5; version 4 reads rope_theta
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        }
    if kind == "llama":
        hf_config["mlp_bias"] = config.biases
    hf_config |= {
        "bos_token_id": None,
        "eos_token_id": None,
    }  # Llama's defaults 1 and 2 may be ordinary tokens of this tokenizer
    return hf_config | {"n_tokens": config.n_tokens, "objective": weights.objective}


def export_llama_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename this model's tensors to those of LlamaForCausalLM and Qwen3ForCausalLM."""
    named = {}
    for name, tensor in state.items():
        for ours, theirs in LLAMA_NAMES:
            name = name.replace(ours, theirs) if ours in name else name
        named[f"model.{name}" if name.startswith("norm.") else name] = tensor
    return named


def _import_llama_names(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Invert `export_llama_names`. Raises ValueError for duplicate names and other rotary frequencies."""
    named: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("rotary_emb.inv_freq"):  # redundant table in older files
            check_inverse_frequencies(name, tensor, config.d_head, config.rope_theta)
            continue
        full = (
            name if name.startswith(("model.", "lm_head.")) else f"model.{name}"
        )  # names of the bare LlamaModel
        ours = full
        # undo the replacements in reverse order
        for own_part, their_part in reversed(LLAMA_NAMES):
            ours = ours.replace(their_part, own_part)
        ours = ours.removeprefix("model.")
        # The replacements are not injective: only a name that maps back to itself is one of Llama's.
        # For example, "model.blocks.0.mlp.up.weight" has no part to replace and would pass as
        # blocks.0.mlp.up.weight.
        if list(export_llama_names({ours: tensor})) != [full]:
            raise ValueError(f"{name}: got a tensor that Llama and Qwen3 do not have")
        if ours in named:
            raise ValueError(f"{name}: got two tensors of this name, with and without 'model.', expected one")
        named[ours] = tensor
    return named


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the single safetensors file, or of the files that the index lists."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files, index = [SINGLE], None
    # the single file has precedence, as in transformers: an index beside it may be left over from another
    # save
    if not (folder / SINGLE).is_file() and (folder / INDEX).is_file():
        index = _read_index(folder / INDEX)
        # many tensors share a file: {tensor: file} -> each file once
        files = sorted(set(index.values()))
    state: dict[str, Tensor] = {}
    for i, name in enumerate(files):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: no such file; expected a model with safetensors")
        if len(files) > 1:
            log.info("reading %s (%d of %d)", name, i + 1, len(files))
        try:
            tensors = load_file(folder / name)
        except SafetensorError as error:
            raise ValueError(
                f"{folder / name}: not a safetensors file ({error}); download it again"
            ) from error
        if index is not None:
            # symmetric difference: tensors that only the file or only the index has
            unmatched = set(tensors) ^ {tensor for tensor, file in index.items() if file == name}
            if unmatched:
                raise ValueError(
                    f"{folder / name}: {sorted(unmatched)[0]} is in only one of this file and {INDEX}; "
                    "download both again"
                )
        state |= tensors
    return state


def _read_index(path: Path) -> dict[str, str]:
    """Return {tensor: file name} of an index.

    Raises ValueError for anything but file names in the same folder, because an untrusted index may contain
    any path.
    """
    files = _read_json(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{path}: weight_map: got nothing, expected file names by tensor")
    for file in files.values():
        if not isinstance(file, str) or not SHARD.fullmatch(file):
            raise ValueError(
                f"{path}: weight_map: got {file!r:.80}, expected .safetensors files of the same folder. "
                "Download the model again from its author."
            )
    return files


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a model folder of transformers")
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: got {type(content).__name__}, expected an object")
    return content
