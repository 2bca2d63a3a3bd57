"""Laws of loss curves from the folders of runs, or tables with a row per step."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from megatron.config.yaml_file import is_finite
from megatron.laws.curve_law import CurveLaw, fit_curve_law
from megatron.plan.run_dir import RESULT
from megatron.study.selection import Columns, read_positive
from megatron.study.table import read_table, read_valid_metrics

COLUMNS = ["step", "lr", Columns.L]


def describe_curves(fitted: Sequence[Path], others: Sequence[Path], warmup_steps: float) -> list[str]:
    """Fit the curves of `fitted`, predict `others`, and return the text of both.

    A table has columns step, lr and loss; of a curve to predict a loss may be missing, as of the
    steps to come. A run that is not finished has the rates of the first fitted curve from its last step
    on. Raises ValueError for other values, and the errors of `read_table`.
    """
    tables = {path: _read_curve(path) for path in fitted}
    curves = [[read_positive(path, table, name) for name in COLUMNS] for path, table in tables.items()]
    law = fit_curve_law(curves, warmup_steps)
    constants = ", ".join(f"{name} {value:.4g}" for name, value in law.params.items())
    lines = [
        f"{law.n_curves} curves: {constants}",
        f"  mean absolute residual {law.residual:.5f} nats; constants of decays are held by a weak prior",
    ]
    return lines + [_describe_prediction(law, path, warmup_steps, tables[fitted[0]]) for path in others]


def _read_curve(path: Path) -> pd.DataFrame:
    """Return a table, or the training steps that a run logged, with a rate above 0."""
    if not path.is_dir():
        return read_table(path)
    logged = [at for at in read_valid_metrics(path) if at["kind"] == "train"]
    # files may be from a stranger: a value need not be a number
    records = [at for at in logged if all(is_finite(at.get(name)) for name in COLUMNS)]
    # a resumed run logs the steps after its checkpoint again
    return pd.DataFrame(records, columns=COLUMNS).query("lr > 0").drop_duplicates("step", keep="last")


def _describe_prediction(law: CurveLaw, path: Path, warmup_steps: float, planned: pd.DataFrame) -> str:
    table = _read_curve(path)
    if path.is_dir() and not (path / RESULT).exists():
        common = table.merge(planned, on="step")
        if not np.allclose(common["lr_x"], common["lr_y"], rtol=0.01):
            raise ValueError(f"{path}: got other rates than the first curve. Give a table of its rates.")
        table = pd.concat([table, planned.loc[planned["step"] > table["step"].max(), ["step", "lr"]]])
    steps, rates = (read_positive(path, table, name) for name in ("step", "lr"))
    predicted = law.predict(steps, rates, warmup_steps)
    text = f"{path.name}: loss {predicted[-1]:.4f} at step {steps[-1]:.0f}"
    measured = table.get(Columns.L, pd.Series(np.nan, table.index)).to_numpy(float)
    done = np.isfinite(measured)
    if not done.any():
        return text
    # the curve's own level: what the law misses at the last tenth of the finished steps
    last = np.flatnonzero(done)[-max(int(done.sum()) // 10, 1) :]
    error = np.nanmean(np.abs(predicted - measured))
    text += f"; mean absolute error of {int(done.sum())} measured steps {error:.5f}"
    if not done[-1]:
        shift = float(np.mean(measured[last] - predicted[last]))
        text += f"; {predicted[-1] + shift:.4f} if it stays {shift:+.4f} from the law, as now"
    return text
