"""The same ids as the `tokenizers` library gives, from C++, where that can be exact."""

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
    """A byte-level BPE in C++. Every thread makes workers of its own from it."""

    vocabulary: Any  # _csrc.BpeVocabulary

    def worker(self) -> Any:
        """Cache and buffers for one thread: a _csrc.BpeWorker."""
        return _csrc.BpeWorker(self.vocabulary)


@cache
def bytes_of_letters() -> dict[str, int]:
    """Byte of each printable letter that stands for one in byte-level vocabularies (GPT-2's encoder.py)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


@cache
def code_point_classes() -> np.ndarray:
    """uint8 [0x110000]: 0 other, 1 letter, 2 number, 3 white space, as `tokenizers` sees them.

    Read from code_points.json, runs of [first code point, class], which tools/derive_code_points.py
    generates.
    """
    runs = json.loads(Path(__file__).with_name("code_points.json").read_text())["runs"]
    starts, kinds = np.array(runs, dtype=np.int64).T
    lengths = np.diff(np.append(starts, N_CODE_POINTS))
    return np.repeat(kinds.astype(np.uint8), lengths)


def compile_fast(told: dict[str, Any]) -> tuple[FastBpe | None, str]:
    """(encoder, "") where C++ gives exactly the library's ids for a tokenizer.json, else (None, reason)."""
    model = told["model"]
    reason = _unlike(told)
    if reason:
        return None, reason
    vocabulary: dict[str, int] = model["vocab"]
    byte_ids = np.full(256, -1, dtype=np.int64)
    for letter, byte in bytes_of_letters().items():
        byte_ids[byte] = vocabulary.get(letter, -1)
    if (byte_ids < 0).any():
        return None, f"the vocabulary lacks {int((byte_ids < 0).sum())} of the 256 bytes"
    try:
        merges = _csrc.merge_ids(vocabulary, model["merges"])
    except KeyError as error:
        return None, f"a merge makes {error}, which is not in its vocabulary"
    special = told["added_tokens"][0] if told["added_tokens"] else {"content": "", "id": 0}
    compiled = _csrc.bpe_vocabulary(
        byte_ids, merges, code_point_classes(), special["content"].encode(), special["id"]
    )
    return FastBpe(compiled), ""


def compile_gpt2(merges: str, eod: str, eod_id: int) -> FastBpe:
    """As `compile_fast`, for GPT-2's own: first its bytes in the order of their letters, then its merges.

    `merges`: the lines of its file behind the first. Its vocab.json says no more, and is slow to read.
    """
    letters = bytes_of_letters()
    rows = _csrc.ranked_merge_ids("\n".join(letters), merges)
    byte_ids = np.argsort(np.array(list(letters.values())))
    return FastBpe(_csrc.bpe_vocabulary(byte_ids, rows, code_point_classes(), eod.encode(), eod_id))


def _unlike(told: dict[str, Any]) -> str:
    """What about a serialised tokenizer the C++ does not do; empty where it does all."""
    model, pre = told["model"], told.get("pre_tokenizer") or {}
    if model.get("type") != "BPE":
        return f"its model is {model.get('type')}, not BPE"
    if any(pre.get(key) != value for key, value in BYTE_LEVEL.items()):
        return "its pre-tokeniser is not GPT-2's"
    if told.get("normalizer") is not None:
        return "it has a normaliser"
    for key in (
        "dropout",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "byte_fallback",
        "ignore_merges",
    ):
        if model.get(key):
            return f"its model has {key}"
    added = told.get("added_tokens") or []
    if len(added) > 1:
        return f"it has {len(added)} added tokens"
    if added and any(added[0].get(key) for key in ("single_word", "lstrip", "rstrip", "normalized")):
        return "its added token is matched with conditions"
    if added and not added[0].get("special", True):
        return "its added token is no special one"  # which its library finds in a text whatever is asked
    return ""
