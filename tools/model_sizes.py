"""List the named model sizes with their exact numbers of parameters.

    python tools/model_sizes.py
    python tools/model_sizes.py --n-tokens 4096 7M 14M
    python tools/model_sizes.py 117M 425M --conventions
    python tools/model_sizes.py 117M --tokens 2e9 model.tied_embedding=false model.n_kv_heads=4

A size's name is its label in the published ladder, not a count: N depends on the vocabulary and on the
options of the model. C is the training FLOPs for --tokens tokens.
"""

import argparse
from collections.abc import Mapping, Sequence

from megatron.cli import create_parser, positive_int, report_error, run_main
from megatron.config.presets import load_model_sizes
from megatron.config.read import build_config
from megatron.config.schema import ModelConfig
from megatron.config.yaml_file import merge_sections, parse_overrides
from megatron.plan.conventions import training_flops_per_token
from megatron.plan.count import flops_per_token, n_non_embedding, n_params

GPT2_TOKENS = 50257


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument(
        "words",
        nargs="*",
        default=[],
        metavar="SIZE | model.key=value",
        help="sizes (default: all) and options",
    )
    parser.add_argument(
        "--n-tokens",
        type=positive_int,
        default=GPT2_TOKENS,
        metavar="N",
        help="tokens of the tokenizer; default: GPT-2's",
    )
    parser.add_argument(
        "--seq-len", type=positive_int, default=2048, metavar="TOKENS", help="sequence length, for FLOPs"
    )
    parser.add_argument(
        "--tokens", type=float, metavar="TOKENS", help="training tokens for C; default: 20 per parameter"
    )
    parser.add_argument(
        "--conventions",
        action="store_true",
        help="training FLOPs per token by the conventions of the literature",
    )
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; options may appear between positional words."""
    return build_parser().parse_intermixed_args(argv)


def resolve_shape(size: str, args: argparse.Namespace, options: Sequence[str]) -> ModelConfig:
    """Return the resolved shape of a size. Raise ValueError for an unknown name or option."""
    more = parse_overrides(options)
    other = [key for key in more if key != "model"]
    if other:
        raise ValueError(f"got '{other[0]}', expected only options of the model, such as model.n_kv_heads=4")
    written = more.get("model", {})
    if not isinstance(written, dict):
        raise ValueError(f"model: got {written!r}, expected an option such as model.n_kv_heads=4")
    raw = {
        "model": merge_sections({"size": size, "n_tokens": args.n_tokens}, written),
        "dataset": {"seq_len": args.seq_len},
        # a configuration requires a length of the run, which the shape does not depend on
        "lr_scheduler": {"total_iterations": 1},
    }
    return build_config(raw, where=size).model


def format_conventions(shapes: Mapping[str, ModelConfig], seq_len: int) -> str:
    """Format a line for each size: training FLOPs per token by each convention, and their ratio to 6 N."""
    lines = []
    for name, model in shapes.items():
        flops_by_convention = training_flops_per_token(model, seq_len)
        if not lines:
            lines.append(f"{'name':>7}" + "".join(f"{convention:>20}" for convention in flops_by_convention))
        cells = (
            f"{flops:.3e} ({flops / flops_by_convention['6nd']:.2f})"
            for flops in flops_by_convention.values()
        )
        lines.append(f"{name:>7}" + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join([*lines, "FLOPs per token, forward and backward; in brackets the ratio to 6 N"])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    args = parse_args(argv)
    options = [word for word in args.words if "=" in word]
    names = [word for word in args.words if "=" not in word] or list(load_model_sizes())
    columns = ("d_model", "d_ff", "d_head", "n_heads", "n_layers")
    try:
        shapes = {name: resolve_shape(name, args, options) for name in names}
    except (OSError, ValueError) as error:
        return report_error(error)
    if args.conventions:
        print(format_conventions(shapes, args.seq_len))
        return 0
    print(
        f"{'name':>7}{'N':>16}{'without embedding':>20}" + "".join(f"{c:>9}" for c in columns) + f"{'C':>11}"
    )
    for name, model in shapes.items():
        n = n_params(model)
        # 20 tokens per parameter: Hoffmann et al., arXiv 2203.15556
        flops = flops_per_token(model, args.seq_len) * (args.tokens or 20 * n)
        numbers = "".join(f"{getattr(model, column):9,}" for column in columns)
        print(f"{name:>7}{n:16,}{n_non_embedding(model):20,}{numbers}{flops:11.2e}")
    return 0


if __name__ == "__main__":
    run_main(main)
