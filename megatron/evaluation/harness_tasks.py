"""Load tasks of lm-eval by name, whose data are local files or on the hub."""

import difflib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.tokenizer.hub_cache import find_hub_error


def open_tasks(names: Sequence[str], include_path: Path | None) -> dict[str, "LazyTask"]:
    """Return {name: lazily loaded tasks of lm-eval} for names of tasks, groups or tags.

    include_path   folder of the user's task files, which precede lm-eval's

    Raises ValueError for names unknown to lm-eval,
    FileNotFoundError without the folder.
    """
    if not names:
        raise ValueError("--tasks: got no task, expected at least one")
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"--tasks: got {', '.join(repeated)} twice, expected once")
    if include_path is not None and not include_path.is_dir():
        raise FileNotFoundError(f"--include-path: got no folder {include_path}, expected one of task files")
    if hub_error := find_hub_error():  # read when datasets is imported; else it retries for a minute
        os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    import lm_eval.tasks

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    folder = None if include_path is None else str(include_path)
    # reading all of lm-eval's task files
    # takes seconds: first without them
    task_manager = lm_eval.tasks.TaskManager(include_path=folder, include_defaults=folder is None)
    if folder is not None and not set(names) <= set(task_manager.all_tasks):
        task_manager = lm_eval.tasks.TaskManager(include_path=folder)
    for name in names:
        if name not in task_manager.all_tasks:
            close = difflib.get_close_matches(name, task_manager.all_tasks, 3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise ValueError(f"--tasks: got {name!r}, which lm-eval does not have{hint}")
    return {name: LazyTask(task_manager, name, hub_error) for name in names}


class LazyTask:
    """A task whose code and data are loaded on demand."""

    def __init__(self, task_manager: Any, name: str, hub_error: str | None) -> None:
        self.task_manager, self.name, self.hub_error = task_manager, name, hub_error

    def load(self) -> Any:
        """Return lm-eval's task. Raises ValueError if its data cannot be loaded."""
        try:
            return self.task_manager.load([self.name])
        except (OSError, ConnectionError) as error:
            reason = self.hub_error or (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"{self.name}: cannot load its data ({reason}). Give --include-path.") from error

    def build_requests(self, limit: int | None) -> list[Any]:
        """Return the requests of a single task for its first `limit` documents."""
        task = self.load()["tasks"][self.name]
        task.build_all_requests(limit=limit, rank=0, world_size=1)
        return task.instances
