"""Scaling rules: learning rate and batch size of a run as a function of its N and D.

    3.0e-4                                                   a constant
    steplaw                                                  Li et al., arXiv 2503.04715 ("Step Law")
    {coefficient: 1.79, n: -0.713, d: 0.307}                 any 1.79 N^-0.713 D^0.307
    {mup: 3.0e-3, base_d_model: 256}                         one rate for every width, tuned at the base
    {completep: 3.0e-3, base_d_model: 256, base_n_layers: 4} one rate for every width and depth

Batches are in tokens and take the first three forms.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config.presets import suggest_nearest
from megatron.config.schema import ModelConfig
from megatron.config.yaml_file import is_finite
from megatron.plan.count import n_non_embedding, n_params

MAX_EXPONENT = 10
# Step Law and Kaplan count N without embeddings, Chinchilla with them: an exponent is only valid with its N.
COUNTS = {"non_embedding": n_non_embedding, "all": n_params}
TRANSFERS = {"mup": ("base_d_model", "base_d_head"),
             "completep": ("base_d_model", "base_n_layers", "base_d_head")}  # fmt: skip
# both with N without embeddings, as defined by the authors
STEPLAW = {
    "lr": {"coefficient": 1.79, "n": -0.713, "d": 0.307},
    "batch_tokens": {"coefficient": 0.58, "d": 0.571},
}


@dataclass(frozen=True)
class ScalingRule:
    """Rule coefficient N^n D^d, with the keys that a run's `model` section needs for it."""

    coefficient: float
    n: float = 0.0
    d: float = 0.0
    params: str = "non_embedding"
    model: dict[str, Any] = field(default_factory=dict)

    def __call__(self, model: ModelConfig, train_tokens: float) -> float:
        """Return the value to six digits, since it is written to the config and enters the run's identity."""
        value = self.coefficient * COUNTS[self.params](model) ** self.n * train_tokens**self.d
        # Powers of float64 can differ in the last digit between two math libraries. Six digits hide that: the
        # same study has the same identities on every machine.
        return float(f"{value:.6g}")


def read_rule(raw: Any, kind: str, where: str) -> ScalingRule:
    """Read and validate a rule; `kind` is lr or batch_tokens. Raises ValueError with the expected value."""
    if raw == "steplaw":
        raw = STEPLAW[kind]
    if is_finite(raw):
        raw = {"coefficient": raw}
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: got {raw!r}, expected a number, steplaw, or coefficient with n and d.")
    # transfer rules (muP, CompleteP) set the rate at the base and scale it in the model's parametrization
    for name, keys in TRANSFERS.items():
        # a batch has no transfer rule: there `mup` is an unknown key
        if name in raw and kind == "lr":
            _refuse_unknown_keys(raw, [name, *keys], where)
            base = {key: value for key, value in raw.items() if key != name}
            return ScalingRule(_read_number(raw, name, where), model={"parametrization": name, **base})
    _refuse_unknown_keys(raw, ["coefficient", "n", "d", "params"], where)
    params = raw.get("params", "non_embedding")
    if not isinstance(params, str) or params not in COUNTS:
        raise ValueError(f"{where}.params: got {params!r}, expected one of {', '.join(COUNTS)}.")
    exponents = {key: _read_number(raw, key, where, positive=False) for key in ("n", "d") if key in raw}
    return ScalingRule(_read_number(raw, "coefficient", where), params=params, **exponents)


def round_batch(tokens: float, seq_len: int, multiple: int) -> int:
    """Return the samples of a batch of about `tokens` tokens: the nearest positive multiple of `multiple`."""
    # Example: 500,000 tokens, windows of 1,024, multiple of 16: round(30.5) = 31 multiples, 496 samples.
    return max(1, round(tokens / (seq_len * multiple))) * multiple


def _read_number(raw: dict[str, Any], key: str, where: str, positive: bool = True) -> float:
    value = raw.get(key)
    if not is_finite(value) or (value <= 0 if positive else abs(value) > MAX_EXPONENT):
        expected = "a number above 0" if positive else f"a number from -{MAX_EXPONENT} to {MAX_EXPONENT}"
        raise ValueError(f"{where}.{key}: got {value!r}, expected {expected}.")
    return float(value)


def _refuse_unknown_keys(raw: dict[str, Any], keys: Sequence[str], where: str) -> None:
    for key in raw:
        if key not in keys:
            raise ValueError(f"{where}: unknown key '{key}'; {suggest_nearest(str(key), list(keys))}")
