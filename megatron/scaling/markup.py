"""Plain sentences as markup: numbers keep their sign and unit on one line, powers are raised."""

import re
from html import escape


def prose(text: str) -> str:
    """Text as markup, in which a number stays on one line with its sign and its unit."""
    return re.sub(r" (%|FLOPs|±|=) ?", _tied, escape(text))


def _tied(match: re.Match[str]) -> str:
    after = {"±": "&nbsp;", "=": "&nbsp;"}.get(match[1], " " if match[0].endswith(" ") else "")
    return f"&nbsp;{match[1]}{after}"


def paragraph(text: str, style: str = "") -> str:
    """A paragraph of a class, the empty text for none."""
    return f"<p{f' class={chr(34)}{style}{chr(34)}' if style else ''}>{prose(text)}</p>" if text else ""


def raised(text: str) -> str:
    """Markup of a formula in which N^0.35 stands for a power."""
    return re.sub(r"\^([-\w.]+)", r"<sup>\1</sup>", escape(text))
