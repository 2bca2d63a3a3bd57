"""Split documents by the hash of their text into train.jsonl and held_out.jsonl, with counts per source."""

import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SIDES = ("train", "held_out")
HELD_OUT_SHARE = 0.05
HELD_OUT_SHARE_RANGE = (
    0.001,
    0.5,
)  # below: too few held-out documents for a score; above: too little text to train on


class SplitWriter:
    """Write each text once, to the side that the first 8 bytes of its sha256 select."""

    def __init__(self, folder: Path, held_out_share: float = HELD_OUT_SHARE) -> None:
        self.n_documents = self.n_bytes = 0
        self._limit = held_out_share * 2**64  # first 8 bytes of sha256 are uniform on 0..2^64 - 1
        self._digests: set[bytes] = set()
        self._files = {side: (folder / f"{side}.jsonl").open("wb") for side in SIDES}
        self._file_sums = {side: hashlib.sha256() for side in SIDES}
        self._source_sums: dict[str, Any] = {}
        self._counts: Counter[str] = Counter()
        self._by_source: dict[str, Counter[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()

    def sync(self) -> None:
        """Flush all written data to disk (fsync)."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def add(self, source: str, text: str) -> None:
        """Write a document, or count it as skipped if it is blank or a copy of an earlier one."""
        counts = self._by_source.setdefault(source, Counter())
        source_sum = self._source_sums.setdefault(source, hashlib.sha256())
        # an unpaired surrogate becomes "?"; the digest below is of the bytes that are written
        raw = text.encode("utf-8", "replace")
        digest = hashlib.sha256(raw).digest()
        if not text.strip():
            counts["blank"] += 1
            return
        if digest in self._digests:
            counts["copies"] += 1
            return
        # 32 bytes per document in memory; the digest also selects the side
        self._digests.add(digest)
        side = "held_out" if int.from_bytes(digest[:8]) < self._limit else "train"
        # no ASCII escapes: the file is then about as large as the text, in any script
        line = (json.dumps({"text": raw.decode()}, ensure_ascii=False) + "\n").encode()
        self._files[side].write(line)
        self._file_sums[side].update(line)
        source_sum.update(digest)
        for count in (self._counts, counts):
            count[f"{side}_documents"] += 1
            count[f"{side}_bytes"] += len(raw)
        self.n_documents += 1
        self.n_bytes += len(raw)

    def count_totals(self) -> dict[str, int]:
        """Return documents and bytes of text on each side."""
        return {
            f"{side}_{unit}": self._counts[f"{side}_{unit}"]
            for unit in ("documents", "bytes")
            for side in SIDES
        }

    def file_sha256(self) -> dict[str, str]:
        """Return the sha256 of the two files as written."""
        return {f"{side}.jsonl": sum_.hexdigest() for side, sum_ in self._file_sums.items()}

    def source_stats(self) -> list[dict[str, Any]]:
        """Return per source: documents, bytes, held-out and skipped counts, and a hash.

        The hash is the sha256 over the sha256 digests of its texts in the order of writing.
        """
        return [
            {
                "name": name,
                "documents": sum(counts[f"{side}_documents"] for side in SIDES),
                "bytes": sum(counts[f"{side}_bytes"] for side in SIDES),
                "held_out_documents": counts["held_out_documents"],
                "held_out_bytes": counts["held_out_bytes"],
                "skipped": {reason: counts[reason] for reason in ("blank", "copies")},
                "sha256": self._source_sums[name].hexdigest(),
            }
            for name, counts in self._by_source.items()
        ]


def is_intact(folder: Path, sums: object) -> bool:
    """Return whether both files exist unchanged. `sums`: the result of `SplitWriter.file_sha256`."""
    if not isinstance(sums, dict) or set(sums) != {f"{side}.jsonl" for side in SIDES}:
        return False
    for name, expected in sums.items():
        if not (folder / name).is_file():
            return False
        with (folder / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                return False
    return True
