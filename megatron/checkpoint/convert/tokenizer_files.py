"""Write tokenizer files in the format of transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

from megatron.log import get_logger
from megatron.tokenizer.bpe import BpeTokenizer
from megatron.tokenizer.eod import CONFIG
from megatron.tokenizer.kinds import load_tokenizer_by_name
from megatron.tokenizer.special_tokens import (
    MAP,
    find_companion_file,
    find_special_ids,
    read_settings,
)

log = get_logger(__name__)

TEMPLATE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"
TEMPLATE_FILES = (TEMPLATE, "chat_template.json")


def write_tokenizer(name: str, folder: Path) -> dict[str, Any]:
    """Write the files of a tokenizer, given by folder, file or name; return its keys for config.json.

    Files of transformers next to it are copied: names of special tokens and chat templates. This project's
    end-of-document token is written as eos_token.
    Errors as in `kinds.load_tokenizer_by_name`, and ValueError for a kind that transformers has no files for.
    """
    tokenizer = load_tokenizer_by_name(name)
    # This project's end-of-document id overrides: generation must stop at the token that ended documents in
    # training.
    ids = find_special_ids(name, tokenizer) | {"eos": tokenizer.eod_id}
    _copy_templates(name, folder)
    if isinstance(tokenizer, BpeTokenizer):
        tokenizer.save(folder)
        _write_settings(name, folder, {kind: _get_vocabulary_token(tokenizer, i) for kind, i in ids.items()})
    elif Path(name).is_file():
        shutil.copyfile(name, folder / "tokenizer.model")
        for file in (CONFIG, MAP):
            if path := find_companion_file(name, file):
                shutil.copyfile(path, folder / file)
    else:
        raise ValueError(f"{name}: transformers has no files for this kind of tokenizer")
    return {f"{kind}_token_id": i for kind, i in ids.items() if kind != "unk"}


def _get_vocabulary_token(tokenizer: BpeTokenizer, token_id: int) -> str:
    token = tokenizer.inner.id_to_token(token_id)
    assert token is not None, "`find_special_ids` returns ids of the vocabulary"
    return token


def _write_settings(name: str, folder: Path, words: dict[str, str]) -> None:
    """Write tokenizer_config.json, copied or made from the special tokens, and special_tokens_map.json."""
    settings, tokens = read_settings(name, CONFIG), read_settings(name, MAP)
    if settings is None:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        settings |= {f"{kind}_token": word for kind, word in words.items()}
    # transformers would try to load the code that auto_map names, which is not in the folder
    if settings.pop("auto_map", None) is not None:
        log.warning("%s: its auto_map names code that is not copied; tokenizer.json is used without it", name)
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    for content in (settings, tokens):
        if content is not None and _get_token_text(content.get("eos_token")) != words["eos"]:
            content["eos_token"] = words["eos"]
    _write_json(folder / CONFIG, settings)
    if tokens is not None:
        _write_json(folder / MAP, tokens)


def _copy_templates(name: str, folder: Path) -> None:
    for file in TEMPLATE_FILES:
        if path := find_companion_file(name, file):
            shutil.copyfile(path, folder / file)
    templates = Path(name) / TEMPLATES
    if templates.is_dir():
        (folder / TEMPLATES).mkdir()
        for path in sorted(templates.glob("*.jinja")):
            shutil.copyfile(path, folder / TEMPLATES / path.name)


def _get_token_text(token: Any) -> Any:
    """Return the text of a special token, which is a string or an object with the key `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
