"""Learning rate and batch of a run as a rule of its N and D, as a study writes them.

    3.0e-4                                                   a constant
    steplaw                                                  Li et al., arXiv 2503.04715 ("Step Law")
    {coefficient: 1.79, n: -0.713, d: 0.307}                 any 1.79 N^-0.713 D^0.307
    {mup: 3.0e-3, base_d_model: 256}                         one rate for every width, tuned at the base
    {completep: 3.0e-3, base_d_model: 256, base_n_layers: 4} and for every depth

Batches are in tokens and take the first three forms.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config.count import n_non_embedding, n_params
from megatron.config.presets import nearest
from megatron.config.schema import ModelConfig
from megatron.config.yaml_file import is_finite

MOST_EXPONENT = 10
COUNTS = {"non_embedding": n_non_embedding, "all": n_params}
TRANSFERS = {"mup": ("base_d_model", "base_d_head"),
             "completep": ("base_d_model", "base_n_layers", "base_d_head")}  # fmt: skip
# N without embeddings in both, as the authors count it
STEPLAW = {
    "lr": {"coefficient": 1.79, "n": -0.713, "d": 0.307},
    "batch_tokens": {"coefficient": 0.58, "d": 0.571},
}


@dataclass(frozen=True)
class Rule:
    """coefficient N^n D^d, with what a run's `model` section needs for it to hold."""

    coefficient: float
    n: float = 0.0
    d: float = 0.0
    params: str = "non_embedding"
    model: dict[str, Any] = field(default_factory=dict)

    def __call__(self, model: ModelConfig, train_tokens: float) -> float:
        """Its value, to six digits: what is written in a file is what a run's name is made of."""
        value = self.coefficient * COUNTS[self.params](model) ** self.n * train_tokens**self.d
        return float(f"{value:.6g}")


def read_rule(told: Any, kind: str, where: str) -> Rule:
    """A rule as written; `kind` is lr or batch_tokens. ValueError says what was wanted."""
    if told == "steplaw":
        told = STEPLAW[kind]
    if is_finite(told):
        told = {"coefficient": told}
    if not isinstance(told, dict):
        raise ValueError(f"{where}: found {told!r}, wanted a number, steplaw, or coefficient with n and d")
    for name, keys in TRANSFERS.items():
        if name in told and kind == "lr":
            _refuse_others(told, [name, *keys], where)
            base = {key: value for key, value in told.items() if key != name}
            return Rule(_number(told, name, where), model={"parametrization": name, **base})
    _refuse_others(told, ["coefficient", "n", "d", "params"], where)
    params = told.get("params", "non_embedding")
    if not isinstance(params, str) or params not in COUNTS:
        raise ValueError(f"{where}.params: found {params!r}, wanted one of {', '.join(COUNTS)}")
    exponents = {key: _number(told, key, where, positive=False) for key in ("n", "d") if key in told}
    return Rule(_number(told, "coefficient", where), params=params, **exponents)


def whole_batch(tokens: float, seq_len: int, multiple: int) -> int:
    """Samples of a batch of about so many tokens: the nearest multiple, one multiple at least."""
    return max(1, round(tokens / (seq_len * multiple))) * multiple


def _number(told: dict[str, Any], key: str, where: str, positive: bool = True) -> float:
    value = told.get(key)
    if not is_finite(value) or (value <= 0 if positive else abs(value) > MOST_EXPONENT):
        wanted = "a number above 0" if positive else f"a number from -{MOST_EXPONENT} to {MOST_EXPONENT}"
        raise ValueError(f"{where}.{key}: found {value!r}, wanted {wanted}")
    return float(value)


def _refuse_others(told: dict[str, Any], known: Sequence[str], where: str) -> None:
    for key in told:
        if key not in known:
            raise ValueError(f"{where}: unknown key '{key}'; {nearest(str(key), list(known))}")
