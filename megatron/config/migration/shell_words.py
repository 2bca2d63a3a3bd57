"""Splits a bash script into simple commands and raw words, which keep their quotes and expansions."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

UNKNOWN = "\x00"  # surrounds the text of a value that is not known
HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")


@dataclass
class Lexed:
    """A simple command: its raw words, and its here-document with whether that one has expansions.

    joint   "&&" or "||" if it depends on the command before it
    """

    words: list[str]
    document: tuple[str, bool] | None = None
    joint: str = ""


def split_commands(text: str, separators: str = "\n;|&") -> Iterator[Lexed]:
    """Yield the simple commands of a script, without comments.

    separators   characters that end a command; "" for the inside of an array, which is one list of words
    """
    words: list[str] = []
    pending: list[tuple[str, bool]] = []  # end word and expansions of here-documents of this line
    word, joint, i = "", "", 0
    text = text.replace("\r\n", "\n")
    while i <= len(text):
        char = text[i] if i < len(text) else "\n"
        if text.startswith("\\\n", i):
            i += 2
            continue
        if char == "#" and not word:
            i = _find(text, "\n", i)
            continue
        match = HERE_DOCUMENT.match(text, i) if separators and not text.startswith("<<<", i) else None
        if match is not None:
            pending.append((match[2], not match[1]))
            i = match.end()
            continue
        is_end = char in separators if separators else i >= len(text)
        if not (is_end or char.isspace()) and not (char == ">" and separators):
            length = _measure(text, i, word)
            word += text[i : i + length]
            i += length
            continue
        if char == "&" and word.endswith(">") or char == ">" and word.isdigit():
            word += char  # 2>&1 and 2> are not the end of a command
            i += 1
            continue
        if word:
            words.append(word)
            word = ""
        if char == ">":
            words.append(char)
        i += 1
        if is_end:
            document = None
            if char == "\n":
                for end, expands in pending:
                    body, i = _take_document(text, i, end)
                    document = body, expands
                pending = []
            if words:
                yield Lexed(words, document, joint if joint in ("&&", "||") else "")
                joint = ""
            # a newline after && or || continues the list
            joint += char.strip()
            words = []


def _measure(text: str, i: int, word: str) -> int:
    """Return the length of the piece of a word that begins at text[i]: a character, quotes or brackets."""
    char = text[i]
    if char == "\\":
        return 2
    if char == "'":
        return _find(text, "'", i + 1) + 1 - i
    if char == '"':
        return _measure_quotes(text, i)
    if char in "`":
        return _find(text, "`", i + 1) + 1 - i
    # $(...) and ${...} contain spaces; so does the list after NAME=
    if char == "$" and text[i + 1 : i + 2] in ("(", "{"):
        return 1 + _measure_brackets(text, i + 1)
    if char == "(" and word.endswith("="):
        return _measure_brackets(text, i)
    return 1


def _measure_quotes(text: str, i: int) -> int:
    k = i + 1
    while k < len(text) and text[k] != '"':
        if text[k] == "$" and text[k + 1 : k + 2] in ("(", "{"):
            k += 1 + _measure_brackets(text, k + 1)
        else:
            k += 2 if text[k] == "\\" else 1
    return k + 1 - i


def _measure_brackets(text: str, i: int) -> int:
    """Return the length up to the bracket that closes text[i], past quotes and nested brackets."""
    opening, closing = text[i], ")" if text[i] == "(" else "}"
    k, depth = i, 0
    while k < len(text):
        char = text[k]
        if char in "'\"\\":
            k += _measure(text, k, "")
            continue
        if char == "#" and opening == "(" and text[k - 1].isspace():
            k = _find(text, "\n", k)  # a comment in an array
            continue
        depth += (char == opening) - (char == closing)
        k += 1
        if not depth:
            break
    return k - i


def _take_document(text: str, i: int, end: str) -> tuple[str, int]:
    """Return (here-document that begins at text[i], index after its end word)."""
    lines: list[str] = []
    while i < len(text):
        stop = _find(text, "\n", i)
        line = text[i:stop]
        i = stop + 1
        if line.strip() == end:
            break
        lines.append(line + "\n")
    return "".join(lines), i


def _find(text: str, what: str, i: int) -> int:
    """Return the index of the next `what`, the end of the text without it."""
    place = text.find(what, i)
    return len(text) if place < 0 else place
