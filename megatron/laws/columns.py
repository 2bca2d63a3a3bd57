"""Columns of a fit: of a data frame or plain arrays, and their check."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

Result = TypeVar("Result")
# Columns of this project's tables, for arguments that are not given
DEFAULT_COLUMNS = {"N": "n_params", "D": "train_tokens", "L": "loss", "C": "train_flops"}
ARRAYS = (*DEFAULT_COLUMNS, "U", "scores", "groups", "loss_se")


def takes_data_frame(fit: Callable[..., Result]) -> Callable[..., Result]:
    """Let a fit take a data frame first, and names of its columns in place of arrays.

    `fit_law(frame, L="val_loss", U="unique_tokens")` fits the
    columns n_params, train_tokens, val_loss and unique_tokens.
    Raises ValueError for a column that the frame lacks.
    """
    parameters = signature(fit).parameters
    required = [name for name in parameters if parameters[name].default is Parameter.empty]

    @wraps(fit)
    def fit_columns(*args: Any, **options: Any) -> Result:
        if not args or not hasattr(args[0], "columns"):
            return fit(*args, **options)
        frame, *rest = args
        given = dict(zip(required, rest, strict=False)) | options
        options = {name: DEFAULT_COLUMNS[name] for name in required if name in DEFAULT_COLUMNS} | given
        for name in set(ARRAYS) & set(options):
            column = options[name]
            if isinstance(column, str) and column not in frame.columns:
                columns = ", ".join(map(str, frame.columns))
                raise ValueError(f"{name}: got no column '{column}', expected one of {columns}")
            options[name] = frame[column].to_numpy() if isinstance(column, str) else column
        return fit(**options)

    return fit_columns


def validate_columns(**columns: ArrayLike) -> list[np.ndarray]:
    """Return each column as float64 [n].

    Raises ValueError for different lengths, or values that are not positive.
    """
    values = {name: np.asarray(column, dtype=float).ravel() for name, column in columns.items()}
    lengths = [len(v) for v in values.values()]
    if len(set(lengths)) != 1:
        raise ValueError(
            f"{', '.join(values)}: got {', '.join(map(str, lengths))} values, expected equally many"
        )
    for name, v in values.items():
        wrong = np.flatnonzero(~np.isfinite(v) | (v <= 0))
        if len(wrong):
            raise ValueError(f"{name}, run {wrong[0] + 1}: got {v[wrong[0]]}, expected a positive number")
    return list(values.values())
