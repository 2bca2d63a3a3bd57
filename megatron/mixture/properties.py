"""Properties of documents, and the settings of a corpus.

A property is written `EXPRESSION AS name TYPE`. The expression is a path
(`meta.language`, `files[0].lang`), or any DuckDB SQL over the columns of the
record. A line of JSON has one column, `record`.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron.config.presets import suggest_nearest

TYPES = {
    "string": "VARCHAR",
    "category": "VARCHAR",  # few values: stored with a dictionary
    "integer": "BIGINT",
    "float": "DOUBLE",
    "boolean": "BOOLEAN",
    "date": "DATE",
    "list": "VARCHAR[]",
}
# columns of every document
RESERVED_NAMES = ("corpus", "file", "row", "begin", "size", "tokens", "_kind", "_meta")
PATH_PATTERN = re.compile(r"[A-Za-z_]\w*(\[\d+\])*(\.[A-Za-z_]\w*(\[\d+\])*)*")
# The shortest expression whose rest is `AS name type`. CAST(x AS DATE) AS day date:
# "CAST(x" fails, because ") AS day date" is left, and the expression becomes CAST(x
# AS DATE).
PROPERTY_PATTERN = re.compile(
    r"(?P<expression>.+?)(\s+AS\s+(?P<name>\w+)(\s+(?P<type>\w+))?)?",
    re.IGNORECASE | re.DOTALL,
)

PRESETS: dict[str, tuple[str, ...]] = {
    "slimpajama": ("meta.redpajama_set_name AS source category",),
    "c4": ("url AS url", "substr(record->>'$.timestamp', 1, 10) AS day date"),
    "fineweb": (
        "url AS url",
        "dump AS dump category",
        "language AS language category",
        "language_score AS language_score float",
        "token_count AS token_count integer",
    ),
    "pile": ("meta.pile_set_name AS source category",),
}


@dataclass(frozen=True)
class Property:
    """One property of the documents of a corpus; `kind` is a key of TYPES."""

    name: str
    expression: str
    kind: str = "string"

    def __str__(self) -> str:
        return f"{self.expression} AS {self.name} {self.kind}"

    @property
    def sql_type(self) -> str:
        """DuckDB type of its column."""
        return TYPES[self.kind]

    @property
    def root(self) -> str | None:
        """First name of a path; None for SQL."""
        return re.split(r"[.\[]", self.expression)[0] if PATH_PATTERN.fullmatch(self.expression) else None

    def raw_sql(self) -> str:
        """Return the SQL of the value as it is in the record."""
        if not PATH_PATTERN.fullmatch(self.expression):
            return f"({self.expression})"
        # a list must stay JSON for the cast to VARCHAR[]; other kinds are cast from
        # text without quotes
        how = "json_extract" if self.kind == "list" else "json_extract_string"
        return f"{how}(record, '$.{self.expression}')"

    def to_sql(self) -> str:
        """Return the SQL of the value in its type. DuckDB raises an error for a value that cannot be cast."""
        raw = self.raw_sql()
        # json_extract_string returns VARCHAR already
        is_text = self.sql_type == "VARCHAR" and PATH_PATTERN.fullmatch(self.expression)
        return raw if is_text else f"CAST({raw} AS {self.sql_type})"


@dataclass(frozen=True)
class Corpus:
    """Settings of a corpus.

    tokenizer   the tokenizer that counted the tokens; None if they are not counted
    added       properties that `add_property` has added later, by their types
    """

    name: str
    text_key: str
    properties: tuple[Property, ...]
    tokenizer: dict[str, Any] | None = None
    added: tuple[Property, ...] = ()

    @property
    def all_properties(self) -> tuple[Property, ...]:
        """Properties of the registration, and those added later."""
        return (*self.properties, *self.added)

    @property
    def compatibility_key(self) -> tuple[Any, ...]:
        """Settings that must be equal when files are added. The path of a tokenizer may differ."""
        return self.properties, self.text_key, self.tokenizer and self.tokenizer | {"name": None}

    def to_json(self) -> str:
        """Return the settings as the description of the table."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Corpus":
        """Parse a description. Raises ValueError for another text."""
        try:
            fields = json.loads(text)
            properties, added = (
                tuple(Property(**prop) for prop in fields.pop(key)) for key in ("properties", "added")
            )
            return cls(**fields, properties=properties, added=added)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"got a table that is not a corpus ({error}). Register it again.") from error


def quote_identifier(name: str) -> str:
    """Return a column name in SQL. It may be a keyword, such as order."""
    return '"' + name.replace('"', '""') + '"'


def quote_text(text: str) -> str:
    """Return a text in SQL."""
    return "'" + text.replace("'", "''") + "'"


def json_path(key: str) -> str:
    """Return the JSON path of a key of a record, in SQL."""
    escaped = key.replace('"', '\\"')
    return quote_text(f'$."{escaped}"')


def read_property(text: str) -> Property:
    """Parse `EXPRESSION [AS name [TYPE]]`. A path is named by its last component.

    Raises ValueError for other text.
    """
    match = PROPERTY_PATTERN.fullmatch(text.strip())
    if match is None or not match["expression"].strip():
        raise ValueError(f"property {text!r}: expected EXPRESSION AS name TYPE.")
    expression, name = match["expression"].strip(), match["name"]
    if name is None:
        if not PATH_PATTERN.fullmatch(expression):
            raise ValueError(f"property {text!r}: got no name. Add AS name.")
        # files[0].lang[1]: name lang
        name = re.sub(r"\[\d+\]", "", expression.rpartition(".")[2])
    name, kind = name.lower(), (match["type"] or "string").lower()
    if kind not in TYPES:
        raise ValueError(f"property {text!r}: no type '{kind}'; {suggest_nearest(kind, list(TYPES))}")
    if name in RESERVED_NAMES or not PATH_PATTERN.fullmatch(name):
        raise ValueError(
            f"property {text!r}: got the reserved or invalid name '{name}'. Add AS another_name."
        )
    return Property(name, expression, kind)


def read_properties(texts: Sequence[str], preset: str | None = None) -> tuple[Property, ...]:
    """Return the properties of a preset, followed by those in `texts`.

    Raises ValueError for an unknown preset or a repeated name.
    """
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"preset: got '{preset}', expected one of {', '.join(PRESETS)}.")
    properties = [read_property(text) for text in (*PRESETS.get(preset or "", ()), *texts)]
    names = [prop.name for prop in properties]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"property '{name}': got the name twice. Rename one of them with AS another_name."
            )
    return tuple(properties)
