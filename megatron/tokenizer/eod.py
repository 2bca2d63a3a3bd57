"""Base of tokenizers, and their end-of-document token, equal for folders, files and names of the hub.

1. the token or id of the caller (--eod-token, --eod-id)
2. `eos_token` of the tokenizer_config.json beside the tokenizer's file
3. the only one of EOD_NAMES in the vocabulary; if it has several, the caller must choose
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.yaml_file import is_single_line
from megatron.io import read_json

EOD_NAMES = ("<|endoftext|>", "<eod>", "</s>", "<|end_of_text|>")
CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class Eod:
    """End-of-document token. `token` is None for an id without text; `source` names the rule applied."""

    id: int
    token: str | None
    source: str


class Tokenizer(ABC):
    """Base of tokenizers. Those with equal `sha256` give equal ids.

    n_tokens      largest id + 1
    eod           end-of-document token, or None if unknown
    missing_eod   reason why it is unknown
    """

    name: str
    n_tokens: int
    sha256: str
    eod: Eod | None
    missing_eod = "the tokenizer defines none"

    @property
    def eod_id(self) -> int:
        """End-of-document id. Raises ValueError if it is unknown."""
        if self.eod is None:
            raise ValueError(
                f"{self.name}: got no end-of-document token ({self.missing_eod}), expected one. "
                "Set it with --eod-token or --eod-id."
            )
        return self.eod.id

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary, or None."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without end-of-document tokens."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""

    def choose_eod(self, token: str | None, number: int | None) -> None:
        """Set the end-of-document token to the caller's token or id. Raises ValueError for an unknown one."""
        if token is not None and number is not None:
            raise ValueError("--eod-token, --eod-id: got both, expected one of them. Remove one.")
        if token is not None:
            if (token_id := self.token_id(token)) is None:
                raise ValueError(
                    f"--eod-token: got '{token}', expected a token of {self.name}. "
                    "Its vocabulary must have it as one token."
                )
            self.eod = Eod(token_id, token, "--eod-token")
        if number is not None:
            if not 0 <= number < self.n_tokens:
                raise ValueError(
                    f"--eod-id: got {number}, expected 0 to {self.n_tokens - 1}. "
                    f"{self.name} has {self.n_tokens} ids."
                )
            self.eod = Eod(number, None, "--eod-id")


def read_configured_eos(config: Path | None) -> str | None:
    """Return `eos_token` of a tokenizer_config.json, or None without the file or the key.

    Raises ValueError for invalid content.
    """
    content = None if config is None else read_json(config)
    return None if content is None else read_token(content, "eos_token", str(config))


def read_token(settings: dict[str, Any], key: str, where: str) -> str | None:
    """Return the text of a special token: text, or a serialised AddedToken {"content": "</s>", ...}."""
    token = settings.get(key)
    token = token.get("content") if isinstance(token, dict) else token
    if token is not None and not (isinstance(token, str) and is_single_line(token)):
        raise ValueError(f"{where}: got {key} {token!r}, expected a line of text. Correct the file.")
    return token


def find_eod(token_to_id: Callable[[str], int | None], eos: str | None) -> tuple[Eod | None, str]:
    """Return (end-of-document token by rules 2 and 3, ""), or (None, reason).

    If `eos` is configured but not in the vocabulary,
    rule 3 is not applied. Documents of one corpus must
    not end with a token that depends on the order of a list:
    several well-known names are ambiguous.
    """
    # a configured token that is missing must not be replaced by another
    # one: that would go unnoticed
    words = (eos,) if eos is not None else EOD_NAMES
    ends = [(token, number) for token in words if (number := token_to_id(token)) is not None]
    if len(ends) == 1:
        token, number = ends[0]
        return Eod(number, token, CONFIG if eos is not None else "well-known name"), ""
    if ends:
        return None, f"its vocabulary has {' and '.join(token for token, _ in ends)}"
    names = f"eos_token {eos} of its {CONFIG}" if eos is not None else f"none of {', '.join(EOD_NAMES)}"
    return None, f"{names} is{' not' if eos is not None else ''} in the vocabulary"
