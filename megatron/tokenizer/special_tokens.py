"""Special tokens in transformers' configuration files beside a tokenizer."""

from pathlib import Path
from typing import Any

from megatron.io import read_json
from megatron.tokenizer.eod import CONFIG, read_token
from megatron.tokenizer.hub_cache import find_cached_file

MAP = "special_tokens_map.json"
TOKEN_KINDS = ("bos", "eos", "pad", "unk")
CLASS_BOS = {
    "GPT2Tokenizer": "<|endoftext|>",
    "GPT2TokenizerFast": "<|endoftext|>",
}  # bos token of a class if none is configured


def find_companion_file(name: str, file: str) -> Path | None:
    """Return a file beside the tokenizer of a folder, file or hub name (in its cache), or None."""
    path = Path(name)
    if path.is_dir():
        companion = path / file
    elif path.is_file():
        if path.suffix not in (".json", ".model"):
            return None  # a tokenizer of llama2.c
        companion = path.with_name(file)
    elif name.startswith((".", "/")) or name.count("/") > 1:
        return None
    else:
        return find_cached_file(name, file)
    return companion if companion.is_file() else None


def read_settings(name: str, file: str) -> dict[str, Any] | None:
    """Return the content of CONFIG or MAP beside a tokenizer, or None. Raises ValueError for other JSON."""
    path = find_companion_file(name, file)
    return None if path is None else read_json(path)


def read_special_tokens(name: str) -> dict[str, str] | None:
    """Return the configured {"bos": token, ...} as transformers reads them, or None without a configuration.

    CONFIG has precedence over MAP. Raises ValueError for a token that is not text.
    """
    config, token_map = read_settings(name, CONFIG), read_settings(name, MAP)
    if config is None and token_map is None:
        return None
    tokens: dict[str, str] = {}
    for kind in TOKEN_KINDS:
        for settings in (config or {}, token_map or {}):
            token = read_token(settings, f"{kind}_token", name)
            if token:
                # setdefault: CONFIG is first in the loop, so MAP only adds what CONFIG lacks
                tokens.setdefault(kind, token)
    class_bos = CLASS_BOS.get(str((config or {}).get("tokenizer_class")))
    # an explicit null in the configuration disables the default of the class
    if class_bos and "bos_token" not in (config or {}):
        tokens.setdefault("bos", class_bos)
    return tokens


def find_special_ids(name: str, tokenizer: Any) -> dict[str, int]:
    """Return {"bos": id, ...} of the configured tokens that are in the vocabulary.

    Without a configuration only bos is returned, if the tokenizer puts such an id before a text.
    """
    tokens = read_special_tokens(name)
    if tokens is None:
        bos_id = getattr(tokenizer, "bos_id", None)
        return {} if bos_id is None else {"bos": bos_id}
    inner = getattr(tokenizer, "inner", None)
    ids = {kind: inner.token_to_id(token) for kind, token in tokens.items()} if inner is not None else {}
    return {kind: token_id for kind, token_id in ids.items() if token_id is not None}


def find_prefix_id(name: str, tokenizer: Any) -> int:
    """Return the id before a text without context, as lm-eval's `hf`: bos, else end of document."""
    return find_special_ids(name, tokenizer).get("bos", tokenizer.eod_id)
