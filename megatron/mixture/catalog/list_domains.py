"""Domains of a property with several values per document, such as the languages of a repository.

`once`   A document is in one domain: that of one of its values, chosen by a hash of its file's content, its
         number in the file and the property. Every value is equally likely, except that values to which the
         mixture gives a weight take precedence over others. Domains are disjoint, so that an epoch of all
         domains contains each document once.
`each`   A document is in the domain of each of its values, as a key of Mixtera matches it. An epoch of all
         domains contains it once for each value.

Repeated values and NULL within a list count once and not at all. A document without values is in the domain
of missing values, as for other properties.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.mixture.lazy_imports import import_pyarrow

LIST_DOMAINS = ("once", "each")


def find_weighted_values(written: Any, by: Sequence[str]) -> dict[str, set[Any]]:
    """Return the values of each property to which weights, as in a mixture file, give a share above 0.

    Invalid weights are ignored here: `compute_weights` refuses them.
    """
    values_by_name: dict[str, set[Any]] = {}
    entries: list[tuple[dict[str, Any], Any, Sequence[str]]] = []
    if isinstance(written, Mapping) and by:
        entries = [({by[0]: value}, entry, by[1:] or by) for value, entry in written.items()]
    elif isinstance(written, list):
        entries = [
            (entry["where"], entry, by)
            for entry in written
            if isinstance(entry, Mapping) and isinstance(entry.get("where"), Mapping)
        ]
    for criteria, entry, rest in entries:
        if entry == 0 or isinstance(entry, Mapping) and entry.get("weight") == 0:
            continue
        inner = find_weighted_values(entry.get("weights"), rest) if isinstance(entry, Mapping) else {}
        for name, values in [*criteria.items(), *inner.items()]:
            listed = values if isinstance(values, list | set) else [values]
            values_by_name.setdefault(name, set()).update(value for value in listed if isinstance(value, str))
    return values_by_name


def split_list_domains(
    batches: Iterable[Any], names: Sequence[str], how: str, files: Mapping[int, Any],
    weighted: Mapping[str, Collection[str]],
) -> Iterator[Any]:  # fmt: skip
    """Yield the batches with one value in place of each list, and a row for each domain of a document.

    batches    Arrow record batches with the columns file (id), row, and the lists `names`
    how        one of LIST_DOMAINS
    files      query.SourceFile of each file, by id
    weighted   values of each property that take precedence in `once`

    Raises ValueError for another value of `how`.
    """
    if how not in LIST_DOMAINS:
        raise ValueError(f"list_domains: got '{how}', expected one of {', '.join(LIST_DOMAINS)}.")
    # the content, or the name of a file of an older catalog: not the id, which depends on other files
    file_keys = (
        {id: _hash_text(file.sha256 or Path(file.path).name) for id, file in files.items()} if names else {}
    )
    for batch in batches:
        for name in names if len(batch) else ():
            batch = _split_column(batch, name, how, file_keys, weighted.get(name, ()))
        yield batch


def _split_column(
    batch: Any, name: str, how: str, file_keys: Mapping[int, int], weighted: Collection[str]
) -> Any:
    arrow = import_pyarrow()
    place = batch.schema.get_field_index(name)
    lists = batch.column(place)
    if arrow.types.is_null(lists.type):  # no corpus of the batch has the property
        return batch.set_column(place, name, lists.cast(arrow.string()))
    # (document, value) of each element, without the lists in Python
    parents, flat = lists.value_parent_indices(), lists.flatten()
    encoded = flat.dictionary_encode()
    distinct = encoded.dictionary.to_pylist()
    # sorted by value: the choice must not depend on the order in which a batch contains them
    order = sorted(range(len(distinct)), key=distinct.__getitem__)
    rank = np.empty(len(distinct) + 1, dtype=np.int64)
    rank[order] = np.arange(len(distinct))
    codes = encoded.indices.fill_null(len(distinct)).to_numpy(zero_copy_only=False)
    is_value = codes < len(distinct)
    parent = parents.to_numpy(zero_copy_only=False).astype(np.int64)[is_value]
    value = rank[codes[is_value]]
    # distinct pairs, sorted by document and value
    pairs = np.sort(parent * max(1, len(distinct)) + value)
    # not np.unique, whose hashing took 50 times as long
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]
    parent, value = pairs // max(1, len(distinct)), pairs % max(1, len(distinct))
    if how == "once" and weighted:
        is_weighted = np.array([distinct[i] in weighted for i in order], dtype=bool)[value]
        # documents with a weighted value lose their other ones
        has_weighted = np.zeros(len(batch), dtype=bool)
        has_weighted[parent[is_weighted]] = True
        remaining = is_weighted | ~has_weighted[parent]
        parent, value = parent[remaining], value[remaining]
    n_values = np.bincount(parent, minlength=len(batch))
    if how == "each":
        # a document without values keeps one row, with a missing value
        rows = np.repeat(np.arange(len(batch)), np.maximum(n_values, 1))
        chosen = np.full(len(rows), -1, dtype=np.int64)
        chosen[np.repeat(n_values > 0, np.maximum(n_values, 1))] = value
    else:
        rows = np.arange(len(batch))
        begins = np.cumsum(n_values) - n_values
        files, of_file = np.unique(batch.column("file").to_numpy(), return_inverse=True)
        keys = np.array([file_keys[file] for file in files.tolist()], dtype=np.uint64)[of_file]
        numbers = batch.column("row").to_numpy().astype(np.uint64)
        draws = _mix_bits(keys ^ _mix_bits(numbers ^ np.uint64(_hash_text(name))))
        # the modulo of 64 bits is uniform to within n_values / 2^64
        draw = (draws % np.maximum(n_values, 1).astype(np.uint64)).astype(np.int64)
        chosen = np.full(len(batch), -1, dtype=np.int64)
        has_value = n_values > 0
        chosen[has_value] = value[(begins + draw)[has_value]]
    names_sorted = arrow.array([distinct[i] for i in order], arrow.string())
    column = names_sorted.take(arrow.array(chosen, mask=chosen < 0))
    if how == "each":
        batch = batch.take(arrow.array(rows))
    return batch.set_column(place, name, column)


def _hash_text(text: str) -> int:
    """Return 64 bits that stand for a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _mix_bits(words: np.ndarray) -> np.ndarray:
    """Return a permutation of 64-bit words in which each bit depends on all (splitmix64, Steele 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)  # modulo 2^64, as numpy's arrays wrap around
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
