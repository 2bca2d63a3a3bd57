"""HTML from the templates of this package. All text is escaped unless a filter here returns markup."""

import re
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def render_template(name: str, **content: Any) -> str:
    """Return a template of `templates/` with its content."""
    return make_environment().get_template(name).render(content)


@cache
def make_environment() -> "Environment":
    """Return the environment of the templates. A name that a template lacks raises an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("megatron.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"prose": mark_units, "powers": mark_powers}
    # tojson escapes <, > and &, because "</script>" or "<!--" would end or change a script element
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment


def mark_units(text: str) -> "Markup":
    """Return escaped text with non-breaking spaces between a number and its sign or unit."""
    from markupsafe import Markup, escape

    # "3.2 % of" -> "3.2&nbsp;% of": the space after %, FLOPs stays breakable; ± and = bind on both sides
    return Markup(re.sub(r" (%|FLOPs|±|=) ?", _join_unit, str(escape(text))))


def _join_unit(match: re.Match[str]) -> str:
    after = {"±": "&nbsp;", "=": "&nbsp;"}.get(match[1], " " if match[0].endswith(" ") else "")
    return f"&nbsp;{match[1]}{after}"


def mark_powers(text: str) -> "Markup":
    """Return an escaped formula with powers such as N^0.35 as superscript."""
    from markupsafe import Markup, escape

    # applied after escape: the pattern contains no character that escape replaces
    return Markup(re.sub(r"\^([-\w.]+)", r"<sup>\1</sup>", str(escape(text))))
