"""What the runs of a study are and cost, in a table for people, before anything is spent."""

from collections.abc import Sequence

from megatron.run_dir import is_done
from megatron.scaling.conventions import training_flops_per_token
from megatron.scaling.ladder import PlannedRun, short_number
from megatron.scaling.memory import bytes_of
from megatron.scaling.price import Speed, duration, makespan

SHOWN = {"exact": "FLOPs", "6nd": "6ND", "kaplan": "Kaplan", "palm": "PaLM",
         "megatron": "Megatron", "chinchilla": "Chinchilla"}  # fmt: skip
HEAD = ("run", "size", "N", "tokens", "unique", "epochs", "steps", "batch", "lr", *SHOWN.values(), "memory",
        "expected", "status")  # fmt: skip
TO_THE_LEFT = (0, len(HEAD) - 1)


def price_table(runs: Sequence[PlannedRun], speed: Speed, jobs: int, gpus_per_run: int = 1) -> str:
    """A line a run and one of totals. FLOPs are of the whole training, by several conventions.

    `expected` and the totals are of what is trained: a run that branches from a trunk trains its end alone.
    """
    rows = [HEAD, *(_row(run, speed, gpus_per_run) for run in runs)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = [
        "  ".join(
            cell.ljust(w) if i in TO_THE_LEFT else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    waiting = [run for run in runs if not is_done(run.folder, run.plan.identity)]
    seconds = [speed.seconds(run) for run in waiting]
    tokens = sum(run.plan.tokens_per_step * run.own_steps for run in waiting)
    flops = sum(run.own_flops for run in waiting)
    total = (
        f"{len(waiting)} of {len(runs)} runs to do: {short_number(tokens)} tokens, {flops:.2e} FLOPs, "
        f"about {duration(makespan(seconds, jobs)) if seconds else '0 s'} with {jobs} at a time"
    )
    if gpus_per_run > 1:
        total += f" on {gpus_per_run} GPUs each"
    lines.append(f"{total}, {duration(sum(seconds))} one after another (expected from {speed.basis})")
    saved = sum(run.plan.train_flops for run in waiting) - flops
    if saved:
        lines.append(f"{saved:.2e} FLOPs more without shared trunks (share_trunks: false)")
    return "\n".join(lines)


def _row(run: PlannedRun, speed: Speed, gpus_per_run: int) -> tuple[str, ...]:
    plan, config = run.plan, run.config
    each = training_flops_per_token(config.model, plan.seq_len)
    done = is_done(run.folder, plan.identity)
    notes = ["held out"] if run.held_out else []
    notes += [f"from step {run.branch.step:,} of a trunk"] if run.branch and not done else []
    return (
        config.name,
        plan.size,
        f"{plan.n_params:,}",
        f"{plan.train_tokens:,}",
        short_number(plan.unique_tokens),
        f"{plan.epochs:.2f}",
        f"{plan.n_steps:,}",
        f"{config.dataset.batch_size}",
        f"{config.optim.lr:.3g}",
        *(f"{each[name] * plan.train_tokens:.2e}" for name in SHOWN),
        f"{bytes_of(config, gpus_per_run) / 2**30:.1f} GiB",
        duration(speed.seconds(run)),
        ", ".join([*notes, "done" if done else "to run"]),
    )
