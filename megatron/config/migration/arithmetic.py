"""Evaluation of the whole-number arithmetic of bash, $((...)), from its syntax tree."""

import ast
from collections.abc import Callable

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    # bash truncates towards 0
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
}
MAX_CHARACTERS = 500


def evaluate_integer(text: str) -> int:
    """Return the value of numbers with + - * / % and brackets. Raises ValueError for anything else."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"got {len(text)} characters of arithmetic, expected {MAX_CHARACTERS} or fewer")
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError) as error:
        raise ValueError(f"got {text!r}, expected whole numbers with + - * / %") from error


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError("got another expression, expected whole numbers with + - * / %")
