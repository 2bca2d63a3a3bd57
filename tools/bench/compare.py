"""Compare the benchmark results of two commits, and fail if one is slower by more than a stated loss.

    python tools/bench/compare.py --base HEAD~1 --head HEAD --loss 10%
    python tools/bench/compare.py --base v0.1 --head HEAD --run --rounds 3 --benches train fit

The results come from the history that the benches write. A commit followed by + means its results with
modified files. Only cells of one machine with the same versions are compared; others are listed as not
compared. A ratio above 1 is a gain of the head, for speeds and for costs.

The noise is the half-width of a one-sided 95 % interval of the ratio: Welch's t-test of the logarithms of the
results, or, where a commit has only one result, of the repetitions inside it. A process varies less than
several, so that noise is too small. A loss within the noise is reported and is no failure; a loss without
any noise estimate is one.

--run checks out both commits into temporary worktrees and runs the reduced benches of this checkout
(smoke.py) with the code of each, in turns: base, head, base, head. Load that changes during the comparison
then affects both. Use an idle machine.

Exit status 1 also means that a bench failed on the head only; 2 that there is nothing to compare.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from history import ROOT, add_history_options, append_record, read_history
from scipy.stats import t as student_t

from megatron.cli import create_parser, install_stop_handlers, positive_int, run_main

Record = dict[str, Any]
Key = tuple[str, str]  # bench, cell
LEVEL = 0.95
BENCH_LIMIT_S = 600


class WrongUseError(Exception):
    """Commits that are unknown, or that cannot be compared."""


@dataclass(frozen=True)
class Comparison:
    """One cell: values of both commits, ratio (above 1: a gain of the head), noise of the ratio's log."""

    key: Key
    base: float
    head: float
    unit: str
    ratio: float
    noise: float | None

    def judge(self, loss: float) -> str:
        """Return what the ratio means for a permitted loss such as 0.1."""
        is_noise = self.noise is not None and abs(_log(self.ratio)) <= self.noise
        if self.ratio < 1 - loss:
            return "loss within noise" if is_noise else "LOSS"
        return "" if is_noise or self.ratio == 1 else "gain" if self.ratio > 1 else "smaller loss"


def _log(ratio: float) -> float:
    return math.log(ratio) if 0 < ratio < math.inf else math.inf


def compare_samples(base: Sequence[float], head: Sequence[float], better: str) -> tuple[float, float | None]:
    """Return (ratio of the medians, noise of its log); noise is None with fewer than two values a side."""
    a, b = float(np.median(base)), float(np.median(head))
    if better == "lower":
        a, b = b, a
    # counts of failures may be 0: equal is 1, and fewer than some is a gain without limit
    ratio = 1.0 if a == b else b / a if a > 0 else math.inf
    if min(len(base), len(head)) < 2 or min(*base, *head) <= 0:
        return ratio, None
    logs = [np.log(base), np.log(head)]
    variances = [float(np.var(side, ddof=1)) / len(side) for side in logs]
    if sum(variances) == 0:
        return ratio, 0.0
    # Welch-Satterthwaite: degrees of freedom of a difference of means with unequal variances
    n_free = sum(variances) ** 2 / sum(v**2 / (len(x) - 1) for v, x in zip(variances, logs, strict=True))
    return ratio, float(student_t.ppf(LEVEL, n_free)) * math.sqrt(sum(variances))


def compare_cell(key: Key, base: Sequence[Record], head: Sequence[Record]) -> Comparison:
    """Compare the results of one cell, measured on the same machine with the same versions."""
    better, unit = head[-1]["better"], head[-1].get("unit", "")
    values = [[record["value"] for record in side] for side in (base, head)]
    ratio, noise = compare_samples(*values, better)
    if min(map(len, values)) < 2:
        # one result a side: only its repetitions show any spread
        repeats = [[x for record in side for x in record.get("repeats") or ()] for side in (base, head)]
        if min(map(len, repeats)) >= 2:
            noise = compare_samples(*repeats, better)[1]
    return Comparison(key, *(float(np.median(side)) for side in values), unit, ratio, noise)


def describe_setting(record: Record) -> str:
    """Return what must be equal in a comparison: machine, versions, unit and direction."""
    return json.dumps(
        [record.get(name) for name in ("machine", "versions", "unit", "better")], sort_keys=True
    )


def compare_records(
    base: Sequence[Record], head: Sequence[Record]
) -> tuple[list[Comparison], dict[Key, str]]:
    """Return (comparisons, reason by cell that is not compared)."""
    sides: list[dict[Key, dict[str, list[Record]]]] = []
    for records in (base, head):
        cells: dict[Key, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
        for record in records:
            cells[record["bench"], record["cell"]][describe_setting(record)].append(record)
        sides.append(cells)
    comparisons, skipped = [], {}
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        settings = [side.get(key, {}) for side in sides]
        common = [setting for setting in settings[0] if setting in settings[1]]
        for setting in common:
            comparisons.append(compare_cell(key, settings[0][setting], settings[1][setting]))
        if not common:
            skipped[key] = explain_difference(*settings)
    return comparisons, skipped


def explain_difference(base: dict[str, list[Record]], head: dict[str, list[Record]]) -> str:
    """Return why the results of a cell cannot be compared."""
    if not base or not head:
        return f"no result of the {'head' if base else 'base'}"
    (a, *_), (b, *_) = list(base.values())[-1], list(head.values())[-1]
    different = [name for name in ("machine", "versions", "unit", "better") if a.get(name) != b.get(name)]
    name = different[0]
    return f"other {name}: {json.dumps(a.get(name))} and {json.dumps(b.get(name))}"


def resolve_commit(name: str, records: Sequence[Record]) -> str:
    """Return the full hash of a commit, with + if the name has it. Raise WrongUseError if it is unknown."""
    bare = name.removesuffix("+")
    git = ["git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{bare}^{{commit}}"]
    done = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, timeout=30)
    # without git, or for a commit of another clone: the beginning of a hash in the history
    hashes = {str(record["commit"]) for record in records if record["commit"] is not None}
    matches = [done.stdout.strip()] if done.returncode == 0 else [h for h in hashes if h.startswith(bare)]
    if len(matches) != 1 or not bare:
        raise WrongUseError(f"got commit '{name}', expected one that git or the history knows.")
    return matches[0] + name[len(bare) :]


def select_results(records: Sequence[Record], commit: str) -> list[Record]:
    """Return the results of a commit; of its modified files if it ends with +."""
    return [r for r in records if f"{r['commit']}{'+' if r.get('dirty') else ''}" == commit]


@contextmanager
def open_worktree(commit: str, folder: Path) -> Iterator[Path]:
    """Check out a commit into a folder, with the benches of this checkout and a C++ helper."""
    git = ["git", "-C", str(ROOT)]
    run_checked([*git, "worktree", "add", "--quiet", "--detach", str(folder), commit])
    try:
        # the same benches on both sides: an older commit may lack them, or measure something else
        shutil.copytree(ROOT / "tools" / "bench", folder / "tools" / "bench", dirs_exist_ok=True)
        shutil.copy(ROOT / "megatron" / "bench_history.py", folder / "megatron")
        helpers = list((ROOT / "megatron").glob("_csrc*.so"))
        same = subprocess.run([*git, "diff", "--quiet", commit, "--", "csrc", "setup.py"], timeout=60)
        if same.returncode == 0 and helpers:
            shutil.copy(helpers[0], folder / "megatron")
        else:
            print(f"building the C++ helper of {commit[:12]}", flush=True)
            run_checked([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], folder)
        yield folder
    finally:
        run_checked([*git, "worktree", "remove", "--force", str(folder)])


def run_checked(command: Sequence[str], cwd: Path | None = None) -> None:
    """Run a command. Raise OSError with its last line if it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise OSError(f"{' '.join(command)}: {last}")


def check_benches(names: Sequence[str]) -> None:
    """Raise WrongUseError for a bench that has no reduced form."""
    import smoke  # in the same folder

    if unknown := [name for name in names if name not in smoke.REDUCED]:
        expected = ", ".join(smoke.REDUCED)
        raise WrongUseError(f"--benches: got {', '.join(unknown)}, expected some of {expected}.")


def run_both(commits: Sequence[str], args: argparse.Namespace) -> tuple[list[Record], int]:
    """Run the benches with both commits in turns; return (results, benches that fail on the head only)."""
    import smoke  # in the same folder

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        history, inputs = folder / "history.jsonl", folder / "inputs"
        inputs.mkdir()
        smoke.prepare_inputs(inputs)
        errors: dict[str, set[str]] = {commit: set() for commit in commits}
        with (
            open_worktree(commits[0], folder / "base") as base,
            open_worktree(commits[1], folder / "head") as head,
        ):
            for turn in range(args.rounds):
                for bench in args.benches or smoke.REDUCED:
                    for commit, checkout in zip(commits, (base, head), strict=True):
                        outcome = smoke.run_bench(
                            bench,
                            smoke.find_folders(inputs),
                            history,
                            checkout,
                            {"BENCH_COMMIT": commit},
                            BENCH_LIMIT_S,
                        )
                        problem = outcome.error or outcome.skipped
                        if problem:
                            print(f"{commit[:12]} {bench}: {problem}", flush=True)
                        if outcome.error:
                            errors[commit].add(bench)
                print(f"round {turn + 1} of {args.rounds} done", flush=True)
        records = list(read_history(history)) if history.is_file() else []
    if args.history is not None:
        for record in records:
            append_record(args.history, record)
    return records, len(errors[commits[1]] - errors[commits[0]])


def print_comparisons(comparisons: Sequence[Comparison], skipped: dict[Key, str], loss: float) -> int:
    """Print a line for each cell and a summary; return the number of losses beyond the permitted one."""
    width = max((len(" ".join(c.key)) for c in comparisons), default=4)
    print(f"{'cell':{width}} {'base':>12} {'head':>12} {'unit':14} {'ratio':>6} {'noise':>7}")
    for cell in comparisons:
        noise = "unknown" if cell.noise is None else f"{math.expm1(cell.noise):7.1%}"
        print(
            f"{' '.join(cell.key):{width}} {cell.base:12,.5g} {cell.head:12,.5g} {cell.unit:14} "
            f"{cell.ratio:6.3f} {noise:>7} {cell.judge(loss)}".rstrip()
        )
    for key, reason in skipped.items():
        print(f"not compared: {' '.join(key)}: {reason}")
    verdicts = [cell.judge(loss) for cell in comparisons]
    n_losses, n_noise = verdicts.count("LOSS"), verdicts.count("loss within noise")
    print(
        f"{len(comparisons)} cells compared, {len(skipped)} not; {n_losses} with a loss above {loss:.0%}, "
        f"{n_noise} with one within the noise"
    )
    return n_losses


def parse_share(word: str) -> float:
    """Parse a share such as 10% or 0.1 (an argparse type)."""
    try:
        share = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"got '{word}', expected a share such as 10% or 0.1")
    return share


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("commits").add_argument
    add("--base", required=True, metavar="COMMIT", help="commit to compare with")
    add("--head", default="HEAD", metavar="COMMIT", help="commit that may be slower or faster")
    add("--loss", type=parse_share, default=0.1, metavar="SHARE", help="loss that is permitted")
    add = parser.add_argument_group("new measurements").add_argument
    add("--run", action="store_true", help="measure both commits now, in turns")
    add("--rounds", type=positive_int, default=3, metavar="N", help="turns of each commit with --run")
    add("--benches", nargs="+", metavar="NAME", help="benches to run or to compare; default: all")
    add_history_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two commits; return 1 for a loss and 2 for wrong use."""
    args = build_parser().parse_args(argv)
    try:
        return compare_commits(args)
    except WrongUseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def compare_commits(args: argparse.Namespace) -> int:
    """Read or measure the results of both commits, and print the comparison."""
    records: list[Record] = []
    if args.run:
        check_benches(args.benches or ())
    else:
        if args.history is None or not args.history.is_file():
            raise WrongUseError(f"{args.history}: no history. Run make bench-smoke, or add --run.")
        records = list(read_history(args.history))
    commits = [resolve_commit(name, records) for name in (args.base, args.head)]
    if commits[0] == commits[1]:
        raise WrongUseError(f"got {commits[0][:12]} as base and head, expected two commits.")
    n_failed = 0
    if args.run:
        if any(commit.endswith("+") for commit in commits):
            raise WrongUseError("--run: got a commit with +, expected commits without modified files.")
        records, n_failed = run_both(commits, args)
    sides = [select_results(records, commit) for commit in commits]
    if args.benches:
        sides = [[record for record in side if record["bench"] in args.benches] for side in sides]
    if not args.run and not all(sides):
        missing = [commit[:12] for commit, side in zip(commits, sides, strict=True) if not side]
        raise WrongUseError(f"{args.history}: no results of {', '.join(missing)}. Add --run to measure them.")
    comparisons, skipped = compare_records(*sides)
    n_losses = print_comparisons(comparisons, skipped, args.loss)
    if not comparisons and not n_failed:
        raise WrongUseError("no cell was measured for both commits on one machine with the same versions.")
    return int(n_losses + n_failed > 0)


if __name__ == "__main__":
    install_stop_handlers()
    run_main(main)
