"""Each architecture of transformers that a few fields of the model describe: logits, text and a way back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.convert.formats import convert_checkpoint, read_any
from megatron.config.hf import shape_from_hf
from megatron.generation.generate import generate
from megatron.generation.sampling import Sampling
from megatron.plan.count import n_params

with pytest.MonkeyPatch.context() as patched:  # read at import; unset again for later tests
    patched.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
NEOX = {**SMALL, "intermediate_size": 80}
# of 4 pairs, one has more than 4 turns in 32 positions, one less than 1, and two are between
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
# name -> (class, keys of its configuration, options of the model that it must give)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", GROUPED, {}),
    "llama-biases": ("Llama", {**GROUPED, "attention_bias": True, "mlp_bias": True}, {"biases": True}),
    "llama3.1": ("Llama", {**GROUPED, "rope_parameters": LLAMA3}, {"rope_scaling": "llama3"}),
    "llama-linear": ("Llama", {**GROUPED, "rope_parameters": LINEAR}, {"rope_factor": 4.0}),
    "qwen2": ("Qwen2", {**GROUPED, "tie_word_embeddings": True}, {"qkv_biases": True}),
    "qwen2-window": (
        "Qwen2",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0},
        {"attention_window": 6},
    ),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 16}, {"qk_norm": True}),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": None}, {"attention_window": None}),
    "mistral-window": ("Mistral", {**GROUPED, "sliding_window": 6, "head_dim": 16}, {"attention_window": 6}),
    "olmo2": ("Olmo2", GROUPED, {"norm_placement": "output", "qk_norm_all_heads": True}),
    "pythia": ("GPTNeoX", NEOX, {"parallel_residual": True, "rotary_dims": 2, "feed_forward": "gelu_exact"}),
    "neox-serial": (
        "GPTNeoX",
        {**NEOX, "use_parallel_residual": False, "tie_word_embeddings": True, "hidden_act": "gelu_new",
         "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0}},
        {"parallel_residual": False, "rotary_dims": None, "feed_forward": "gelu"},
    ),
    "gpt2": (
        "GPT2",
        {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        {"feed_forward": "gelu"},
    ),
    "gpt2-exact": (
        "GPT2",
        {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
         "activation_function": "gelu"},
        {"feed_forward": "gelu_exact"},
    ),
}  # fmt: skip
MODEL_CLASS = {"GPT2": "GPT2LMHeadModel"}
TOKENS = torch.randint(0, 50, (3, 40), generator=torch.Generator().manual_seed(2))


def save(name: str, folder: Path) -> Any:
    """Save a random model of transformers in which every part matters, and return it."""
    kind, keys, _ = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **keys, initializer_range=0.15, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    model = getattr(transformers, MODEL_CLASS.get(kind, f"{kind}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # gains that are not 1, biases that are not 0
                parameter += 0.3 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    return model


def compute_logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return read_any(folder).build_model()(TOKENS, causal=True)


@pytest.mark.parametrize("name", CASES)
def test_an_architecture_has_equal_logits_in_and_out(name: str, tmp_path: Path) -> None:
    theirs = save(name, tmp_path / "hub")
    with torch.no_grad():
        expected = theirs(TOKENS).logits
    scale = float(expected.std())
    assert scale > 0.1
    weights = read_any(tmp_path / "hub")
    for key, value in CASES[name][2].items():
        assert getattr(weights.config, key) == value
    assert n_params(weights.config) == sum(tensor.numel() for tensor in theirs.parameters())
    torch.testing.assert_close(compute_logits(tmp_path / "hub"), expected, rtol=0, atol=1e-5)
    convert_checkpoint(tmp_path / "hub", tmp_path / "native", to="native")
    convert_checkpoint(tmp_path / "native", tmp_path / "back", to="huggingface")
    back = type(theirs).from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        assert torch.equal(back(TOKENS).logits, expected)
    state, again = theirs.state_dict(), back.state_dict()
    assert state.keys() == again.keys() and all(torch.equal(state[key], again[key]) for key in state)


@pytest.mark.parametrize("name", CASES)
def test_greedy_text_of_an_architecture_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = save(name, tmp_path)
    model = read_any(tmp_path).build_model()
    prompts = [row[:9] for row in TOKENS]  # longer than the windows
    ours = generate(
        model, [row.tolist() for row in prompts], max_new_tokens=20, sampling=Sampling(temperature=0)
    )
    for prompt, text in zip(prompts, ours, strict=True):
        expected = theirs.generate(prompt[None], max_new_tokens=20, do_sample=False)[0, 9:]
        assert text == expected.tolist()


@pytest.mark.parametrize("name", CASES)
def test_a_training_shape_is_that_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        content.pop(key, None)
    config = read_any(tmp_path).config
    for key, value in shape_from_hf(content).items():
        assert getattr(config, key) == value, key


def test_llama3_scaling_reads_the_length_of_the_model_if_it_is_not_given(tmp_path: Path) -> None:
    save("llama3.1", tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["rope_parameters"]["original_max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert read_any(tmp_path).config.rope_original_positions == 64
    with torch.no_grad():
        expected = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()(TOKENS).logits
    torch.testing.assert_close(compute_logits(tmp_path), expected, rtol=0, atol=1e-5)
