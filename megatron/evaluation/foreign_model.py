"""Models that transformers runs instead of this project: which folders, and why."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpoint.convert.formats import read_any
from megatron.checkpoint.convert.huggingface import CONFIG_FILE, PROJECT_KEYS
from megatron.checkpoint.model_weights import Weights
from megatron.config.cli_choices import BACKENDS
from megatron.config.schema import ModelConfig
from megatron.io import read_json

LENGTH_KEYS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
CAUSAL_CLASSES = ("ForCausalLM", "LMHeadModel")  # ends of the names of transformers' classes
N_PROBE = 8  # ids of the pass that compares logits with hidden states
OBJECTIVE = "autoregressive"  # of every model that transformers' classes for causal language models run


@dataclass(frozen=True)
class ForeignModel:
    """A Hugging Face folder that transformers runs. `reason`: why this project does not."""

    path: Path
    reason: str
    tokenizer: str | None = None
    objective: str = OBJECTIVE

    def as_weights(self) -> "ForeignWeights":
        """Return the facts that held-out scoring needs. Raises ValueError if config.json lacks them."""
        hf_config = read_json(self.path / CONFIG_FILE) or {}
        rows = hf_config.get("vocab_size")
        if type(rows) is not int or rows < 1:
            raise ValueError(f"{self.path / CONFIG_FILE}: vocab_size: got {rows!r}, expected a count")
        names = (key for key in LENGTH_KEYS if type(hf_config.get(key)) is int)
        n_positions = next((hf_config[key] for key in names), None)
        has_tokenizer = any((self.path / file).is_file() for file in ("tokenizer.json", "vocab.json"))
        return ForeignWeights(
            config=ModelConfig(n_tokens=rows, vocab_rows=rows),
            objective=self.objective,
            state={},
            seq_len=n_positions,
            tokenizer=self.tokenizer or (str(self.path) if has_tokenizer else None),
            source=str(self.path),
        )


class ForeignWeights(Weights):
    """Facts about a model that transformers runs. Of `config` only the vocabulary applies to it."""

    def build_model(self) -> Any:
        """Load the model with transformers."""
        return TransformersNet(Path(self.source))


class TransformersNet(nn.Module):
    """A causal language model of transformers behind the part of `Gpt` that scores a corpus."""

    def __init__(self, folder: Path) -> None:
        """Raise ValueError if transformers cannot load it, or if its head is more than a matrix."""
        super().__init__()
        from transformers import AutoModelForCausalLM  # slow import

        try:
            self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"{folder}: transformers cannot load it ({reason[:300]})") from error
        self.config = SimpleNamespace(document_mask=False)
        # the loss is computed from hidden states and head in chunks, without the logits of a whole batch
        tokens = torch.arange(N_PROBE)[None] % self.head_weight.shape[0]
        with torch.inference_mode():
            logits = self.model(input_ids=tokens, use_cache=False).logits
            expected = self.hidden_states(tokens, causal=True) @ self.head_weight.T
        if logits.shape != expected.shape or not torch.allclose(logits, expected, rtol=1e-4, atol=1e-4):
            raise ValueError(
                f"{folder}: its logits are more than its last hidden states times a matrix, which this tool "
                "does not score. Use evaluate_downstream.py."
            )

    @property
    def embedding(self) -> Any:
        return self.model.get_input_embeddings()

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head [V, D]."""
        return self.model.get_output_embeddings().weight

    def hidden_states(self, tokens: Tensor, causal: bool) -> Tensor:
        """Return the input of the head: tokens int64 [B, S] -> [B, S, D]."""
        assert causal, "models of transformers are autoregressive"
        try:
            return self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        except IndexError as error:  # from a table of learned positions
            raise ValueError(
                f"--seq-len: got {tokens.shape[1]} positions, more than the model has. Use fewer."
            ) from error


def _is_causal_model(hf_config: dict[str, Any]) -> bool:
    """Return whether a config.json states that transformers has a causal language model for it.

    Other folders (masked diffusion, with code of their own) must not be scored as autoregressive.
    """
    classes = hf_config.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else None
    is_export = any(key in hf_config for key in PROJECT_KEYS)  # of this project, which reads it itself
    return isinstance(first, str) and first.endswith(CAUSAL_CLASSES) and not is_export


def read_scored_model(path: Path, tokenizer: str | None, backend: str = "auto") -> Weights | ForeignModel:
    """Load weights, or return the folder for transformers.

    backend   native: this project's model, or an error; transformers: always transformers; auto: transformers
              for folders of Hugging Face whose architecture or tokenizer this project refuses

    Raises FileNotFoundError or ValueError with a one-line message.
    """
    assert backend in BACKENDS, backend
    hf_config = read_json(path / CONFIG_FILE) if path.is_dir() else None
    can_be_foreign = hf_config is not None and _is_causal_model(hf_config)
    if backend == "transformers":
        if hf_config is None:
            raise ValueError(f"--backend transformers: got {path}, expected a folder with {CONFIG_FILE}.")
        return ForeignModel(path, "--backend transformers", tokenizer)
    try:
        weights = read_any(path, tokenizer=tokenizer)
    except ValueError as error:
        if backend == "native" or not can_be_foreign:
            raise
        return ForeignModel(path, str(error), tokenizer)
    if weights.tokenizer is None and can_be_foreign and backend == "auto":
        return ForeignModel(path, f"{path}: no tokenizer that this project reads", tokenizer)
    return weights
