"""AdamW over a model's parameters."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megatron.config.parametrization import rule_of
from megatron.config.schema import ModelConfig, OptimConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw(
    parameters: Mapping[str, nn.Parameter], config: OptimConfig, shape: ModelConfig
) -> torch.optim.Optimizer:
    """A fused AdamW over parameters under the one-GPU model's names; its state is there from the start.

    Its groups are of parameters under one rule: matrices decay, gains and biases do not. Each has `lr_scale`:
    who sets the rate sets group["lr"] to the run's rate times that. ValueError where apex's kernel is asked
    for and not installed.
    """
    kinds: dict[tuple[bool, float, float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            rule = rule_of(shape, name, parameter.ndim)
            kind = (parameter.ndim >= 2, rule.lr, rule.weight_decay, rule.eps)
            kinds.setdefault(kind, []).append(parameter)
    groups = [
        {
            "params": held,
            "weight_decay": config.weight_decay * decay if decays else 0.0,
            "lr": config.lr * lr,
            "lr_scale": lr,
            "eps": config.eps * eps,
        }
        for (decays, lr, decay, eps), held in kinds.items()
    ]
    common = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    if config.kernel == "apex":
        optimizer = _apex(groups, common)
    else:
        optimizer = torch.optim.AdamW(groups, **common, fused=True)
    for parameter in (parameter for group in groups for parameter in group["params"]):
        optimizer.state[parameter] = {name: torch.zeros_like(parameter) for name in MOMENTS}
        optimizer.state[parameter]["step"] = torch.zeros((), device=parameter.device)
    return optimizer


def _apex(groups: list[dict], common: dict) -> torch.optim.Optimizer:
    try:
        from apex.optimizers import FusedAdam
    except ImportError as error:
        raise ValueError(
            "optim.kernel: apex is not installed; build NVIDIA's from https://github.com/NVIDIA/apex "
            "(`pip install apex` is a different package), or leave optim.kernel at torch"
        ) from error
    return FusedAdam(groups, **common, adam_w_mode=True)


def update(optimizer: torch.optim.Optimizer, lr: float, divisor: Tensor, is_finite: Tensor) -> None:
    """One step with the gradients divided by `divisor`, or none where `is_finite` says 0; both scalars.

    torch's fused kernel does both itself, so that the host need not wait for the device to know.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
    if isinstance(optimizer, torch.optim.AdamW):
        # offloaded weights are on the host, and torch would have the kernel read both before they are there
        held = optimizer.param_groups[0]["params"][0].device
        optimizer.grad_scale = divisor.float().to(held)
        optimizer.found_inf = (1.0 - is_finite.float()).to(held)
        optimizer.step()
    elif bool(is_finite):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        torch._foreach_div_(gradients, divisor.float())
        optimizer.step()
        for state in optimizer.state.values():  # apex counts in its groups
            state["step"] += 1


def tell_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that counts in its groups go on from the steps that its state tells."""
    for group in optimizer.param_groups:
        if not isinstance(optimizer, torch.optim.AdamW):
            group["step"] = int(optimizer.state[group["params"][0]]["step"])
