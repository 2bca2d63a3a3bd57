"""Tokenizers as transformers keeps them beside a model."""

import json
import shutil
from pathlib import Path
from typing import Any

from megatron.log import get_logger
from megatron.tokenizer.bpe import BpeTokenizer
from megatron.tokenizer.kinds import load_by_name
from megatron.tokenizer.special_tokens import CONFIG, MAP, companion, read_settings, special_ids

log = get_logger(__name__)

TEMPLATE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"
COPIED = (TEMPLATE, "chat_template.json")


def write_tokenizer(name: str, folder: Path) -> dict[str, Any]:
    """Write the files of a tokenizer, given by folder, file or name; gives its keys for config.json.

    Settings of transformers beside it go with it: names of special tokens, chat templates. What ends a
    document here is written as eos_token.
    Errors as `kinds.load_by_name`, and ValueError for a kind that transformers has no files for.
    """
    tokenizer = load_by_name(name)
    ids = special_ids(name, tokenizer) | {"eos": tokenizer.eod_id}
    _copy_templates(name, folder)
    if isinstance(tokenizer, BpeTokenizer):
        tokenizer.save(folder)
        words = {kind: tokenizer.inner.id_to_token(i) for kind, i in ids.items()}
        _write_settings(name, folder, words)
    elif Path(name).is_file():
        shutil.copyfile(name, folder / "tokenizer.model")
        for file in (CONFIG, MAP):
            if path := companion(name, file):
                shutil.copyfile(path, folder / file)
    else:
        raise ValueError(f"{name}: transformers has no files for this kind of tokenizer")
    return {f"{kind}_token_id": i for kind, i in ids.items() if kind != "unk"}


def _write_settings(name: str, folder: Path, words: dict[str, str]) -> None:
    """tokenizer_config.json: as beside the source, else made of the special tokens; and its map of them."""
    settings, tokens = read_settings(name, CONFIG), read_settings(name, MAP)
    if settings is None:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        settings |= {f"{kind}_token": word for kind, word in words.items()}
    if settings.pop("auto_map", None) is not None:
        log.warning("%s: its auto_map names code that is not copied; tokenizer.json is read without it", name)
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    for held in (settings, tokens):
        if held is not None and _word(held.get("eos_token")) != words["eos"]:
            held["eos_token"] = words["eos"]
    _write(folder / CONFIG, settings)
    if tokens is not None:
        _write(folder / MAP, tokens)


def _copy_templates(name: str, folder: Path) -> None:
    for file in COPIED:
        if path := companion(name, file):
            shutil.copyfile(path, folder / file)
    templates = Path(name) / TEMPLATES
    if templates.is_dir():
        (folder / TEMPLATES).mkdir()
        for path in sorted(templates.glob("*.jinja")):
            shutil.copyfile(path, folder / TEMPLATES / path.name)


def _word(token: Any) -> Any:
    """A special token is text, or an object with its text as content."""
    return token.get("content") if isinstance(token, dict) else token


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
