"""Decompressed content of bz2 and xz files, which may consist of several streams.

`bz2.BZ2File` and `lzma.LZMAFile` ignore what follows a stream if it is not a valid stream: in a file of
several streams (pbzip2, xz --threads, concatenated files), damage at the start of one would silently drop all
documents after it. Here any such content is an error.
"""

import bz2
import io
import lzma
from typing import IO, Any

READ_BYTES = 1 << 18
XZ_MEMORY_BYTES = 256 << 20  # limit of the dictionary that a file requires; xz -9 requires 65 MiB
XZ_PADDING = 4  # between streams: zero bytes, a multiple of this number
SUFFIXES = (".bz2", ".xz")


class PackedStream(io.RawIOBase):
    """Raw file of the decompressed content. Wrap it into an io.BufferedReader.

    A read raises EOFError for a truncated file, OSError or lzma.LZMAError for a corrupt one.
    """

    def __init__(self, file: IO[bytes], suffix: str) -> None:
        """`file`: the compressed bytes. `suffix`: .bz2 or .xz."""
        assert suffix in SUFFIXES
        self._file, self._is_xz = file, suffix == ".xz"
        self._decoder: Any = None  # of the current stream; None: between streams
        self._pending = b""  # compressed bytes that are not decoded

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Decompress at most len(buffer) bytes into the buffer; return their number, 0 at the end."""
        while self._decoder is not None or self._open_stream():
            if self._decoder.needs_input and not self._pending:
                self._pending = self._file.read(READ_BYTES)
                if not self._pending:
                    raise EOFError("the file ends within a compressed stream")
            # max_length bounds the memory: a small file may decompress to any size
            data = self._decoder.decompress(self._pending, len(buffer))
            self._pending = b""  # the decoder keeps what it has not used
            if self._decoder.eof:
                self._pending, self._decoder = self._decoder.unused_data, None
            if data:
                buffer[: len(data)] = data
                return len(data)
        return 0

    def _open_stream(self) -> bool:
        """Begin the next stream; return False at the end of the file."""
        n_zeros = 0
        while True:
            self._pending = self._pending or self._file.read(READ_BYTES)
            if not self._is_xz or not self._pending:
                break
            content = self._pending.lstrip(b"\0")
            n_zeros += len(self._pending) - len(content)
            self._pending = content
            if content:
                break
        if n_zeros % XZ_PADDING:
            raise lzma.LZMAError(f"{n_zeros} zero bytes after a stream, expected a multiple of {XZ_PADDING}")
        if not self._pending:
            return False
        self._decoder = (
            lzma.LZMADecompressor(lzma.FORMAT_XZ, XZ_MEMORY_BYTES) if self._is_xz else bz2.BZ2Decompressor()
        )
        return True
