"""Model shapes from config.json files of Hugging Face."""

import json
from pathlib import Path

import pytest

from megatron.config.hf import shape_from_hf
from megatron.plan.count import n_params
from megatron.plan.resolve import resolve_config

CONFIGS = json.loads(Path(__file__).with_name("hf_configs.json").read_text())
PUBLISHED = {"llama-3-8b": 8_030_261_248, "qwen3-0.6b": 596_049_920, "gpt2": 124_439_808}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_number_of_parameters(name: str) -> None:
    hf_config = CONFIGS[name]
    rows = hf_config["vocab_size"]
    model = {"hf_config": hf_config, "n_tokens": rows - 1, "vocab_rows": rows}
    raw = {"model": model, "dataset": {"seq_len": 512}, "lr_scheduler": {"total_iterations": 1}}
    assert n_params(resolve_config(raw).model) == PUBLISHED[name]


def test_names_of_hugging_face_become_ours() -> None:
    shape = shape_from_hf(CONFIGS["llama-3-8b"])
    assert (shape["n_kv_heads"], shape["tied_embedding"], shape["rope_theta"]) == (8, False, 500000.0)
    rope = {"rope_type": "default", "rope_theta": 7.0}
    assert shape_from_hf({"rope_parameters": rope})["rope_theta"] == 7.0
    assert shape_from_hf(CONFIGS["gpt2"])["n_positions"] == 1024
    assert shape_from_hf(CONFIGS["qwen3-0.6b"])["qk_norm"] is True


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
