"""Requests of the clients of a mixture server: JSON that is checked before it is used."""

import json
from typing import Any

import numpy as np

from megatron.mixture.document_chunks import DocumentChunks

MAX_CHUNKS = 1024  # per request
MAX_BYTES = 1 << 20  # of a request's JSON
REQUEST_KEYS = {"mixture", "identity", "first", "n"}
REPORT_KEYS = {"mixture", "identity", "chunk", "nats", "tokens"}
OPTIONAL_KEYS = {"run"}
MAX_CHUNK = 1 << 40  # largest chunk number


def parse_request(ticket: bytes, mixtures: dict[str, DocumentChunks]) -> dict[str, Any]:
    """Return the content of a ticket: {mixture, identity, first, n}, and perhaps run.

    Raises ValueError for other content.
    """
    request = _parse_json(ticket, REQUEST_KEYS, mixtures)
    for key, most in (("first", MAX_CHUNK), ("n", MAX_CHUNKS)):
        _check_number(request, key, most)
    return request


def parse_report(body: bytes, mixtures: dict[str, DocumentChunks]) -> dict[str, Any]:
    """Return the losses on a chunk: {mixture, identity, chunk, nats, tokens}, and perhaps run.

    nats and tokens are float64 [K]. Raises ValueError for other content.
    """
    report = _parse_json(body, REPORT_KEYS, mixtures)
    _check_number(report, "chunk", MAX_CHUNK)
    for key in ("nats", "tokens"):
        try:
            report[key] = np.array(report[key], dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{key}: expected a list of numbers.") from None
    return report


def _parse_json(content: bytes, keys: set[str], mixtures: dict[str, DocumentChunks]) -> dict[str, Any]:
    try:
        request = json.loads(content) if len(content) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        raise ValueError("request: expected JSON.") from None
    if not isinstance(request, dict) or set(request) - OPTIONAL_KEYS != keys:
        raise ValueError(f"request: expected the keys {', '.join(sorted(keys))}.")
    if not isinstance(request["mixture"], str) or request["mixture"] not in mixtures:
        raise ValueError(f"mixture: got an unknown name, expected one of {', '.join(sorted(mixtures))}.")
    if not isinstance(request.get("run", ""), str):
        raise ValueError("run: expected a name.")
    if request["identity"] != mixtures[request["mixture"]].identity:
        raise ValueError(
            "the documents of the mixture have changed. Start a new run, or restore the documents."
        )
    return request


def _check_number(request: dict[str, Any], key: str, most: int) -> None:
    # not isinstance: bool is a subclass of int
    if type(request[key]) is not int or not 0 <= request[key] <= most:
        raise ValueError(f"{key}: expected an integer from 0 to {most}.")
