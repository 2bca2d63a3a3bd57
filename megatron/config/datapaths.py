"""Data-path files: lines of `weight path-prefix`, as in Megatron-DeepSpeed, read and checked."""

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from megatron.config.sidecar import SYNTHETIC as SYNTHETIC  # of those who read data paths
from megatron.config.sidecar import eod_use_of
from megatron.config.sidecar import read_sidecar as read_sidecar

SUFFIX = ".txt"
ALONE = Fraction(1)
HEAD = struct.Struct("<9sQB")  # of an .idx: magic, version, code of the ids' type
BYTES_OF_CODE = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}


@dataclass(frozen=True)
class Corpus:
    """One .bin/.idx pair and its share of the samples; only the proportions of weights count."""

    prefix: str
    weight: Fraction


def read_corpora(path: str | Path) -> tuple[Corpus, ...]:
    """What dataset.path_train or path_eval names: the corpora of a data-path file (.txt), else one prefix.

    FileNotFoundError or ValueError with file and line for what cannot be used as it is.
    """
    if not str(path).endswith(SUFFIX):
        return (Corpus(str(path), ALONE),)
    return read_data_paths(Path(path))


def read_data_paths(path: Path) -> tuple[Corpus, ...]:
    """The corpora of a data-path file: at least one, each whole on disk, none twice, all of one tokenizer.

    A line may stand in quotes; `#` begins a comment at the start of a line or after a space; `$NAME` and `~`
    are replaced. A prefix is looked for from the working directory, then from the file's own folder.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such data-path file")
    corpora: list[Corpus] = []
    seen: dict[Path, str] = {}
    lines = list(_lines(path))
    for where, line in lines:
        weight, written = _split(line, where, alone=len(lines) == 1)
        prefix = _find(written, path.parent, where)
        known = Path(prefix).resolve()
        if known in seen:
            raise ValueError(f"{where}: {prefix} is on {seen[known]} already; give it once, with one weight")
        seen[known] = f"line {where.rpartition(':')[2]}"
        corpora.append(Corpus(prefix, weight))
        compare_tokenizers(corpora[0].prefix, prefix, where)
    if not corpora:
        raise ValueError(f"{path}: names no corpus; wanted lines such as: 0.7 data/c4_text_document")
    return tuple(corpora)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """(file:line, content) without comments, quotes and empty lines."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text ({error}); wanted lines of: weight path-prefix") from error
    for number, line in enumerate(text.splitlines(), 1):
        content = (" " + line.replace("\t", " ")).partition(" #")[0].strip()
        if len(content) > 1 and content[0] == content[-1] and content[0] in "\"'":
            content = content[1:-1].strip()
        if content:
            yield f"{path}:{number}", content


def _split(line: str, where: str, alone: bool) -> tuple[Fraction, str]:
    words = line.split(maxsplit=1)
    if len(words) == 1:
        if alone:
            return ALONE, words[0]
        raise ValueError(f"{where}: {line!r} is one word; of several corpora each needs: weight path-prefix")
    try:
        weight = Fraction(words[0])
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{where}: weight {words[0]!r} is no number; wanted: weight path-prefix") from None
    if weight <= 0:
        raise ValueError(
            f"{where}: weight {words[0]} is not above 0; to leave the corpus out, remove the line"
        )
    return weight, words[1].strip("\"'")


def _find(written: str, folder: Path, where: str) -> str:
    """The prefix whose pair is there."""
    wanted = os.path.expanduser(os.path.expandvars(written))
    if "$" in wanted:
        raise ValueError(f"{where}: {written} names a variable that is not set")
    wanted = wanted.removesuffix(".bin").removesuffix(".idx")  # the name of either file is as good
    places = list(dict.fromkeys((wanted, str(folder / wanted))))
    for prefix in places:
        if all(Path(prefix + suffix).is_file() for suffix in (".bin", ".idx")):
            return prefix
    if " " in wanted:
        raise FileNotFoundError(f"{where}: no pair {written}.bin/.idx; wanted one corpus a line")
    if wanted != written.removesuffix(".bin").removesuffix(".idx"):
        places = [written]  # a variable's value may be a secret: it is in no message
    raise FileNotFoundError(
        f"{where}: no pair {' or '.join(f'{place}.bin/.idx' for place in places)}; "
        "make it with tools/preprocess_data_many_cores.py, or mend the path"
    )


def compare_tokenizers(first: str, other: str, where: str) -> None:
    """ValueError where the sidecars of two pairs tell of different tokenizers; silence agrees with all."""
    one, two = _tokenizer(first), _tokenizer(other)
    for key in ("sha256", "n_tokens"):
        if one.get(key) is not None and two.get(key) is not None and one[key] != two[key]:
            raise ValueError(
                f"{where}: {other} was made with another tokenizer than {first} "
                f"({key} {str(two[key])[:12]}, not {str(one[key])[:12]}); tokenise them alike"
            )


def compare_eods(prefixes: Sequence[str], allow_mixed: bool = False) -> tuple[str, ...]:
    """Warnings where datasets end their documents differently, or where a sidecar does not say how.

    ValueError where two sidecars say that they differ, unless that is allowed.
    """
    uses = [(prefix, eod_use_of(prefix)) for prefix in prefixes if prefix != SYNTHETIC]
    known = [(prefix, use) for prefix, use in uses if use is not None]
    warnings = []
    for prefix, use in known[1:]:
        first, expected = known[0]
        if use == expected:
            continue
        difference = f"{prefix}: got {use}, expected {expected} as in {first}."
        if not allow_mixed:
            raise ValueError(
                f"{difference} Tokenise both with the same --append-eod and --eod-token, "
                "or set dataset.mixed_eod=true to mix them."
            )
        warnings.append(difference)
    if len(uses) > 1:
        warnings += [
            f"{prefix}: no sidecar that says how its documents end; see that it is as in the others"
            for prefix, use in uses
            if use is None
        ]
    return tuple(warnings)


def _tokenizer(prefix: str) -> dict[str, Any]:
    if not Path(f"{prefix}.json").is_file():
        return {}  # a pair that another program made
    found = read_sidecar(prefix).get("tokenizer")
    return found if isinstance(found, dict) else {}


def tokens_held(prefix: str | Path) -> int:
    """Tokens of a pair: what its sidecar says, else, where another program made it, what its .bin holds.

    Raises ValueError for a sidecar without the number and for an index of another layout than MMIDIDX 1,
    FileNotFoundError where there is neither.
    """
    if prefix == SYNTHETIC or Path(f"{prefix}.json").is_file():
        n_tokens = read_sidecar(prefix).get("tokens")
        if not isinstance(n_tokens, int):
            raise ValueError(
                f"{prefix}.json: tokens is {n_tokens!r}, wanted a number; preprocess the corpus again"
            )
        return n_tokens
    if not Path(f"{prefix}.idx").is_file():
        raise FileNotFoundError(
            f"{prefix}.idx: no such file; wanted the prefix of a .bin/.idx pair, "
            "as tools/preprocess_data_many_cores.py writes it"
        )
    with Path(f"{prefix}.idx").open("rb") as file:
        head = file.read(HEAD.size)
    magic, version, code = HEAD.unpack(head.ljust(HEAD.size, b"\0"))
    if magic != b"MMIDIDX\0\0" or version != 1 or code not in BYTES_OF_CODE:
        raise ValueError(
            f"{prefix}.idx: not an index of layout MMIDIDX version 1; preprocess the corpus again"
        )
    return Path(f"{prefix}.bin").stat().st_size // BYTES_OF_CODE[code]
