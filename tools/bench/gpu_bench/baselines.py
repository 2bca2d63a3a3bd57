"""Other implementations of the same training step: LlamaForCausalLM, and a model in the style of nanoGPT."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron.checkpoint.convert.names import LLAMA, export_names
from megatron.config.schema import ModelConfig, OptimConfig
from megatron.model.transformer import Gpt
from megatron.objective.task import Task


def build_plain_step(
    network: nn.Module, tasks: list[Task], optim: OptimConfig, device: torch.device, accumulate: int
) -> Callable[[int], Tensor]:
    """Build a training step in a few lines: autocast, cross_entropy, torch's fused AdamW."""
    matrices = [p for p in network.parameters() if p.ndim >= 2]
    gains = [p for p in network.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    betas = (optim.beta1, optim.beta2)
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, fused=True)

    def step(i: int) -> Tensor:
        total = torch.zeros((), device=device)
        for j in range(accumulate):
            task = tasks[(i * accumulate + j) % len(tasks)].to(device)
            with torch.autocast(device.type, torch.bfloat16):
                out = network(task.inputs)
                logits = out if isinstance(out, Tensor) else out.logits
                loss = F.cross_entropy(logits.flatten(0, 1), task.targets) / accumulate
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(network.parameters(), optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def build_llama(model: ModelConfig, seq_len: int) -> nn.Module:
    """Build LlamaForCausalLM of transformers with the shape of a model and torch's fused attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=model.d_model,
            intermediate_size=model.d_ff,
            head_dim=model.d_head,
            num_attention_heads=model.n_heads,
            num_key_value_heads=model.n_heads,
            num_hidden_layers=model.n_layers,
            vocab_size=model.vocab_rows,
            rms_norm_eps=model.norm_eps,
            max_position_embeddings=seq_len,
            tie_word_embeddings=True,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )


def load_our_weights(network: nn.Module, ours_model: Gpt) -> None:
    """Copy the weights of our model to a baseline with the same shape."""
    state = ours_model.state_dict()
    if not isinstance(network, NanoGpt):
        state = {"lm_head.weight": ours_model.embedding.weight} | export_names(
            LLAMA, state, ours_model.config
        )
    network.load_state_dict(state)


class NanoAttention(nn.Module):
    """Multi-head attention with rotary positions."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.n_heads, width = model.n_heads, model.n_heads * model.d_head
        for name in ("query", "key", "value"):
            setattr(self, name, nn.Linear(model.d_model, width, bias=False))
        self.out = nn.Linear(width, model.d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, causal: bool) -> Tensor:
        q, k, v = (
            y(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for y in (self.query, self.key, self.value)
        )
        q, k = (rotate(y, cos, sin).to(v.dtype) for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(y.transpose(1, 2).flatten(-2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (k, k + K / 2) of the last axis."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class NanoMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(model.d_model, model.d_ff, bias=False)
        self.up = nn.Linear(model.d_model, model.d_ff, bias=False)
        self.down = nn.Linear(model.d_ff, model.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class NanoBlock(nn.Module):
    """Pre-norm block."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.d_model, model.norm_eps)
        self.attention = NanoAttention(model)
        self.mlp_norm = nn.RMSNorm(model.d_model, model.norm_eps)
        self.mlp = NanoMlp(model)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, causal: bool) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, causal)
        return x + self.mlp(self.mlp_norm(x))


class NanoGpt(nn.Module):
    """The same shape in the style of nanoGPT: plain modules, no kernels of ours; parameter names are ours."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.d_head, self.theta = model.d_head, model.rope_theta
        self.embedding = nn.Embedding(model.vocab_rows, model.d_model)
        self.blocks = nn.ModuleList(NanoBlock(model) for _ in range(model.n_layers))
        self.norm = nn.RMSNorm(model.d_model, model.norm_eps)

    def forward(self, tokens: Tensor, causal: bool = True) -> Tensor:
        """Map tokens [B, S] to logits [B, S, V]."""
        dtype, device = self.embedding.weight.dtype, tokens.device
        pairs = torch.arange(0, self.d_head, 2, dtype=torch.float64, device=device) / self.d_head
        angle = torch.arange(tokens.shape[1], device=device)[:, None] * self.theta**-pairs
        angle = torch.cat([angle, angle], dim=-1)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin, causal)
        return F.linear(self.norm(x), self.embedding.weight)
