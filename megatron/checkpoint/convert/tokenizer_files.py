"""Read and write transformers' files of a tokenizer: special tokens, chat template, tokenizer.json."""

import json
import shutil
from pathlib import Path
from typing import Any

from megatron.io import read_json
from megatron.log import get_logger
from megatron.tokenizer.bpe import BpeTokenizer
from megatron.tokenizer.eod import CONFIG, read_token
from megatron.tokenizer.hub_cache import find_cached_file
from megatron.tokenizer.kinds import load_tokenizer_by_name

log = get_logger(__name__)

MAP = "special_tokens_map.json"
TOKEN_KINDS = ("bos", "eos", "pad", "unk")
# bos token of a class if none is configured
CLASS_BOS = {"GPT2Tokenizer": "<|endoftext|>", "GPT2TokenizerFast": "<|endoftext|>"}
TEMPLATE = "chat_template.jinja"


def write_tokenizer(name: str, folder: Path) -> dict[str, Any]:
    """Write the files of a tokenizer, given by folder, file or name; return its keys for config.json.

    Files of transformers next to it are copied: names of special tokens and the
    chat template. This project's end-of-document token is written as eos_token.
    Errors as in `kinds.load_tokenizer_by_name`, and ValueError for a kind that
    transformers has no files for.
    """
    tokenizer = load_tokenizer_by_name(name)
    # This project's end-of-document id overrides: generation
    # must stop at the token that ended documents in training.
    ids = find_special_ids(name, tokenizer) | {"eos": tokenizer.eod_id}
    copied = [TEMPLATE]
    if isinstance(tokenizer, BpeTokenizer):
        tokenizer.save(folder)
        words = {kind: tokenizer.inner.id_to_token(token_id) for kind, token_id in ids.items()}
        _write_settings(name, folder, words)
    elif Path(name).is_file():
        shutil.copyfile(name, folder / "tokenizer.model")
        copied += [CONFIG, MAP]
    else:
        raise ValueError(f"{name}: transformers has no files for this kind of tokenizer")
    for file in copied:
        if path := find_companion_file(name, file):
            shutil.copyfile(path, folder / file)
    return {f"{kind}_token_id": i for kind, i in ids.items() if kind != "unk"}


def _write_settings(name: str, folder: Path, words: dict[str, str | None]) -> None:
    """Write tokenizer_config.json, copied or made from the special tokens, and special_tokens_map.json."""
    settings = read_settings(name, CONFIG)
    if settings is None:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        settings |= {f"{kind}_token": word for kind, word in words.items()}
    # transformers would try to load the code that
    # auto_map names, which is not in the folder
    if settings.pop("auto_map", None) is not None:
        log.warning("%s: its auto_map names code that is not copied; tokenizer.json is used without it", name)
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    for file, content in ((CONFIG, settings), (MAP, read_settings(name, MAP))):
        if content is None:
            continue
        if read_token(content, "eos_token", name) != words["eos"]:
            content["eos_token"] = words["eos"]
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / file).write_text(text, encoding="utf-8")


def find_companion_file(name: str, file: str) -> Path | None:
    """Return a file beside the tokenizer of a folder, file or hub name (in its cache), or None."""
    path = Path(name)
    if not path.exists():
        is_hub_name = not name.startswith((".", "/")) and name.count("/") <= 1
        return find_cached_file(name, file) if is_hub_name else None
    companion = path / file if path.is_dir() else path.with_name(file)
    return companion if companion.is_file() else None


def read_settings(name: str, file: str) -> dict[str, Any] | None:
    """Return the content of CONFIG or MAP beside a tokenizer, or None. Raises ValueError for other JSON."""
    path = find_companion_file(name, file)
    return None if path is None else read_json(path)


def find_special_ids(name: str, tokenizer: Any) -> dict[str, int]:
    """Return {"bos": id, ...} of the configured tokens in the vocabulary, as transformers reads them.

    CONFIG has precedence over MAP. Without a configuration only bos is
    returned, if the tokenizer puts such an id before a text. Raises ValueError
    for a token that is not text.
    """
    config, token_map = read_settings(name, CONFIG), read_settings(name, MAP)
    if config is None and token_map is None:
        bos_id = getattr(tokenizer, "bos_id", None)
        return {} if bos_id is None else {"bos": bos_id}
    config, token_map = config or {}, token_map or {}
    tokens = {}
    # an explicit null in the configuration disables the default of the class
    if "bos_token" not in config:
        tokens["bos"] = CLASS_BOS.get(str(config.get("tokenizer_class")))
    for kind in TOKEN_KINDS:
        # MAP only adds what CONFIG lacks
        entries = [read_token(settings, f"{kind}_token", name) for settings in (config, token_map)]
        tokens[kind] = entries[0] or entries[1] or tokens.get(kind)
    inner = getattr(tokenizer, "inner", None)
    ids = {kind: inner.token_to_id(token) for kind, token in tokens.items() if token and inner is not None}
    return {kind: token_id for kind, token_id in ids.items() if token_id is not None}


def find_prefix_id(name: str, tokenizer: Any) -> int:
    """Return the id before a text without context, as lm-eval's `hf`: bos, else end of document."""
    return find_special_ids(name, tokenizer).get("bos", tokenizer.eod_id)
