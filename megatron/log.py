"""One logger for the whole package, with the rank in its prefix."""

import logging
import os
import sys

FORMAT = "%(asctime)s %(rank)s%(message)s"


class _RankFilter(logging.Filter):
    """Adds `rank`, empty when there is a single process."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = f"[rank {os.environ['RANK']}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
        return True


def get_logger(name: str = "megatron") -> logging.Logger:
    """The package's logger, or a child of it. Warnings and above from every rank, the rest from rank 0."""
    root = logging.getLogger("megatron")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
        handler.addFilter(_RankFilter())
        root.addHandler(handler)
        root.setLevel(logging.INFO if int(os.environ.get("RANK", "0")) == 0 else logging.WARNING)
        root.propagate = False
    return root if name == "megatron" else root.getChild(name.removeprefix("megatron."))
