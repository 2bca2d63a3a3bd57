"""Conversion of plain sentences to HTML: no line break between number and unit, powers as superscript."""

import re
from html import escape


def render_prose(text: str) -> str:
    """Return text as HTML with non-breaking spaces between a number and its sign or unit."""
    # "3.2 % of" -> "3.2&nbsp;% of": the space after %, FLOPs stays breakable; ± and = bind on both sides
    return re.sub(r" (%|FLOPs|±|=) ?", _join_unit, escape(text))


def _join_unit(match: re.Match[str]) -> str:
    after = {"±": "&nbsp;", "=": "&nbsp;"}.get(match[1], " " if match[0].endswith(" ") else "")
    return f"&nbsp;{match[1]}{after}"


def render_paragraph(text: str, style: str = "") -> str:
    """Return a paragraph with an optional CSS class; empty for empty text."""
    return (
        f"<p{f' class={chr(34)}{style}{chr(34)}' if style else ''}>{render_prose(text)}</p>" if text else ""
    )


def render_powers(text: str) -> str:
    """Return a formula as HTML, with powers such as N^0.35 as superscript."""
    # applied after escape: the pattern contains no character that escape replaces
    return re.sub(r"\^([-\w.]+)", r"<sup>\1</sup>", escape(text))
