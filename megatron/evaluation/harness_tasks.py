"""Load tasks of lm-eval by name, from local files or the hub."""

import difflib
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.evaluation.local_tasks import write_local_tasks
from megatron.tokenizer.hub_cache import find_hub_error


@contextmanager
def open_tasks(names: Sequence[str], data: Path | None) -> Iterator[dict[str, Any]]:
    """Yield {name: lazily loaded tasks of lm-eval} for names of tasks, groups or tags.

    data   folder with the files of LOCAL_TASKS; None: lm-eval downloads them

    Raises ValueError for names unknown to lm-eval, FileNotFoundError for missing files.
    """
    if not names:
        raise ValueError("--tasks: got no task, expected at least one")
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"--tasks: got {', '.join(repeated)} twice, expected once")
    hub_error = find_hub_error() if data is None else None
    if data is not None or hub_error:  # read when datasets is imported; else it retries for a minute
        os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    import lm_eval.tasks

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    task_folder = Path(lm_eval.tasks.__file__).parent
    with tempfile.TemporaryDirectory(prefix="tasks-") as folder:
        if data is None:
            task_manager = lm_eval.tasks.TaskManager()
        else:
            write_local_tasks(names, data, task_folder, Path(folder))
            task_manager = lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False)
        for name in names:
            if name not in task_manager.all_tasks:
                close = difflib.get_close_matches(name, task_manager.all_tasks, 3)
                hint = f"; did you mean {' or '.join(close)}?" if close else ""
                raise ValueError(f"--tasks: got {name!r}, which lm-eval does not have{hint}")
        yield {name: _LazyTask(task_manager, name, hub_error) for name in names}


class _LazyTask:
    """A task whose code and data are loaded on demand."""

    def __init__(self, task_manager: Any, name: str, hub_error: str | None) -> None:
        self.task_manager, self.name, self.hub_error = task_manager, name, hub_error

    def load(self) -> Any:
        """Return lm-eval's task. Raises ValueError if its data cannot be loaded."""
        try:
            return self.task_manager.load([self.name])
        except (OSError, ConnectionError) as error:
            reason = self.hub_error or (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"{self.name}: cannot load its data ({reason}); give --data-dir") from error

    def build_requests(self, limit: int | None) -> list[Any]:
        """Return the requests of a single task for its first `limit` documents."""
        task = self.load()["tasks"][self.name]
        task.build_all_requests(limit=limit, rank=0, world_size=1)
        return task.instances
