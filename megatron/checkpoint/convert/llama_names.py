"""Map tensor names to those of Hugging Face's Llama, which Qwen, Mistral and OLMo 2 share."""

from torch import Tensor

from megatron.checkpoint.convert.redundant_tensors import check_inverse_frequencies
from megatron.config.schema import ModelConfig

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
# OLMo 2 has norms of outputs only, and other names for them
OLMO2_NORMS = {
    "attention_norm.": "post_attention_layernorm.",
    "mlp_norm.": "post_feedforward_layernorm.",
}


def _list_replacements(config: ModelConfig) -> tuple[tuple[str, str], ...]:
    if config.norm_placement == "input":
        return LLAMA_NAMES
    return tuple((ours, OLMO2_NORMS.get(ours, theirs)) for ours, theirs in LLAMA_NAMES)


def export_llama_names(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Rename this model's tensors to those of LlamaForCausalLM and the classes with the same names."""
    named = {}
    for name, tensor in state.items():
        for ours, theirs in _list_replacements(config):
            name = name.replace(ours, theirs) if ours in name else name
        named[f"model.{name}" if name.startswith("norm.") else name] = tensor
    return named


def import_llama_names(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Invert `export_llama_names`. Raises ValueError for duplicate names and other rotary frequencies."""
    named: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("rotary_emb.inv_freq"):  # redundant table in older files
            check_inverse_frequencies(name, tensor, config)
            continue
        full = (
            name if name.startswith(("model.", "lm_head.")) else f"model.{name}"
        )  # names of the bare LlamaModel
        ours = full
        # undo the replacements in reverse order
        for own_part, their_part in reversed(_list_replacements(config)):
            ours = ours.replace(their_part, own_part)
        ours = ours.removeprefix("model.")
        # The replacements are not injective: only a name that maps back to itself is one of Llama's.
        # For example, "model.blocks.0.mlp.up.weight" has no part to replace and would pass as
        # blocks.0.mlp.up.weight.
        if list(export_llama_names({ours: tensor}, config)) != [full]:
            raise ValueError(f"{name}: got a tensor that models of this type do not have")
        if ours in named:
            raise ValueError(f"{name}: got two tensors of this name, with and without 'model.', expected one")
        named[ours] = tensor
    return named
