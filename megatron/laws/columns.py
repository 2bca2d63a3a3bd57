"""Columns of a data frame as the arrays of a fit."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeVar

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
