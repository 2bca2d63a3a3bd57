"""Sidecar of a dataset: reads and validates its JSON, and how its documents end.

The sidecar of `<prefix>.bin/.idx` is `<prefix>.json`. That of a dataset of parts is `<prefix>.parts.json`,
which also lists the parts (megatron/data/parts.py); `<prefix>.parts.idx` is its index.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.schema import SYNTHETIC as SYNTHETIC  # re-exported for readers of datasets
from megatron.plan.idx_header import DTYPE_NAMES
from megatron.remote_cache import localize
from megatron.remote_requests import is_url

# practically endless; the default vocabulary size is GPT-2's
SYNTHETIC_SIDECAR = {"tokens": 1 << 62, "tokenizer": {"n_tokens": 50257}, "sha256": SYNTHETIC}
MAX_COUNT = 1 << 63
PARTS_SUFFIX = ".parts.json"
PARTS_INDEX_SUFFIX = ".parts.idx"

# (returns whether a value is valid, description of valid values)
FieldCheck = tuple[Callable[[Any], bool], str]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_COUNT


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _or_null(check: FieldCheck) -> FieldCheck:
    return (lambda value: value is None or check[0](value)), f"{check[1]} or null"


# JSON does not separate counts from other numbers: 1.0, true, -1 and 10^30 are rejected
COUNT: FieldCheck = (_is_count, "a whole number")
NUMBER: FieldCheck = (_is_number, "a finite number")
SIZE: FieldCheck = (lambda value: _is_count(value) and value > 0), "a whole number of 1 or more"
STRING: FieldCheck = ((lambda value: isinstance(value, str)), "a string")
BOOLEAN: FieldCheck = ((lambda value: isinstance(value, bool)), "true or false")
OBJECT: FieldCheck = ((lambda value: isinstance(value, dict)), "an object")
OBJECTS: FieldCheck = (
    (lambda value: isinstance(value, list) and all(isinstance(item, dict) for item in value)),
    "a list of objects",
)
FIELDS: dict[str, FieldCheck] = {
    "dtype": (
        (lambda value: isinstance(value, str) and value in DTYPE_NAMES.values()),
        "one of " + ", ".join(DTYPE_NAMES.values()),
    ),
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
    "part": OBJECT,
    "merged_from": OBJECTS,
    "subset_of": OBJECT,
    "parts": OBJECTS,
}
PART_FIELDS: dict[str, FieldCheck] = {
    "path": STRING,
    "documents": COUNT,
    "tokens": COUNT,
    "mtime_ns": COUNT,
    "sidecar_sha256": _or_null(STRING),
    "sha256": OBJECT,
}
TOKENIZER_FIELDS: dict[str, FieldCheck] = {
    "name": _or_null(STRING),
    "sha256": _or_null(STRING),
    "n_tokens": _or_null(COUNT),
    "eod_id": _or_null(COUNT),
    "eod_token": _or_null(STRING),
    "eod_from": _or_null(STRING),
}
# block_bytes: the two are hashes of the hashes of blocks of this size (megatron/data/block_hash.py)
SUM_FIELDS: dict[str, FieldCheck] = {"bin": STRING, "idx": STRING, "block_bytes": SIZE}


def is_dataset_of_parts(prefix: str | Path) -> bool:
    """Return whether a prefix names a dataset of parts. Raises ValueError if it also names a .bin or .idx."""
    if is_url(prefix):
        return False
    parts = Path(f"{prefix}{PARTS_SUFFIX}")
    if not parts.is_file():
        return False
    for suffix in (".bin", ".idx"):
        if Path(f"{prefix}{suffix}").is_file():
            raise ValueError(
                f"{parts}: got {prefix}{suffix} as well, expected a list of parts or a .bin/.idx dataset. "
                "Delete or rename one of them."
            )
    return True


def dataset_exists(prefix: str | Path) -> bool:
    """Return whether a prefix or URL names a dataset: .bin and .idx, or a list of parts.

    Raises as `is_dataset_of_parts`, and RemoteError for a URL without one.
    """
    if is_url(prefix):
        return Path(f"{localize(prefix)}.idx").is_file()
    return is_dataset_of_parts(prefix) or all(Path(f"{prefix}{end}").is_file() for end in (".bin", ".idx"))


def find_sidecar(prefix: str | Path) -> Path | None:
    """Return the path of the sidecar of a dataset, of a URL that in the cache; None if there is none.

    Raises as `is_dataset_of_parts`.
    """
    if is_dataset_of_parts(prefix):
        return Path(f"{prefix}{PARTS_SUFFIX}")
    path = Path(f"{localize(prefix)}.json")
    return path if path.is_file() else None


def read_sidecar(prefix: str | Path) -> dict[str, Any]:
    """Read the sidecar of a .bin/.idx dataset and check the types of its known fields.

    Raises FileNotFoundError if there is none, ValueError for invalid content.
    """
    if str(prefix) == SYNTHETIC:
        return SYNTHETIC_SIDECAR
    path = find_sidecar(prefix)
    if path is None:
        raise FileNotFoundError(
            f"{prefix}.json: no such file, expected the prefix of a .bin/.idx/.json dataset, "
            "as tools/preprocess_data_many_cores.py writes it"
        )
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{path}: got invalid JSON ({reason}), expected an object. Preprocess the corpus again."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: got {type(content).__name__}, expected an object. Preprocess the corpus again."
        )
    _check_fields(path, "", content, FIELDS)
    _check_fields(path, "tokenizer.", content.get("tokenizer") or {}, TOKENIZER_FIELDS)
    _check_fields(path, "sha256.", content.get("sha256") or {}, SUM_FIELDS | {"parts": STRING})
    for number, part in enumerate(content.get("parts") or []):
        _check_fields(path, f"parts[{number}].", part, PART_FIELDS)
        _check_fields(path, f"parts[{number}].sha256.", part.get("sha256") or {}, SUM_FIELDS)
    return content


def _check_fields(path: Path, where: str, content: dict[str, Any], checks: dict[str, FieldCheck]) -> None:
    for name, (is_valid, expected) in checks.items():
        # unknown and missing keys are accepted: files of older and newer versions have fewer or more
        if name in content and not is_valid(content[name]):
            raise ValueError(
                f"{path}: {where}{name}: got {str(content[name])[:40]!r}, expected {expected}. "
                "Preprocess the corpus again, or delete this file if another program wrote it."
            )


@dataclass(frozen=True)
class EodUse:
    """End of the documents of a dataset: the token `eod_id`, or None for no end-of-document token."""

    eod_id: int | None

    def __str__(self) -> str:
        return "no end-of-document token" if self.eod_id is None else f"end-of-document id {self.eod_id}"


def parse_eod_use(sidecar: dict[str, Any] | None) -> EodUse | None:
    """Return how the documents of a dataset end according to its sidecar; None if it is not recorded."""
    appended = (sidecar or {}).get("append_eod")
    if sidecar is None or appended is None:
        return None
    # false and missing differ: false records that documents have no end token
    if not appended:
        return EodUse(None)
    eod_id = (sidecar.get("tokenizer") or {}).get("eod_id")
    return None if eod_id is None else EodUse(eod_id)


def read_eod_use(prefix: str) -> EodUse | None:
    """Return how the documents of a dataset end; None if it is not recorded or there is no sidecar."""
    has_sidecar = prefix != SYNTHETIC and find_sidecar(prefix) is not None
    return parse_eod_use(read_sidecar(prefix)) if has_sidecar else None
