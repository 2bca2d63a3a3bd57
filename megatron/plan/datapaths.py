"""Reader of data-path files: `weight path-prefix` entries, as in Megatron-DeepSpeed."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from megatron.config.schema import SYNTHETIC as SYNTHETIC  # re-exported for readers of data paths
from megatron.data.sidecar import EodUse, count_tokens, find_prefix, load_sidecar, parse_eod_use, strip_suffix

# practically endless; the default vocabulary size is GPT-2's
SYNTHETIC_SIDECAR: dict[str, Any] = {"tokens": 1 << 62, "tokenizer": {"n_tokens": 50257}, "sha256": SYNTHETIC}
SUFFIX = ".txt"
QUOTED = re.compile(r"\"([^\"]*)\"|'([^']*)'")
NUMBER = re.compile(r"[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?|[0-9]+/[0-9]+")
UNIQUE = " unique="


@dataclass(frozen=True)
class WeightedCorpus:
    """One .bin/.idx dataset and its weight. Only the proportions of weights count.

    unique_tokens   use only its first whole samples with this many tokens, and repeat them; None: all
    """

    prefix: str
    weight: Fraction
    unique_tokens: int | None = None


def read_corpora(path: str | Path) -> tuple[WeightedCorpus, ...]:
    """Return the corpora of a data-path file (.txt), or the single corpus of a prefix.

    Raises FileNotFoundError or ValueError with file
    and line for an unusable data-path file.
    """
    if not str(path).endswith(SUFFIX):
        return (WeightedCorpus(str(path), Fraction(1)),)
    return read_data_paths(Path(path))


def read_held_out_corpora(path: str | Path) -> tuple[WeightedCorpus, ...]:
    """Return the corpora of held-out text. Raises ValueError for unique=TOKENS: they are scored whole."""
    corpora = read_corpora(path)
    if any(corpus.unique_tokens for corpus in corpora):
        raise ValueError(f"{path}: got unique=TOKENS, which is for training. Remove it for held-out text.")
    return corpora


def name_corpora(prefixes: Sequence[str]) -> list[str]:
    """Return the file names of datasets; their prefixes if file names are not unique."""
    names = [Path(prefix).name for prefix in prefixes]
    return names if len(set(names)) == len(names) else list(prefixes)


def read_data_paths(path: Path) -> tuple[WeightedCorpus, ...]:
    """Return the corpora of a data-path file: at least one, all complete, distinct and of one tokenizer.

    A line has one or several entries `weight path-prefix`, which may be
    quoted, or one entry `weight path-prefix unique=TOKENS`. `#` begins a comment
    at the start of a line or after a space. `$NAME` and `~` are expanded. A prefix is relative to the working
    directory, or else to the folder of the file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such data-path file")
    corpora: list[WeightedCorpus] = []
    first_recorded: str | None = None
    seen: dict[Path, str] = {}
    lines = list(read_lines(path))
    entries = [(location, entry) for location, line in lines for entry in _split_entries(line)]
    for location, entry in entries:
        # location is "file:line", for error messages
        entry, unique_tokens = _split_unique(entry, location)
        weight, written = _parse_entry(entry, location, is_only_entry=len(entries) == 1)
        prefix = _find_prefix(written, path.parent, location)
        resolved = Path(prefix).resolve()  # detects one dataset under two names
        if resolved in seen:
            raise ValueError(f"{location}: {prefix} is on {seen[resolved]} already. Give it once.")
        seen[resolved] = f"line {location.rpartition(':')[2]}"
        corpora.append(WeightedCorpus(prefix, weight, unique_tokens))
        # with the first that records a tokenizer: one without a record is
        # compatible with all
        if first_recorded is None and _read_tokenizer_record(prefix):
            first_recorded = prefix
        compare_tokenizers(first_recorded or prefix, prefix, location)
    if not corpora:
        raise ValueError(f"{path}: got no corpus, expected lines such as: 0.7 data/c4_text_document")
    return tuple(corpora)


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (file:line, content) of each line that is not empty, without comments and quotes."""
    try:
        # utf-8-sig drops the byte order mark of Windows editors, which would
        # become part of the first weight
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: got bytes that are not UTF-8 ({error}). Save it as UTF-8.") from error
    for number, line in enumerate(text.splitlines(), 1):
        # the leading space makes a `#` at the start of a line a comment too
        content = (" " + line.replace("\t", " ")).partition(" #")[0].strip()
        if content:
            yield f"{path}:{number}", content


def _split_entries(line: str) -> list[str]:
    """Return the `weight path-prefix` entries of a line, without quotes.

    A line has one entry, quoted or not, or several: each in quotes, or
    alternating weights and prefixes.
    """
    quoted = QUOTED.findall(line)
    if quoted and not QUOTED.sub("", line).strip(" ,"):
        return [entry for pair in quoted for text in pair if text.strip() for entry in _split_pairs(text)]
    return _split_pairs(line)


def _split_pairs(line: str) -> list[str]:
    """Return the entries of text without outer quotes."""
    words = line.split()
    # 0.3 a 0.7 b: every other word is a number; a single prefix may contain
    # spaces and is left whole
    if len(words) > 2 and len(words) % 2 == 0 and all(NUMBER.fullmatch(word) for word in words[::2]):
        return [f"{weight} {prefix}" for weight, prefix in zip(words[::2], words[1::2], strict=True)]
    return [line.strip()]


def _split_unique(entry: str, location: str) -> tuple[str, int | None]:
    """Return an entry without its last word `unique=TOKENS`, and these tokens."""
    rest, mark, number = entry.rpartition(UNIQUE)
    if not mark:
        return entry, None
    # isdecimal is true for digits only: neither a sign nor an exponent
    if not number.isdecimal() or not int(number):
        raise ValueError(f"{location}: got unique={number}, expected a number of tokens such as 500000.")
    return rest, int(number)


def _parse_entry(line: str, location: str, is_only_entry: bool) -> tuple[Fraction, str]:
    """Return (weight, prefix). The only entry of a file may omit the weight.

    A Fraction keeps 0.3 exactly three tenths, so that shares are exact.
    """
    # at most one split: a path may contain spaces
    words = line.split(maxsplit=1)
    if len(words) == 1:
        if is_only_entry:
            return Fraction(1), words[0]
        raise ValueError(f"{location}: got the single word {line!r}, expected: weight path-prefix")
    try:
        # accepts 0.3, 3e-1 and 3/10, which are the same Fraction; 3/0 raises
        # ZeroDivisionError
        weight = Fraction(words[0])
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{location}: got weight {words[0]!r}, expected: number path-prefix") from None
    if weight <= 0:
        raise ValueError(f"{location}: got weight {words[0]}, expected more than 0. Remove the line.")
    return weight, words[1].strip("\"'")


def _find_prefix(written: str, folder: Path, location: str) -> str:
    """Return the prefix of the existing .bin/.idx dataset that a line names."""
    requested = os.path.expanduser(os.path.expandvars(written))
    # expandvars leaves the name of an unset variable in the text
    if "$" in requested:
        raise ValueError(f"{location}: {written} contains an environment variable that is not set")
    # the name of a file of the dataset is accepted too
    requested = strip_suffix(requested)
    if (prefix := find_prefix(requested, folder)) is not None:
        return prefix
    if " " in requested:
        expected = "`weight path-prefix` pairs"
        raise FileNotFoundError(f"{location}: no dataset {written}.bin/.idx, expected {expected}")
    # the value of a variable may be a secret,
    # so messages contain only its name
    name = requested if requested == strip_suffix(written) else written
    raise FileNotFoundError(
        f"{location}: no dataset {name}.bin/.idx, neither in the working directory nor in {folder}. "
        "Create it with tools/preprocess_data_many_cores.py, or correct the path."
    )


def compare_tokenizers(first: str, other: str, location: str) -> None:
    """Raise ValueError if the sidecars of two datasets record different tokenizers.

    A dataset without a record is compatible with all tokenizers.
    """
    first_record, other_record = _read_tokenizer_record(first), _read_tokenizer_record(other)
    for key in ("sha256", "n_tokens"):
        expected, value = first_record.get(key), other_record.get(key)
        if None not in (expected, value) and value != expected:
            difference = f"{key} {str(value)[:12]}, not {str(expected)[:12]}"
            raise ValueError(
                f"{location}: {other} has another tokenizer than {first} ({difference}). "
                "Use the same tokenizer for both."
            )


def compare_eods(prefixes: Sequence[str], allow_mixed: bool = False) -> tuple[str, ...]:
    """Return warnings about datasets that end documents differently or do not record how they end them.

    Raises ValueError if the records of two
    datasets differ, unless `allow_mixed`.
    """
    uses = [(prefix, parse_eod_use(load_sidecar(prefix))) for prefix in prefixes if prefix != SYNTHETIC]
    return compare_eod_uses(uses, allow_mixed, "set dataset.mixed_eod=true to mix them")


def compare_eod_uses(
    uses: Sequence[tuple[str, EodUse | None]], allow_mixed: bool, hint: str
) -> tuple[str, ...]:
    """Return warnings as `compare_eods`. `uses`: (prefix, end of its documents); `hint`: of the error."""
    first, expected = next((entry for entry in uses if entry[1] is not None), ("", None))
    warnings = []
    for prefix, use in uses if len(uses) > 1 else ():
        if use is None:
            check = "Check that they end as in the other datasets."
            warnings.append(f"{prefix}: no sidecar that records how its documents end. {check}")
        elif use != expected:
            warnings.append(f"{prefix}: got {use}, expected {expected} as in {first}.")
            if not allow_mixed:
                raise ValueError(
                    f"{warnings[-1]} Tokenise both with the same --append-eod and --eod-token, or {hint}."
                )
    return tuple(warnings)


def _read_tokenizer_record(prefix: str) -> dict[str, Any]:
    record = (read_corpus_sidecar(prefix) or {}).get("tokenizer")
    return record if isinstance(record, dict) else {}


def read_corpus_sidecar(prefix: str) -> dict[str, Any] | None:
    """Return the sidecar of a corpus, also of `synthetic`; None for a dataset of another program."""
    return SYNTHETIC_SIDECAR if prefix == SYNTHETIC else load_sidecar(prefix)


def count_corpus_tokens(prefix: str | Path) -> int:
    """Return the number of tokens of a corpus. Raises as `count_tokens`."""
    return int(SYNTHETIC_SIDECAR["tokens"]) if prefix == SYNTHETIC else count_tokens(prefix)
