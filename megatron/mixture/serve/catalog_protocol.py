"""Requests about the catalog and the mixtures of a server's folder: JSON that is checked before it is used.

A client names files, properties, conditions and keys of a mixture. Refused are paths outside of the server's
roots, properties that are SQL instead of a path, conditions beyond those of a mixture file, custom rules
(`module:Class`, which would import code), and everything that is not one of the keys below.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from megatron.mixture.catalog.expression import Condition
from megatron.mixture.catalog.input_files import find_input_files
from megatron.mixture.catalog.properties import (
    PATH_PATTERN,
    PRESETS,
    Property,
    quote_identifier,
    read_properties,
)
from megatron.mixture.journal import RUN_NAME
from megatron.mixture.settings import RULES

MAX_REQUEST_BYTES = 1 << 17  # JSON of one request
MAX_WORDS = 1024  # elements of one list: files, properties, conditions
MAX_WORD_CHARS = 1 << 14
REFUSED_MIXTURE_KEYS = {
    "catalog": "the server has one catalog",
    "tokenizer": "a server sends whole documents",
}


def read_request(body: bytes, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """Return a JSON object with these keys. Raises ValueError for anything else."""
    try:
        request = json.loads(body or b"{}") if len(body) <= MAX_REQUEST_BYTES else None
        # escapes such as \ud800 are JSON, but no text that a file or a query can contain
        json.dumps(request, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        raise ValueError(f"request: expected a JSON object of at most {MAX_REQUEST_BYTES:,} bytes, in UTF-8.")
    missing, unknown = set(required) - set(request), set(request) - {*required, *optional}
    if missing or unknown:
        raise ValueError(
            f"request: got the keys {', '.join(sorted(map(str, request))) or 'none'}, expected "
            f"{', '.join(required) or 'none'}{' and perhaps ' + ', '.join(optional) if optional else ''}."
        )
    return request


def read_words(request: dict[str, Any], key: str) -> list[str]:
    """Return the list of strings under a key; a missing key or null is an empty list, a string a list."""
    words = request.get(key)
    words = [] if words is None else [words] if isinstance(words, str) else words
    if (
        not isinstance(words, list)
        or len(words) > MAX_WORDS
        or not all(isinstance(word, str) and 0 < len(word) <= MAX_WORD_CHARS for word in words)
    ):
        raise ValueError(f"{key}: expected at most {MAX_WORDS:,} strings of {MAX_WORD_CHARS:,} characters.")
    return words


def read_word(request: dict[str, Any], key: str, default: str | None = None) -> str:
    """Return the string under a key. Raises ValueError for anything else."""
    word = request.get(key, default)
    if not isinstance(word, str) or not 0 < len(word) <= MAX_WORD_CHARS or "\0" in word:
        raise ValueError(f"{key}: expected a string of at most {MAX_WORD_CHARS:,} characters.")
    return word


def read_flag(request: dict[str, Any], key: str) -> bool:
    """Return the boolean under a key; a missing key is False."""
    flag = request.get(key, False)
    if not isinstance(flag, bool):
        raise ValueError(f"{key}: got {flag!r}, expected true or false.")
    return flag


def read_name(request: dict[str, Any], key: str) -> str:
    """Return a name that is also a safe file name."""
    name = request.get(key)
    if not isinstance(name, str) or not RUN_NAME.fullmatch(name):
        raise ValueError(f"{key}: expected a name of letters, digits, _ . and -, of at most 64 characters.")
    return name


@dataclass(frozen=True)
class Registration:
    """A request to register files; `files` are resolved and below the roots."""

    corpus: str
    files: tuple[str, ...]
    properties: tuple[Property, ...]
    text_key: str
    tokenizer: str | None
    append_eod: bool


def read_registration(body: bytes, folder: Path, roots: Sequence[Path]) -> Registration:
    """Return the request to register files of the server's machine.

    folder   relative paths and patterns begin here
    roots    resolved folders that must contain the files and the tokenizer

    Raises ValueError for other content, and FileNotFoundError for files below the roots that are missing.
    """
    optional = ("properties", "preset", "text_key", "tokenizer", "append_eod")
    request = read_request(body, ("corpus", "inputs"), optional)
    preset = request.get("preset")
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}.")
    for prop in read_properties(words := read_words(request, "properties")):
        # SQL over a record may read any file of the server: register_corpus.py accepts it on the machine only
        if not PATH_PATTERN.fullmatch(prop.expression):
            raise ValueError(
                f"properties: got the expression {prop.expression!r}, expected a path such as meta.language. "
                "Run tools/register_corpus.py on the server's machine for SQL."
            )
    inputs = [check_below(word, folder, roots) for word in read_words(request, "inputs")]
    if not inputs:
        raise ValueError("inputs: got no file, expected paths on the server's machine.")
    # a link below a root may lead out of it: each file is checked again where it really is
    files = [check_below(str(path.resolve()), folder, roots) for path in find_input_files(inputs)]
    tokenizer = request.get("tokenizer")
    if tokenizer is not None:
        tokenizer = check_below(read_word(request, "tokenizer"), folder, roots)
        tokenizer = check_below(str(Path(tokenizer).resolve()), folder, roots)
        if not Path(tokenizer).exists():
            raise FileNotFoundError(f"tokenizer: {tokenizer}: no such file or folder on the server.")
    return Registration(
        read_name(request, "corpus"), tuple(files), read_properties(words, preset),
        read_word(request, "text_key", "text"), tokenizer, read_flag(request, "append_eod"),
    )  # fmt: skip


def check_below(word: str, folder: Path, roots: Sequence[Path]) -> str:
    """Return an absolute path or pattern without `..`. Raises ValueError outside of the roots.

    It is compared before the disk is read, so that the message does not depend on what exists there.
    """
    if "\0" in word:
        raise ValueError("inputs: got a path with a zero byte, expected a path on the server.")
    path = os.path.normpath(os.path.join(folder, word))
    if not any(Path(path).is_relative_to(root) for root in roots):
        raise ValueError(
            f"{word}: is in none of the server's folders {', '.join(map(str, roots))}. "
            "Move the file, or start the server with its folder as --root."
        )
    return path


def read_mixture_request(body: bytes) -> tuple[str, dict[str, Any]]:
    """Return (name, keys of the mixture file) of a request to create a mixture.

    The default name is derived from the keys: the same mixture has the same name. Raises ValueError for keys
    that a client may not set.
    """
    request = read_request(body, ("spec",), ("name",))
    spec = request["spec"]
    if not isinstance(spec, dict):
        raise ValueError("spec: expected the keys of a mixture file.")
    for key, why in REFUSED_MIXTURE_KEYS.items():
        if key in spec:
            raise ValueError(f"spec: got {key}, but {why}. Remove it.")
    adaptive = spec.get("adaptive")
    if isinstance(adaptive, dict) and adaptive.get("rule") not in RULES:
        raise ValueError(
            f"spec: adaptive.rule: got {adaptive.get('rule')!r}, expected {' or '.join(RULES)}. "
            "A class of your own is accepted only in a mixture file on the server's machine."
        )
    text = format_spec(spec)
    # the reader of mixture files would replace it by another key of the file
    if "${" in text:
        raise ValueError("spec: got a reference ${...}, expected plain values.")
    name = read_name(request, "name") if request.get("name") is not None else name_mixture(spec)
    return name, spec


def format_spec(spec: dict[str, Any]) -> str:
    """Return the keys of a mixture as JSON, equal for equal keys in any order. JSON is YAML as well."""
    return json.dumps(spec, sort_keys=True, indent=1, ensure_ascii=False)


def name_mixture(spec: dict[str, Any]) -> str:
    """Return the default name of a mixture, a hash of its keys."""
    return f"m{hashlib.sha256(format_spec(spec).encode()).hexdigest()[:16]}"


def format_condition(condition: str | Condition) -> str:
    """Return a condition as SQL, which the server parses and checks. A string is SQL already."""
    if isinstance(condition, str):
        return condition
    if condition.parts:
        parts = [format_condition(part) for part in condition.parts]
        return (
            f"(NOT {parts[0]})"
            if condition.operator == "NOT"
            else f"({f' {condition.operator} '.join(parts)})"
        )
    name, values = quote_identifier(condition.name), [_format_value(value) for value in condition.values]
    if condition.operator == "IN":
        return f"({name} IN ({', '.join(values)}))"
    if condition.operator == "contains":
        return f"contains({name}, {values[0]})"
    return f"({' '.join([name, condition.operator, ' AND '.join(values)]).strip()})"


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, int | float):
        return repr(value)
    text = value.isoformat() if isinstance(value, date) else str(value)
    # the only character that ends a string in SQL is a quote
    return "'" + text.replace("'", "''") + "'"
