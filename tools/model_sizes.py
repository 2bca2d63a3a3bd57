"""List the named sizes with the number of parameters that they really have.

    python tools/model_sizes.py
    python tools/model_sizes.py --n-tokens 4096 7M 14M
    python tools/model_sizes.py 117M 425M --conventions
    python tools/model_sizes.py 117M --tokens 2e9 model.tied_embedding=false model.n_kv_heads=4

A size's name is the label of the published ladder, not a count: N depends on the vocabulary and on the
options of the shape. C is the training FLOPs of so many tokens.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.command import command, count, failed, run
from megatron.config.count import flops_per_token, n_non_embedding, n_params
from megatron.config.presets import model_sizes
from megatron.config.read import build_config
from megatron.config.schema import ModelConfig
from megatron.config.yaml_file import merge, parse_override
from megatron.scaling.conventions import training_flops_per_token

GPT2_TOKENS = 50257


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument(
        "words",
        nargs="*",
        default=[],
        metavar="SIZE | model.key=value",
        help="sizes (by itself all), options",
    )
    parser.add_argument(
        "--n-tokens", type=count, default=GPT2_TOKENS, metavar="N", help="of the tokenizer; by itself GPT-2's"
    )
    parser.add_argument(
        "--seq-len", type=count, default=2048, metavar="TOKENS", help="of a sample, for FLOPs"
    )
    parser.add_argument("--tokens", type=float, metavar="TOKENS", help="for C; by itself 20 a parameter")
    parser.add_argument(
        "--conventions", action="store_true", help="training FLOPs a token as the literature counts them"
    )
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options may stand between other words."""
    return build_parser().parse_intermixed_args(argv)


def shape(size: str, args: argparse.Namespace, options: Sequence[str]) -> ModelConfig:
    """The resolved shape of a size. ValueError for a name or an option that is not known."""
    more: dict[str, Any] = {}
    for word in options:
        more = merge(more, parse_override(word))
    other = [key for key in more if key != "model"]
    if other:
        raise ValueError(f"'{other[0]}': options of the model only, such as model.n_kv_heads=4")
    written = more.get("model", {})
    if not isinstance(written, dict):
        raise ValueError(f"model: got {written!r}, expected an option such as model.n_kv_heads=4")
    raw = {
        "model": merge({"size": size, "n_tokens": args.n_tokens}, written),
        "dataset": {"seq_len": args.seq_len},
        "lr_scheduler": {"total_iterations": 1},
    }
    return build_config(raw, where=size).model


def by_convention(shapes: Mapping[str, ModelConfig], seq_len: int) -> str:
    """A line for each size: training FLOPs a token by each convention, and how far from 6 N D."""
    lines = []
    for name, model in shapes.items():
        found = training_flops_per_token(model, seq_len)
        if not lines:
            lines.append(f"{'name':>7}" + "".join(f"{convention:>20}" for convention in found))
        cells = (f"{flops:.3e} ({flops / found['6nd']:.2f})" for flops in found.values())
        lines.append(f"{name:>7}" + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join([*lines, "FLOPs a token, forward and backward; in brackets times 6 N"])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    args = parse_args(argv)
    options = [word for word in args.words if "=" in word]
    names = [word for word in args.words if "=" not in word] or list(model_sizes())
    columns = ("d_model", "d_ff", "d_head", "n_heads", "n_layers")
    try:
        shapes = {name: shape(name, args, options) for name in names}
    except (OSError, ValueError) as error:
        return failed(error)
    if args.conventions:
        print(by_convention(shapes, args.seq_len))
        return 0
    print(
        f"{'name':>7}{'N':>16}{'without embedding':>20}" + "".join(f"{c:>9}" for c in columns) + f"{'C':>11}"
    )
    for name, model in shapes.items():
        n = n_params(model)
        flops = flops_per_token(model, args.seq_len) * (args.tokens or 20 * n)
        numbers = "".join(f"{getattr(model, column):9,}" for column in columns)
        print(f"{name:>7}{n:16,}{n_non_embedding(model):20,}{numbers}{flops:11.2e}")
    return 0


if __name__ == "__main__":
    run(main)
