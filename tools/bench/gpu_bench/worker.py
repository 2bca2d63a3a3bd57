"""The process that measures cells or checks, and its other end: names in, one line of JSON out for each."""

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

# After one of these every further call of CUDA in the process fails: only a new process can continue.
STICKY_ERRORS = ("CUDA error", "CUDA driver error", "Error [CUDA]")
MAX_ERROR_CHARS = 400

Record = dict[str, Any]


class Worker:
    """The process that measures. It is replaced after a crash, a CUDA error or an exceeded time."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self.process: subprocess.Popen[str] | None = None

    def measure(self, name: str, timeout_s: float) -> Record:
        """Return the record of a name; one with `failed` if the process ended or exceeded its time."""
        for _ in range(2):
            process = self._start()
            assert process.stdin is not None, "a pipe"
            try:
                process.stdin.write(name + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                # it ended after its previous record: a new process takes the name
                self.stop()
                continue
            return self._read(process, name, timeout_s)
        return {"cell": name, "failed": "the process ended twice before it read the name"}

    def _start(self) -> "subprocess.Popen[str]":
        if self.process is None or self.process.poll() is not None:
            self.stop()
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        return self.process

    def _read(self, process: "subprocess.Popen[str]", name: str, timeout_s: float) -> Record:
        assert process.stdout is not None, "a pipe"
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                self.stop()
                return {"cell": name, "failed": f"exceeded {timeout_s:.0f} s"}
        line = process.stdout.readline()
        if not line:
            status = process.wait()
            return {"cell": name, "failed": f"the process ended with status {status}"}
        record: Record = json.loads(line)
        if record.get("sticky"):
            self.stop()
        return record

    def stop(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except BrokenPipeError:
                pass  # a name that the process did not read


def serve(measure: Callable[[str], Record]) -> None:
    """Measure the names on standard input, and print a line of JSON for each.

    Ends the process after a CUDA error that would make all later names fail.
    """
    # libraries may print to standard output, which is the protocol's: they get standard error instead
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        name = line.rstrip("\n")
        try:
            record = measure(name)
        # any failure is reported, and the next name is measured
        except Exception as error:
            record = {"cell": name, "failed": describe_error(error)}
            if is_sticky(error):
                record["sticky"] = True
        print(json.dumps(record), file=protocol, flush=True)
        if record.get("sticky"):
            # without destructors, which would call CUDA again and may hang
            os._exit(1)


def describe_error(error: BaseException) -> str:
    """Return one line of at most a few hundred characters."""
    kind = "out of memory" if type(error).__name__ == "OutOfMemoryError" else type(error).__name__
    return f"{kind}: {str(error)[:MAX_ERROR_CHARS]}"


def is_sticky(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, makes CUDA unusable in this process."""
    while error is not None:
        if any(text in str(error) for text in STICKY_ERRORS):
            return True
        error = error.__cause__ or error.__context__
    return False
