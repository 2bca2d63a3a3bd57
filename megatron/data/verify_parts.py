"""Verification of a dataset of parts, several parts at a time."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron.data.block_hash import hash_blocks
from megatron.data.inspect import find_faults, find_wrong_counts
from megatron.data.parts import DatasetPart, PartsTokens
from megatron.plan.sidecar import PARTS_INDEX_SUFFIX, PARTS_SUFFIX


def find_faults_of_parts(
    prefix: str | Path, advance: Callable[[int], object] = lambda n_bytes: None, n_workers: int = 1
) -> Iterator[str]:
    """Yield a message for every violated invariant of a dataset of parts, in the order of the parts.

    `n_workers` threads verify a part each: hashing and reading release the interpreter lock. The messages do
    not depend on the number of threads. Then the index of the whole is compared with its hash and
    the counts. Raises the errors of opening the dataset; an error of opening a part is a message.
    """
    dataset = PartsTokens(prefix)
    lock = threading.Lock()

    def advance_locked(n_bytes: int) -> None:
        with lock:
            advance(n_bytes)

    pool = ThreadPoolExecutor(n_workers, thread_name_prefix="verify")
    try:
        for faults in pool.map(lambda part: _verify_part(part, prefix, advance_locked), dataset.parts):
            yield from faults
    finally:
        pool.shutdown(cancel_futures=True)
    assert dataset.sidecar is not None, "a list of parts is a sidecar"
    sums = dataset.sidecar.get("sha256") or {}
    if "idx" not in sums:
        yield f"{prefix}{PARTS_SUFFIX}: no hashes; later changes cannot be detected"
    elif (
        hash_blocks(Path(f"{prefix}{PARTS_INDEX_SUFFIX}"), sums.get("block_bytes")).hexdigest() != sums["idx"]
    ):
        yield f"{prefix}{PARTS_INDEX_SUFFIX}: its hash differs from that of the list; the file has changed"
    yield from find_wrong_counts(dataset, dataset.sidecar)


def _verify_part(part: DatasetPart, prefix: str | Path, advance: Callable[[int], object]) -> list[str]:
    """Return the messages for one part; it is read completely."""
    faults = []
    if not part.matches_record():
        faults.append(f"{part.prefix}: got another sidecar or index than in {prefix}{PARTS_SUFFIX}")
    recorded = {"sha256": part.sha256} if part.sidecar_sha256 is None and "bin" in part.sha256 else None
    try:
        faults += find_faults(part.prefix, advance, recorded)
    except (OSError, ValueError) as error:
        faults.append(str(error))
    return faults
