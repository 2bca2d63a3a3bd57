"""The logger of the package, with the rank in its prefix."""

import logging
import os
import sys

FORMAT = "%(asctime)s %(rank)s%(message)s"


class _RankFilter(logging.Filter):
    """Filter that adds `rank` to records and passes only warnings and above from ranks other than 0.

    `rank` is empty for a single process. The environment is read
    for every record: srun and mpirun set other variables than torchrun,
    and parallel/world.py translates them after this logger was created.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        rank = os.environ.get("RANK", "0")
        record.rank = f"[rank {rank}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
        return rank == "0" or record.levelno >= logging.WARNING


def get_logger(name: str = "megatron") -> logging.Logger:
    """Return the package's logger or a child of it.

    Warnings and above are logged by every rank, lower levels by rank 0 only.
    """
    root = logging.getLogger("megatron")
    # once per process: a second handler would print every line twice
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
        handler.addFilter(_RankFilter())
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        # the root logger may have a handler of another
        # library, which would print the line again
        root.propagate = False
    return root if name == "megatron" else root.getChild(name.removeprefix("megatron."))
