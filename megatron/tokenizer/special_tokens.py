"""The special tokens that transformers' settings beside a tokenizer name, and the files that hold them."""

import json
from pathlib import Path
from typing import Any

from megatron.tokenizer.hub import cached_file

CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
KINDS = ("bos", "eos", "pad", "unk")
CLASS_BOS = {"GPT2Tokenizer": "<|endoftext|>", "GPT2TokenizerFast": "<|endoftext|>"}  # where none is named


def companion(name: str, file: str) -> Path | None:
    """A file beside the tokenizer of a folder, a file or a hub name (in its cache); None: not there."""
    path = Path(name)
    if path.is_dir():
        found = path / file
    elif path.is_file():
        if path.suffix not in (".json", ".model"):
            return None  # of llama2.c
        found = path.with_name(file)
    elif name.startswith((".", "/")) or name.count("/") > 1:
        return None
    else:
        return cached_file(name, file)
    return found if found.is_file() else None


def read_settings(name: str, file: str) -> dict[str, Any] | None:
    """The content of CONFIG or MAP beside a tokenizer; None where it is not there. ValueError."""
    path = companion(name, file)
    if path is None:
        return None
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); fetch the tokenizer again") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: got {type(settings).__name__}, expected an object; fetch it again")
    return settings


def special_tokens(name: str) -> dict[str, str] | None:
    """{"bos": token, ...} that the settings name, as transformers reads them; None without settings.

    CONFIG is read first, then MAP. ValueError for a token that is no text.
    """
    config, mapped = read_settings(name, CONFIG), read_settings(name, MAP)
    if config is None and mapped is None:
        return None
    tokens = {}
    for kind in KINDS:
        for settings in (config or {}, mapped or {}):
            token = settings.get(f"{kind}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None and not isinstance(token, str):
                raise ValueError(
                    f"{name}: {kind}_token is {token!r}, expected text; fetch the tokenizer again"
                )
            if token:
                tokens.setdefault(kind, token)
    class_bos = CLASS_BOS.get(str((config or {}).get("tokenizer_class")))
    if class_bos and "bos_token" not in (config or {}):
        tokens.setdefault("bos", class_bos)
    return tokens


def special_ids(name: str, tokenizer: Any) -> dict[str, int]:
    """{"bos": id, ...} of the named tokens that are in the vocabulary; without settings of bos alone.

    Then bos is the id that the tokenizer itself puts before a text, where it does.
    """
    tokens = special_tokens(name)
    if tokens is None:
        bos_id = getattr(tokenizer, "bos_id", None)
        return {} if bos_id is None else {"bos": bos_id}
    inner = getattr(tokenizer, "inner", None)
    ids = {kind: inner.token_to_id(token) for kind, token in tokens.items()} if inner is not None else {}
    return {kind: token_id for kind, token_id in ids.items() if token_id is not None}


def prefix_id(name: str, tokenizer: Any) -> int:
    """What stands before a text without context, as in lm-eval's `hf`: bos, else the end of a document."""
    return special_ids(name, tokenizer).get("bos", tokenizer.eod_id)
