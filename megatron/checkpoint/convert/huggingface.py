"""Read and write models in the format of Hugging Face's transformers: config.json, safetensors, tokenizer.

Autoregressive models are exported as the class of transformers
that has their shape (CLASSES in huggingface_config.py); the same
classes are imported. Masked-diffusion models of the shapes of Llama,
Qwen2 and Qwen3 are exported with the code that runs them,
`modeling_masked_diffusion.py`, for `trust_remote_code`.

All rows of the embedding are exported, including [MASK] and padding,
so that a round trip is bitwise exact. `Weights.strip_spare_rows`
drops the rows that are not tokens. config.json records
the number of token rows and the objective under PROJECT_KEYS.
"""

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.convert.huggingface_config import (
    DIFFUSION_SHAPES,
    build_hf_config,
    choose_model_type,
    parse_hf_config,
)
from megatron.checkpoint.convert.mdlm_names import import_mdlm_names
from megatron.checkpoint.convert.names import BUFFERS, choose_family, export_names, import_names
from megatron.checkpoint.convert.tokenizer_files import write_tokenizer
from megatron.checkpoint.model_weights import Weights, clone_if_view
from megatron.config.hf import DIFFUSION_TYPE, DIFFUSION_TYPES, MDLM, find_model_type
from megatron.config.schema import ModelConfig
from megatron.io import atomic_folder, read_json
from megatron.log import get_logger

log = get_logger(__name__)

CONFIG_FILE, GENERATION = "config.json", "generation_config.json"
SINGLE = "model.safetensors"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
# keys of this project in config.json; transformers preserves and ignores them
PROJECT_KEYS = ("n_tokens", "objective")
CODE = "modeling_masked_diffusion.py"
TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))  # one of the two sets


def read_huggingface(folder: Path) -> Weights:
    """Load the weights of a model folder as float32.

    Keys missing in config.json have transformers' defaults. Keys that do not
    affect the logits are logged. Every tensor is used, or dropped because it is
    redundant (a tied head, after a check that it is equal; rotary frequencies,
    causal masks). Raises FileNotFoundError if it is not a model folder,
    ValueError for an unsupported model.
    """
    hf_config = read_json(folder / CONFIG_FILE)
    if hf_config is None:
        raise FileNotFoundError(
            f"{folder / CONFIG_FILE}: no such file; expected a model folder of transformers"
        )
    try:
        kind = find_model_type(hf_config)
        objective = "masked_diffusion" if kind in DIFFUSION_TYPES else "autoregressive"
        if (exported := hf_config.pop("objective", objective)) != objective:
            raise ValueError(f"objective: got {exported!r}, expected {objective!r} for this model_type")
        config, n_positions, ignored = parse_hf_config(hf_config)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_FILE}: {error}") from error
    if ignored:
        log.warning(
            "%s: ignored keys that do not affect the logits: %s", folder / CONFIG_FILE, ", ".join(ignored)
        )
    tensors = _read_tensors(folder)
    try:
        state = _convert_names(tensors, config, kind)
    # RuntimeError: tensors of other shapes than the configuration
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{folder}: {' '.join(str(error).split())[:300]}") from error
    has_tokenizer = any(all((folder / name).is_file() for name in names) for names in TOKENIZER_FILES)
    weights = Weights(
        config=config,
        objective=objective,
        state={name: tensor.float() for name, tensor in state.items()},
        seq_len=n_positions,
        tokenizer=str(folder) if has_tokenizer else None,
        source=str(folder),
    )
    weights.build_model()  # raises ValueError for a missing tensor or a wrong shape
    return weights


def _convert_names(tensors: dict[str, Tensor], config: ModelConfig, kind: str) -> dict[str, Tensor]:
    """Return tensors under this model's names, without redundant ones. Raises ValueError for others."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() and not BUFFERS.search(name):
            raise ValueError(
                f"{name}: got {tensor.dtype}, expected floating point; quantised models are not supported"
            )
    if kind == MDLM:
        state = import_mdlm_names(tensors, config)
    else:
        state = import_names(choose_family(kind, config), tensors, config)
    head = state.get("unembedding.weight")
    if config.tied_embedding and head is not None and "embedding.weight" in state:
        if not torch.equal(head, state["embedding.weight"]):  # False for other shapes too
            raise ValueError(
                "lm_head.weight: differs from the embedding, expected equal under tie_word_embeddings true. "
                "Set tie_word_embeddings to false in config.json if the head is a separate matrix."
            )
        del state["unembedding.weight"]
    if not config.tied_embedding and head is None:
        raise ValueError(
            "lm_head.weight: missing, but tie_word_embeddings is false, which is transformers' default for "
            "all types but gpt2. Set it to true in config.json if the embedding is the head."
        )
    return state


def write_huggingface(weights: Weights, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a model folder with its tokenizer, if it is known, atomically.

    Raises ValueError if transformers has no class for the model, and
    FileExistsError if the folder exists.
    """
    kind = choose_model_type(weights)
    diffusion = weights.objective == "masked_diffusion"
    if diffusion and kind not in DIFFUSION_SHAPES:
        raise ValueError(
            f"{weights.source}: diffusion models can be exported in the shape of "
            f"{', '.join(DIFFUSION_SHAPES)}, got {kind}'s"
        )
    if diffusion and weights.config.rope_scaling != "none":
        raise ValueError(
            f"{weights.source}: got model.rope_scaling, expected none; the exported diffusion code has none"
        )
    from huggingface_hub import save_torch_state_dict  # slow import

    renamed = export_names(choose_family(kind, weights.config), weights.state, weights.config)
    state = {name: clone_if_view(tensor).to(dtype) for name, tensor in renamed.items()}
    hf_config = build_hf_config(weights, kind, dtype)
    if diffusion:
        classes = {"AutoConfig": "Config", "AutoModel": "Lm", "AutoModelForMaskedLM": "Lm"}
        module = CODE.removesuffix(".py")
        hf_config |= {
            "model_type": DIFFUSION_TYPE,
            "architectures": ["MaskedDiffusionLm"],
            "qk_norm": weights.config.qk_norm,
            "qkv_bias": weights.config.qkv_biases,
            "auto_map": {auto: f"{module}.MaskedDiffusion{name}" for auto, name in classes.items()},
        }
    # config.json is written after the tensors and the
    # tokenizer, because it contains keys of the latter
    with atomic_folder(folder) as partial:
        save_torch_state_dict(state, partial, safe_serialization=True)
        if diffusion:
            code = resources.files("megatron.checkpoint.convert") / "exported" / CODE
            (partial / CODE).write_text(code.read_text())
        ids = {} if weights.tokenizer is None else write_tokenizer(weights.tokenizer, partial)
        # a tokenizer's padding id may be past the
        # embedding's rows, where transformers rejects it
        ends = {key: i for key, i in ids.items() if i < weights.config.vocab_rows}
        hf_config |= ends
        if not diffusion:  # `generate` must not sample rows that are not tokens
            # rows from n_tokens on are [MASK] and padding
            spare = list(range(weights.config.n_tokens, weights.config.vocab_rows))
            _write_json(partial / GENERATION, ends | ({"suppress_tokens": spare} if spare else {}))
        _write_json(partial / CONFIG_FILE, hf_config)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the single safetensors file, or of the numbered files of a larger model."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    # The single file has precedence, as in transformers. The
    # index is not read: the names of the files contain their
    # number, and `build_model` detects a missing tensor.
    files = sorted(p for p in folder.iterdir() if SHARD.fullmatch(p.name))
    of_all = f"-of-{len(files):05}.safetensors"
    if (folder / SINGLE).is_file():
        files = [folder / SINGLE]
    elif not files or not all(p.name.endswith(of_all) for p in files):
        raise FileNotFoundError(
            f"{folder}: got {len(files)} files model-K-of-N.safetensors, expected {SINGLE} or all N of one "
            "model. Download it again."
        )
    state: dict[str, Tensor] = {}
    for i, path in enumerate(files):
        if len(files) > 1:
            log.info("reading %s (%d of %d)", path, i + 1, len(files))
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path}: not a safetensors file ({error}); download it again") from error
        if repeated := set(tensors) & set(state):
            raise ValueError(f"{path}: got {min(repeated)} in two files, expected one; download both again")
        state |= tensors
    return state


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
