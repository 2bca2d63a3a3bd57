"""Custom rules for weights that follow the model: `adaptive.rule: module:Class`.

Reading a mixture imports the module, so a mixture with such a rule must be trusted like a program. A module
whose source defines no class of that name is refused before any of it runs.
"""

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np

from megatron.mixture.adaptive import WeightRule

METHODS = ("observe", "as_dict", "restore")  # of adaptive.WeightRule


def make_rule(name: str, weights: np.ndarray, where: str) -> WeightRule:
    """Return an instance of module:Class, constructed with the first weights, float64 [K].

    Raises ValueError, prefixed by `where`, for a module that is missing or defines no such class, and for a
    class without the methods of a rule.
    """
    module, _, class_name = name.partition(":")
    place = f"{where}: adaptive.rule {name}"
    # the code of an imported module has run already, and its file may have changed since
    if module not in sys.modules:
        _check_source(module, class_name, place)
    try:
        rule_class: Callable[[np.ndarray], WeightRule] = getattr(importlib.import_module(module), class_name)
    except Exception as error:  # importing a module may raise anything
        raise ValueError(f"{place} cannot be imported ({error}). Add its folder to PYTHONPATH.") from error
    missing = [method for method in METHODS if not callable(getattr(rule_class, method, None))]
    is_class = inspect.isclass(rule_class)
    if not is_class or missing:
        raise ValueError(
            f"{place}: got {rule_class!r}, expected a class with {', '.join(METHODS)}. Implement them."
        )
    try:
        return rule_class(weights)
    except Exception as error:
        raise ValueError(
            f"{place}: got {type(error).__name__} ({error}), expected Class(weights). Correct its __init__."
        ) from error


def _check_source(module: str, class_name: str, place: str) -> None:
    """Raise ValueError unless the module's source defines or imports the class. None of it is executed."""
    spec = find_module_spec(module)
    if spec is None:
        raise ValueError(f"{place} cannot be imported (no module {module}). Add its folder to PYTHONPATH.")
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise ValueError(f"{place}: got a module without source, expected a .py file. Wrap the class in one.")
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (SyntaxError, ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{place} cannot be imported ({error}). Correct {spec.origin}.") from error
    names = {
        named
        # nested definitions count too: for these `getattr` in make_rule fails, after the import
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
            f"{place}: got {spec.origin}, which has no class {class_name}. Use a class that it defines."
        )


def find_module_spec(module: str) -> ModuleSpec | None:
    """Return the spec of a module without importing it or its parent packages.

    None if the module is not installed.
    """
    # importlib.util.find_spec("a.b") imports the package a. This loop calls the finders as import does, for a
    # and then for a.b in the folders of a, without running a/__init__.py.
    folders, spec, name = None, None, ""
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec(name, folders, None) if find_spec is not None else None
            if spec is not None:
                break
        if spec is None:
            return None
        folders = spec.submodule_search_locations
        if folders is None and name != module:
            return None
    return spec
