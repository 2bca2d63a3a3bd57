"""Models exported to transformers, run by transformers, and imported again."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.convert.formats import convert_checkpoint
from megatron.checkpoint.convert.huggingface import read_huggingface, write_huggingface
from megatron.checkpoint.model_weights import Weights, load_weights, save_weights
from megatron.generation.generate_diffusion import generate_diffusion
from megatron.generation.sampling import Sampling
from megatron.model.transformer import Gpt
from tests.checkpoint.conftest import import_transformers, weights_of
from tests.conftest import build_tiny, flip_middle_bit
from tests.wrong_values import read_refusal

transformers = import_transformers()

TOKENS = torch.randint(0, 40, (2, 30), generator=torch.Generator().manual_seed(2))


def assert_same(first: Weights, second: Weights) -> None:
    torch.testing.assert_close(first.state, second.state, rtol=0, atol=0)
    assert (first.config, first.objective, first.seq_len) == (second.config, second.objective, second.seq_len)


@pytest.mark.parametrize(
    "more",
    [{}, {"qkv_biases": True}, {"qk_norm": True, "tied_embedding": False}],
    ids=["llama", "qwen2", "qwen3"],
)
def test_a_diffusion_model_is_exported_with_code_that_gives_the_same_logits(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    model = build_tiny(n_tokens=40, **more)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter += 0.05 * torch.arange(len(parameter)).cos()
    write_huggingface(weights_of(model, "masked_diffusion"), tmp_path / "out")
    load = transformers.AutoModelForMaskedLM.from_pretrained
    theirs = load(tmp_path / "out", trust_remote_code=True).eval()
    tokens = TOKENS.clone()
    tokens[:, ::3] = theirs.config.mask_token_id
    assert theirs.config.mask_token_id == 40
    with torch.no_grad():
        expected = model(tokens, causal=False)
        scale = float(expected.std())
        torch.testing.assert_close(theirs(tokens).logits, expected, rtol=1e-5, atol=1e-5 * scale)
    filled = theirs.generate(TOKENS[:, :6], max_new_tokens=10, steps=5)
    greedy = Sampling(temperature=0)
    ours = generate_diffusion(model, TOKENS[:, :6].tolist(), n_new_tokens=10, n_steps=5, sampling=greedy)
    assert filled[:, 6:].tolist() == ours
    assert "megatron." not in (tmp_path / "out" / "modeling_masked_diffusion.py").read_text()
    assert_same(read_huggingface(tmp_path / "out"), weights_of(model, "masked_diffusion"))


def test_rows_that_are_no_token_can_be_dropped(tiny: Gpt, tmp_path: Path) -> None:
    save_weights(weights_of(tiny), tmp_path / "native")
    convert_checkpoint(tmp_path / "native", tmp_path / "out", to="huggingface", strip_rows=True)
    back = read_huggingface(tmp_path / "out")
    assert (back.config.n_tokens, back.config.vocab_rows) == (40, 40)
    assert torch.equal(back.build_model()(TOKENS, causal=True), tiny(TOKENS, causal=True)[..., :40])


def test_weights_in_half_precision_are_imported_bitwise_equal(tiny: Gpt, tmp_path: Path) -> None:
    half = {name: tensor.bfloat16().float() for name, tensor in tiny.state_dict().items()}
    weights = weights_of(tiny, state=half)
    write_huggingface(weights, tmp_path / "out", torch.bfloat16)
    assert_same(read_huggingface(tmp_path / "out"), weights)


def test_native_weights_are_loaded_and_a_damaged_file_is_refused(tiny: Gpt, tmp_path: Path) -> None:
    save_weights(weights_of(tiny), tmp_path / "ck")
    assert_same(load_weights(tmp_path / "ck"), weights_of(tiny))
    with pytest.raises(FileExistsError, match="already exists"):
        save_weights(weights_of(tiny), tmp_path / "ck")
    flip_middle_bit(tmp_path / "ck" / "model_state_dict.pt")
    with pytest.raises(ValueError, match="another sha256 than was saved"):
        load_weights(tmp_path / "ck")


def test_a_model_that_cannot_be_converted_is_refused_and_leaves_no_files(tmp_path: Path) -> None:
    def refused(sentence: str, source: Path, **options: Any) -> None:
        words = {"to": "huggingface", **options}
        assert sentence in str(read_refusal(lambda: convert_checkpoint(source, tmp_path / "out", **words)))
        assert not list(tmp_path.glob("out*"))

    refused("no such checkpoint", tmp_path / "nowhere")
    olmo = {"norm_placement": "output", "qk_norm": True, "qk_norm_all_heads": True}
    scaled = {"rope_scaling": "linear", "rope_factor": 2.0}
    for i, (objective, more, sentence) in enumerate(
        (
            ("autoregressive", {"parametrization": "mup", "base_d_model": 16}, "another parametrization)"),
            ("autoregressive", {"norm": "layernorm"}, "has another norm)"),
            ("masked_diffusion", scaled, "the exported diffusion code has none"),
            ("masked_diffusion", olmo, "got olmo2's"),
            ("masked_diffusion", {"predicts_next": True}, "llama has another predicts_next)"),
        )
    ):
        save_weights(weights_of(build_tiny(n_tokens=40, **more), objective), tmp_path / str(i))
        refused(sentence, tmp_path / str(i))
    save_weights(weights_of(build_tiny(n_tokens=40), "masked_diffusion"), tmp_path / "diffusion")
    refused("needs its [MASK] row", tmp_path / "diffusion", strip_rows=True)
    refused("not available on the Hugging Face hub", tmp_path / "diffusion", tokenizer="no-such")
    write_huggingface(weights_of(build_tiny(n_tokens=40)), tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text("{")
    refused("got invalid JSON", tmp_path / "hf", to="native")
