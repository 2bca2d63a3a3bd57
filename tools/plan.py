"""Write a study to start from, list model sizes, and propose the runs of a study.

    scaling init study.yaml
    scaling sizes 117M 425M --conventions
    scaling sizes 117M --n-tokens 4096 model.tied_embedding=false model.n_kv_heads=4
    scaling plan --budget 1e20 --runs 20 --target 1e22
    scaling plan --budget 3e19 --law law.json --done table.csv --runs 4 --target 1e22

`python tools/plan.py ACTION ...` is the same. A size's name is its label in the published ladder, not a
count: N depends on the vocabulary and on the options of the model. C is the training FLOPs for --tokens
tokens. plan prints expected errors at the constants of the prior law (--law; default: arXiv 2404.10102),
next to those of common designs with the same budget and limits.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.cli import add_action, create_parser, positive_float, positive_int, run_main
from megatron.config.presets import load_model_sizes
from megatron.config.read import build_config
from megatron.config.schema import ModelConfig
from megatron.config.yaml_file import merge_sections, parse_overrides
from megatron.io import write_atomic
from megatron.laws.design import (
    CRITERIA,
    Designer,
    ExpectedErrors,
    RunSet,
    build_simple_designs,
    generate_candidates,
)
from megatron.laws.law import Law
from megatron.plan.conventions import training_flops_per_token
from megatron.plan.count import flops_per_token, n_non_embedding, n_params
from megatron.study.format import format_count
from megatron.study.published import find_law
from megatron.study.selection import Columns, select_runs

GPT2_TOKENS = 50257
TOKENS_PER_PARAMETER = 20  # Hoffmann et al., arXiv 2203.15556
SHAPE = ("d_model", "d_ff", "d_head", "n_heads", "n_layers")
NOISE = 0.005  # spread of a run's log loss, if the law has none
LARGEST_SHARE = 0.25  # of the budget, for one run
PRIOR = "besiroglu"  # default prior law
STUDY = """\
name: {name}
directory: experiments/{name}
run:
  dataset: {{path_train: data/train_text_document, path_eval: data/val_text_document, batch_size: 64}}
  optim: {{lr: steplaw, weight_decay: 0.1}}
  lr_scheduler: {{kind: cosine, warmup_fraction: 0.02, lr_min_ratio: 0.1}}
cells:
  - {{size: [7M, 14M, 20M], flops: [1.0e+15, 3.0e+15]}}
  - {{size: [14M, 20M, 35M, 57M], flops: [1.0e+16, 3.0e+16]}}
  - {{size: 14M, flops: 3.0e+15, seeds: [1, 2]}} # seeds 0, 1 and 2 show the scatter of a run
  - {{size: best, flops: 1.2e+17}} # forecast by scaling frontier --predict, then trained
# next: python tools/sweep.py {path} --dry-run --hardware H100
"""
CHOOSE = "Choose from candidates of your own with megatron.laws.design.Designer"
REMOVED = {
    "--largest-share": CHOOSE,
    "--repeats": "Train each run with several seeds of its study",
    "--sizes": CHOOSE,
    "--tokens-per-parameter": CHOOSE,
}


def run_init(args: argparse.Namespace) -> None:
    """Write the study, and print where it is."""
    path = args.study
    if path.exists():
        raise ValueError(f"{path}: got an existing file, expected a new one. Choose another name.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, STUDY.format(name=path.stem, path=path))
    print(f"{path}: a study of 16 runs and a forecast; adapt its data, sizes and budgets")


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


def run_sizes(args: argparse.Namespace) -> None:
    """Print the table of sizes."""
    options = [word for word in args.words if "=" in word]
    names = [word for word in args.words if "=" not in word] or list(load_model_sizes())
    shapes = {name: resolve_shape(name, args, options) for name in names}
    if args.conventions:
        print_conventions(shapes, args.seq_len)
        return
    head = f"{'name':>7}{'N':>16}{'without embedding':>20}"
    print(head + "".join(f"{column:>9}" for column in SHAPE) + f"{'C':>11}")
    for name, model in shapes.items():
        n = n_params(model)
        flops = flops_per_token(model, args.seq_len) * (args.tokens or TOKENS_PER_PARAMETER * n)
        numbers = "".join(f"{getattr(model, column):9,}" for column in SHAPE)
        print(f"{name:>7}{n:16,}{n_non_embedding(model):20,}{numbers}{flops:11.2e}")


def print_conventions(shapes: Mapping[str, ModelConfig], seq_len: int) -> None:
    """Print a line for each size: training FLOPs per token by each convention, and their ratio to 6 N."""
    rows = {name: training_flops_per_token(model, seq_len) for name, model in shapes.items()}
    conventions = next(iter(rows.values()))
    print(f"{'name':>7}" + "".join(f"{convention:>20}" for convention in conventions))
    for name, row in rows.items():
        cells = (f"{flops:.3e} ({flops / row['6nd']:.2f})" for flops in row.values())
        print(f"{name:>7}" + "".join(f"{cell:>20}" for cell in cells))
    print("FLOPs per token, forward and backward; in brackets the ratio to 6 N")


def run_plan(args: argparse.Namespace) -> None:
    """Choose the runs, and print them with their expected errors."""
    law = Law.load(args.law) if args.law else find_law(PRIOR)[0]
    assert isinstance(law, Law), "the prior is a law of loss"
    if law.identified is False and not args.force:
        raise ValueError(
            f"--law {args.law}: its runs do not identify {', '.join(law.not_identified) or 'it'}. "
            "Plan from the published prior without --law, or add --force."
        )
    done = read_done_runs(args)
    noise = (law.spread or NOISE) if args.noise is None else args.noise
    try:
        designer = Designer(law, args.target or 100 * args.budget, noise, done)
        candidates = generate_candidates(LARGEST_SHARE * args.budget, args.unique)
        chosen = designer.choose(candidates, args.budget, args.runs, args.criterion)
    # the information matrix of the constants is singular: some of them do not change any loss of these runs
    except np.linalg.LinAlgError:
        raise ValueError(
            f"--law {args.law}: these runs do not identify all constants of {law.form}. "
            "Give --unique, or a law of form chinchilla."
        ) from None
    if args.out:
        cells = zip(chosen.N, chosen.D, chosen.U, chosen.flops, strict=True)
        text = "".join(f"{n:.0f},{d:.0f},{u:.0f},{c:.6g}\n" for n, d, u, c in cells)
        write_atomic(args.out, "n_params,train_tokens,unique_tokens,flops_6nd\n" + text)
    print_runs(chosen)
    print(
        f"\nexpected standard errors at {designer.target:.2e} FLOPs, "
        f"for a noise of {designer.noise:g} in a run's log loss:"
    )
    print(f"{'design':<20}{'runs':>5}{'FLOPs':>11}{'ln N*':>10}{'ln L*':>10}{'a':>10}")
    # `expect` adds the finished runs to every design, so that of no new runs is the state before the study
    if done is not None:
        print_design("done so far", designer.expect(chosen.select([])))
    print_design(f"proposed ({args.criterion})", designer.expect(chosen))
    for name, runs in build_simple_designs(args.budget, args.runs, args.unique).items():
        print_design(name, designer.expect(runs))


def read_done_runs(args: argparse.Namespace) -> RunSet | None:
    """Read the runs of --done; None without the option."""
    if args.done is None:
        return None
    runs = select_runs(args.done, Columns(), args.objective)
    # a run of D tokens from U unique ones: min(D, U) are unique
    return RunSet(runs.N, runs.D, runs.D if args.unique is None else runs.D.clip(max=args.unique))


def print_design(name: str, expected: ExpectedErrors) -> None:
    """Print one design with its expected errors."""
    errors = (expected.log_size, expected.log_loss, expected.a_exponent)
    columns = "".join(f"{error:>10.3g}" for error in errors)
    print(f"{name:<20}{expected.n_runs:>5}{expected.flops:>11.2e}{columns}")


def print_runs(runs: RunSet) -> None:
    """Print one line per run."""
    print(f"{'N':>8}{'D':>8}{'D/N':>8}{'epochs':>8}{'FLOPs':>10}")
    for n, d, u, c in zip(runs.N, runs.D, runs.U, runs.flops, strict=True):
        print(f"{format_count(n, 3):>8}{format_count(d, 3):>8}{d / n:>8.3g}{d / u:>8.3g}{c:>10.2e}")


def add_init(actions: Any) -> None:
    """Add the action init."""
    parser = add_action(actions, "init", "write a study to start from", "scaling init study.yaml")
    parser.add_argument("study", type=Path, metavar="STUDY.yaml", help="file to write; it must not exist")
    parser.set_defaults(run=run_init)


def add_sizes(actions: Any) -> None:
    """Add the action sizes."""
    parser = add_action(
        actions,
        "sizes",
        "list the named model sizes with their exact numbers of parameters",
        "scaling sizes 7M 14M --n-tokens 4096",
    )
    add = parser.add_argument
    add(
        "words", nargs="*", default=[], metavar="SIZE | model.key=value", help="sizes (default: all), options"
    )
    add("--n-tokens", type=positive_int, default=GPT2_TOKENS, metavar="N", help="tokens of the tokenizer")
    add("--seq-len", type=positive_int, default=2048, metavar="TOKENS", help="sequence length, for FLOPs")
    tokens = f"training tokens for C; default: {TOKENS_PER_PARAMETER} per parameter"
    add("--tokens", type=float, metavar="TOKENS", help=tokens)
    add("--conventions", action="store_true", help="FLOPs per token by the conventions of the literature")
    parser.set_defaults(run=run_sizes)


def add_plan(actions: Any) -> None:
    """Add the action plan."""
    parser = add_action(
        actions,
        "plan",
        "propose the runs that minimize the error of the extrapolated optimum for a budget",
        "scaling plan --budget 1e20 --runs 20 --target 1e22",
    )
    add = parser.add_argument
    add("--budget", type=positive_float, required=True, metavar="FLOPS", help="compute of all runs, 6 N D")
    target = "compute at which to predict N* and L*; default: 100 budgets"
    add("--target", type=positive_float, metavar="FLOPS", help=target)
    criterion = "c: minimize the errors of N* and L*; D: those of all constants"
    add("--criterion", choices=CRITERIA, default="c", help=criterion)
    add("--law", type=Path, metavar="LAW.json", help="the prior law")
    add("--force", action="store_true", help="use the constants of --law even if they are not identified")
    add("--done", type=Path, metavar="TABLE.csv", help="table of finished runs")
    add("--objective", metavar="NAME", help="objective of the runs in --done")
    noise = f"spread of a run's log loss; default: that of the law, or {NOISE}"
    add("--noise", type=float, metavar="SHARE", help=noise)
    add("--runs", type=positive_int, default=20, metavar="N", help="maximum number of new runs")
    unique = "unique tokens; training beyond them repeats text"
    add("--unique", type=float, metavar="TOKENS", help=unique)
    add("--out", type=Path, metavar="RUNS.csv", help="also write the runs to this file")
    parser.set_defaults(run=run_plan)


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__, removed=REMOVED)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", help="what to do")
    for add in (add_init, add_sizes, add_plan):
        add(actions)
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; options of sizes may appear between its words."""
    parser = build_parser()
    args, words = parser.parse_known_args(argv)
    if words and (args.action != "sizes" or any(word.startswith("-") for word in words)):
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    if words:
        args.words = [*args.words, *words]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one action, and print its result."""
    args = parse_args(argv)
    args.run(args)
    return 0


if __name__ == "__main__":
    run_main(main)
