"""Model shapes from config.json files of Hugging Face."""

import pytest

from megatron.config.hf import shape_from_hf
from megatron.plan.count import n_params
from megatron.plan.resolve import resolve_config

# published parameter counts: the sizes of the published weights
LLAMA_3_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16",
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False, "hidden_act": "silu",
    "attention_bias": False, "attention_dropout": 0.0, "rms_norm_eps": 1e-5, "rope_scaling": None,
    "rope_theta": 500000.0, "max_position_embeddings": 8192, "bos_token_id": 128000, "use_cache": True,
    "initializer_range": 0.02, "pretraining_tp": 1,
}  # fmt: skip
QWEN3_0_6B = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936,
    "tie_word_embeddings": True, "attention_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1000000, "use_sliding_window": False, "sliding_window": None, "max_window_layers": 28,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "n_ctx": 1024,
    "vocab_size": 50257, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "attn_pdrop": 0.0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "summary_type": "cls_index",
}  # fmt: skip


@pytest.mark.parametrize(
    ("hf_config", "published"),
    [(LLAMA_3_8B, 8_030_261_248), (QWEN3_0_6B, 596_049_920), (GPT2, 124_439_808)],
    ids=["llama-3-8b", "qwen3-0.6b", "gpt2"],
)
def test_published_models_have_their_published_number_of_parameters(hf_config: dict, published: int) -> None:
    rows = hf_config["vocab_size"]
    model = {"hf_config": hf_config, "n_tokens": rows - 1, "vocab_rows": rows}
    raw = {"model": model, "dataset": {"seq_len": 512}, "lr_scheduler": {"total_iterations": 1}}
    assert n_params(resolve_config(raw).model) == published


def test_names_of_hugging_face_become_ours() -> None:
    shape = shape_from_hf(LLAMA_3_8B)
    assert (shape["n_kv_heads"], shape["tied_embedding"], shape["rope_theta"]) == (8, False, 500000.0)
    rope = {"rope_type": "default", "rope_theta": 7.0}
    assert shape_from_hf({"rope_parameters": rope})["rope_theta"] == 7.0
    assert shape_from_hf(GPT2)["n_positions"] == 1024
    assert shape_from_hf(QWEN3_0_6B)["qk_norm"] is True


def test_an_unsupported_shape_is_refused_in_one_sentence() -> None:
    for hf_config, sentence in (
        ({"model_type": "bert"}, "hf_config.model_type: got 'bert', expected one of llama, qwen2, qwen3"),
        ({"hidden_act": "relu"}, "hf_config.hidden_act: got 'relu', expected 'silu'"),
        ({"rope_scaling": {"type": "linear"}}, "hf_config.rope_scaling.factor: got None"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "expected rope_type default, linear, llama3"),
        ({"attention_bias": True}, "attention_bias, mlp_bias: got different values"),
        ({"model_type": "gpt2", "resid_pdrop": 0.1}, "hf_config.resid_pdrop: got 0.1, expected 0.0"),
        ({"num_kv_heads": 2}, "unknown key 'num_kv_heads'; did you mean 'num_key_value_heads'?"),
    ):
        with pytest.raises(ValueError) as caught:
            shape_from_hf(hf_config)
        assert sentence in str(caught.value)
