"""C++ encoder of byte-level BPE for tokenizers for which it gives exactly the ids of `tokenizers`."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron import _csrc

N_CODE_POINTS = 0x110000
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}


@dataclass(frozen=True)
class FastBpe:
    """Vocabulary and merges of a byte-level BPE in C++. Each thread creates its own worker."""

    vocabulary: "_csrc.BpeVocabulary"

    def create_worker(self) -> "_csrc.BpeWorker":
        """Return cache and buffers for one thread."""
        return _csrc.BpeWorker(self.vocabulary)


@cache
def unicode_to_bytes() -> dict[str, int]:
    """Return the byte of each printable character in byte-level vocabularies (GPT-2's encoder.py).

    Printable Latin-1 bytes map to themselves, the other 68 bytes to the characters from U+0100 on.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(0xAE, 0x100)]
    # 33 control characters and space, 0x7F to 0xA0, and 0xAD, the soft hyphen: 33 + 34 + 1 = 68
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


@cache
def load_code_point_classes() -> np.ndarray:
    """Return the class of every code point, uint8 [0x110000]: 0 other, 1 letter, 2 number, 3 white space.

    The classes are those of `tokenizers`. tools/derive_code_points.py writes them to code_points.json as runs
    of [first code point, class].
    """
    runs = json.loads(Path(__file__).with_name("code_points.json").read_text())["runs"]
    # runs [[0, 0], [9, 3], [14, 0], ...]: starts [0, 9, 14, ...], lengths [9, 5, ...]
    starts, kinds = np.array(runs, dtype=np.int64).T
    lengths = np.diff(np.append(starts, N_CODE_POINTS))  # a run ends where the next one begins
    return np.repeat(kinds.astype(np.uint8), lengths)


def compile_fast_bpe(tokenizer_json: dict[str, Any]) -> tuple[FastBpe | None, str]:
    """Return (encoder, "") if C++ gives exactly the ids of a tokenizer.json, else (None, reason)."""
    model = tokenizer_json["model"]
    reason = _find_unsupported_feature(tokenizer_json)
    if reason:
        return None, reason
    vocabulary: dict[str, int] = model["vocab"]
    # byte -> id; a vocabulary without all 256 bytes cannot encode every text
    byte_ids = np.full(256, -1, dtype=np.int64)
    for letter, byte in unicode_to_bytes().items():
        byte_ids[byte] = vocabulary.get(letter, -1)
    if (byte_ids < 0).any():
        return None, f"the vocabulary lacks {int((byte_ids < 0).sum())} of the 256 bytes"
    try:
        merges = _csrc.merge_ids(vocabulary, model["merges"])
    except KeyError as error:
        return None, f"a merge produces {error}, which is not in its vocabulary"
    added: list[dict[str, Any]] = tokenizer_json["added_tokens"]
    special: dict[str, Any] = added[0] if added else {"content": "", "id": 0}
    compiled = _csrc.bpe_vocabulary(
        byte_ids, merges, load_code_point_classes(), special["content"].encode(), special["id"]
    )
    return FastBpe(compiled), ""


def compile_gpt2_bpe(merges: str, eod: str, eod_id: int) -> FastBpe:
    """Compile GPT-2's tokenizer from its merges: the lines of its file after the first.

    GPT-2's ids are the bytes in the order of their printable characters, then the merges in order. Its
    vocab.json contains nothing else and is slow to read.
    """
    letters = unicode_to_bytes()
    rows = _csrc.ranked_merge_ids("\n".join(letters), merges)
    # letters.values()[id] is the byte of an id; argsort inverts this permutation
    byte_ids = np.argsort(np.array(list(letters.values())))
    return FastBpe(_csrc.bpe_vocabulary(byte_ids, rows, load_code_point_classes(), eod.encode(), eod_id))


def _find_unsupported_feature(tokenizer_json: dict[str, Any]) -> str:
    """Return the first feature of a serialised tokenizer that C++ does not support, empty if none."""
    model, pre = tokenizer_json["model"], tokenizer_json.get("pre_tokenizer") or {}
    if model.get("type") != "BPE":
        return f"its model is {model.get('type')}, not BPE"
    if any(pre.get(key) != value for key, value in BYTE_LEVEL.items()):
        return "its pre-tokenizer is not GPT-2's"
    if tokenizer_json.get("normalizer") is not None:
        return "it has a normalizer"
    for key in (
        "dropout",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "byte_fallback",
        "ignore_merges",
    ):
        if model.get(key):
            return f"its model has {key}"
    added = tokenizer_json.get("added_tokens") or []
    if len(added) > 1:
        return f"it has {len(added)} added tokens"
    if added and any(added[0].get(key) for key in ("single_word", "lstrip", "rstrip", "normalized")):
        return "its added token is matched with conditions"
    if added and not added[0].get("special", True):
        # the library matches such a token in a text even if special tokens are disabled
        return "its added token is not a special token"
    return ""
