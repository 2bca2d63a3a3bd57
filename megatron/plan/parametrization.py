"""Scaling of initial weights, learning rates and multipliers with a model's shape.

m_N = d_model / base_d_model and m_L = n_layers / base_n_layers. At the base
shape the three parametrizations are equal. A learning rate tuned there
transfers to every width under mup (Yang et al., arXiv 2203.03466, table 8, for
Adam), and to every width and depth under completep (Dey et al., arXiv
2505.01618, table 1 with alpha = 1):

                                 standard            mup               completep
    std of a hidden matrix       s                   s / sqrt(m_N)     s / sqrt(m_N)
    ... into the residual stream s / sqrt(2 L)       / sqrt(m_N) too   s / sqrt(2 L_base m_N)
    std of embedding and head    s                   s                 s
    rate of a hidden matrix      lr                  lr / m_N          lr / m_N
    rate of all else             lr                  lr                lr
    decay of a hidden matrix     wd                  wd m_N            wd m_N
    ... by Muon                  lr                  lr / sqrt(m_N)    lr / sqrt(m_N)
    ... and its decay            wd                  wd sqrt(m_N)      wd sqrt(m_N)
    AdamW's eps in blocks        eps                 eps / m_N         eps / (m_N m_L)
    ... and outside              eps                 eps / m_N         eps / m_N
    factor of a branch           1                   1                 1 / m_L
    factor of query . key        1 / sqrt(d_head)    sqrt(base_d_head) / d_head
    factor of the logits         1                   1 / m_N           1 / m_N

s is `model.init_std`, by default 0.02 as in GPT-2 and Llama. With this value a
much narrower model starts on a plateau at the entropy of single tokens: with
0.1, the loss of d_model 48 was 0.7 nats lower after 400,000 tokens. The decay
grows as the rate shrinks, because AdamW subtracts rate x decay. eps follows
the size of the gradients, which fall as 1 / m_N through the factor of the
logits and, in a block, as 1 / m_L through the factor of the branch.

Muon's update has AdamW's root mean square at every width, but another spectral
norm. A product with a hidden matrix changes equally at every width if the
spectral norm of the update does not depend on it (Yang et al., arXiv
2310.17813, condition 1). The entries of AdamW's update are near +-lr, and their
signs have a low rank, so its spectral norm grows as m_N. The singular values of
Muon's are equal, about 0.2 sqrt(max(out, in)) lr (Liu et al., arXiv 2502.16982,
section 2.2): they grow as sqrt(m_N) only.
"""

import math
from dataclasses import dataclass
from typing import Literal

from megatron.config.schema import ModelConfig

JOINS_RESIDUAL = ("attention.out.weight", "mlp.down.weight")


@dataclass(frozen=True)
class ParameterRule:
    """Initial std of one parameter, and factors for the run's lr, weight decay and eps."""

    std: float
    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


def width_ratio(model: ModelConfig) -> float:
    """Return m_N; 1 under the standard parametrization."""
    if model.parametrization == "standard" or model.base_d_model is None:
        return 1.0
    return model.d_model / model.base_d_model


def depth_ratio(model: ModelConfig) -> float:
    """Return m_L; 1 unless the parametrization scales with depth."""
    if model.parametrization != "completep" or model.base_n_layers is None:
        return 1.0
    return model.n_layers / model.base_n_layers


def logit_multiplier(model: ModelConfig) -> float:
    """Return the factor of the logits."""
    return 1 / width_ratio(model)


def residual_multiplier(model: ModelConfig) -> float:
    """Return the factor of the attention and feed-forward outputs before the residual addition."""
    return 1 / depth_ratio(model)


def attention_multiplier(model: ModelConfig) -> float:
    """Return the factor of query . key."""
    if model.parametrization == "standard" or model.base_d_head is None:
        return 1 / math.sqrt(model.d_head)
    return math.sqrt(model.base_d_head) / model.d_head


def is_hidden_matrix(name: str, n_axes: int) -> bool:
    """Return whether a parameter is a matrix of a block; gains and biases have one axis."""
    return "blocks." in name and n_axes >= 2


def find_parameter_rule(
    model: ModelConfig, name: str, n_axes: int, kind: Literal["adamw", "muon"] = "adamw"
) -> ParameterRule:
    """Return the rule of a parameter, given its name in the model (with any prefix) and number of axes.

    kind   optimizer of the matrices of the blocks
    """
    width, depth = width_ratio(model), depth_ratio(model)
    in_block = "blocks." in name
    eps = 1 / (width * depth) if in_block else 1 / width
    # embedding, head, and the vectors of norms
    # and biases keep the std, rate and decay of the base.
    if not is_hidden_matrix(name, n_axes):
        return ParameterRule(std=model.init_std, eps=eps)
    # A product with a hidden matrix sums over a number
    # of terms proportional to d_model: a std that falls
    # as 1 / sqrt(width) keeps the variance of the sum.
    std = model.init_std / math.sqrt(width)
    if name.endswith(JOINS_RESIDUAL):
        std /= math.sqrt(2 * model.n_layers / depth)  # L / m_L = L_base under completep, else L
    growth = width if kind == "adamw" else math.sqrt(width)  # of the spectral norm of an update
    return ParameterRule(std=std, lr=1 / growth, weight_decay=growth, eps=eps)
