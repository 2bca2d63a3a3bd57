"""What is known of a document beside its text: an expression over the record, a name and a type.

Written `EXPRESSION AS name TYPE`. The expression is a path (`meta.redpajama_set_name`, `files[0].lang`), or
any SQL of DuckDB over the columns of the record; of a line of JSON the one column is `record`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.presets import nearest

TYPES = {
    "string": "VARCHAR",
    "category": "VARCHAR",  # few values: compressed by a dictionary, and one value is read once
    "integer": "BIGINT",
    "float": "DOUBLE",
    "boolean": "BOOLEAN",
    "date": "DATE",
    "list": "VARCHAR[]",
}
TAKEN = ("corpus", "file", "row", "begin", "size", "tokens")  # columns that every document has
PATH = re.compile(r"[A-Za-z_]\w*(\[\d+\])*(\.[A-Za-z_]\w*(\[\d+\])*)*")
WRITTEN = re.compile(
    r"(?P<expression>.+?)(\s+AS\s+(?P<name>\w+)(\s+(?P<type>\w+))?)?",
    re.IGNORECASE | re.DOTALL,
)

# which part of RedPajama a record is of: its parts say so in ways of their own, or by what else they have
RED_PAJAMA_SOURCE = """coalesce(
    record->>'$.meta.source', split_part(record->>'$.source', '/', 1),
    CASE WHEN record->>'$.meta.arxiv_id' IS NOT NULL THEN 'arxiv'
    WHEN record->>'$.meta.short_book_title' IS NOT NULL THEN 'book'
    WHEN contains(record->>'$.meta.url', 'wikipedia.org') THEN 'wikipedia' END)"""
# of GitHub the programming language with the most bytes in the repository
RED_PAJAMA_LANGUAGE = """CASE json_type(record, '$.meta.language') WHEN 'ARRAY' THEN
    list_reverse_sort(from_json(
        record->'$.meta.language', '[{"bytes":"BIGINT","name":"VARCHAR"}]'
    ))[1].name ELSE record->>'$.meta.language' END"""

PRESETS: dict[str, tuple[str, ...]] = {
    "slimpajama": ("meta.redpajama_set_name AS source category",),
    "redpajama": (
        f"{RED_PAJAMA_SOURCE} AS source category",
        f"{RED_PAJAMA_LANGUAGE} AS language category",
        "json_extract_string(record, '$.meta.language[*].name') AS languages list",
        "meta.license AS license category",
        "meta.url AS url",
    ),
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
        """What DuckDB keeps it as."""
        return TYPES[self.kind]

    def raw(self, is_json: bool) -> str:
        """The value as the record has it, in SQL."""
        if not PATH.fullmatch(self.expression):
            return f"({self.expression})"
        if not is_json:
            return self.expression
        how = "json_extract" if self.kind == "list" else "json_extract_string"
        return f"{how}(record, '$.{self.expression}')"

    def sql(self, is_json: bool) -> str:
        """The value in its type; DuckDB raises for one that has none."""
        raw = self.raw(is_json)
        # text comes out of JSON as text
        is_text = is_json and self.sql_type == "VARCHAR" and PATH.fullmatch(self.expression)
        return raw if is_text else f"CAST({raw} AS {self.sql_type})"


def quoted(name: str) -> str:
    """A column's name in SQL; it may be a word of SQL, such as order."""
    return '"' + name.replace('"', '""') + '"'


def read_property(written: str) -> Property:
    """`EXPRESSION [AS name [TYPE]]`; a path is named by its last word. ValueError for what is none."""
    found = WRITTEN.fullmatch(written.strip())
    if found is None or not found["expression"].strip():
        raise ValueError(f"property {written!r}: wanted EXPRESSION AS name TYPE")
    expression, name = found["expression"].strip(), found["name"]
    if name is None:
        if not PATH.fullmatch(expression):
            raise ValueError(f"property {written!r}: an expression needs a name; add AS name")
        name = re.sub(r"\[\d+\]", "", expression.rpartition(".")[2])
    name, kind = name.lower(), (found["type"] or "string").lower()
    if kind not in TYPES:
        raise ValueError(f"property {written!r}: no type '{kind}'; {nearest(kind, list(TYPES))}")
    if name in TAKEN or not PATH.fullmatch(name):
        raise ValueError(f"property {written!r}: may not be named '{name}'; add AS another_name")
    return Property(name, expression, kind)


def read_properties(written: Sequence[str], preset: str | None = None) -> tuple[Property, ...]:
    """Those of a preset, then those written down. ValueError for an unknown preset or a name twice."""
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"preset '{preset}': wanted one of {', '.join(PRESETS)}")
    found = [read_property(one) for one in (*PRESETS.get(preset or "", ()), *written)]
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"property '{name}': named twice; give one of them AS another_name")
    return tuple(found)
