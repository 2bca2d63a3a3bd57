"""AdamW with parameter groups by rule."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from megatron.config.schema import ModelConfig, OptimConfig
from megatron.plan.parametrization import find_parameter_rule, is_hidden_matrix

MOMENTS = ("exp_avg", "exp_avg_sq")
MUON_MOMENT = "momentum_buffer"  # as in torch.optim.Muon


class FusedAdamW:
    """Fused AdamW: the result of `torch.optim.AdamW(fused=True)` without its imports.

    The first group added to a `torch.optim.Optimizer` imports torch's compiler.
    That takes about a second, in a process whose training may
    take ten. `state` and `param_groups` have torch's structure.

    On a GPU the learning rate is a tensor on the device,
    which a CUDA graph reads at each replay.
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float]) -> None:
        """Create the optimizer.

        groups   dictionaries with params, lr, weight_decay and eps
        betas    decay rates of the two moments
        """
        self.param_groups = groups
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self.betas = betas
        if groups and groups[0]["params"][0].is_cuda:
            self.keep_lr_on_device()

    def keep_lr_on_device(self) -> None:
        """Pass the learning rate to the kernel as a tensor from now on."""
        for group in self.param_groups:
            device = group["params"][0].device
            # the CUDA kernel reads float32; the one of the CPU takes any dtype
            dtype = torch.float32 if device.type == "cuda" else torch.float64
            group["lr_tensor"] = torch.zeros((), dtype=dtype, device=device)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the following steps, times the `lr_scale` of each group."""
        for group in self.param_groups:
            group["lr"] = lr * group["lr_scale"]
            if "lr_tensor" in group:
                group["lr_tensor"].fill_(group["lr"])  # a kernel with the number as argument, not a copy

    @torch.no_grad()
    def step(self, divisor: Tensor, found_inf: Tensor) -> None:
        """Update with the gradients divided by `divisor`; no update if `found_inf` is 1.

        Both float32 scalars.
        """
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self.update_group(group, parameters, divisor, found_inf)

    def update_group(
        self, group: dict[str, Any], parameters: list[Any], divisor: Tensor, found_inf: Tensor
    ) -> None:
        """Update `parameters` of a group, which have gradients; the others as in `step`."""
        states = [self.state[parameter] for parameter in parameters]
        steps = [state["step"] for state in states]
        # counted up before the kernel, which uses the
        # step for bias correction, and back if it skipped
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=group.get("lr_tensor", group["lr"]),
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=found_inf,
        )
        # found_inf is a tensor on the device: 0
        # or 1 is subtracted without reading it
        torch._foreach_sub_(steps, [found_inf] * len(steps))


def build_adamw(
    parameters: Mapping[str, nn.Parameter], config: OptimConfig, shape: ModelConfig
) -> torch.optim.Optimizer:
    """Build torch's fused AdamW over parameters under the single-GPU model's names, with its state filled in.

    The groups come from `build_parameter_groups`.
    Raises ValueError if apex is configured but not installed.
    """
    groups = build_parameter_groups(parameters, config, shape)
    betas = config.beta1, config.beta2
    optimizer = (
        _build_apex(groups, config)
        if config.kernel == "apex"
        else torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)
    )
    fill_state(optimizer)
    return optimizer


def build_parameter_groups(
    parameters: Mapping[str, nn.Parameter], config: OptimConfig, shape: ModelConfig
) -> list[dict[str, Any]]:
    """Group the parameters by rule; weight decay applies to matrices, not to gains and biases.

    Each group has `lr_scale`: the learning rate of a step
    is set as group["lr"] = lr * group["lr_scale"]. `is_muon` is
    True for the matrices of the blocks with optim.kind=muon.
    """
    # parameters with equal rules share a group, so
    # that the fused kernel runs once for all of them
    kinds: dict[tuple[bool, bool, float, float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            rule = find_parameter_rule(shape, name, parameter.ndim, config.kind)
            is_muon = uses_muon(config, name, parameter.ndim)
            kind = (is_muon, parameter.ndim >= 2, rule.lr, rule.weight_decay, rule.eps)
            kinds.setdefault(kind, []).append(parameter)
    return [
        {
            "params": members,
            "is_muon": is_muon,
            # mup: rate lr / m_N and decay wd m_N, so the factor
            # 1 - rate x decay does not depend on the width
            "weight_decay": config.weight_decay * decay if decays else 0.0,
            "lr": config.lr * lr,
            "lr_scale": lr,
            "eps": config.eps * eps,
        }
        for (is_muon, decays, lr, decay, eps), members in kinds.items()
    ]


def uses_muon(config: OptimConfig, name: str, n_axes: int) -> bool:
    """Return whether Muon updates a parameter, given its name in the model and number of axes."""
    return config.kind == "muon" and is_hidden_matrix(name, n_axes)


def fill_state(optimizer: "FusedAdamW | torch.optim.Optimizer") -> None:
    """Initialize moments and step counts of every parameter with zero."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            names = (MUON_MOMENT,) if group["is_muon"] else MOMENTS
            optimizer.state[parameter] = {name: torch.zeros_like(parameter) for name in names}
            if not group["is_muon"]:
                # a tensor on the device of the weights: the fused
                # kernel reads it there for the bias correction
                optimizer.state[parameter]["step"] = torch.zeros((), device=parameter.device)


def _build_apex(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    try:
        from apex.optimizers import FusedAdam
    except ImportError as error:
        raise ValueError(
            "optim.kernel: apex is not installed. Build it from https://github.com/NVIDIA/apex "
            "(`pip install apex` is a different package), or set optim.kernel=torch."
        ) from error
    betas = config.beta1, config.beta2
    return FusedAdam(groups, lr=config.lr, betas=betas, eps=config.eps, adam_w_mode=True)


def set_lr(optimizer: "FusedAdamW | torch.optim.Optimizer", lr: float) -> None:
    """Set the learning rate of the following steps, times the `lr_scale` of each group."""
    if isinstance(optimizer, FusedAdamW):
        optimizer.set_lr(lr)
        return
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def step_optimizer(
    optimizer: "FusedAdamW | torch.optim.Optimizer", divisor: Tensor, is_finite: Tensor
) -> None:
    """Take one step with the gradients divided by `divisor`, or none if `is_finite` is False; both scalars.

    torch's fused kernel does both on the device, so the host does not synchronize with it.
    """
    if isinstance(optimizer, FusedAdamW):
        # With offloading the weights are on the host: `.to`
        # blocks until both scalars have arrived there.
        device = optimizer.param_groups[0]["params"][0].device
        with record_function("Optimizer.step#AdamW"):
            optimizer.step(divisor.float().to(device), (1.0 - is_finite.float()).to(device))
    elif bool(is_finite):  # apex has no flag for skipping: this synchronizes with the device
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        torch._foreach_div_(gradients, divisor.float())
        optimizer.step()
        for state in optimizer.state.values():  # apex counts steps in its groups
            state["step"] += 1


def sync_step_counts(optimizer: "FusedAdamW | torch.optim.Optimizer") -> None:
    """Copy the step count from the parameter state into the groups, where apex reads it."""
    for group in optimizer.param_groups:
        if not isinstance(optimizer, FusedAdamW | torch.optim.AdamW):
            group["step"] = int(optimizer.state[group["params"][0]]["step"])
