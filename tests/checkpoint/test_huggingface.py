"""Models out to transformers and in again, run there by transformers itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.convert import convert, read_any
from megatron.checkpoint.huggingface import read_huggingface, write_huggingface
from megatron.checkpoint.weights import Weights, load_weights, save_weights
from megatron.evaluation.generate import generate
from megatron.evaluation.generate_diffusion import generate_diffusion
from megatron.evaluation.sampling import Sampling
from megatron.model.gpt import Gpt

with pytest.MonkeyPatch.context() as patched:  # read at the import, and no test after these wants it
    patched.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")

SHAPES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "LlamaForCausalLM, untied, biases": {"tied_embedding": False, "biases": True, "n_kv_heads": 4},
    "Qwen3ForCausalLM": {"qk_norm": True, "tied_embedding": False, "d_head": 12},
    "GPT2LMHeadModel": {
        "norm": "layernorm",
        "feed_forward": "gelu",
        "positions": "learned",
        "n_positions": 64,
        "biases": True,
        "n_kv_heads": None,
    },
}
TOKENS = torch.randint(0, 40, (2, 30), generator=torch.Generator().manual_seed(2))


def weights_of(model: Gpt, objective: str = "autoregressive") -> Weights:
    return Weights(
        config=model.config, objective=objective, state=model.state_dict(), seq_len=64, source="test"
    )


def assert_same(first: Weights, second: Weights) -> None:
    assert first.state.keys() == second.state.keys()
    for name, tensor in first.state.items():
        assert torch.equal(tensor, second.state[name]), name
    assert (first.config, first.objective, first.seq_len) == (second.config, second.objective, second.seq_len)


@pytest.mark.parametrize("name", SHAPES)
def test_an_exported_model_says_the_same_in_transformers_and_comes_back_to_the_bit(
    tiny_of: Callable[..., Gpt], tmp_path: Path, name: str
) -> None:
    model = tiny_of(n_tokens=40, **SHAPES[name])
    write_huggingface(weights_of(model), tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(theirs).__name__ == name.split(",")[0]
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, model(TOKENS, causal=True), rtol=1e-5, atol=1e-5)
        continued = theirs.generate(TOKENS[:, :5], max_new_tokens=20, do_sample=False, pad_token_id=0)
    found = generate(model, TOKENS[:, :5].tolist(), max_new_tokens=20, how=Sampling(temperature=0))
    assert continued[:, 5:].tolist() == found
    assert_same(read_huggingface(tmp_path / "out"), weights_of(model))


def test_a_model_that_transformers_made_says_the_same_here(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.3,
            rope_theta=50000.0,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
        )
    ).eval()
    made.save_pretrained(tmp_path / "made", max_shard_size="20KB")
    assert len(list((tmp_path / "made").glob("*.safetensors"))) > 1
    weights = read_any(tmp_path / "made")
    assert (weights.config.rope_theta, weights.config.norm_eps, weights.config.n_kv_heads) == (
        50000.0,
        1e-6,
        2,
    )
    with torch.no_grad():
        torch.testing.assert_close(
            weights.model()(TOKENS, causal=True), made(TOKENS).logits, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("more", [{}, {"qk_norm": True, "tied_embedding": False}], ids=["llama", "qwen3"])
def test_a_diffusion_model_goes_out_with_code_that_says_the_same(
    tiny_of: Callable[..., Gpt], tmp_path: Path, more: dict[str, Any]
) -> None:
    model = tiny_of(n_tokens=40, **more)
    write_huggingface(weights_of(model, "masked_diffusion"), tmp_path / "out")
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "out", trust_remote_code=True
    ).eval()
    tokens = TOKENS.clone()
    tokens[:, ::3] = theirs.config.mask_token_id
    assert theirs.config.mask_token_id == 40
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens, causal=False), rtol=1e-5, atol=1e-5)
    filled = theirs.generate(TOKENS[:, :6], max_new_tokens=10, steps=5)
    greedy = Sampling(temperature=0)
    expected = generate_diffusion(model, TOKENS[:, :6].tolist(), n_new_tokens=10, n_steps=5, how=greedy)
    assert filled[:, 6:].tolist() == expected
    assert "megatron." not in (tmp_path / "out" / "modeling_masked_diffusion.py").read_text()
    assert_same(read_huggingface(tmp_path / "out"), weights_of(model, "masked_diffusion"))


def test_llama2c_to_transformers_with_its_tokenizer_and_back_is_the_same_file(
    scaling_data: Path, tmp_path: Path
) -> None:
    folder = scaling_data / "stories260K"
    convert(
        folder / "stories260K.bin", tmp_path / "hf", to="huggingface", tokenizer=str(folder / "tok512.bin")
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    read = tokenizer("Once upon a time", return_tensors="pt")
    assert read.input_ids[0, 0] == 1  # <s> comes by itself
    told = model.generate(**read, max_new_tokens=40, do_sample=False)
    text = tokenizer.decode(told[0], skip_special_tokens=True)
    assert text.startswith("Once upon a time, there was a little girl named Lily. She loved to play outside")
    convert(tmp_path / "hf", tmp_path / "native", to="native")
    convert(tmp_path / "native", tmp_path / "again.bin", to="llama2c")
    assert (tmp_path / "again.bin").read_bytes() == (folder / "stories260K.bin").read_bytes()


def test_rows_that_are_no_token_can_be_left_out(tiny: Gpt, tmp_path: Path) -> None:
    save_weights(weights_of(tiny), tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "out", to="huggingface", strip_rows=True)
    back = read_huggingface(tmp_path / "out")
    assert (back.config.n_tokens, back.config.vocab_rows) == (40, 40)
    assert torch.equal(back.model()(TOKENS, causal=True), tiny(TOKENS, causal=True)[..., :40])


def test_half_precision_of_what_was_in_it_comes_back_to_the_bit(tiny: Gpt, tmp_path: Path) -> None:
    half = {name: of.bfloat16().float() for name, of in tiny.state_dict().items()}
    weights = Weights(config=tiny.config, objective="autoregressive", state=half, seq_len=64)
    write_huggingface(weights, tmp_path / "out", torch.bfloat16)
    assert_same(read_huggingface(tmp_path / "out"), weights)


def test_native_weights_come_back_and_a_damaged_file_does_not(tiny: Gpt, tmp_path: Path) -> None:
    save_weights(weights_of(tiny), tmp_path / "ck")
    assert_same(load_weights(tmp_path / "ck"), weights_of(tiny))
    with pytest.raises(ValueError, match="already there"):
        save_weights(weights_of(tiny), tmp_path / "ck")
    file = tmp_path / "ck" / "model_state_dict.pt"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ValueError, match="the checkpoint is damaged"):
        load_weights(tmp_path / "ck")


def test_what_cannot_be_converted_is_refused_and_leaves_nothing(
    tiny_of: Callable[..., Gpt], tmp_path: Path
) -> None:
    def refused(sentence: str, source: Path, **how: Any) -> None:
        with pytest.raises((ValueError, FileNotFoundError)) as caught:
            convert(source, tmp_path / "out", **{"to": "huggingface", **how})
        assert sentence in str(caught.value) and "\n" not in str(caught.value)
        assert not list(tmp_path.glob("out*"))

    refused("no such checkpoint", tmp_path / "nowhere")
    for name, more, sentence in (
        ("mup", {"parametrization": "mup", "base_d_model": 16}, "its multipliers are those of mup"),
        ("odd", {"norm": "layernorm"}, "together are neither Llama's nor GPT-2's"),
    ):
        save_weights(weights_of(tiny_of(n_tokens=40, **more)), tmp_path / name)
        refused(sentence, tmp_path / name)
    save_weights(weights_of(tiny_of(n_tokens=40), "masked_diffusion"), tmp_path / "diffusion")
    refused("without the row of [MASK]", tmp_path / "diffusion", strip_rows=True)
    refused("llama2.c holds autoregressive models", tmp_path / "diffusion", to="llama2c")
    refused("neither a folder here", tmp_path / "diffusion", tokenizer="no-such")
    write_huggingface(weights_of(tiny_of(n_tokens=40)), tmp_path / "hf")
    told = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(told | {"num_hidden_layers": 3}))
    refused("weights and shape do not fit each other", tmp_path / "hf", to="native")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(told | {"model_type": "bert"}))
    refused("found 'bert'", tmp_path / "hf", to="native")
    (tmp_path / "hf" / "config.json").write_text("{")
    refused("not JSON", tmp_path / "hf", to="native")
