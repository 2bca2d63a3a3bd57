"""Write megatron/tokenizer/code_points.json: what `tokenizers` knows about every code point.

    python csrc/derive_code_points.py

Split patterns use general categories, white space and case; added tokens use word characters and white space
of another engine; normalizers use combining classes. Libraries disagree on thousands of code points because
they follow different versions of Unicode. This tool derives the tables from `tokenizers` itself, in about a
minute.
"""

import json
import string
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from megatron.tokenizer.code_points import CATEGORIES, N_CODE_POINTS, UNSTABLE

OUT = Path(__file__).resolve().parents[1] / "megatron" / "tokenizer" / "code_points.json"
POINTS = np.array([point for point in range(N_CODE_POINTS) if not 0xD800 <= point < 0xE000])
IOTA = "\u0345"  # COMBINING GREEK YPOGEGRAMMENI, the only mark of class 240, the highest
SNOWMAN = "\u2603"  # no word character, and composes with no mark
UNKNOWN = 0  # id of text outside a vocabulary


def find_members(pattern: str) -> np.ndarray:
    """Return which code points a pattern of one character matches, bool [0x110000]."""
    return _remove_pieces(pre_tokenizers.Split(Regex(f"(?:{pattern})+"), "removed"))


def find_numeric() -> np.ndarray:
    """Return which code points the pre-tokenizer Digits takes as digits, bool [0x110000]."""
    split = pre_tokenizers.Digits(individual_digits=True)
    numeric = np.zeros(N_CODE_POINTS, dtype=bool)
    # beside a letter each digit is a piece of one character,
    # and everything else is in longer pieces
    text = "aa" + "aa".join(map(chr, POINTS)) + "aa"
    for piece, _ in split.pre_tokenize_str(text):
        if len(piece) == 1:
            numeric[ord(piece)] = True
    return numeric


def find_word_characters() -> np.ndarray:
    r"""Return which code points are \w for an added token with single_word, bool [0x110000]."""
    # such a token is ordinary text beside a word character
    return _encode_beside_token(AddedToken(SNOWMAN, single_word=True), [UNKNOWN, UNKNOWN])


def find_stripped_characters() -> np.ndarray:
    """Return which code points an added token with rstrip removes, bool [0x110000]."""
    return _encode_beside_token(AddedToken(SNOWMAN, rstrip=True), [UNKNOWN + 1])


def _encode_beside_token(token: AddedToken, expected: list[int]) -> np.ndarray:
    """Return before which code points the token has the expected ids, bool [0x110000]."""
    inner = Tokenizer(models.BPE(vocab={"?": UNKNOWN}, merges=[], unk_token="?"))
    inner.add_tokens([token])
    members = np.zeros(N_CODE_POINTS, dtype=bool)
    texts = [SNOWMAN + chr(point) for point in POINTS]
    encoded = inner.encode_batch_fast(texts, add_special_tokens=False)
    members[POINTS] = [encoding.ids == expected for encoding in encoded]
    return members


def find_combining_classes() -> np.ndarray:
    """Return the canonical combining class of each code point; UNSTABLE if NFC may change a text with it.

    uint8 [0x110000]. Text is in NFC if it has no UNSTABLE character, and if marks in a row, which have
    classes above 0, do not decrease in class.
    """
    nfc, nfd = normalizers.NFC(), normalizers.NFD()
    points = POINTS[1:]  # without the separator
    classes = np.zeros(N_CODE_POINTS, dtype=np.uint8)
    # a mark between a base and U+0345 moves before it: all lower classes sort before 240
    ordered = _normalize_each(nfd, [SNOWMAN + IOTA + chr(point) for point in points])
    marks = [int(point) for point, text in zip(points, ordered, strict=True) if text[-1] == IOTA]
    # a mark that decomposes is never in NFC, and is marked below
    order = _sort_marks(nfd, [mark for mark in marks if nfd.normalize_str(chr(mark)) == chr(mark) != IOTA])
    for rank, group in enumerate([*order, [ord(IOTA)]], start=1):
        classes[group] = rank  # the order of classes matters, not their values
    decomposed, composed = (_normalize_each(form, list(map(chr, points))) for form in (nfd, nfc))
    for point, apart, again in zip(points, decomposed, composed, strict=True):
        if again != chr(point):
            classes[point] = UNSTABLE  # never in NFC
        elif apart != again:
            classes[[ord(letter) for letter in apart[1:]]] = UNSTABLE  # composes with a character before it
    return classes


def _sort_marks(nfd: normalizers.NFD, marks: list[int]) -> list[list[int]]:
    """Group marks by combining class, in the order of the classes."""
    groups: list[list[int]] = []
    for mark in marks:
        low, high = 0, len(groups)
        while low < high:  # binary search: two marks of one class keep their order
            middle = (low + high) // 2
            other = groups[middle][0]
            if _swaps(nfd, other, mark):
                high = middle
            elif _swaps(nfd, mark, other):
                low = middle + 1
            else:
                groups[middle].append(mark)
                break
        else:
            groups.insert(low, [mark])
    return groups


def _swaps(nfd: normalizers.NFD, first: int, second: int) -> bool:
    """Return whether `second` moves before `first`: its class is lower."""
    return bool(nfd.normalize_str(SNOWMAN + chr(first) + chr(second)) == SNOWMAN + chr(second) + chr(first))


def _normalize_each(form: normalizers.Normalizer, texts: list[str]) -> list[str]:
    # NUL is a starter that composes with nothing, so that the texts do not affect each other
    return form.normalize_str("\x00".join(texts)).split("\x00")


def find_folds() -> dict[str, list[int]]:
    """Return the code points beyond ASCII that ASCII letters match without regard to case."""
    folds = {}
    for letter in string.ascii_lowercase:
        points = np.flatnonzero(find_members(f"(?i:{letter})"))
        folds[letter] = [int(point) for point in points if point >= 128]
    return {letter: points for letter, points in folds.items() if points}


def _remove_pieces(split: pre_tokenizers.PreTokenizer) -> np.ndarray:
    text = "".join(map(chr, POINTS))
    members = np.ones(N_CODE_POINTS, dtype=bool)
    members[0xD800:0xE000] = False
    for _, (begin, end) in split.pre_tokenize_str(text):
        members[POINTS[begin:end]] = False  # what remains after the removal is not a member
    return members


def encode_runs(values: Iterable[int]) -> list[list[int]]:
    """Return runs of [first code point, value]."""
    flat = np.asarray(values, dtype=np.int64)
    starts = [0, *(np.flatnonzero(np.diff(flat)) + 1).tolist()]
    return [[start, int(flat[start])] for start in starts]


def derive_categories() -> np.ndarray:
    """Return the position in CATEGORIES of each code point, uint8 [0x110000]."""
    table = np.full(N_CODE_POINTS, CATEGORIES.index("Cn"), dtype=np.uint8)
    for number, name in enumerate(CATEGORIES):
        if name not in ("Cn", "Cs"):
            table[find_members(rf"\p{{{name}}}")] = number
    return table


def main() -> None:
    """Derive all tables, and write them as runs of [first code point, value]."""
    tables = {
        "categories": derive_categories(),
        "space": find_members(r"\s"),
        "numeric": find_numeric(),
        "word": find_word_characters(),
        "strip": find_stripped_characters(),
        "combining": find_combining_classes(),
    }
    runs = {name: encode_runs(table) for name, table in tables.items()}
    content = {"about": f"code points in tokenizers {tokenizers.__version__}", "folds": find_folds(), **runs}
    OUT.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    print(f"{OUT}: {', '.join(f'{name} {len(table)}' for name, table in runs.items())} runs")


if __name__ == "__main__":
    main()
