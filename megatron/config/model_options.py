"""Checks of a model's options against each other: each must have an effect on the model that is built."""

from dataclasses import fields

from megatron.config.schema import ModelConfig

LLAMA3_KEYS = ("rope_low_factor", "rope_high_factor", "rope_original_positions")


def check_model_options(model: ModelConfig, objective: str) -> None:
    """Raise ValueError for options of a model that contradict each other or have no effect."""
    conflicts = (
        ("qkv_biases", model.qkv_biases and model.biases, "model.biases, which includes them"),
        ("qk_norm_all_heads", model.qk_norm_all_heads and not model.qk_norm, "no model.qk_norm"),
        (
            "parallel_residual",
            model.parallel_residual and model.norm_placement == "output",
            "model.norm_placement=output",
        ),
        ("head_bias", model.head_bias and model.tied_embedding, "a tied embedding"),
    )
    for name, is_conflict, other in conflicts:
        if is_conflict:
            raise ValueError(f"model.{name}: got {other} as well. Remove one of the two settings.")
    for key in fields(model):
        owner = key.metadata.get("objective")
        if getattr(model, key.name) != key.default and owner not in (None, objective):
            raise ValueError(f"model.{key.name}: belongs to {owner}, but objective.name is {objective}")
    if model.attention_window is not None and objective != "autoregressive":
        raise ValueError(f"model.attention_window: got objective.name={objective}, expected autoregressive")
    if model.mask_id is not None and model.mask_id >= model.n_tokens:
        raise ValueError(
            f"model.mask_id: got {model.mask_id}, expected an id below model.n_tokens {model.n_tokens}. "
            "Remove the key if [MASK] is the row after the ids."
        )
    _check_rotary(model)


def _check_rotary(model: ModelConfig) -> None:
    default = ModelConfig()
    rotary = model.positions == "rotary"
    keys = {"rotary_dims": rotary, "rope_scaling": rotary, "rope_factor": model.rope_scaling != "none"}
    keys |= dict.fromkeys(LLAMA3_KEYS, model.rope_scaling == "llama3")
    for key, has_effect in keys.items():
        if getattr(model, key) != getattr(default, key) and not has_effect:
            expected = "positions=rotary" if key in ("rotary_dims", "rope_scaling") else "rope_scaling"
            raise ValueError(f"model.{key}: has no effect without model.{expected}. Remove the key.")
    if model.rotary_dims is not None and (model.rotary_dims % 2 or model.rotary_dims > model.d_head):
        raise ValueError(
            f"model.rotary_dims: got {model.rotary_dims}, expected an even number up to d_head {model.d_head}"
        )
    if model.rope_scaling == "llama3":
        if model.rope_original_positions is None:
            raise ValueError(
                "model.rope_original_positions: missing, expected with model.rope_scaling=llama3"
            )
        if model.rope_low_factor >= model.rope_high_factor:
            raise ValueError(
                f"model.rope_low_factor: got {model.rope_low_factor}, expected less than "
                f"model.rope_high_factor {model.rope_high_factor}"
            )
