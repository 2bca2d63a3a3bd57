"""Folders of LLaDA, Dream and MDLM equal twins after their papers and public configurations.

Their own code is remote. The twins of LLaDA and Dream are transformers' Llama and Qwen2 under a full
attention mask; that of MDLM is written out below.
"""

import itertools
import json
import math
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

with pytest.MonkeyPatch.context() as patched:  # read at import; unset again for later tests
    patched.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")

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


class MdlmTwin(nn.Module):
    """MDLM of arXiv 2406.07524 without time conditioning: a DiT with rotary positions, adaptive norms."""

    def __init__(self, width: int = 32, n_heads: int = 4, n_blocks: int = 2, condition: int = 9) -> None:
        super().__init__()
        self.n_heads = n_heads
        tensors = {"vocab_embed.embedding": (51, width), "sigma_map.mlp.0.weight": (condition, 256)}
        tensors |= {"sigma_map.mlp.0.bias": (condition,), "sigma_map.mlp.2.weight": (condition, condition)}
        tensors |= {"sigma_map.mlp.2.bias": (condition,)}
        for i in range(n_blocks):
            shapes: dict[str, tuple[int, ...]] = {
                "norm1.weight": (width,), "attn_qkv.weight": (3 * width, width),
                "attn_out.weight": (width, width), "norm2.weight": (width,),
                "mlp.0.weight": (4 * width, width), "mlp.0.bias": (4 * width,),
                "mlp.2.weight": (width, 4 * width), "mlp.2.bias": (width,),
                "adaLN_modulation.weight": (6 * width, condition), "adaLN_modulation.bias": (6 * width,),
            }  # fmt: skip
            tensors |= {f"blocks.{i}.{name}": shape for name, shape in shapes.items()}
        tensors |= {"output_layer.norm_final.weight": (width,), "output_layer.linear.weight": (51, width)}
        tensors |= {"output_layer.linear.bias": (51,), "output_layer.adaLN_modulation.bias": (2 * width,)}
        tensors |= {"output_layer.adaLN_modulation.weight": (2 * width, condition)}
        generator = torch.Generator().manual_seed(2)
        self.tensors = {
            name: 0.3 * torch.randn(shape, generator=generator) + ("norm" in name) * 1.0
            for name, shape in tensors.items()
        }

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str, shift: Tensor, scale: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return normed * self.tensors[f"{name}.weight"] * (1 + scale[:, None]) + shift[:, None]

    def rotate(self, x: Tensor) -> Tensor:
        n, width = x.shape[-2:]
        angle = torch.arange(n)[:, None] * 10000.0 ** -(torch.arange(0, width, 2) / width)
        first, second = x.chunk(2, -1)
        return torch.cat(
            [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1
        )

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(10000) * torch.arange(128) / 128)
        angles = torch.zeros(len(tokens), 1) * frequencies  # time 0
        time = torch.cat([angles.cos(), angles.sin()], -1)
        condition = F.silu(self.linear(F.silu(self.linear(time, "sigma_map.mlp.0")), "sigma_map.mlp.2"))
        x = self.tensors["vocab_embed.embedding"][tokens]
        for i in range(2):
            block = f"blocks.{i}"
            parts = self.linear(condition, f"{block}.adaLN_modulation").chunk(6, -1)
            qkv = self.linear(self.norm(x, f"{block}.norm1", parts[0], parts[1]), f"{block}.attn_qkv")
            q, k, v = qkv.unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, S, K] each
            scores = self.rotate(q) @ self.rotate(k).transpose(-1, -2) / math.sqrt(q.shape[-1])
            mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
            x = x + parts[2][:, None] * self.linear(mixed, f"{block}.attn_out")
            hidden = self.linear(self.norm(x, f"{block}.norm2", parts[3], parts[4]), f"{block}.mlp.0")
            x = x + parts[5][:, None] * self.linear(F.gelu(hidden, approximate="tanh"), f"{block}.mlp.2")
        shift, scale = self.linear(condition, "output_layer.adaLN_modulation").chunk(2, -1)
        logits = self.linear(self.norm(x, "output_layer.norm_final", shift, scale), "output_layer.linear")
        logits[..., 50] = -torch.inf  # [MASK] is never predicted
        return logits


def save_mdlm(folder: Path) -> Logits:
    twin = MdlmTwin()
    config = {
        "model_type": "mdlm", "architectures": ["MDLM"], "vocab_size": 51, "model_length": 64,
        "hidden_dim": 32, "cond_dim": 9, "n_blocks": 2, "n_heads": 4, "dropout": 0.1,
        "time_conditioning": False, "return_dict": False,
        "auto_map": {"AutoModelForMaskedLM": "modeling_mdlm.MDLM"},
    }  # fmt: skip
    save(folder, config, {f"backbone.{name}": tensor for name, tensor in twin.tensors.items()})
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


def test_it_is_scored_by_the_bound_and_left_to_right(family: Family) -> None:
    """Both are enumerated with the twin: all masks of three tokens, and one order of them."""
    hub, twin, mask_id = family
    context, answer = [3, 9, 4], [5, 1, 2]
    model, requests = read_any(hub).build_model(), [Request((3, 9, 4), (5, 1, 2))]

    def compute_nats(hidden: tuple[int, ...], scored: tuple[int, ...]) -> float:
        shown = [mask_id if i in hidden else token for i, token in enumerate(answer)]
        log_p = twin(torch.tensor([context + shown]))[0].double().log_softmax(-1)
        return -sum(float(log_p[3 + i, answer[i]]) for i in scored)

    masks = [mask for n in (1, 2, 3) for mask in itertools.combinations(range(3), n)]
    # the number of hidden tokens is uniform in 1..3, then the mask; each hidden token has the weight 3 / n
    bound = sum(compute_nats(mask, mask) / (len(mask) * math.comb(3, len(mask))) for mask in masks)
    in_order = sum(compute_nats(tuple(range(i, 3)), (i,)) for i in range(3))
    options: dict[str, Any] = {"batch_size": 4, "max_length": 64, "world": ALONE}
    scored = score_bound(model, requests, num_mc=7, seed=0, **options)
    assert -scored.log_p[0] == pytest.approx(bound, abs=1e-4)
    assert -score_left_to_right(model, requests, **options).log_p[0] == pytest.approx(in_order, abs=1e-4)


def test_it_writes_text_without_its_mask(family: Family) -> None:
    hub, twin, mask_id = family
    greedy, model = Sampling(temperature=0), read_any(hub).build_model()
    (text,) = generate_diffusion(model, [[3, 9, 4]], n_new_tokens=6, n_steps=6, sampling=greedy)
    tokens = torch.tensor([[3, 9, 4] + [mask_id] * 6])
    for _ in range(6):  # the most confident prediction of a masked position is kept
        log_p = twin(tokens)[0].log_softmax(-1)
        log_p[:, mask_id] = -torch.inf
        best = log_p.masked_fill((tokens[0] != mask_id)[:, None], -torch.inf)
        place = int(best.max(-1).values.argmax())
        tokens[0, place] = int(best[place].argmax())
    assert text == tokens[0, 3:].tolist() and mask_id not in text


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
    with pytest.raises(ValueError) as caught:
        read_any(tmp_path / "hub")
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
