"""Measure whether activations change equally at every width and depth, and plot it for each parametrization.

    python tools/bench/coordinate_check.py --out coordinates.html
    python tools/bench/coordinate_check.py --widths 64 128 256 512 --lr 2e-3 --steps 10

Small models of each parametrization take a few steps at one learning rate. With mup the change of every
activation is the same at each width, with completep also at each depth. With standard it grows, so the
largest stable learning rate of a larger model is smaller (Yang et al., arXiv 2203.03466, appendix D.1). The
tool prints the power of width and depth that
each change follows, and writes the page.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron.cli import create_parser, positive_int, run_main
from megatron.config.presets import padded_rows, swiglu_width
from megatron.config.schema import ModelConfig, OptimConfig
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from megatron.objective.autoregressive import Autoregressive
from megatron.objective.task import Task, compute_task_loss
from megatron.optim.adamw import step_optimizer
from megatron.optim.muon import build_optimizer
from megatron.report.plot_coordinates import CoordinateSweep, write_coordinate_page

PARAMETRIZATIONS = ("standard", "mup", "completep")
QUANTITIES = ("embedding", "attention", "feed_forward", "residual", "logits")


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("models").add_argument
    widths, depths = [64, 128, 256, 512], [2, 4, 8, 16, 32]
    sizes = {"type": positive_int, "nargs": "+"}
    add("--widths", default=widths, metavar="D", help="d_model; the first is the base", **sizes)
    add("--depths", default=depths, metavar="N", help="layers; the first is the base", **sizes)
    add("--d-head", type=positive_int, default=32, metavar="D", help="channels of an attention head")
    add("--n-tokens", type=positive_int, default=255, metavar="N", help="tokens of the vocabulary")
    add = parser.add_argument_group("training").add_argument
    add("--lr", type=float, default=4e-3, metavar="RATE", help="learning rate, for every size")
    add("--optimizer", choices=("adamw", "muon"), default="adamw", help="optim.kind")
    add("--steps", type=positive_int, default=10, metavar="N", help="training steps of each model")
    add("--seeds", type=positive_int, default=2, metavar="N", help="models per point, whose RMS is plotted")
    add("--threads", type=positive_int, metavar="N", help="default: torch's choice")
    add("--out", type=Path, default=Path("coordinates.html"), metavar="PAGE.html", help="output page")
    return parser


def build_shape(args: argparse.Namespace, parametrization: str, width: int, depth: int) -> ModelConfig:
    """Build the model config of one point."""
    base: dict[str, Any] = {}
    # At the base size all three parametrizations are the same model. mup scales with d_model / base_d_model,
    # completep also with n_layers / base_n_layers.
    if parametrization != "standard":
        base["base_d_model"] = args.widths[0]
    if parametrization == "completep":
        base["base_n_layers"] = args.depths[0]
    return ModelConfig(
        d_model=width,
        d_ff=swiglu_width(width),
        d_head=args.d_head,
        n_heads=width // args.d_head,
        n_layers=depth,
        n_tokens=args.n_tokens,
        vocab_rows=padded_rows(args.n_tokens),
        parametrization=parametrization,
        **base,
    )


def make_text(n_tokens: int, n_samples: int, seq_len: int, seed: int) -> np.ndarray:
    """Return samples int64 [n_samples, seq_len + 1] whose tokens follow from the previous one, with noise."""
    rng = np.random.default_rng(seed)
    # the next token is the previous one plus 3, 4 or 5: a loss of log 3 nats can be learned
    steps = 3 + rng.integers(0, 3, (n_samples, seq_len + 1))
    return (rng.integers(n_tokens, size=(n_samples, 1)) + steps.cumsum(axis=1)) % n_tokens


def measure_coordinates(
    shape: ModelConfig, optim: OptimConfig, *, n_steps: int, seed: int = 0, n_samples: int = 8
) -> dict[str, list[float]]:
    """Return, per quantity, the RMS of its change since initialization after steps 1..n_steps.

    `attention` and `feed_forward` are the outputs of the branches of the last block, `residual` is the input
    of the final norm. A new model is trained at the constant rate `optim.lr`. Each step uses its own batch of
    64-token samples, and the activations are from one additional batch.
    """
    model = Gpt(shape)
    init_weights(model, seed)
    optimizer = build_optimizer(dict(model.named_parameters()), optim, shape)
    batches = [make_text(shape.n_tokens, n_samples, seq_len=64, seed=seed + i) for i in range(n_steps + 1)]
    tasks = [Autoregressive().corrupt(batch, np.arange(n_samples)) for batch in batches]
    at_first = record_activations(model, tasks[0])
    moved: dict[str, list[float]] = {name: [] for name in QUANTITIES}
    for task in tasks[1:]:
        loss = compute_task_loss(model.hidden_states(task.inputs, True), model.head_weight, task)[0]
        (loss / task.count).backward()
        step_optimizer(optimizer, torch.ones(()), torch.tensor(True))
        model.zero_grad()
        for name, now in record_activations(model, tasks[0]).items():
            # always against the activations at initialization, on the same batch
            moved[name].append((now - at_first[name]).square().mean().sqrt().item())
    return moved


@torch.no_grad()
def record_activations(model: Gpt, task: Task) -> dict[str, Tensor]:
    """Return the QUANTITIES of a task."""
    outputs: dict[str, Tensor] = {}
    last = model.blocks[-1]
    modules = {"embedding": model.embedding, "attention": last.attention, "feed_forward": last.mlp}

    def store_as(name: str, is_input: bool = False) -> Callable[..., None]:
        def store(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            outputs[name] = inputs[0] if is_input else output

        return store

    handles = [module.register_forward_hook(store_as(name)) for name, module in modules.items()]
    handles.append(model.norm.register_forward_hook(store_as("residual", is_input=True)))
    outputs["logits"] = model(task.inputs, True)
    for handle in handles:
        handle.remove()
    return outputs


def run_sweep(args: argparse.Namespace, parametrization: str, axis: str) -> CoordinateSweep:
    """Measure one parametrization over the widths at the base depth, or over the depths at the base width."""
    moved: dict[str, list[float]] = {name: [] for name in QUANTITIES}
    optim = OptimConfig(kind=args.optimizer, lr=args.lr)
    sizes = args.widths if axis == "width" else args.depths
    for size in sizes:
        width, depth = (size, args.depths[0]) if axis == "width" else (args.widths[0], size)
        model = build_shape(args, parametrization, width, depth)
        runs = [measure_coordinates(model, optim, n_steps=args.steps, seed=i) for i in range(args.seeds)]
        for name in QUANTITIES:
            # root mean square over seeds of the change after the last step
            moved[name].append(float(np.sqrt(np.mean([run[name][-1] ** 2 for run in runs]))))
    return CoordinateSweep(parametrization, axis, sizes, moved)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the slopes and write the page."""
    args = build_parser().parse_args(argv)
    if min(len(args.widths), len(args.depths)) < 2 or any(width % args.d_head for width in args.widths):
        raise ValueError(f"--widths, --depths: expected two or more, and multiples of --d-head {args.d_head}")
    if args.threads:
        torch.set_num_threads(args.threads)
    sweeps = []
    print(f"{'power of':8} {'':12}" + "".join(f"{name:>14}" for name in QUANTITIES))
    for axis in ("width", "depth"):
        for parametrization in PARAMETRIZATIONS:
            done = run_sweep(args, parametrization, axis)
            sweeps.append(done)
            slopes = "".join(f"{done.fit_slope(name):14.2f}" for name in QUANTITIES)
            print(f"{axis:8} {parametrization:12}{slopes}", flush=True)
    settings = (
        f"{args.steps} steps of {args.optimizer} at a rate of {args.lr:g}, {args.seeds} models per point. "
        f"Width varies at {args.depths[0]} blocks, depth at width {args.widths[0]}; these are the base sizes."
    )
    write_coordinate_page(sweeps, settings, args.out)
    print(f"{args.out}: written")
    return 0


if __name__ == "__main__":
    run_main(main)
