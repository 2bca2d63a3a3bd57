"""Work of a server that takes longer than a request: a client starts it, and asks for its result."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

MAX_WAITING = 32  # jobs that have not ended, of one queue
MAX_ENDED = 1024  # results that are kept


class BusyError(Exception):
    """The server has too much to do. The client repeats the request later."""


class RateLimiter:
    """Limit on requests: `burst` at once, and `per_s` in the long run."""

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_s, self.burst, self.clock = per_s, burst, clock
        self._lock, self._left, self._at = threading.Lock(), float(burst), clock()

    def take(self) -> None:
        """Count a request. Raises BusyError above the limit."""
        with self._lock:
            now = self.clock()
            # a token bucket: it fills with `per_s`, and a request takes one token
            self._left, self._at = min(self.burst, self._left + (now - self._at) * self.per_s), now
            if self._left < 1:
                raise BusyError(f"got more than {self.per_s:g} requests per second. Send fewer.")
            self._left -= 1


class JobQueue:
    """Jobs by name, executed in order by some threads. A name that has not ended is not started again."""

    def __init__(self, name: str, n_threads: int = 1) -> None:
        self._executor = ThreadPoolExecutor(n_threads, thread_name_prefix=f"mixture-{name}")
        self._lock, self._jobs = threading.Lock(), dict[str, Future[dict[str, Any]]]()

    def start(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Start a job, unless one of that name has not ended. Raises BusyError if too many are waiting."""
        with self._lock:
            job = self._jobs.get(name)
            if job is not None and not job.done():
                return
            if sum(not other.done() for other in self._jobs.values()) >= MAX_WAITING:
                raise BusyError(f"{MAX_WAITING} jobs are waiting. Start it again later.")
            ended = [other for other, future in self._jobs.items() if future.done()]
            # a dictionary keeps the order of insertion: the oldest results are dropped
            for other in {*ended[: len(ended) - MAX_ENDED], name} & set(self._jobs):
                del self._jobs[other]
            self._jobs[name] = self._executor.submit(work)

    def get(self, name: str, errors: tuple[type[Exception], ...]) -> dict[str, Any] | None:
        """Return {state: running}, {state: done, result} or {state: failed, error}; None if it is unknown.

        errors   those whose message is for the client; others are programming errors and are raised
        """
        job = self._jobs.get(name)
        if job is None:
            return None
        if not job.done():
            return {"state": "running"}
        try:
            return {"state": "done", "result": job.result()}
        except errors as error:
            return {"state": "failed", "error": next(iter(str(error).splitlines()), type(error).__name__)}

    def close(self) -> None:
        """Drop the jobs that have not begun, and wait for the others."""
        self._executor.shutdown(cancel_futures=True)
