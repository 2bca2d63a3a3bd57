"""Propose the runs of a study: the ones that make the extrapolated optimum tightest for a budget.

    python tools/plan_study.py --budget 1e20 --runs 20 --target 1e22
    python tools/plan_study.py --budget 3e19 --law law.json --done table.csv --runs 4 --target 1e22

The errors are expected ones, at the constants of the prior law (--law; by itself those of arXiv 2404.10102),
beside designs of the same budget and limits that people often choose.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.command import command, count, failed, run
from megatron.run_dir import write_whole
from megatron.scaling import wording
from megatron.scaling.design import CRITERIA, Designer, Expected, Limits, Runs, candidates, simple_designs
from megatron.scaling.law import PUBLISHED, Law
from megatron.scaling.selection import Columns, select_runs

NOISE = 0.005  # spread of a run's log loss, where the law does not say
PRIOR = "Besiroglu et al. 2024"  # the law that is taken for true where none is given


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    what = parser.add_argument_group("what is wanted")
    what.add_argument("--budget", type=float, required=True, metavar="FLOPS", help="of all new runs, 6 N D")
    what.add_argument(
        "--target", type=float, metavar="FLOPS", help="where N* and L* are wanted; by itself 100 budgets"
    )
    what.add_argument(
        "--criterion", choices=CRITERIA, default="c", help="c: errors of N* and L*; D: of all constants"
    )
    known = parser.add_argument_group("what is known")
    known.add_argument("--law", type=Path, metavar="LAW.json", help="the prior law")
    known.add_argument(
        "--force", action="store_true", help="take the constants of --law though they are not identified"
    )
    known.add_argument("--done", type=Path, metavar="TABLE.csv", help="runs that are known already")
    known.add_argument("--objective", metavar="NAME", help="of the runs in --done")
    known.add_argument(
        "--noise",
        type=float,
        metavar="SHARE",
        help=f"spread of a run's log loss; else the law's, or {NOISE}",
    )
    runs = parser.add_argument_group("which runs may be")
    runs.add_argument("--runs", type=count, default=20, metavar="N", help="new runs, at most")
    runs.add_argument(
        "--largest-share",
        type=float,
        default=0.25,
        metavar="SHARE",
        help="of the budget for one run, at most",
    )
    runs.add_argument(
        "--tokens-per-parameter",
        type=float,
        nargs=2,
        default=(4, 400),
        metavar=("LOW", "HIGH"),
        help="of D/N",
    )
    runs.add_argument("--sizes", type=float, nargs="+", metavar="N", help="only these sizes, in parameters")
    runs.add_argument("--unique", type=float, metavar="TOKENS", help="unique text; more is repetition")
    runs.add_argument("--repeats", type=count, default=1, metavar="N", help="seeds of one run, at most")
    parser.add_argument("--out", type=Path, metavar="RUNS.csv", help="write the runs here too")
    return parser


def line(name: str, told: Expected) -> str:
    """One design with the errors it should leave."""
    return (
        f"{name:<20}{told.n_runs:>5}{told.flops:>11.2e}{told.log_size:>10.3g}{told.log_loss:>10.3g}"
        f"{told.a_exponent:>10.3g}"
    )


def listed(runs: Runs) -> str:
    """A line a run."""
    head = f"{'N':>8}{'D':>8}{'D/N':>8}{'epochs':>8}{'FLOPs':>10}"
    rows = [
        f"{wording.count(n, 3):>8}{wording.count(d, 3):>8}{d / n:>8.3g}{d / u:>8.3g}{c:>10.2e}"
        for n, d, u, c in zip(runs.N, runs.D, runs.U, runs.flops, strict=True)
    ]
    return "\n".join([head, *rows])


def known(args: argparse.Namespace) -> Runs | None:
    """The runs of --done."""
    if args.done is None:
        return None
    runs = select_runs(args.done, Columns(), args.objective)
    return Runs(runs.N, runs.D, runs.D if args.unique is None else runs.D.clip(max=args.unique))


def main(argv: Sequence[str] | None = None) -> int:
    """Choose, and print the runs and what they should leave open."""
    args = build_parser().parse_args(argv)
    try:
        if not args.budget > 0 or not 0 < args.largest_share <= 1:
            raise ValueError("--budget wants FLOPs above 0, and --largest-share a number in (0, 1]")
        prior = Law(form="chinchilla", params=PUBLISHED[PRIOR], objective=0.0, huber_delta=1e-3, n_runs=240)
        law = Law.load(args.law) if args.law else prior
        if law.identified is False and not args.force:
            raise ValueError(
                f"--law {args.law}: its runs do not identify {', '.join(law.not_identified) or 'it'}, so a "
                "plan would rest on a guess. Plan from the published prior without --law, or add --force."
            )
        done = known(args)
        target = 100 * args.budget if args.target is None else args.target
        noise = (law.spread or NOISE) if args.noise is None else args.noise
        designer = Designer(law, target, noise, done)
        limits = Limits(args.largest_share * args.budget, tuple(args.tokens_per_parameter), args.sizes)
        every = candidates(limits.largest_flops, limits.ratios, limits.sizes, args.unique)
        simple = {
            name: limits.keep(runs)
            for name, runs in simple_designs(args.budget, args.runs, args.unique).items()
        }
        chosen = designer.propose(
            every, list(simple.values()), args.budget, args.runs, args.criterion, args.repeats
        )
        if args.out:
            cells = zip(chosen.N, chosen.D, chosen.U, chosen.flops, strict=True)
            text = "".join(f"{n:.0f},{d:.0f},{u:.0f},{c:.6g}\n" for n, d, u, c in cells)
            write_whole(args.out, "n_params,train_tokens,unique_tokens,flops_6nd\n" + text)
    except np.linalg.LinAlgError:
        print(
            f"error: --law {args.law}: these runs do not hold all constants of {law.form}; give --unique, or "
            "a law of form chinchilla",
            file=sys.stderr,
        )
        return 1
    except (OSError, ValueError) as error:
        return failed(error)
    print(listed(chosen))
    print(
        f"\nexpected standard errors at {designer.target:.2e} FLOPs, a run's log loss to {designer.noise:g}:"
    )
    print(f"{'design':<20}{'runs':>5}{'FLOPs':>11}{'ln N*':>10}{'ln L*':>10}{'a':>10}")
    if done is not None:
        print(line("done so far", designer.expect(chosen.take([]))))
    print(line(f"proposed ({args.criterion})", designer.expect(chosen)))
    for name, runs in simple.items():
        print(line(name, designer.expect(runs)))
    return 0


if __name__ == "__main__":
    run(main)
