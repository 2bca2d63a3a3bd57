"""Folders of LLaDA, Dream and MDLM equal twins after their papers and public configurations.

Their own code is remote. The twins of LLaDA and Dream are transformers' Llama and Qwen2 under a full
attention mask; MDLM's is written out below.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import save_file
from torch import Tensor, nn

from megatron.checkpoint.convert.formats import convert_checkpoint, read_any
from megatron.evaluation.likelihood import Request
from megatron.evaluation.likelihood_diffusion import score_bound, score_left_to_right
from megatron.generation.generate_diffusion import generate_diffusion
from megatron.generation.sampling import Sampling
from megatron.parallel.world import World
from tests.wrong_values import read_refusal

with pytest.MonkeyPatch.context() as patched:  # read at import; unset again for later tests
    patched.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

Logits = Callable[[Tensor], Tensor]
ALONE = World(0, 1, 0, torch.device("cpu"))
ROWS, MASK = 50, 44  # of LLaDA and Dream: [MASK] is inside of the ids
LLADA_NAMES = {
    "model.embed_tokens": "model.transformer.wte", "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out", "model.layers": "model.transformer.blocks",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm", "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj", "self_attn.v_proj": "v_proj", "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj", "mlp.down_proj": "ff_out",
}  # fmt: skip
# keys of GSAI-ML/LLaDA-8B-Base's config.json, with small sizes
LLADA = {
    "activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0, "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0, "attention_layer_norm": False, "attention_layer_norm_with_affine": True,
    "auto_map": {"AutoModel": "modeling_llada.LLaDAModelLM"}, "bias_for_layer_norm": False,
    "block_group_size": 1, "block_type": "llama", "d_model": 32, "embedding_dropout": 0.0,
    "embedding_size": ROWS, "eos_token_id": 40, "flash_attention": False, "include_bias": False,
    "include_qkv_bias": False, "init_cutoff_factor": None, "init_device": "meta", "init_fn": "mitchell",
    "init_std": 0.02, "input_emb_norm": False, "layer_norm_type": "rms", "layer_norm_with_affine": True,
    "mask_token_id": MASK, "max_sequence_length": 64, "mlp_hidden_size": 48, "mlp_ratio": 4,
    "model_type": "llada", "multi_query_attention": None, "n_heads": 4, "n_kv_heads": 4, "n_layers": 2,
    "pad_token_id": 40, "precision": "amp_bf16", "residual_dropout": 0.0, "rms_norm_eps": 1e-5,
    "rope": True, "rope_full_precision": True, "rope_theta": 500000.0, "scale_logits": False,
    "transformers_version": "4.46.3", "use_cache": False, "vocab_size": ROWS, "weight_tying": False,
}  # fmt: skip
SMALL = {
    "vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "initializer_range": 0.15, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def save(folder: Path, config: dict[str, Any], state: dict[str, Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in state.items()}, folder / "model.safetensors"
    )


def shake(model: nn.Module) -> None:
    """Give every vector values that are neither 0 nor 1."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape)


def attend_both_ways(model: nn.Module) -> Logits:
    """Return the logits of a causal model of transformers under a mask that hides nothing."""

    @torch.no_grad()
    def compute(tokens: Tensor) -> Tensor:
        n = tokens.shape[1]
        return model.eval()(tokens, attention_mask=torch.zeros(len(tokens), 1, n, n)).logits

    return compute


def save_llada(folder: Path) -> Logits:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    twin = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, rms_norm_eps=1e-5, rope_parameters=rope)
    )
    shake(twin)
    state = {}
    for name, tensor in twin.state_dict().items():
        for theirs, llada in LLADA_NAMES.items():
            name = name.replace(theirs, llada)
        state[name] = tensor
    save(folder, LLADA, state)
    return attend_both_ways(twin)


def save_dream(folder: Path) -> Logits:
    torch.manual_seed(1)
    keys = {**SMALL, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    twin = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**keys, rope_parameters=rope))
    shake(twin)
    config = {
        **keys, "model_type": "Dream", "architectures": ["DreamModel"], "mask_token_id": MASK,
        "use_mrope": False, "rope_theta": 1e6, "rope_scaling": None, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "use_sliding_window": False,
        "auto_map": {"AutoModel": "modeling_dream.DreamModel"},
    }  # fmt: skip
    save(folder, config, twin.state_dict())
    logits = attend_both_ways(twin)

    def shift(tokens: Tensor) -> Tensor:  # the output of a position predicts the token after it
        return torch.cat([logits(tokens)[:, :1], logits(tokens)[:, :-1]], dim=1)

    return shift


class AdaptiveNorm(nn.LayerNorm):
    """A norm without bias, whose output is scaled and shifted by functions of the time."""

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x) * (1 + scale[:, None]) + shift[:, None]


class MdlmBlock(nn.Module):
    def __init__(self, width: int, n_heads: int, condition: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm1, self.norm2 = AdaptiveNorm(width, bias=False), AdaptiveNorm(width, bias=False)
        self.attn_qkv = nn.Linear(width, 3 * width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        hidden, gelu = 4 * width, nn.GELU(approximate="tanh")
        self.mlp = nn.Sequential(nn.Linear(width, hidden), gelu, nn.Linear(hidden, width))
        self.adaLN_modulation = nn.Linear(condition, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.adaLN_modulation(condition).chunk(6, -1)
        qkv = self.attn_qkv(self.norm1(x, *parts[:2]))
        q, k, v = qkv.unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, S, K] each
        n, d_head = q.shape[-2:]
        angle = torch.arange(n)[:, None] * 10000.0 ** -(torch.arange(0, d_head, 2) / d_head).repeat(2)
        q, k = apply_rotary_pos_emb(q, k, angle.cos()[None], angle.sin()[None])
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = x + parts[2][:, None] * self.attn_out(mixed)
        return x + parts[5][:, None] * self.mlp(self.norm2(x, *parts[3:5]))


class MdlmTwin(nn.Module):
    """MDLM of arXiv 2406.07524 without time conditioning: a DiT with rotary positions, adaptive norms."""

    def __init__(self, width: int = 32, n_heads: int = 4, n_blocks: int = 2, condition: int = 9) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(51, width))
        self.sigma_map = nn.Sequential(nn.Linear(256, condition), nn.SiLU(), nn.Linear(condition, condition))
        self.blocks = nn.ModuleList(MdlmBlock(width, n_heads, condition) for _ in range(n_blocks))
        self.norm_final = AdaptiveNorm(width, bias=False)
        self.linear = nn.Linear(width, 51)
        self.adaLN_modulation = nn.Linear(condition, 2 * width)

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        # cosines and sines of the time 0
        time = torch.cat([torch.ones(len(tokens), 128), torch.zeros(len(tokens), 128)], -1)
        condition, x = F.silu(self.sigma_map(time)), self.embedding[tokens]
        for block in self.blocks:
            x = block(x, condition)
        logits = self.linear(self.norm_final(x, *self.adaLN_modulation(condition).chunk(2, -1)))
        logits[..., 50] = -torch.inf  # [MASK] is never predicted
        return logits


def save_mdlm(folder: Path) -> Logits:
    torch.manual_seed(2)
    twin = MdlmTwin()
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape) + ("norm" in name))
    config = {
        "model_type": "mdlm", "architectures": ["MDLM"], "vocab_size": 51, "model_length": 64,
        "hidden_dim": 32, "cond_dim": 9, "n_blocks": 2, "n_heads": 4, "dropout": 0.1,
        "time_conditioning": False, "return_dict": False,
        "auto_map": {"AutoModelForMaskedLM": "modeling_mdlm.MDLM"},
    }  # fmt: skip
    state = {}
    for name, tensor in twin.state_dict().items():
        name = name.replace("sigma_map", "sigma_map.mlp").replace("embedding", "vocab_embed.embedding")
        is_of_output = name.startswith(("norm_final", "linear", "adaLN"))
        state["backbone." + ("output_layer." if is_of_output else "") + name] = tensor
    save(folder, config, state)
    return twin


FAMILIES: dict[str, tuple[Callable[[Path], Logits], int]] = {
    "llada": (save_llada, MASK),
    "dream": (save_dream, MASK),
    "mdlm": (save_mdlm, 50),
}
Family = tuple[Path, Logits, int]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Return the folder, the twin and the id of [MASK] of a family."""
    save_family, mask_id = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param) / "hub"
    return folder, save_family(folder), mask_id


def test_a_published_diffusion_model_has_the_logits_of_its_twin(family: Family, tmp_path: Path) -> None:
    hub, twin, mask_id = family
    convert_checkpoint(hub, tmp_path / "native", to="native")
    tokens = torch.randint(0, 40, (3, 17), generator=torch.Generator().manual_seed(0))
    tokens[:, 3::4] = mask_id
    expected = twin(tokens).log_softmax(-1)
    for path in (hub, tmp_path / "native"):
        weights = read_any(path)
        assert (weights.objective, weights.config.mask_row) == ("masked_diffusion", mask_id)
        with torch.no_grad():
            ours = weights.build_model()(tokens, causal=False).log_softmax(-1)
        columns = expected[0, 0] > -torch.inf
        torch.testing.assert_close(ours[..., columns], expected[..., columns], rtol=1e-5, atol=1e-5)
        assert bool((ours[..., ~columns].exp() == 0).all())
    assert expected[..., :40].std() > 0.1


def test_a_masked_token_is_scored_and_written_as_its_twin_predicts_it(family: Family) -> None:
    """With one token, the bound and the score from left to right are both its loss behind [MASK]."""
    hub, twin, mask_id = family
    model, answer = read_any(hub).build_model(), 5
    contexts = torch.randint(0, 40, (20, 3), generator=torch.Generator().manual_seed(1))
    log_p = twin(F.pad(contexts, (0, 1), value=mask_id))[:, 3].double().log_softmax(-1)
    requests = [Request(tuple(context), (answer,)) for context in contexts.tolist()]
    options: dict[str, Any] = {"batch_size": 4, "max_length": 64, "world": ALONE}
    for scored in (
        score_bound(model, requests, num_mc=1, seed=0, **options),
        score_left_to_right(model, requests, **options),
    ):
        assert scored.log_p == pytest.approx(log_p[:, answer].numpy(), abs=1e-4)
    greedy = Sampling(temperature=0)
    texts = generate_diffusion(model, contexts.tolist(), n_new_tokens=1, n_steps=1, sampling=greedy)
    # in one of the families [MASK] is likeliest somewhere, and it is never written
    log_p[:, mask_id] = -torch.inf
    assert texts == log_p.argmax(-1)[:, None].tolist()


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("llada", {"block_type": "sequential"}, "block_type: got 'sequential', expected 'llama'"),
        ("llada", {"alibi": True}, "alibi: got True, expected False"),
        ("llada", {"include_bias": True}, "include_bias: got True"),
        ("llada", {"mask_token_id": 60}, "mask_token_id: got 60, expected below 50"),
        ("llada", {"mask_token_id": None}, "mask_token_id: got None, expected int"),
        ("llada", {"d_model": 30}, "n_heads: got 4, expected a divisor of d_model 30"),
        ("llada", {"n_layers": 3}, "weights do not match the model configuration"),
        ("mdlm", {"time_conditioning": True}, "time_conditioning: got True, expected False"),
        ("mdlm", {"n_blocks": 1}, "blocks.1.adaLN_modulation.bias"),
        ("mdlm", {"n_blocks": 3}, "blocks.2.adaLN_modulation.weight: missing"),
        ("dream", {"mask_token_id": 50}, "mask_token_id: got 50, expected below 50"),
        ("dream", {"objective": "autoregressive"}, "expected 'masked_diffusion' for this model_type"),
    ],
)
def test_another_computation_is_refused(
    name: str, change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    FAMILIES[name][0](tmp_path / "hub")
    path = tmp_path / "hub" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert sentence in str(read_refusal(lambda: read_any(tmp_path / "hub")))
