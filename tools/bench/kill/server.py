"""Trials of a mixture server that is killed while a client reads its chunks and reports losses."""

import hashlib
import random
import shutil
import threading
import time
from pathlib import Path

import numpy as np

from kill.inputs import Inputs, tool_command
from kill.outcomes import read_outcome
from kill.trials import ALL, GONE_S, LIMIT_S, RunningCommand, Tally
from megatron.mixture.client import make_token_file, read_token
from megatron.train.local_ranks import reserve_port

N_CHUNKS = 120
PACE_S = 0.03  # pause between chunks, so that the client outlives several servers
MORE = "count: documents\nadaptive: {rule: loss, every_steps: 2, delay_steps: 4}\n"


class Client(threading.Thread):
    """Thread that reads chunks 0, 1, ... and reports a synthetic loss for each."""

    def __init__(self, port: int, token: str) -> None:
        super().__init__(name="mixture-client", daemon=True)
        self.location, self.token = f"grpc+tcp://127.0.0.1:{port}", token
        self.digests: list[str] = []
        self.error: Exception | None = None

    def run(self) -> None:
        """Read until `N_CHUNKS` are read, or until an error, which is stored in `error`."""
        try:
            self._read_chunks()
        except Exception as error:  # reported with the trial; an exception of a thread would be lost
            self.error = error

    def _read_chunks(self) -> None:
        from megatron.mixture.client import Connection, RemoteChunks

        # The client must survive the time between a kill and the moment when the next server listens. It
        # repeats a request without an answer for 120 s.
        with Connection(self.location, self.token, patience_s=120.0) as connection:
            source = RemoteChunks(connection, "slim")
            for chunk in range(N_CHUNKS):
                table = source.read(chunk, 1)
                # a server that resumed with other weights or at another position would return other documents
                self.digests.append(hashlib.sha256(repr(table.to_pydict()).encode()).hexdigest())
                # Domain k has a loss of 1 + k c / 8 nats per token in chunk c, so the weights change
                # during the run. If a restarted server lost a report, later chunks would have other weights.
                tokens = np.full(len(source.names), 10.0)
                source.report(chunk, tokens * (1.0 + np.arange(len(source.names)) * chunk / 8), tokens)
                time.sleep(PACE_S)


class ServerTrials:
    """Trials of the server, as `trials.Trials`.

    The client must get the same chunks, and the log must contain the same weights.
    """

    def __init__(self, inputs: Inputs, work: Path, rng: random.Random, logs: Path) -> None:
        """Run the job undisturbed. Raise RuntimeError if that fails."""
        self.inputs, self.work, self.rng, self.logs = inputs, work, rng, logs
        self.tally = Tally("mixture-server")
        # made before the clock starts, since the moments of the kills are drawn from the duration
        _ = inputs.catalog
        start = time.monotonic()
        # without a kill
        self.expected = self._serve_client("whole", 0)
        self.duration_s = time.monotonic() - start
        if self.tally.faults or self.tally.leftovers:
            raise RuntimeError(f"the undisturbed run failed: {self.tally.faults}")

    def run(self, n_kills: int) -> Tally:
        """Run trials until `n_kills` kills have hit."""
        while self.tally.n_hits < n_kills and self.tally.n_trials < 3 * n_kills + 3:
            name = str(self.tally.n_trials)
            # faults that exist before this trial; the files of a trial that adds one are copied
            n_before = len(self.tally.faults) + len(self.tally.leftovers)
            outcome = self._serve_client(name, min(self.rng.choice((2, 3)), n_kills - self.tally.n_hits))
            self.tally.n_trials += 1
            if outcome == self.expected:
                self.tally.n_equal += 1
            else:
                keys = sorted(key for key in outcome.keys() | self.expected.keys()
                              if outcome.get(key) != self.expected.get(key))  # fmt: skip
                self.tally.faults.append(f"{name}: different: {', '.join(keys[:6])}")
            if len(self.tally.faults) + len(self.tally.leftovers) > n_before:
                shutil.copytree(self.work, self.logs / f"mixture-server.{name}")
        return self.tally

    def _wait_for_moment(self, client: Client, n_read: int) -> None:
        """Return after a random time, or a random time after a chunk of the current server."""
        # Kills at a random time may hit a server during its start, before it has served anything. The others
        # wait for a chunk of the current server, and so hit it while it serves or stores a report.
        if self.rng.random() < 0.3:
            client.join(self.rng.uniform(0, self.duration_s / 2))
            return
        end, n_more = time.monotonic() + LIMIT_S, self.rng.randint(1, N_CHUNKS // 4)
        while client.is_alive() and len(client.digests) < n_read + n_more and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(self.rng.uniform(0, 2 * PACE_S))

    def _serve_client(self, name: str, n_kills: int) -> dict[str, str]:
        """Serve one client to its end with `n_kills` kills; return its chunks and the server's files."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        mixture = self.inputs.write_mixture(self.work, MORE)
        log = self.logs / f"mixture-server.{name}.log"
        # Every server of a trial listens on the same port. The reservation keeps it from other processes
        # between the death of a server and the start of the next.
        with reserve_port() as port:
            token_file = make_token_file(mixture.parent)
            words = tool_command("mixture_server", mixture.parent, "--port", port)
            server, client = RunningCommand(words, log), Client(port, read_token(token_file))
            client.start()
            for _ in range(n_kills):
                n_read = len(client.digests)
                self._wait_for_moment(client, n_read)
                if not client.is_alive() or not server.kill(ALL, self.rng):
                    self.tally.n_missed += 1
                    break
                # a server that has not served a chunk yet was killed during its start
                self.tally.phases["work" if len(client.digests) > n_read else "start"] += 1
                self.tally.targets[ALL] += 1
                self.tally.n_restarts += 1
                # the new server must restore the weights from the log of reports
                server = RunningCommand(words, log)
            client.join(LIMIT_S)
            if client.error is not None or client.is_alive():
                self.tally.faults.append(f"{name}: the client failed: {client.error or 'it hangs'}")
            # on SIGTERM an orderly end with status 0, unlike the kills above
            server.process.terminate()
            if (status := server.wait(GONE_S)) != 0:
                self.tally.faults.append(f"{name}: the server ended with {status} after SIGTERM: see {log}")
            if pids := server.wait_until_gone(GONE_S):
                self.tally.leftovers.append(f"{name}: processes left: {pids}")
            server.end()
        chunks = {f"chunk {i}": digest for i, digest in enumerate(client.digests)}
        return chunks | read_outcome(self.work)
