"""Proxy in front of Arrow Flight: TLS, and a limit on the size of requests before they are received.

Arrow Flight accepts messages of any length and has no option to limit them, and gRPC receives the whole
message of a call before the token is checked. Flight therefore listens on a Unix socket in a private folder
of this process, and clients connect to the proxy. The proxy counts the bytes of the HTTP/2 frames of a
connection, and closes it if its open requests exceed the size that a request needs. Responses are forwarded
unchanged, with back-pressure.

The package h2 would decode and answer the frames, that is, end the connection here instead of forwarding it.
All that is needed of HTTP/2 is the frame header of 9 bytes.
"""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

# RFC 9113: preface in section 3.4, frame header in 4.1, types and flags in 6
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER_BYTES = 9  # length (3 bytes), type, flags, stream (4 bytes)
DATA, HEADERS, RESET, CONTINUATION = 0, 1, 3, 9
END_STREAM = 1
MAX_OPEN_REQUESTS = 4  # incomplete requests of the largest size, per connection
MAX_CONNECTIONS = 1024
PREFACE_WAIT_S = 10.0
BLOCK_BYTES = 1 << 18


class RequestMeter:
    """Counter of the bytes of the requests that a client sends over one HTTP/2 connection."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes   of one request, including its headers"""
        self.max_bytes = max_bytes
        # missing bytes of the preface; bytes of an incomplete frame header; number of missing payload bytes
        self._preface, self._head, self._skip = PREFACE, b"", 0
        self._open: dict[int, int] = {}  # stream id -> bytes so far

    @property
    def is_http2(self) -> bool:
        """True once the HTTP/2 preface has been received."""
        return not self._preface

    def feed(self, data: bytes) -> None:
        """Count the next bytes. Raises ValueError if they are not HTTP/2, or if a request is too large."""
        # A block may end anywhere: inside the preface, a frame header or a payload. Payloads are skipped in
        # one step, and only an incomplete header of at most 8 bytes is stored.
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
            n = FRAME_HEADER_BYTES - len(self._head)
            self._head, at = self._head + data[at : at + n], at + n
            if len(self._head) == FRAME_HEADER_BYTES:
                self._count_frame(self._head)
                self._skip, self._head = int.from_bytes(self._head[:3], "big"), b""

    def _count_frame(self, head: bytes) -> None:
        """Count one frame by its header of FRAME_HEADER_BYTES bytes."""
        n, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        # the highest bit of the stream id is reserved (RFC 9113, section 4.1)
        stream = int.from_bytes(head[5:], "big") & (1 << 31) - 1
        # of any type: frames that belong to no request (SETTINGS, PING) are limited here alone
        if n > self.max_bytes:
            raise ValueError(f"got a frame of {n:,} bytes, expected at most {self.max_bytes:,}")
        if kind in (DATA, HEADERS, CONTINUATION):
            # With the header of each frame, so that empty frames count too: an endless sequence of
            # CONTINUATION frames reaches the limit, and so does a large number of streams.
            size = self._open[stream] = self._open.get(stream, 0) + n + FRAME_HEADER_BYTES
            if size > self.max_bytes or sum(self._open.values()) > MAX_OPEN_REQUESTS * self.max_bytes:
                raise ValueError(f"got a request of {size:,} bytes, expected at most {self.max_bytes:,}")
        # The request is complete, or the client has cancelled it.
        # `and` binds before `or`. CONTINUATION is not in the list: bit 0 is not END_STREAM there.
        if kind == RESET or kind in (DATA, HEADERS) and flags & END_STREAM:
            self._open.pop(stream, None)


class RequestProxy:
    """Listener for clients, in a thread, that forwards their requests to a Unix socket."""

    def __init__(
        self, backend: Path, max_bytes: int, tls: ssl.SSLContext | None, on_refused: Callable[[str], None]
    ) -> None:
        """Create the proxy.

        backend      Unix socket of the server; the sockets of the connections are created in its folder
        on_refused   called with the reason when a connection is refused
        """
        self.backend, self.max_bytes, self.tls, self.on_refused = backend, max_bytes, tls, on_refused
        # all coroutines run in the thread of this loop, so that the counters need no lock
        self._loop = asyncio.new_event_loop()
        self._n_opened = self._n_open = 0
        self._is_closing = False
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="mixture-front", daemon=True)

    def start(self, host: str, port: int) -> int:
        """Listen on all addresses of a host, and return the port. Port 0: choose a free one.

        Raises OSError if the port cannot be bound.
        """
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
            name = next(str(address[4][0]) for address in addresses if address[0] == family)
            wait = {"ssl_handshake_timeout": PREFACE_WAIT_S} if self.tls is not None else {}
            server = await asyncio.start_server(
                self._serve_connection,
                name,
                port,
                family=family,
                ssl=self.tls,
                limit=BLOCK_BYTES,
                backlog=256,
                **wait,
            )
            port = server.sockets[0].getsockname()[1]
            # port 0: the first family chooses the port, and the others use the same one
            self._servers.append(server)
        return port

    async def _stop(self) -> None:
        # no new connections first, then the end of those that are open
        self._is_closing = True
        for server in self._servers:
            server.close()
        tasks = [task for task in asyncio.all_tasks(self._loop) if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until either side closes it."""
        if self._n_open >= MAX_CONNECTIONS:
            # not close(), which would wait for the TLS shutdown of the client
            writer.transport.abort()
            self.on_refused("connections")
            return
        self._n_open += 1
        backend_writer: asyncio.StreamWriter | None = None
        tasks: list[asyncio.Task[None]] = []
        try:
            # bound to a unique path, because Flight identifies clients by the name of their socket
            self._n_opened += 1
            name = self.backend.with_name(f"c{self._n_opened}")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client_socket:
                client_socket.bind(str(name))
                # the socket keeps the name without the file, and nothing connects to it
                name.unlink()
                client_socket.setblocking(False)
                await self._loop.sock_connect(client_socket, str(self.backend))
                # a duplicate for asyncio, which closes it; `with` closes the original
                backend_reader, backend_writer = await asyncio.open_unix_connection(
                    sock=client_socket.dup(), limit=BLOCK_BYTES
                )
            tasks = [
                self._loop.create_task(self._forward_requests(reader, backend_writer)),
                self._loop.create_task(_forward_bytes(backend_reader, writer)),
            ]
            # if one direction ends, the connection ends
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # either side has closed the connection
        except asyncio.CancelledError:
            if not self._is_closing:  # asyncio of Python 3.11 prints a traceback for a cancelled connection
                raise
        finally:
            self._n_open -= 1
            for task in tasks:
                task.cancel()
            for side in (writer, backend_writer):
                if side is not None:
                    side.transport.abort() if self._is_closing else side.close()

    async def _forward_requests(
        self, reader: asyncio.StreamReader, backend_writer: asyncio.StreamWriter
    ) -> None:
        meter = RequestMeter(self.max_bytes)
        try:
            while True:
                # a client that sends nothing is disconnected after 10 s; after the preface it may be idle
                wait_s = None if meter.is_http2 else PREFACE_WAIT_S
                data = await asyncio.wait_for(reader.read(BLOCK_BYTES), wait_s)
                if not data:
                    return
                meter.feed(data)  # before any byte is forwarded
                backend_writer.write(data)
                # waits while Flight reads slower than the client sends: memory per connection is bounded
                await backend_writer.drain()
        except TimeoutError:
            self.on_refused("silent")
        except ValueError:
            self.on_refused("size")
        except OSError:
            pass  # either side has closed the connection


async def _forward_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(BLOCK_BYTES):
            writer.write(data)
            # the same for a client that reads slower than Flight sends
            await writer.drain()


def make_tls_context(certificate: bytes, key: bytes, folder: Path) -> ssl.SSLContext:
    """Return a server's TLS context made from PEM files.

    `folder` must be private to this process; the files are written there for a moment. Raises ValueError if
    the certificate and the key do not match.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # TLS negotiates HTTP/2, which gRPC requires, by ALPN (RFC 9113, section 3.2)
    context.set_alpn_protocols(["h2"])
    # load_cert_chain accepts paths only, not bytes
    files = folder / "certificate.pem", folder / "key.pem"
    try:
        for path, content in zip(files, (certificate, key), strict=True):
            # created private before the key is written
            path.touch(0o600)
            path.write_bytes(content)
        context.load_cert_chain(*files)
    except ssl.SSLError as error:
        raise ValueError(
            f"--tls-cert, --tls-key: got files that do not match ({error.reason}), expected PEM."
        ) from error
    finally:
        for path in files:
            path.unlink(missing_ok=True)
    return context
