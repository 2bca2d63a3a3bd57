"""Work spread over processes: none is waited for in vain, and none outlives its parent.

`multiprocessing.Pool` waits for ever for a worker that was killed, for want of memory perhaps.
"""

import contextlib
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def as_finished(
    begin: Callable[[], Callable[[Item], Result]], items: Iterable[Item], n_workers: int
) -> Iterator[Result]:
    """The results for all items, as they are finished, from `n_workers` processes.

    Each process calls `begin` once and what it gave for each item that it is dealt; items are taken only when
    a process is free. Raises what that call raised, and ChildProcessError where a process was killed; either
    way, and when the caller goes away, all processes are ended first.
    """
    # spawn: a fork would copy the locks of whatever threads the parent runs
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(n_workers):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(begin, theirs), daemon=True)
            worker.start()
            theirs.close()
            workers[ours] = worker
        yield from _deal(iter(items), workers)
    finally:
        for connection, worker in workers.items():
            worker.kill()
            worker.join()
            connection.close()


def _deal(items: Iterator[Item], workers: dict[Connection, BaseProcess]) -> Iterator[Any]:
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
            with _Watch(workers[connection]):
                connection.send(item)
            busy.add(connection)
        if not busy:
            return
        for connection in wait(list(busy)):
            with _Watch(workers[connection]):
                error, result = connection.recv()
            if error is not None:
                raise error
            busy.remove(connection)
            free.append(connection)
            yield result


class _Watch:
    """Turns the silence of a dead worker into a sentence."""

    def __init__(self, worker: BaseProcess) -> None:
        self.worker = worker

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, EOFError | BrokenPipeError | ConnectionResetError):
            self.worker.join()
            raise ChildProcessError(
                f"a worker ended with exit code {self.worker.exitcode} before its work was done, for want of "
                "memory perhaps; run the same command again, with fewer workers, to go on"
            ) from error


def _serve(begin: Callable[[], Callable[[Any], Any]], connection: Connection) -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent gets them too, and ends its workers
        signal.signal(number, signal.SIG_IGN)
    function: Callable[[Any], Any] | None = None
    while True:
        try:
            item = connection.recv()
        except (EOFError, ConnectionResetError):
            return  # the parent is gone
        try:
            function = function or begin()
            answer = None, function(item)
        except Exception as error:  # it is raised again in the parent
            error.add_note(traceback.format_exc())
            answer = error, None
        with contextlib.suppress(BrokenPipeError):
            connection.send(answer)
