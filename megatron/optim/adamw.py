"""AdamW over a model's parameters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from megatron.config.parametrization import rule_of
from megatron.config.schema import ModelConfig, OptimConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedAdamW:
    """AdamW by torch's fused kernel: what `torch.optim.AdamW(fused=True)` computes, without its imports.

    The first group that is added to a `torch.optim.Optimizer` imports torch's compiler, about a second of a
    process whose training may take ten. `state` and `param_groups` have torch's form.
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float]) -> None:
        """Groups with params, lr, weight_decay and eps; `betas` are the decay rates of the two moments."""
        self.param_groups = groups
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self.betas = betas

    @torch.no_grad()
    def step(self, divisor: Tensor, found_inf: Tensor) -> None:
        """One update with gradients over `divisor`, or none where `found_inf` is 1; float32 scalars."""
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not held:
                continue
            states = [self.state[parameter] for parameter in held]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                held,
                [parameter.grad for parameter in held],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                steps,
                lr=group["lr"],
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
                found_inf=found_inf,
            )
            torch._foreach_sub_(steps, [found_inf] * len(steps))


def adamw(
    parameters: Mapping[str, nn.Parameter], config: OptimConfig, shape: ModelConfig
) -> torch.optim.Optimizer:
    """torch's fused AdamW over parameters under the one-GPU model's names; its state is there from the start.

    Its groups are those of `parameter_groups`. ValueError where apex's kernel is asked for and not installed.
    """
    groups = parameter_groups(parameters, config, shape)
    common = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    optimizer = (
        _apex(groups, common) if config.kernel == "apex" else torch.optim.AdamW(groups, **common, fused=True)
    )
    _fill_state(optimizer)
    return optimizer


def fused_adamw(
    parameters: Mapping[str, nn.Parameter], config: OptimConfig, shape: ModelConfig
) -> "FusedAdamW | torch.optim.Optimizer":
    """The same update for our own engine, driven by `update`: FusedAdamW or apex's. Errors as `adamw`."""
    if config.kernel == "apex":
        return adamw(parameters, config, shape)
    optimizer = FusedAdamW(parameter_groups(parameters, config, shape), (config.beta1, config.beta2))
    _fill_state(optimizer)
    return optimizer


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], config: OptimConfig, shape: ModelConfig
) -> list[dict[str, Any]]:
    """Groups of parameters under one rule: matrices decay, gains and biases do not.

    Each has `lr_scale`: who sets the rate sets group["lr"] to the run's rate times that.
    """
    kinds: dict[tuple[bool, float, float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            rule = rule_of(shape, name, parameter.ndim)
            kind = (parameter.ndim >= 2, rule.lr, rule.weight_decay, rule.eps)
            kinds.setdefault(kind, []).append(parameter)
    return [
        {
            "params": held,
            "weight_decay": config.weight_decay * decay if decays else 0.0,
            "lr": config.lr * lr,
            "lr_scale": lr,
            "eps": config.eps * eps,
        }
        for (decays, lr, decay, eps), held in kinds.items()
    ]


def _fill_state(optimizer: "FusedAdamW | torch.optim.Optimizer") -> None:
    """Moments and steps of zero for every parameter."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        optimizer.state[parameter] = {name: torch.zeros_like(parameter) for name in MOMENTS}
        optimizer.state[parameter]["step"] = torch.zeros((), device=parameter.device)


def _apex(groups: list[dict], common: dict) -> torch.optim.Optimizer:
    try:
        from apex.optimizers import FusedAdam
    except ImportError as error:
        raise ValueError(
            "optim.kernel: apex is not installed; build NVIDIA's from https://github.com/NVIDIA/apex "
            "(`pip install apex` is a different package), or leave optim.kernel at torch"
        ) from error
    return FusedAdam(groups, **common, adam_w_mode=True)


def update(
    optimizer: "FusedAdamW | torch.optim.Optimizer", lr: float, divisor: Tensor, is_finite: Tensor
) -> None:
    """One step with the gradients divided by `divisor`, or none where `is_finite` says 0; both scalars.

    torch's fused kernel does both itself, so that the host need not wait for the device to know.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
    if isinstance(optimizer, FusedAdamW):
        # offloaded weights are on the host, and the kernel would read both before they are there
        held = optimizer.param_groups[0]["params"][0].device
        with record_function("Optimizer.step#AdamW"):
            optimizer.step(divisor.float().to(held), (1.0 - is_finite.float()).to(held))
    elif bool(is_finite):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        torch._foreach_div_(gradients, divisor.float())
        optimizer.step()
        for state in optimizer.state.values():  # apex counts in its groups
            state["step"] += 1


def tell_steps(optimizer: "FusedAdamW | torch.optim.Optimizer") -> None:
    """Let an optimizer that counts in its groups go on from the steps that its state tells."""
    for group in optimizer.param_groups:
        if not isinstance(optimizer, FusedAdamW | torch.optim.AdamW):
            group["step"] = int(optimizer.state[group["params"][0]]["step"])
