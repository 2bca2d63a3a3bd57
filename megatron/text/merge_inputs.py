"""Inputs of a merge: datasets by name, pattern or list, in natural order, and whether they fit together."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.indexed import IndexedTokens, resolve_prefix
from megatron.data.parts import PartsTokens, open_dataset
from megatron.log import get_logger
from megatron.plan.sidecar import (
    PARTS_INDEX_SUFFIX,
    PARTS_SUFFIX,
    EodUse,
    dataset_exists,
    parse_eod_use,
)

log = get_logger(__name__)
SAMPLED_DOCUMENTS = 1000  # whose last tokens `detect_eod` compares
PATTERN = re.compile(r"[*?\[]")
WEIGHT = re.compile(r"[\"']?[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?(/[0-9]+)?\s+\S")
DIGITS = re.compile(r"([0-9]+)")


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that orders numbers in names by value: part-2 before part-10."""
    # numbers sort before text; 007 and 7 are equal here, and `sorted` keeps the order of equal keys
    return [(0, int(word)) if i % 2 else (1, word) for i, word in enumerate(DIGITS.split(name))]


def expand_prefixes(
    words: Sequence[str], lists: Sequence[Path] = (), allow_missing: bool = False
) -> list[str]:
    """Return the dataset prefixes of words, then of list files. Patterns are expanded, in natural order.

    allow_missing   accept patterns without a match, as of an unfinished merge that has removed its inputs

    Raises FileNotFoundError for a pattern without a match, ValueError for an unusable list and for a dataset
    that is named twice.
    """
    named = [(word, word) for word in words]
    for path in lists:
        named += read_list(path)
    prefixes: dict[Path, tuple[str, str]] = {}
    for word, origin in named:
        for prefix in _expand_word(word, origin, allow_missing):
            path = resolve_dataset_path(prefix)
            if path in prefixes:
                raise ValueError(
                    f"{origin}: got {prefix} twice, also as {prefixes[path][1]}. Give each dataset once; to "
                    "repeat text in training, use weights in a data-path file."
                )
            prefixes[path] = prefix, origin
    if not prefixes and not allow_missing:
        raise ValueError("no datasets: got empty lists, expected a prefix, a pattern or --list")
    return [prefix for prefix, _ in prefixes.values()]


def resolve_dataset_path(prefix: str) -> Path:
    """Return the real path of a dataset without its suffix, for comparisons."""
    data = Path(f"{prefix}.bin").resolve()  # of the file: it may be a link
    return data.with_name(data.name.removesuffix(".bin"))


def _expand_word(word: str, origin: str, allow_missing: bool) -> list[str]:
    prefix = resolve_prefix(word)
    if dataset_exists(prefix) or not PATTERN.search(word):
        return [prefix]
    prefixes = _match_pattern(word)
    if not prefixes and not allow_missing:
        raise FileNotFoundError(f"{origin}: no dataset matches, expected prefixes of .bin/.idx datasets")
    return prefixes


def _match_pattern(word: str) -> list[str]:
    for suffix in (PARTS_SUFFIX, ".bin", ".idx"):
        word = word.removesuffix(suffix)
    matches = {
        path.removesuffix(suffix)
        for suffix in (".bin", ".idx", PARTS_SUFFIX)
        for path in glob(word + suffix)
        if not path.endswith(PARTS_INDEX_SUFFIX)
    }
    return sorted(sorted(matches), key=natural_key)


def read_list(path: Path) -> list[tuple[str, str]]:
    """Return (prefix, "file:line") of a list of datasets: one prefix or pattern a line, `#` begins a comment.

    A prefix is relative to the working directory, or else to the folder of the list.

    Raises FileNotFoundError, or ValueError for weights.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such list of datasets")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: got bytes that are not UTF-8 ({error}), expected one prefix a line"
        ) from error
    entries = []
    for number, line in enumerate(lines, 1):
        word = (" " + line.replace("\t", " ")).partition(" #")[0].strip()
        if not word:
            continue
        location = f"{path}:{number}"
        if WEIGHT.match(word) and not dataset_exists(resolve_prefix(word)):
            raise ValueError(
                f"{location}: got weight {word.split()[0]}, expected a prefix: a merge has natural sizes. "
                "Give a data-path file with weights to dataset.path_train instead."
            )
        beside = str(path.parent / word)
        entries.append((word if _exists(word) or not _exists(beside) else beside, location))
    return entries


def _exists(word: str) -> bool:
    return dataset_exists(resolve_prefix(word)) or bool(PATTERN.search(word) and _match_pattern(word))


@dataclass(frozen=True)
class MergeInputs:
    """Open datasets that fit together, and the entries of their sidecars that hold for all of them."""

    datasets: list[IndexedTokens]
    meta: dict[str, Any]

    @property
    def n_documents(self) -> int:
        """Documents of all datasets."""
        return sum(dataset.n_documents for dataset in self.datasets)

    @property
    def n_tokens(self) -> int:
        """Tokens of all datasets."""
        return sum(dataset.n_tokens for dataset in self.datasets)


def open_inputs(prefixes: Sequence[str], output: Path, mixed_eod: bool) -> MergeInputs:
    """Open datasets that are to be merged. Raises as `merge_datasets`."""
    datasets: list[IndexedTokens] = []
    for prefix in prefixes:
        dataset = open_dataset(resolve_prefix(prefix))
        if isinstance(dataset, PartsTokens):
            datasets += [open_dataset(part.prefix) for part in dataset.parts]
        else:
            datasets.append(dataset)
        if Path(dataset.prefix).resolve() == output.resolve():
            raise ValueError(f"{output}: is one of the inputs. Choose another name.")
    for dataset in datasets[1:]:
        if dataset.dtype != datasets[0].dtype:
            raise ValueError(
                f"{dataset.prefix}: got {dataset.dtype}, expected {datasets[0].dtype} as in "
                f"{datasets[0].prefix}. Tokenise them with the same settings."
            )
        _compare_tokenizers(datasets[0], dataset)
    check_part_numbers(datasets)
    use = _find_common_eod(datasets, mixed_eod)
    meta: dict[str, Any] = {"merged_from": [describe_origin(dataset) for dataset in datasets]}
    records = [record for dataset in datasets if (record := _tokenizer_meta(dataset))]
    if records:
        tokenizer, ends = records[0], [record.get("eod_id") for record in records]
        if use is None and len(set(ends)) > 1:  # no end token is valid for all documents
            tokenizer = {name: value for name, value in tokenizer.items() if not name.startswith("eod_")}
        meta["tokenizer"] = tokenizer
    sidecars = [dataset.sidecar or {} for dataset in datasets]
    for name in ("append_eod", "special_text", "json_key"):  # keep entries that all sidecars share
        if (
            name == "append_eod"
            and use is None
            and len({str(parse_eod_use(sidecar)) for sidecar in sidecars}) > 1
        ):
            continue  # they end differently
        if name in sidecars[0] and all(sidecar.get(name) == sidecars[0][name] for sidecar in sidecars):
            meta[name] = sidecars[0][name]
    if "append_eod" in meta and all("empty_documents" in sidecar for sidecar in sidecars):
        meta["empty_documents"] = sum(sidecar["empty_documents"] for sidecar in sidecars)
    return MergeInputs(datasets, meta)


def _compare_tokenizers(first: IndexedTokens, other: IndexedTokens) -> None:
    records = [_tokenizer_meta(dataset) for dataset in (first, other)]
    sums = [record.get("sha256") for record in records]
    if not all(sums):
        unknown = other if sums[0] else first
        log.warning(
            "%s: its tokenizer is unknown, no sidecar names it; make sure that it is that of the others",
            unknown.prefix,
        )
        return
    sizes = [record.get("n_tokens") for record in records]
    if sums[0] != sums[1] or None not in sizes and sizes[0] != sizes[1]:
        raise ValueError(
            f"{other.prefix}: got another tokenizer than {first.prefix}. "
            "Tokenise them with the same tokenizer."
        )


def check_part_numbers(datasets: Sequence[IndexedTokens]) -> None:
    """Check that datasets written with --part I/N are all parts of their jobs, each once, in any order.

    Datasets without a part number are not checked. Raises ValueError for a missing or repeated part.
    """
    jobs: dict[tuple[Any, ...], dict[int, str]] = {}
    for dataset in datasets:
        sidecar = dataset.sidecar or {}
        part = sidecar.get("part") or {}
        number, n_parts = part.get("number"), part.get("of")
        if not isinstance(number, int) or not isinstance(n_parts, int):
            continue
        numbers = jobs.setdefault((n_parts, part.get("inputs_sha256"), sidecar.get("json_key")), {})
        if number in numbers:
            raise ValueError(
                f"{dataset.prefix}: got part {number} of {n_parts:,} again, as {numbers[number]}. "
                "Give each part once."
            )
        numbers[number] = dataset.prefix
    for (n_parts, *_), numbers in jobs.items():
        # not a list of all missing numbers: n_parts is a number in a file
        first_missing = next(number for number in range(1, len(numbers) + 2) if number not in numbers)
        if first_missing <= n_parts:
            raise ValueError(
                f"{next(iter(numbers.values()))}: got {len(numbers):,} of {n_parts:,} parts of its job, not "
                f"part {first_missing} of the same input. Write it with tools/preprocess_data_many_cores.py "
                "--part."
            )


def _find_common_eod(datasets: Sequence[IndexedTokens], mixed_eod: bool) -> EodUse | None:
    """Return how the documents of all datasets end; None if it differs (with `mixed_eod`) or is unknown.

    Raises ValueError if it differs without `mixed_eod`.
    """
    # 1. what the sidecars state; 2. for datasets without one, what the last tokens show
    uses = [parse_eod_use(dataset.sidecar) for dataset in datasets]
    first_known = next((i for i, use in enumerate(uses) if use is not None), None)
    named = next(
        (i for i, dataset in enumerate(datasets) if _tokenizer_meta(dataset).get("eod_id") is not None), None
    )
    likely = None if named is None else _tokenizer_meta(datasets[named])["eod_id"]
    for i, dataset in enumerate(datasets):
        if uses[i] is None:
            uses[i] = detect_eod(dataset, likely)
            dataset.unmap()  # the maps of 1,000 datasets would be too many open files
    first = (
        next((i for i, use in enumerate(uses) if use is not None), None)
        if first_known is None
        else first_known
    )
    if first is None:
        return None
    for dataset, use in zip(datasets, uses, strict=True):
        if use is None:
            log.warning(
                "%s: the end of its documents is unknown; make sure that it is as in the others",
                dataset.prefix,
            )
        elif use != uses[first]:
            words = f"{dataset.prefix}: got {use}, expected {uses[first]} as in {datasets[first].prefix}."
            if not mixed_eod:
                raise ValueError(
                    f"{words} Tokenise both with the same --append-eod and --eod-token, or give --mixed-eod."
                )
            log.warning("%s", words)
    same = all(use == uses[first] for use in uses)
    return uses[first] if same else None


def detect_eod(dataset: IndexedTokens, likely: int | None) -> EodUse | None:
    """Detect how documents end without a sidecar, from the last tokens of up to SAMPLED_DOCUMENTS documents.

    likely   the expected end id. None: the id that ends all of several documents, if there is one.
    """
    n = dataset.n_documents
    if not n:
        return None
    begins, lengths = dataset.document_spans(
        np.unique(np.linspace(0, n - 1, SAMPLED_DOCUMENTS).astype(np.int64))
    )
    # an empty document has no last token: begin - 1 is the last token of the document before it
    last = dataset.tokens[(begins + lengths - 1)[lengths > 0]]
    if not len(last):
        return None
    if likely is not None:
        return EodUse(likely if bool((last == likely).all()) else None)
    # a single document proves nothing: any last token ends all of one document
    return EodUse(int(last[0])) if len(last) > 1 and bool((last == last[0]).all()) else None


def _tokenizer_meta(dataset: IndexedTokens) -> dict[str, Any]:
    return (dataset.sidecar or {}).get("tokenizer") or {}


def describe_origin(dataset: IndexedTokens) -> dict[str, Any]:
    """Return the entry for a source dataset in the sidecar of a derived dataset."""
    entry = {"path": Path(dataset.prefix).name, "documents": dataset.n_documents, "tokens": dataset.n_tokens}
    return entry | {"sha256": (dataset.sidecar or {}).get("sha256")}
