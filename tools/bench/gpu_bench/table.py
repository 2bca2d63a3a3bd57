"""Table and predictions of the GPU bench."""

from dataclasses import replace
from typing import Any

from gpu_bench import cells
from megatron.cli import format_table
from megatron.plan.hardware import find_device
from megatron.plan.roofline import EAGER, RATES, StepTime, predict_step

HEAD = ("cell", "tokens/s", "MFU", "executed", "predicted", "ms/step", "GiB", "kernels/step")
PARTS = ("block products", "head", "attention", "elementwise", "loss", "casts", "optimizer", "launches")


def predict_cell(cell: Any, hardware: str, seq_len: int, accumulate: int) -> StepTime | None:
    """Return the roofline's prediction of a cell; None for a device that it does not list."""
    device = find_device(hardware)
    if device is None:
        return None
    tokens = cell.rows * seq_len
    return predict_step(
        cells.make_model(cell.size),
        seq_len,
        cell.objective == cells.AR,
        device,
        cell.predicted,
        microbatch_tokens=tokens,
        tokens_per_step=tokens * accumulate,
    )


def format_row(record: dict[str, Any]) -> tuple[str, ...]:
    """Return a row of the table."""
    if "value" not in record:
        return (
            record["cell"],
            record.get("failed") or f"skipped: {record['skipped']}",
            *[""] * (len(HEAD) - 2),
        )

    def share(name: str) -> str:
        return "n/a" if record.get(name) is None else f"{100 * record[name]:.1f} %"

    memory = record.get("memory_gib")
    # the peak of a graph is known only as reserved memory
    mark = " reserved" if record.get("memory_kind") == "reserved" else ""
    predicted = record.get("predicted")
    return (
        record["cell"],
        f"{record['value']:,.0f}",
        share("mfu"),
        share("mfu_executed"),
        "n/a" if predicted is None else f"{predicted:,.0f} ({share('predicted_mfu')})",
        f"{record['step_ms']:,.1f}",
        "n/a" if memory is None else f"{memory:.1f}{mark}",
        f"{record['kernels_per_step']:,.0f}",
    )


def describe_record(record: dict[str, Any]) -> str:
    """Return one line for the terminal."""
    row = format_row(record)
    if "value" not in record:
        return f"{row[0]:<40} {row[1]}"
    top = ", ".join(f"{kernel['share']:.0%} {kernel['name'][:24]}" for kernel in record["kernels"][:2])
    return (
        f"{row[0]:<40} {row[1]:>10} tokens/s  MFU {row[2]}  executed {row[3]}  predicted {row[4]}  "
        f"GiB {row[6]}  {top}"
    )


def format_markdown(records: dict[str, dict[str, Any]], sizes: list[str] | None, seq_len: int) -> str:
    """Return the table for benchmarks.md, and the ratios to the other sides of the same run."""
    ordered = [records[cell.name] for cell in cells.list_cells(sizes) if cell.name in records]
    lines = [f"| {' | '.join(HEAD)} |", f"| {' | '.join('---' for _ in HEAD)} |"]
    lines += [f"| {' | '.join(format_row(record))} |" for record in ordered]
    for record in ordered:
        side, size, objective, _ = record["cell"].split("/")
        base = records.get(f"ours/{size}/{objective}/default")
        if side != "ours" and "value" in record and base is not None and "value" in base:
            lines.append(f"\nours / {side}, {size} {objective}: {base['value'] / record['value']:.2f} times")
    measured = next((record for record in ordered if "value" in record), None)
    if measured is not None:
        lines.append(f"\n{measured['hardware']}, torch {measured['torch']}, S = {seq_len}")
    return "\n".join(lines) + "\n"


def print_predictions(hardware: str, sizes: list[str] | None, seq_len: int, accumulate: int) -> None:
    """Print the prediction of every cell, that of an eager step with separate kernels, and the parts.

    Raises ValueError for an unknown GPU.
    """
    rows = []
    for cell in cells.list_cells(sizes):
        step = predict_cell(cell, hardware, seq_len, accumulate)
        if step is None:
            raise ValueError(f"--hardware: got {hardware}, expected a GPU in megatron/plan/hardware.py.")
        parts = (f"{step.parts.get(name, 0.0) * 1e6:.2f}" for name in PARTS)
        total = f"{step.seconds_per_token * 1e6:.2f}"
        before = predict_cell(replace(cell, predicted=EAGER), hardware, seq_len, accumulate)
        assert before is not None, "the device is listed"
        mfus = (f"{100 * step.mfu:.1f}", f"{100 * before.mfu:.1f}")
        rows.append((cell.name, f"{step.tokens_per_s:,.0f}", *mfus, *parts, total))
    print(f"{hardware}: {RATES}; S = {seq_len}, microseconds a token")
    print("\n".join(format_table(("cell", "tokens/s", "MFU %", "eager", *PARTS, "sum"), rows, ("cell",))))
