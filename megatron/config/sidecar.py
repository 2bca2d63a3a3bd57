"""The JSON beside a .bin/.idx dataset: read and validated in one place, and how its documents end."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SYNTHETIC = "synthetic"  # instead of a prefix: random tokens without files
# they do not end; the vocabulary is of a usual size, GPT-2's, where the model does not say
SYNTHETIC_SIDECAR = {"tokens": 1 << 62, "tokenizer": {"n_tokens": 50257}, "sha256": SYNTHETIC}
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "uint16")
LARGEST = 1 << 63

Check = tuple[Callable[[Any], bool], str]  # whether a value is sound, and what is expected


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _or_null(check: Check) -> Check:
    return (lambda value: value is None or check[0](value)), f"{check[1]} or null"


COUNT: Check = (_is_count, "a whole number")
NUMBER: Check = (_is_number, "a finite number")
STRING: Check = ((lambda value: isinstance(value, str)), "a string")
BOOLEAN: Check = ((lambda value: isinstance(value, bool)), "true or false")
OBJECT: Check = ((lambda value: isinstance(value, dict)), "an object")
OBJECTS: Check = (
    (lambda value: isinstance(value, list) and all(isinstance(item, dict) for item in value)),
    "a list of objects",
)
FIELDS: dict[str, Check] = {
    "dtype": ((lambda value: isinstance(value, str) and value in DTYPES), f"one of {', '.join(DTYPES)}"),
    "documents": COUNT,
    "tokens": COUNT,
    "empty_documents": COUNT,
    "longest_document": COUNT,
    "rejected_lines": COUNT,
    "rejected_files": COUNT,
    "unigram_entropy_nats": _or_null(NUMBER),
    "append_eod": BOOLEAN,
    "special_text": BOOLEAN,
    "json_key": STRING,
    "job": _or_null(STRING),
    "tokenizer": _or_null(OBJECT),
    "sha256": OBJECT,
    "sources": OBJECTS,
    "merged_from": OBJECTS,
    "subset_of": OBJECT,
}
TOKENIZER_FIELDS: dict[str, Check] = {
    "name": _or_null(STRING),
    "sha256": _or_null(STRING),
    "n_tokens": _or_null(COUNT),
    "eod_id": _or_null(COUNT),
    "eod_token": _or_null(STRING),
    "eod_from": _or_null(STRING),
}


def read_sidecar(prefix: str | Path) -> dict[str, Any]:
    """The JSON beside a .bin/.idx dataset, its known fields of the right types.

    FileNotFoundError where there is none, ValueError in one sentence for what is not sound.
    """
    if str(prefix) == SYNTHETIC:
        return SYNTHETIC_SIDECAR
    path = Path(f"{prefix}.json")
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; wanted the prefix of a .bin/.idx/.json triple, "
            "as tools/preprocess_data_many_cores.py writes it"
        )
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: not JSON ({reason}); preprocess the corpus again") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: got {type(content).__name__}, expected an object. Preprocess the corpus again."
        )
    _check_fields(path, "", content, FIELDS)
    _check_fields(path, "tokenizer.", content.get("tokenizer") or {}, TOKENIZER_FIELDS)
    _check_fields(path, "sha256.", content.get("sha256") or {}, {"bin": STRING, "idx": STRING})
    return content


def _check_fields(path: Path, where: str, content: dict[str, Any], checks: dict[str, Check]) -> None:
    for name, (is_sound, expected) in checks.items():
        if name in content and not is_sound(content[name]):
            raise ValueError(
                f"{path}: {where}{name}: got {str(content[name])[:40]!r}, expected {expected}. "
                "Preprocess the corpus again, or delete this file if another program wrote it."
            )


@dataclass(frozen=True)
class EodUse:
    """How the documents of a dataset end: each with `eod_id`, or, where it is None, with their text."""

    eod_id: int | None

    def __str__(self) -> str:
        return "no end-of-document token" if self.eod_id is None else f"end-of-document id {self.eod_id}"


def eod_use(sidecar: dict[str, Any] | None) -> EodUse | None:
    """What a sidecar says of the ends of documents; None where it says nothing."""
    appended = (sidecar or {}).get("append_eod")
    if sidecar is None or appended is None:
        return None
    if not appended:
        return EodUse(None)
    number = (sidecar.get("tokenizer") or {}).get("eod_id")
    return None if number is None else EodUse(number)


def eod_use_of(prefix: str) -> EodUse | None:
    """`eod_use` of a prefix; None, too, where it has no sidecar."""
    has_sidecar = prefix != SYNTHETIC and Path(f"{prefix}.json").is_file()
    return eod_use(read_sidecar(prefix)) if has_sidecar else None
