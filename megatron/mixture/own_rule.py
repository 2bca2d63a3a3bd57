"""A rule of one's own for weights that follow the model: `adaptive.rule: module:Class`.

Reading a mixture runs the module, so that a mixture with such a rule is trusted as a program is. What is not
written as a class of that name is refused before anything of it runs.
"""

import ast
import importlib
import importlib.util
import inspect
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np

from megatron.mixture.adaptive import Adaptive

METHODS = ("observe", "as_dict", "restore")  # of adaptive.Adaptive


def make_rule(name: str, weights: np.ndarray, where: str) -> Adaptive:
    """Return module:Class made with the first weights, float64 [K].

    Raises ValueError, which begins with `where`, for a module that is not there or writes no such class, and
    for a class that is no rule.
    """
    module, _, class_name = name.partition(":")
    place = f"{where}: adaptive.rule {name}"
    if module not in sys.modules:
        _check_source(module, class_name, place)
    try:
        rule_class = getattr(importlib.import_module(module), class_name)
    except Exception as error:  # whatever the module does when it is imported
        raise ValueError(f"{place} cannot be imported ({error}); put its folder on PYTHONPATH") from error
    lacking = [one for one in METHODS if not callable(getattr(rule_class, one, None))]
    if not inspect.isclass(rule_class) or lacking:
        raise ValueError(
            f"{place}: got {rule_class!r}, expected a class with {', '.join(METHODS)}. Write those."
        )
    try:
        return rule_class(weights)
    except Exception as error:
        raise ValueError(
            f"{place}: got {type(error).__name__} ({error}), expected Class(weights). Correct its __init__."
        ) from error


def _check_source(module: str, class_name: str, place: str) -> None:
    """ValueError unless the module's source defines or imports the class. Nothing of it is run."""
    found = find_module(module)
    if found is None:
        raise ValueError(f"{place} cannot be imported (no module {module}); put its folder on PYTHONPATH")
    if found.origin is None or not found.origin.endswith(".py"):
        raise ValueError(f"{place}: got a module without source, expected a .py file. Wrap the class in one.")
    try:
        tree = ast.parse(Path(found.origin).read_bytes())
    except (SyntaxError, ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{place} cannot be imported ({error}); correct {found.origin}") from error
    names = {
        named
        for node in ast.walk(tree)
        for named in (
            [node.name]
            if isinstance(node, ast.ClassDef)
            else [alias.asname or alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    if class_name not in names:
        raise ValueError(
            f"{place}: got {found.origin}, which has no class {class_name}. Name one that it has."
        )


def find_module(module: str) -> ModuleSpec | None:
    """Where a module is, without importing it or the packages around it."""
    folders, found, name = None, None, ""
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        found = None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            found = find_spec(name, folders, None) if find_spec is not None else None
            if found is not None:
                break
        if found is None:
            return None
        folders = found.submodule_search_locations
        if folders is None and name != module:
            return None
    return found
