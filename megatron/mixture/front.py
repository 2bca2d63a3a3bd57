"""What clients of a mixture server connect to: TLS, and a limit on the size of requests before they are
received.

Arrow Flight accepts messages of any length and gives no way to limit them, and gRPC receives the whole
message of a call before the token is checked. So Flight listens on a socket of this process's own folder, and
connections come through here: HTTP/2 frames of clients are counted, and a connection whose open requests
exceed what a request needs is closed. Answers pass unread, with back-pressure.
"""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEAD = 9  # length (3 bytes), type, flags, stream (4 bytes)
DATA, HEADERS, RESET, CONTINUATION = 0, 1, 3, 9
END_STREAM = 1
OPEN_REQUESTS = 4  # of the largest size, not yet sent whole, of one connection
MOST_CONNECTIONS = 1024
PREFACE_WAIT_S = 10.0
BLOCK = 1 << 18


class RequestMeter:
    """Counts the bytes of the requests that a client sends over one HTTP/2 connection."""

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: of one request, its headers included."""
        self.most_bytes = most_bytes
        self._preface, self._head, self._skip = PREFACE, b"", 0
        self._open: dict[int, int] = {}  # stream: bytes so far

    @property
    def has_begun(self) -> bool:
        """Whether the client has spoken HTTP/2."""
        return not self._preface

    def feed(self, data: bytes) -> None:
        """Count bytes that come next. ValueError where it is not HTTP/2 or a request is too large."""
        at = 0
        if self._preface:
            n = min(len(data), len(self._preface))
            if data[:n] != self._preface[:n]:
                raise ValueError("got a connection without HTTP/2, expected gRPC")
            self._preface, at = self._preface[n:], n
        while at < len(data):
            if self._skip:
                n = min(self._skip, len(data) - at)
                self._skip, at = self._skip - n, at + n
                continue
            n = FRAME_HEAD - len(self._head)
            self._head, at = self._head + data[at : at + n], at + n
            if len(self._head) == FRAME_HEAD:
                self._count(self._head)
                self._skip, self._head = int.from_bytes(self._head[:3], "big"), b""

    def _count(self, head: bytes) -> None:
        n, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        stream = int.from_bytes(head[5:], "big") & (1 << 31) - 1
        if n > self.most_bytes:
            raise ValueError(f"got a frame of {n:,} bytes, expected at most {self.most_bytes:,}")
        if kind in (DATA, HEADERS, CONTINUATION):
            size = self._open[stream] = self._open.get(stream, 0) + n + FRAME_HEAD
            if size > self.most_bytes or sum(self._open.values()) > OPEN_REQUESTS * self.most_bytes:
                raise ValueError(f"got a request of {size:,} bytes, expected at most {self.most_bytes:,}")
        if kind == RESET or kind in (DATA, HEADERS) and flags & END_STREAM:
            self._open.pop(stream, None)


class Front:
    """Listens for clients, in a thread, and passes their requests on to a Unix socket."""

    def __init__(
        self, backend: Path, most_bytes: int, tls: ssl.SSLContext | None, refused: Callable[[str], None]
    ) -> None:
        """backend: the socket that is asked; its folder keeps those of the connections. `refused` is called
        with what was wrong with a connection."""
        self.backend, self.most_bytes, self.tls, self.refused = backend, most_bytes, tls, refused
        self._loop = asyncio.new_event_loop()
        self._n_opened = self._n_open = 0
        self._is_closing = False
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="mixture-front", daemon=True)

    def start(self, host: str, port: int) -> int:
        """Listen on all addresses of a host; port 0: a free one. Returns the port. OSError where it
        cannot."""
        self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._listen(host, port), self._loop).result()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _listen(self, host: str, port: int) -> int:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family in dict.fromkeys(address[0] for address in addresses):
            name = next(address[4][0] for address in addresses if address[0] == family)
            wait = {"ssl_handshake_timeout": PREFACE_WAIT_S} if self.tls is not None else {}
            server = await asyncio.start_server(
                self._serve, name, port, family=family, ssl=self.tls, limit=BLOCK, backlog=256, **wait
            )
            port = server.sockets[0].getsockname()[1]
            self._servers.append(server)
        return port

    async def _stop(self) -> None:
        self._is_closing = True
        for server in self._servers:
            server.close()
        tasks = [task for task in asyncio.all_tasks(self._loop) if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side closes it."""
        if self._n_open >= MOST_CONNECTIONS:
            writer.transport.abort()
            self.refused("connections")
            return
        self._n_open += 1
        back: asyncio.StreamWriter | None = None
        tasks: list[asyncio.Task[None]] = []
        try:
            # Flight knows clients by the name of their socket
            self._n_opened += 1
            name = self.backend.with_name(f"c{self._n_opened}")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
                made.bind(str(name))
                name.unlink()
                made.setblocking(False)
                await self._loop.sock_connect(made, str(self.backend))
                back_reader, back = await asyncio.open_unix_connection(sock=made.dup(), limit=BLOCK)
            tasks = [
                self._loop.create_task(self._pass_requests(reader, back)),
                self._loop.create_task(_pass_on(back_reader, writer)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # either side has gone
        except asyncio.CancelledError:
            if not self._is_closing:  # streams of Python 3.11 print a traceback for a cancelled connection
                raise
        finally:
            self._n_open -= 1
            for task in tasks:
                task.cancel()
            for one in (writer, back):
                if one is not None:
                    one.transport.abort() if self._is_closing else one.close()

    async def _pass_requests(self, reader: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        meter = RequestMeter(self.most_bytes)
        try:
            while True:
                wait_s = None if meter.has_begun else PREFACE_WAIT_S
                data = await asyncio.wait_for(reader.read(BLOCK), wait_s)
                if not data:
                    return
                meter.feed(data)  # before any of it is passed on
                back.write(data)
                await back.drain()
        except TimeoutError:
            self.refused("silent")
        except ValueError:
            self.refused("size")
        except OSError:
            pass  # either side has gone


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(BLOCK):
            writer.write(data)
            await writer.drain()


def tls_context(certificate: bytes, key: bytes, folder: Path) -> ssl.SSLContext:
    """A server's TLS from PEM; `folder`: of this process alone, for a moment. ValueError where they do not
    fit."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    files = folder / "certificate.pem", folder / "key.pem"
    try:
        for path, content in zip(files, (certificate, key), strict=True):
            path.touch(0o600)
            path.write_bytes(content)
        context.load_cert_chain(*files)
    except ssl.SSLError as error:
        raise ValueError(
            f"--tls-cert, --tls-key: got files that do not fit ({error.reason}), expected PEM."
        ) from error
    finally:
        for path in files:
            path.unlink(missing_ok=True)
    return context
