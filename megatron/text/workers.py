"""Parallel map over processes that detects killed workers and leaves none running after its parent.

`multiprocessing.Pool` waits forever for a worker that was killed, for example by the out-of-memory killer.
`concurrent.futures.ProcessPoolExecutor` raises BrokenProcessPool then, without the exit code. But it submits
all items at once, its shutdown waits for running calls (8 s of a call of 8 s; `kill_workers` needs Python
3.14), and its workers outlive a parent that was killed: they were still there after 30 s.
"""

import contextlib
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar, cast

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def map_unordered(
    make_worker: Callable[[], Callable[[ItemT], ResultT]], items: Iterable[ItemT], n_workers: int
) -> Iterator[ResultT]:
    """Yield the results for all items, in the order of completion, from `n_workers` processes.

    Each process calls `make_worker` once, and the returned function for each item. An item is drawn from
    `items` only when a process is free. Raises the exception of a call, or ChildProcessError if a process was
    killed. All processes are killed before that, and also when the generator is closed.
    """
    # spawn: a fork would copy locks that other threads of the parent may hold
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(n_workers):
            parent_end, child_end = context.Pipe()
            worker = context.Process(target=_run_worker, args=(make_worker, child_end), daemon=True)
            worker.start()
            child_end.close()  # the child has its own copy; recv must raise EOFError when it dies
            workers[parent_end] = worker
        yield from _dispatch_items(iter(items), workers)
    finally:
        # SIGKILL: a handler could delay SIGTERM until native code returns. No worker needs an orderly end:
        # a shard without its marker is written again.
        for connection, process in workers.items():
            process.kill()
            process.join()
            connection.close()


def _dispatch_items(items: Iterator[ItemT], workers: dict[Connection, BaseProcess]) -> Iterator[Any]:
    # A connection is free (its worker waits in recv) or busy (it computes or sends its reply). The parent
    # sends to free workers only, so that parent and worker never block in send at the same time: no deadlock,
    # whatever the size of items and results.
    free, busy = list(workers), set[Connection]()
    is_more = True
    while True:
        while is_more and free:
            try:
                item = next(items)
            except StopIteration:
                is_more = False
                break
            connection = free.pop()
            with _DeadWorkerCheck(workers[connection]):  # a dead process closes its pipe end
                connection.send(item)
            busy.add(connection)
        if not busy:
            return
        # a closed pipe is ready too: recv then raises EOFError, and a killed worker is detected at once
        # `wait` also accepts sockets, hence its wider result
        for connection in cast(list[Connection], wait(list(busy))):
            with _DeadWorkerCheck(workers[connection]):
                error, result = connection.recv()
            if error is not None:
                raise error
            busy.remove(connection)
            free.append(connection)
            yield result


class _DeadWorkerCheck:
    """Convert the pipe errors of a dead worker to ChildProcessError."""

    def __init__(self, worker: BaseProcess) -> None:
        self.worker = worker

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, EOFError | BrokenPipeError | ConnectionResetError):
            # the pipe closes slightly before the process ends; without join, exitcode may still be None
            self.worker.join()
            raise ChildProcessError(
                f"a worker ended with exit code {self.worker.exitcode} before it finished, perhaps out of "
                "memory. Run the same command again, with fewer workers, to resume."
            ) from error


def _run_worker(make_worker: Callable[[], Callable[[Any], Any]], connection: Connection) -> None:
    # the parent receives them too, and kills its workers
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    function: Callable[[Any], Any] | None = None
    while True:
        try:
            item = connection.recv()
        except (EOFError, ConnectionResetError):
            return  # the parent has ended
        reply: tuple[Exception | None, Any]
        try:
            # inside the try block: an error of the constructor is reported as that of an item
            function = function or make_worker()
            reply = None, function(item)
        except Exception as error:  # raised again in the parent
            # pickling drops the traceback; a note stores it as text
            error.add_note(traceback.format_exc())
            reply = error, None
        with contextlib.suppress(BrokenPipeError):  # the parent has ended
            connection.send(reply)
