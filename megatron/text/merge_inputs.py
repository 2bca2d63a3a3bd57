"""Inputs of a merge: datasets by name or pattern, and whether they fit together."""

import re
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import Any

from megatron.data import open_dataset
from megatron.data.indexed import IndexedTokens
from megatron.data.sidecar import (
    PARTS_SUFFIX,
    EodUse,
    locate_dataset,
    parse_eod_use,
    strip_suffix,
)
from megatron.log import get_logger
from megatron.plan.datapaths import compare_eod_uses, compare_tokenizers

log = get_logger(__name__)
DIGITS = re.compile(r"([0-9]+)")


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that orders numbers in names by value: part-2 before part-10."""
    # numbers sort before text; 007 and 7 are equal
    # here, and `sorted` keeps the order of equal keys
    return [(0, int(word)) if i % 2 else (1, word) for i, word in enumerate(DIGITS.split(name))]


def expand_prefixes(names: Sequence[str]) -> list[str]:
    """Return the dataset prefixes of names and patterns; a pattern's are in natural order.

    Raises FileNotFoundError for a name without a dataset, ValueError for a dataset
    that is named twice.
    """
    prefixes: dict[str, str] = {}
    for name in names:
        matches = find_prefixes(name)
        if not matches:
            raise FileNotFoundError(f"{name}: no dataset matches, expected prefixes of .bin/.idx datasets")
        for prefix in matches:
            location = locate_dataset(prefix).location
            if location in prefixes:
                raise ValueError(
                    f"{name}: got {prefix} twice, also as {prefixes[location]}. Give each dataset once; "
                    "to repeat text in training, use weights in a data-path file."
                )
            prefixes[location] = prefix
    return list(prefixes.values())


def find_prefixes(name: str) -> list[str]:
    """Return the datasets that a prefix or a pattern names, in natural order."""
    prefix = strip_suffix(name)
    if locate_dataset(prefix).exists():
        return [prefix]
    paths = [path for suffix in (".bin", ".idx", PARTS_SUFFIX) for path in glob(strip_suffix(name) + suffix)]
    matches = {strip_suffix(path) for path in paths}
    return sorted(sorted(matches), key=natural_key)


def open_inputs(
    prefixes: Sequence[str], output: Path, mixed_eod: bool
) -> tuple[list[IndexedTokens], dict[str, Any]]:
    """Open datasets that are to be merged. Raises as `merge_datasets`.

    Returns the datasets, with the parts of a dataset of parts in its place, and the
    entries of the sidecar that hold for all of them.
    """
    datasets: list[IndexedTokens] = []
    for prefix in prefixes:
        dataset = open_dataset(strip_suffix(prefix))
        datasets += [open_dataset(part.prefix) for part in dataset.parts] or [dataset]
        if dataset.files.location == locate_dataset(output).location:
            raise ValueError(f"{output}: is one of the inputs. Choose another name.")
    for dataset in datasets:
        if dataset.dtype != datasets[0].dtype:
            raise ValueError(
                f"{dataset.prefix}: got {dataset.dtype}, expected {datasets[0].dtype} as in "
                f"{datasets[0].prefix}. Tokenise them with the same settings."
            )
    _compare_tokenizers(datasets, output)
    check_part_numbers(datasets)
    use = _find_common_eod(datasets, mixed_eod)
    return datasets, _merge_sidecars(datasets, use)


def _merge_sidecars(datasets: Sequence[IndexedTokens], use: EodUse | None) -> dict[str, Any]:
    """Return the entries that hold for all datasets.

    use   how all documents end; None: not equally
    """
    meta: dict[str, Any] = {"merged_from": [describe_origin(dataset) for dataset in datasets]}
    records = [record for dataset in datasets if (record := _tokenizer_meta(dataset))]
    if records:
        meta["tokenizer"] = records[0]
        if use is None and len({record.get("eod_id") for record in records}) > 1:
            # no end token is valid for all documents
            entries = records[0].items()
            meta["tokenizer"] = {name: value for name, value in entries if not name.startswith("eod_")}
    sidecars = [dataset.sidecar or {} for dataset in datasets]
    shared = ["special_text", "json_key"]
    if len({parse_eod_use(sidecar) for sidecar in sidecars}) == 1:
        shared.insert(0, "append_eod")
    for name in shared:
        if name in sidecars[0] and all(sidecar.get(name) == sidecars[0][name] for sidecar in sidecars):
            meta[name] = sidecars[0][name]
    n_empty = [sidecar.get("empty_documents") for sidecar in sidecars]
    if "append_eod" in meta and None not in n_empty:
        meta["empty_documents"] = sum(n_empty)
    return meta


def _compare_tokenizers(datasets: Sequence[IndexedTokens], output: Path) -> None:
    """Raise ValueError if two sidecars record different tokenizers; warn about those that record none."""
    recorded = [dataset for dataset in datasets if _tokenizer_meta(dataset).get("sha256")]
    for dataset in datasets if len(datasets) > 1 else ():
        if dataset in recorded:
            compare_tokenizers(recorded[0].prefix, dataset.prefix, str(output))
        else:
            log.warning(
                "%s: no sidecar that records its tokenizer. Check that it is as in the others.",
                dataset.prefix,
            )


def check_part_numbers(datasets: Sequence[IndexedTokens]) -> None:
    """Check that datasets written with --part I/N are all parts of their jobs, each once.

    Datasets without a part number are not checked.
    Raises ValueError for a missing or repeated part.
    """
    jobs: dict[tuple[Any, ...], list[int]] = {}
    for dataset in datasets:
        sidecar = dataset.sidecar or {}
        part = sidecar.get("part") or {}
        number, n_parts = part.get("number"), part.get("of")
        if isinstance(number, int) and isinstance(n_parts, int):
            job = str(part.get("inputs_sha256")), sidecar.get("json_key")
            jobs.setdefault((n_parts, *job), []).append(number)
    for (n_parts, *_), numbers in jobs.items():
        if len(numbers) != n_parts or set(numbers) != set(range(1, len(numbers) + 1)):
            raise ValueError(
                f"got the parts {', '.join(map(str, sorted(numbers)))} of one job, expected each of its "
                f"{n_parts:,} parts once. Write others with tools/preprocess_data_many_cores.py --part."
            )


def _find_common_eod(datasets: Sequence[IndexedTokens], mixed_eod: bool) -> EodUse | None:
    """Return how the documents of all datasets end.

    None: it differs (with `mixed_eod`) or is unknown.
    Raises ValueError if it differs without `mixed_eod`.
    """
    uses = [(dataset.prefix, parse_eod_use(dataset.sidecar)) for dataset in datasets]
    for warning in compare_eod_uses(uses, mixed_eod, "give --mixed-eod"):
        log.warning("%s", warning)
    return uses[0][1] if len({use for _, use in uses}) == 1 else None


def _tokenizer_meta(dataset: IndexedTokens) -> dict[str, Any]:
    return (dataset.sidecar or {}).get("tokenizer") or {}


def describe_origin(dataset: IndexedTokens) -> dict[str, Any]:
    """Return the entry for a source dataset in the sidecar of a derived dataset."""
    entry = {"path": Path(dataset.prefix).name, "documents": dataset.n_documents, "tokens": dataset.n_tokens}
    return entry | {"sha256": (dataset.sidecar or {}).get("sha256")}
