"""Seeded mutations of valid inputs: of bytes, of JSON and YAML trees, and of lines of text."""

import json
import random
import struct
from collections.abc import Callable
from copy import deepcopy
from typing import Any

Mutator = Callable[[random.Random, bytes], bytes]

# On both sides of the limits of int8 to int64, where a cast wraps; 2^53 + 1, which float64 rounds; 1e-320, a
# subnormal; 1e309, which Python reads as Inf.
EXTREMES = (
    0, 1, -1, 2, 7, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**40,
    2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 0.5, -0.5, 1e-320, 1e308, 1e309, -1e309,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
# Values of the wrong type, and text for each place where text is evaluated: a lone surrogate, a byte order
# mark, an Arabic digit (which int() accepts), paths, shell and format strings, a formula, HTML, long and
# nested containers.
VALUES = (
    None, True, False, "", "x", "0", "-1", "1e9", "nan", "true", "null", " ", "a b", "\x00", "\n",
    "a\nb", "\ud800",
    "\ufeff", "٣", "é", "../x", "/etc/hostname", "/dev/null", "~", "${a}", "%s%n", "{0}", "=1+1",
    "<b>", "a" * 5_000,
    [], [[]], [None], ["x"], [1, 2], {}, {"x": 1}, {"": {}}, [[[[1]]]], {"a": {"b": {"c": []}}},
)  # fmt: skip
# Numbers that only some parsers accept, white space that only some strip, and the delimiters of CSV, JSON
# and YAML. Repeated brackets test the depth of recursive parsers.
WORDS = (
    "0", "-1", "1e309", "nan", "inf", "-inf", "1,000", "1_000", "٣", "0x10", "1e400",
    "99999999999999999999", "1.5",
    "1/0", "1/3", "K", "M", "1K", "1KK", ".5", "5.", "+1", "--1", "", " ", "\t", "\x00", "\r",
    "\ufeff", "\u2028",
    "\"", "'", ",", ";", "=", ":", "#", "[", "]", "{", "}", "&a", "*a", "!!x", "|", ">", "-", "%",
    "\\", "é", "\U0001f600",
    "a" * 3_000, "9" * 5_000, "[" * 300, "(" * 300, "NOT " * 100, "null", "true", "~", "..", "/", "<script>",
)  # fmt: skip
# Invalid UTF-8: an encoded surrogate, an overlong "/", a code point above U+10FFFF, a truncated character.
# Then line ends and controls, a varint that does not end, and large integers.
ODD_BYTES = (
    b"\x00", b"\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf5\x80\x80\x80", b"\xe4\xb8", b"\xef\xbb\xbf", b"\r",
    b"\n", b"\x1b[0m", b"\x85", b"\xe2\x80\xa8", b"\x80" * 9, b"\xff" * 8, b"\x7f" * 4,
)  # fmt: skip


def mutate_bytes(rng: random.Random, content: bytes) -> bytes:
    """Make one to four changes: of bits, bytes and numbers, insertions, deletions, copies, truncations."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, n = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 8, 33))
        kind = rng.randrange(9)
        if kind <= 1 and data:
            # the modulo is for `at` = len(data), the place of an insertion at the end
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at : at + n] = rng.randbytes(n)
        elif kind == 3:
            number, size = rng.choice(EXTREMES), rng.choice((1, 2, 4, 8))
            # NaN, Inf and numbers beyond 64 bits are written as 2^63
            whole = int(number) if number == number and abs(number) < 2**64 else 2**63
            # the modulo gives the two's complement: -1 in 2 bytes is ff ff, and 2^40 in 4 bytes is 0
            data[at : at + size] = (whole % 256**size).to_bytes(size, rng.choice(("little", "big")))
        elif kind == 4:
            del data[at : at + n]
        elif kind == 5:
            data[at:at] = rng.choice(ODD_BYTES)
        elif kind == 6:
            data[at:at] = data[at : at + n] * rng.choice((1, 2, 50))
        elif kind == 7 and rng.random() < 0.3:
            # rarely: a truncated file mostly tests the check of the length
            del data[at:]
        elif data:
            other = rng.randrange(len(data))
            data[at : at + n] = data[other : other + n]
    return bytes(data)


def mutate_text(rng: random.Random, content: bytes) -> bytes:
    """Make one to three changes of lines, words and numbers; in a quarter of the cases mutate bytes."""
    if rng.random() < 0.25:
        return mutate_bytes(rng, content)
    # an invalid byte becomes a surrogate, which the last line writes as three invalid bytes or as "?"
    text = content.decode("utf-8", "surrogateescape")
    for _ in range(rng.choice((1, 1, 2, 3))):
        lines = text.split("\n")
        at, kind = rng.randrange(len(lines)), rng.randrange(7)
        if kind == 0:
            lines.insert(at, lines[rng.randrange(len(lines))])
        elif kind == 1 and len(lines) > 1:
            del lines[at]
        elif kind == 2:
            lines[at] = lines[at] + rng.choice(WORDS)
        else:
            lines[at] = _mutate_line(rng, lines[at])
        text = "\n".join(lines)
    return text.encode("utf-8", "surrogatepass" if rng.random() < 0.5 else "replace")


def _mutate_line(rng: random.Random, line: str) -> str:
    """Replace, insert or remove a run of letters and digits, or the characters between two runs."""
    # "lr: 1e-3" -> ["", "lr", ": ", "1e", "-", "3"]. The empty part is the place before the first word.
    parts = [""]
    for letter in line:
        if parts[-1] and letter.isalnum() == parts[-1][-1].isalnum():
            parts[-1] += letter
        else:
            parts.append(letter)
    numbers = [i for i, part in enumerate(parts) if part[:1].isdigit()]
    # half of the changes are at numbers, which are few: counts, sizes and rates are validated most
    at = rng.choice(numbers) if numbers and rng.random() < 0.5 else rng.randrange(len(parts))
    kind = rng.randrange(4)
    if kind == 0:
        parts[at] = rng.choice(WORDS)
    elif kind == 1:
        parts.insert(at, rng.choice(WORDS))
    elif kind == 2:
        parts[at] = ""
    else:
        parts[at] = parts[rng.randrange(len(parts))]
    return "".join(parts)


def mutate_tree(rng: random.Random, tree: Any) -> Any:
    """Return a copy of nested dictionaries and lists with one to three changed nodes."""
    copy = json.loads(json.dumps(tree))  # also turns tuples into lists and keys into strings
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        copy = _mutate_node(rng, copy)
    return copy


def _mutate_node(rng: random.Random, tree: Any) -> Any:
    places = list(_list_places(tree))
    if not places or rng.random() < 0.03:
        return deepcopy(rng.choice(VALUES))
    # all nodes are equally likely, at any depth
    holder, key = rng.choice(places)
    kind = rng.randrange(10)
    if kind <= 2:
        holder[key] = deepcopy(rng.choice(VALUES))
    elif kind <= 4:
        holder[key] = rng.choice(EXTREMES)
    elif kind == 5:
        del holder[key]
    elif kind == 6:
        other, from_key = rng.choice(places)
        # a copy: a node that is assigned into itself would make a cycle, which json cannot write
        holder[key] = json.loads(json.dumps(other[from_key] if _has_key(other, from_key) else None))
    elif kind == 7 and isinstance(holder, dict):
        # a misspelt key: reported as unknown, or the right one as missing
        holder[rng.choice((str(key) + "x", str(key).upper(), "", "a.b", " " + str(key)))] = holder.pop(key)
    elif kind == 8:
        value = holder[key]
        holder[key] = rng.choice(([value], {"x": value}, str(value), [value, value]))
    elif isinstance(holder, list):
        holder.insert(key, deepcopy(rng.choice(VALUES)))
    else:
        holder[rng.choice(("x", "0", "\ud800", "é", "step", "loss"))] = deepcopy(rng.choice(VALUES))
    return tree


def _has_key(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else isinstance(key, int) and key < len(holder)


def _list_places(tree: Any) -> list[tuple[Any, Any]]:
    """Return (container, key or index) of every node."""
    places: list[tuple[Any, Any]] = []
    pending = [tree]
    while pending:
        node = pending.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        places += [(node, key) for key in keys]
        pending += [node[key] for key in keys]
    return places


def mutate_json(rng: random.Random, content: bytes) -> bytes:
    """Mutate the tree in four of six cases, else the text or the bytes."""
    kind = rng.randrange(6)
    if kind == 4:
        return mutate_text(rng, content)
    if kind == 5:
        return mutate_bytes(rng, content)
    try:
        tree = json.loads(content)
    except ValueError:  # content that was mutated before
        return mutate_text(rng, content)
    return json.dumps(mutate_tree(rng, tree), indent=rng.choice((None, 1))).encode()


def mutate_json_lines(rng: random.Random, content: bytes) -> bytes:
    """Mutate one to three lines as JSON, or the text."""
    if rng.random() < 0.25:
        return mutate_text(rng, content)
    lines = content.split(b"\n")
    for _ in range(rng.choice((1, 2, 3))):
        at = rng.randrange(len(lines))
        lines[at] = mutate_json(rng, lines[at]) if lines[at] else b"{}"
    return b"\n".join(lines)


def mutate_yaml(rng: random.Random, content: bytes) -> bytes:
    """Mutate the tree in half of the cases, else the text."""
    import yaml

    if rng.random() < 0.5:
        return mutate_text(rng, content)
    changed = mutate_tree(rng, yaml.safe_load(content))
    return json.dumps(changed).encode() if rng.random() < 0.3 else _dump_yaml(changed)


def _dump_yaml(tree: Any) -> bytes:
    import yaml

    try:
        return yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass")
    except yaml.YAMLError:
        return json.dumps(tree).encode()


def mutate_fields(form: str, at: int = 0) -> Mutator:
    """Return a mutator of one number of a header with a `struct` format at byte `at`.

    In a third of the cases it mutates bytes anywhere.
    """

    def mutate(rng: random.Random, content: bytes) -> bytes:
        if rng.random() < 0.33 or len(content) < at + struct.calcsize(form):
            return mutate_bytes(rng, content)
        numbers: list[Any] = list(struct.unpack_from(form, content, at))
        # One letter per number ("iii", not "3i"), since the sizes are counted by letter. "<" has no padding,
        # so the offset of a number is the sum of the sizes before it.
        sizes = [struct.calcsize(f"<{letter}") for letter in form.lstrip("<")]
        data = bytearray(content)
        place = rng.randrange(len(numbers))
        begin = at + sum(sizes[:place])
        # a number that is wrong by one may pass a check of its range and then be read out of bounds
        near = numbers[place] + rng.choice((-8, -1, 1, 2, 8)) if isinstance(numbers[place], int) else 0
        value = near if rng.random() < 0.5 else rng.choice(EXTREMES)
        whole = int(value) if value == value and abs(value) < 2**64 else 2**63
        data[begin : begin + sizes[place]] = (whole % 256 ** sizes[place]).to_bytes(sizes[place], "little")
        return bytes(data)

    return mutate
