"""Scaling rules: learning rate and batch size of a run as a function of its N and D.

    3.0e-4                                                   a constant
    steplaw                                                  Li et al., arXiv 2503.04715 ("Step Law")
    {coefficient: 1.79, n: -0.713, d: 0.307}                 any 1.79 N^-0.713 D^0.307
    {mup: 3.0e-3, base_d_model: 256}                         one rate for every width, tuned at the base
    {completep: 3.0e-3, base_d_model: 256, base_n_layers: 4} one rate for every width and depth

Batches are in tokens and take the first three forms.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from megatron.config.option import REQUIRED, option
from megatron.config.schema import ModelConfig
from megatron.config.section import check_known_keys, convert_value, read_section
from megatron.config.yaml_file import is_finite
from megatron.plan.count import n_non_embedding, n_params

EXPONENT = "a number from -10 to 10"
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

    coefficient: float = option(REQUIRED, "factor", above=0, expected="a number above 0")
    n: float = option(0.0, "exponent of N", at_least=-10, at_most=10, expected=EXPONENT)
    d: float = option(0.0, "exponent of D", at_least=-10, at_most=10, expected=EXPONENT)
    params: str = option("non_embedding", "parameters that N counts", *COUNTS)
    model: dict[str, Any] = field(default_factory=dict)  # no key of a rule

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
            check_known_keys(raw, [name, *keys], where)
            coefficient = convert_value(raw[name], float, fields(ScalingRule)[0], f"{where}.{name}")
            base = {key: value for key, value in raw.items() if key != name}
            return ScalingRule(coefficient, model={"parametrization": name, **base})
    return read_section(ScalingRule, raw, where)


def round_batch(tokens: float, seq_len: int, multiple: int) -> int:
    """Return the samples of a batch of about `tokens` tokens: the nearest positive multiple of `multiple`."""
    # Example: 500,000 tokens, windows of 1,024, multiple of 16: round(30.5) = 31 multiples, 496 samples.
    return max(1, round(tokens / (seq_len * multiple))) * multiple
