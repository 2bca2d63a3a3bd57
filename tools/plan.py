"""Write a study to start from, list model sizes, and propose the runs of a study.

    scaling init study.yaml
    scaling sizes 117M 425M
    scaling sizes 117M --n-tokens 4096 model.tied_embedding=false model.n_kv_heads=4
    scaling plan --budget 1e20 --runs 20 --target 1e22
    scaling plan --budget 3e19 --law law.json --done table.csv --runs 4 --target 1e22
    scaling choose pool.csv targets.csv --axes n_params train_tokens lr --cost flops_6nd --budget 1e20

`python tools/plan.py ACTION ...` is the same. A size's name is its label in the published ladder, not a
count: N depends on the vocabulary and on the options of the model. C is the training FLOPs for --tokens
tokens. plan prints expected errors at the constants of the prior law (--law; default: arXiv 2404.10102),
next to the errors of common designs with the same budget and limits. choose takes runs of a pool, on any
axes, that predict the targets best for their cost; rows of the pool with a loss are finished runs.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.cli import add_action, create_parser, positive_float, positive_int, print_table, run_main
from megatron.config.presets import load_model_sizes
from megatron.config.read import build_config
from megatron.config.schema import ModelConfig
from megatron.config.yaml_file import merge_sections, parse_overrides
from megatron.io import write_atomic
from megatron.laws.design import CRITERIA, Designer, RunSet, build_simple_designs, generate_candidates
from megatron.laws.law import Law
from megatron.laws.pool_design import MAX_RUNS
from megatron.plan.count import flops_per_token, n_non_embedding, n_params
from megatron.study import ladder
from megatron.study.format import format_count
from megatron.study.pool import choose_runs
from megatron.study.published import find_law
from megatron.study.selection import Columns, select_runs

GPT2_TOKENS = 50257
TOKENS_PER_PARAMETER = 20  # Hoffmann et al., arXiv 2203.15556
SHAPE = ("d_model", "d_ff", "d_head", "n_heads", "n_layers")
NOISE = 0.005  # spread of a run's log loss, if the law has none
LARGEST_SHARE = 0.25  # share of the budget for one run
NEW_STUDY = Path(ladder.__file__).with_name("new_study.yaml")
PRIOR = "besiroglu"  # default prior law
CHOOSE = "Choose from candidates of your own with megatron.laws.design.Designer"
REMOVED = {
    "--conventions": "Use megatron.plan.conventions.training_flops_per_token in Python",
    "--force": "Plan from the published prior, without --law",
    "--largest-share": CHOOSE,
    "--noise": "The noise is from the law, or 0.005 without --law",
    "--repeats": "Train each run with several seeds of its study",
    "--sizes": CHOOSE,
    "--tokens-per-parameter": CHOOSE,
}


def run_init(args: argparse.Namespace) -> None:
    """Write a study to start from.

    scaling init study.yaml
    """
    path = args.study
    if path.exists():
        raise ValueError(f"{path}: got an existing file, expected a new one. Choose another name.")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = NEW_STUDY.read_text().replace("NAME", path.stem).replace("STUDY.yaml", str(path))
    write_atomic(path, text)
    print(f"{path}: a study of 16 runs and a forecast; adapt its data, sizes and budgets")


def resolve_shape(size: str, args: argparse.Namespace, options: Sequence[str]) -> ModelConfig:
    """Return the resolved shape of a size. Raise ValueError for an unknown name or option."""
    for option in options:
        if not option.startswith("model."):
            raise ValueError(f"got '{option}', expected an option of the model, such as model.n_kv_heads=4")
    written = parse_overrides(options).get("model", {})
    assert isinstance(written, dict), "all keys are below model"
    raw = {
        "model": merge_sections({"size": size, "n_tokens": args.n_tokens}, written),
        "dataset": {"seq_len": args.seq_len},
        # a configuration requires a length of the run, which the shape does not depend on
        "lr_scheduler": {"total_iterations": 1},
    }
    return build_config(raw, where=size).model


def run_sizes(args: argparse.Namespace) -> None:
    """List the named model sizes with their exact numbers of parameters.

    scaling sizes 7M 14M --n-tokens 4096
    """
    options = [word for word in args.words if "=" in word]
    names = [word for word in args.words if "=" not in word] or list(load_model_sizes())
    shapes = {name: resolve_shape(name, args, options) for name in names}
    rows = []
    for name, model in shapes.items():
        n = n_params(model)
        flops = flops_per_token(model, args.seq_len) * (args.tokens or TOKENS_PER_PARAMETER * n)
        shape = [f"{getattr(model, column):,}" for column in SHAPE]
        rows.append([name, f"{n:,}", f"{n_non_embedding(model):,}", *shape, f"{flops:.2e}"])
    print_table(["name", "N", "without embedding", *SHAPE, "C"], rows, ())


def run_plan(args: argparse.Namespace) -> None:
    """Propose the runs that minimize the error of the extrapolated optimum for a budget.

    scaling plan --budget 1e20 --runs 20 --target 1e22
    """
    law = Law.load(args.law) if args.law else find_law(PRIOR)[0]
    assert isinstance(law, Law), "the prior is a law of loss"
    if law.identified is False:
        raise ValueError(
            f"--law {args.law}: its runs do not identify {', '.join(law.not_identified) or 'it'}. "
            "Plan from the published prior without --law."
        )
    done = None
    if args.done is not None:
        runs = select_runs(args.done, Columns(), args.objective)
        # a run of D tokens from U unique ones: min(D, U) are unique
        done = RunSet(runs.N, runs.D, runs.D if args.unique is None else runs.D.clip(max=args.unique))
    try:
        designer = Designer(law, args.target or 100 * args.budget, law.spread or NOISE, done)
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
    designs = {f"proposed ({args.criterion})": designer.expect(chosen)}
    # `expect` adds the finished runs to every design, so one without new runs is the state before the study
    if done is not None:
        designs = {"done so far": designer.expect(chosen.select([])), **designs}
    for name, runs in build_simple_designs(args.budget, args.runs, args.unique).items():
        designs[name] = designer.expect(runs)
    rows = [
        [name, f"{d.n_runs}", f"{d.flops:.2e}", *(f"{x:.3g}" for x in (d.log_size, d.log_loss, d.a_exponent))]
        for name, d in designs.items()
    ]
    print_table(["design", "runs", "FLOPs", "ln N*", "ln L*", "a"], rows, ["design"])


def print_runs(runs: RunSet) -> None:
    """Print one line per run."""
    rows = [
        [format_count(n, 3), format_count(d, 3), f"{d / n:.3g}", f"{d / u:.3g}", f"{c:.2e}"]
        for n, d, u, c in zip(runs.N, runs.D, runs.U, runs.flops, strict=True)
    ]
    print_table(["N", "D", "D/N", "epochs", "FLOPs"], rows, ())


def run_choose(args: argparse.Namespace) -> None:
    """Choose runs of a pool that predict the loss of other, expensive runs.

    scaling choose pool.csv targets.csv --axes n_params lr --cost flops_6nd --budget 1e20
    """
    paths = (args.pool, args.targets)
    chosen, text = choose_runs(paths, args.axes, args.cost, args.budget, args.runs, args.score)
    if args.out:
        write_atomic(args.out, chosen.to_csv(index=False))
    print(text)


def add_init(actions: Any) -> None:
    """Add the action init."""
    parser = add_action(actions, "init", run_init)
    parser.add_argument("study", type=Path, metavar="STUDY.yaml", help="file to write; it must not exist")


def add_sizes(actions: Any) -> None:
    """Add the action sizes."""
    parser = add_action(actions, "sizes", run_sizes)
    add = parser.add_argument
    add(
        "words", nargs="*", default=[], metavar="SIZE | model.key=value", help="sizes (default: all), options"
    )
    add("--n-tokens", type=positive_int, default=GPT2_TOKENS, metavar="N", help="tokens of the tokenizer")
    add("--seq-len", type=positive_int, default=2048, metavar="TOKENS", help="sequence length, for FLOPs")
    tokens = f"training tokens for C; default: {TOKENS_PER_PARAMETER} per parameter"
    add("--tokens", type=float, metavar="TOKENS", help=tokens)


def add_plan(actions: Any) -> None:
    """Add the action plan."""
    parser = add_action(actions, "plan", run_plan)
    add = parser.add_argument
    add("--budget", type=positive_float, required=True, metavar="FLOPS", help="compute of all runs, 6 N D")
    target = "compute at which to predict N* and L*; default: 100 budgets"
    add("--target", type=positive_float, metavar="FLOPS", help=target)
    criterion = "c: minimize the errors of N* and L*; D: of all constants"
    add("--criterion", choices=CRITERIA, default="c", help=criterion)
    add("--law", type=Path, metavar="LAW.json", help="the prior law")
    add("--done", type=Path, metavar="TABLE.csv", help="table of finished runs")
    add("--objective", metavar="NAME", help="objective of the runs in --done")
    add("--runs", type=positive_int, default=20, metavar="N", help="maximum number of new runs")
    unique = "unique tokens; training beyond them repeats text"
    add("--unique", type=float, metavar="TOKENS", help=unique)
    add("--out", type=Path, metavar="RUNS.csv", help="also write the runs to this file")


def add_choose(actions: Any) -> None:
    """Add the action choose."""
    parser = add_action(actions, "choose", run_choose)
    add = parser.add_argument
    add("pool", type=Path, metavar="POOL.csv", help="runs to choose from, one per row")
    add("targets", type=Path, metavar="TARGETS.csv", help="runs whose loss is to be predicted")
    axes = "columns that describe a run, above 0, such as parameters, tokens, rate"
    add("--axes", nargs="+", required=True, metavar="NAME", help=axes)
    add("--cost", required=True, metavar="NAME", help="column of the pool, such as FLOPs")
    add("--budget", type=positive_float, required=True, metavar="COST", help="cost of all chosen runs")
    add("--runs", type=positive_int, default=MAX_RUNS, metavar="N", help="maximum number of runs")
    score = "all losses are known: choose as if none were, and score the prediction"
    add("--score", action="store_true", help=score)
    add("--out", type=Path, metavar="RUNS.csv", help="also write the chosen rows to this file")


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__, removed=REMOVED)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", help="what to do")
    for add in (add_init, add_sizes, add_plan, add_choose):
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
