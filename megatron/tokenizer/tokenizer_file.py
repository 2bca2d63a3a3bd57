"""Reading of a BPE tokenizer.json without the library's tokenizer, which takes seconds to build.

The library builds and validates everything but vocabulary and merges,
in a tokenizer of a few hundred pieces.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from megatron import _csrc

MAX_HOLES = 1 << 16


@dataclass(frozen=True)
class BpeFile:
    """Attributes of a BpeTokenizer, with the values of the library's tokenizer.

    added_ids  id of each added token
    """

    model: "_csrc.TokenizerModel"
    sha256: str
    n_tokens: int
    bos_id: int | None
    added_ids: dict[str, int]


def read_bpe_file(content: bytes) -> BpeFile | None:
    """Return the attributes of a tokenizer.json. None: only the library reads or refuses it correctly."""
    try:
        model = _csrc.TokenizerModel(content)
        settings = json.loads(model.settings, parse_float=_refuse_float)
    except (ValueError, RecursionError):
        return None
    largest = model.largest_id
    # dropout as a float is not read above; the library refuses it, or
    # is refused (BpeTokenizer)
    if isinstance(settings, dict) and settings.get("model", {}).get("dropout"):
        return None
    if not len(model) or largest >= len(model) + MAX_HOLES or not isinstance(settings, dict):
        return None
    added_ids = _find_added_ids(model, settings.get("added_tokens"))
    if added_ids is None:
        return None
    reduced = _read_reduced(model, settings, added_ids)
    if reduced is None:
        return None
    text, bos_id = reduced
    return BpeFile(model, _hash(text, model), 1 + max(largest, *added_ids.values(), 0), bos_id, added_ids)


def _refuse_float(text: str) -> float:
    """Python writes a float in another way than the library: 1e-5 as 1e-05."""
    raise ValueError(text)


def _find_added_ids(model: "_csrc.TokenizerModel", added: Any) -> dict[str, int] | None:
    """Return the ids of the added tokens, or None if the library would assign other ids than the file."""
    if not isinstance(added, list):
        return None
    ids: dict[str, int] = {}
    largest = -1
    for token in added:
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str) or not content or content in ids:
            return None
        try:
            token_id = model.find(content)
        except UnicodeEncodeError:
            return None
        if token_id is None:
            token_id = largest + 1 if largest >= len(model) else len(model)
        if token.get("id") != token_id or token_id in ids.values():
            return None
        ids[content] = token_id
        largest = max(largest, token_id)
    return ids


def _read_reduced(
    model: "_csrc.TokenizerModel", settings: dict[str, Any], added_ids: dict[str, int]
) -> tuple[str, int | None] | None:
    """Return (JSON of the library without vocabulary and merges, bos_id) from a tokenizer without merges.

    None if the library refuses it.
    """
    from tokenizers import Tokenizer

    pieces = dict.fromkeys([*added_ids, *model.single_characters()])
    unknown = settings["model"].get("unk_token")
    if isinstance(unknown, str) and model.find(unknown) is not None:
        pieces[unknown] = None
    reduced_model = {**settings["model"], "vocab": {piece: i for i, piece in enumerate(pieces)}}
    try:
        inner = Tokenizer.from_str(json.dumps({**settings, "model": reduced_model}))
        inner.no_truncation()
        inner.no_padding()
        encoding = inner.encode("a", add_special_tokens=True)
        written = json.loads(inner.to_str())
    except Exception:  # the library raises plain Exception for invalid files
        return None
    if written["model"]["type"] != "BPE" or len(written["added_tokens"]) != len(added_ids):
        return None
    written["model"]["vocab"], written["model"]["merges"] = {}, []
    for token in written["added_tokens"]:
        token["id"] = added_ids[token["content"]]
    written["added_tokens"].sort(key=lambda token: token["id"])
    bos_id = encoding.ids[0] if encoding.special_tokens_mask[:1] == [1] else None
    return json.dumps(written, ensure_ascii=False, separators=(",", ":")), bos_id


def _hash(text: str, model: "_csrc.TokenizerModel") -> str:
    """Return the checksum of the library's serialised tokenizer; pieces and merges are last in it."""
    head, separator, tail = text.rpartition('"vocab":{},"merges":[]')
    assert separator, "the order of keys in tokenizers"
    assert tail == "}}", "the order of keys in tokenizers"
    checksum = hashlib.sha256(f'{head}"vocab":'.encode())
    checksum.update(model.vocab_json())
    checksum.update(b',"merges":')
    checksum.update(model.merges_json() + b"}}")
    return checksum.hexdigest()
