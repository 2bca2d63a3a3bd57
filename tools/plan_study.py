"""Propose the runs of a study that minimize the error of the extrapolated optimum for a budget.

    python tools/plan_study.py --budget 1e20 --runs 20 --target 1e22
    python tools/plan_study.py --budget 3e19 --law law.json --done table.csv --runs 4 --target 1e22

It prints expected errors at the constants of the prior law (--law; default: arXiv 2404.10102), next to those
of common designs with the same budget and limits.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.cli import create_parser, positive_int, report_error, run_main
from megatron.io import write_atomic
from megatron.laws.design import (
    CRITERIA,
    Designer,
    ExpectedErrors,
    RunSet,
    build_simple_designs,
    generate_candidates,
)
from megatron.laws.law import PUBLISHED, Law
from megatron.study.format import format_count
from megatron.study.selection import Columns, select_runs

NOISE = 0.005  # spread of a run's log loss, if the law has none
LARGEST_SHARE = 0.25  # of the budget, for one run
PRIOR = "Besiroglu et al. 2024"  # default prior law
CHOOSE = "Choose from candidates of your own with megatron.laws.design.Designer."
REMOVED = {  # options of earlier versions -> replacement
    "--repeats": "Train each run with several seeds of its study.",
    "--sizes": CHOOSE,
    "--largest-share": CHOOSE,
    "--tokens-per-parameter": CHOOSE,
}


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    what = parser.add_argument_group("goal")
    what.add_argument(
        "--budget", type=float, required=True, metavar="FLOPS", help="compute of all new runs, 6 N D"
    )
    what.add_argument(
        "--target",
        type=float,
        metavar="FLOPS",
        help="compute at which to predict N* and L*; default: 100 budgets",
    )
    what.add_argument(
        "--criterion",
        choices=CRITERIA,
        default="c",
        help="c: minimize the errors of N* and L*; D: those of all constants",
    )
    prior = parser.add_argument_group("prior knowledge")
    prior.add_argument("--law", type=Path, metavar="LAW.json", help="the prior law")
    prior.add_argument(
        "--force", action="store_true", help="use the constants of --law even if they are not identified"
    )
    prior.add_argument("--done", type=Path, metavar="TABLE.csv", help="table of finished runs")
    prior.add_argument("--objective", metavar="NAME", help="objective of the runs in --done")
    prior.add_argument(
        "--noise",
        type=float,
        metavar="SHARE",
        help=f"spread of a run's log loss; default: that of the law, or {NOISE}",
    )
    runs = parser.add_argument_group("new runs")
    runs.add_argument("--runs", type=positive_int, default=20, metavar="N", help="maximum number of new runs")
    runs.add_argument(
        "--unique", type=float, metavar="TOKENS", help="unique tokens; training beyond them repeats text"
    )
    for option in REMOVED:
        runs.add_argument(option, nargs="*", metavar="X", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, metavar="RUNS.csv", help="also write the runs to this file")
    return parser


def format_design(name: str, expected: ExpectedErrors) -> str:
    """Format one design with its expected errors."""
    return (
        f"{name:<20}{expected.n_runs:>5}{expected.flops:>11.2e}{expected.log_size:>10.3g}{expected.log_loss:>10.3g}"
        f"{expected.a_exponent:>10.3g}"
    )


def format_runs(runs: RunSet) -> str:
    """Format one line per run."""
    head = f"{'N':>8}{'D':>8}{'D/N':>8}{'epochs':>8}{'FLOPs':>10}"
    rows = [
        f"{format_count(n, 3):>8}{format_count(d, 3):>8}{d / n:>8.3g}{d / u:>8.3g}{c:>10.2e}"
        for n, d, u, c in zip(runs.N, runs.D, runs.U, runs.flops, strict=True)
    ]
    return "\n".join([head, *rows])


def read_done_runs(args: argparse.Namespace) -> RunSet | None:
    """Read the runs of --done; None without the option."""
    if args.done is None:
        return None
    runs = select_runs(args.done, Columns(), args.objective)
    # a run of D tokens from U unique ones: min(D, U) are unique
    return RunSet(runs.N, runs.D, runs.D if args.unique is None else runs.D.clip(max=args.unique))


def main(argv: Sequence[str] | None = None) -> int:
    """Choose the runs, and print them with their expected errors."""
    args = build_parser().parse_args(argv)
    try:
        for option, replacement in REMOVED.items():
            if getattr(args, option.strip("-").replace("-", "_")) is not None:
                raise ValueError(f"{option}: got a removed option. {replacement}")
        if not args.budget > 0:
            raise ValueError(f"--budget: got {args.budget:g}, expected FLOPs above 0")
        prior = Law(form="chinchilla", params=PUBLISHED[PRIOR], objective=0.0, huber_delta=1e-3, n_runs=240)
        law = Law.load(args.law) if args.law else prior
        if law.identified is False and not args.force:
            raise ValueError(
                f"--law {args.law}: its runs do not identify {', '.join(law.not_identified) or 'it'}. "
                "Plan from the published prior without --law, or add --force."
            )
        done = read_done_runs(args)
        target = 100 * args.budget if args.target is None else args.target
        noise = (law.spread or NOISE) if args.noise is None else args.noise
        designer = Designer(law, target, noise, done)
        every = generate_candidates(LARGEST_SHARE * args.budget, args.unique)
        chosen = designer.choose(every, args.budget, args.runs, args.criterion)
        simple = build_simple_designs(args.budget, args.runs, args.unique)
        if args.out:
            cells = zip(chosen.N, chosen.D, chosen.U, chosen.flops, strict=True)
            text = "".join(f"{n:.0f},{d:.0f},{u:.0f},{c:.6g}\n" for n, d, u, c in cells)
            write_atomic(args.out, "n_params,train_tokens,unique_tokens,flops_6nd\n" + text)
    # the information matrix of the constants is singular: some of them do not change any loss of these runs
    except np.linalg.LinAlgError:
        print(
            f"error: --law {args.law}: these runs do not identify all constants of {law.form}. "
            "Give --unique, or a law of form chinchilla.",
            file=sys.stderr,
        )
        return 1
    except (OSError, ValueError) as error:
        return report_error(error)
    print(format_runs(chosen))
    print(
        f"\nexpected standard errors at {designer.target:.2e} FLOPs, "
        f"for a noise of {designer.noise:g} in a run's log loss:"
    )
    print(f"{'design':<20}{'runs':>5}{'FLOPs':>11}{'ln N*':>10}{'ln L*':>10}{'a':>10}")
    # `expect` adds the finished runs to every design, so that of no new runs is the state before the study
    if done is not None:
        print(format_design("done so far", designer.expect(chosen.select([]))))
    print(format_design(f"proposed ({args.criterion})", designer.expect(chosen)))
    for name, runs in simple.items():
        print(format_design(name, designer.expect(runs)))
    return 0


if __name__ == "__main__":
    run_main(main)
