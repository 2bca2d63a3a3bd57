"""Which token ends a document: one rule for folders, files and names of the hub.

1. what the caller names (--eod-token, --eod-id)
2. `eos_token` of the tokenizer_config.json beside the tokenizer's own file
3. the first of EOD_NAMES that the vocabulary has
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.yaml_file import is_one_line
from megatron.run_dir import read_json

EOD_NAMES = ("<|endoftext|>", "<eod>", "</s>", "<|end_of_text|>")
CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class Eod:
    """The end-of-document token. `token` is None for an id without a text; `source`: which rule chose it."""

    id: int
    token: str | None
    source: str


class WithEod:
    """A tokenizer of which the end-of-document token may be unknown."""

    name: str
    n_tokens: int
    eod: Eod | None
    missing_eod = "none is known"

    @property
    def eod_id(self) -> int:
        """The id that ends a document. ValueError where none is known."""
        if self.eod is None:
            raise ValueError(
                f"{self.name}: got no end-of-document token ({self.missing_eod}), expected one. "
                "Name it with --eod-token or --eod-id."
            )
        return self.eod.id

    def token_id(self, token: str) -> int | None:
        """The id of a token of the vocabulary."""
        raise NotImplementedError

    def choose_eod(self, token: str | None, number: int | None) -> None:
        """Replace the end by what the caller names. ValueError for what the vocabulary lacks."""
        if token is not None and number is not None:
            raise ValueError("--eod-token, --eod-id: got both, expected one of them. Leave one out.")
        if token is not None:
            found = self.token_id(token)
            if found is None:
                raise ValueError(
                    f"--eod-token: got '{token}', expected a token of {self.name}. "
                    "Its vocabulary must have it as one token."
                )
            self.eod = Eod(found, token, "--eod-token")
        if number is not None:
            if not 0 <= number < self.n_tokens:
                raise ValueError(
                    f"--eod-id: got {number}, expected 0 to {self.n_tokens - 1}. "
                    f"{self.name} has {self.n_tokens} ids."
                )
            self.eod = Eod(number, None, "--eod-id")


def configured_eos(config: Path | None) -> str | None:
    """`eos_token` of a tokenizer_config.json; None without the file or without the key.

    ValueError for a file of another kind.
    """
    content: Any = None if config is None else read_json(config)
    if content is None:
        return None
    if not isinstance(content, dict):
        raise ValueError(f"{config}: got {type(content).__name__}, expected an object. Delete it or mend it.")
    token = content.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None and not (isinstance(token, str) and is_one_line(token)):
        raise ValueError(f"{config}: got eos_token {token!r}, expected a line of text. Mend it or delete it.")
    return token


def find_eod(token_to_id: Callable[[str], int | None], eos: str | None) -> tuple[Eod | None, str]:
    """The end by rules 2 and 3, or None and why; nothing is guessed for an `eos` not in the vocabulary."""
    for token in (eos,) if eos is not None else EOD_NAMES:
        number = token_to_id(token)
        if number is not None:
            return Eod(number, token, CONFIG if eos is not None else "well-known name"), ""
    words = f"eos_token {eos} of its {CONFIG}" if eos is not None else f"none of {', '.join(EOD_NAMES)}"
    return None, f"{words} is{' not' if eos is not None else ''} in the vocabulary"
