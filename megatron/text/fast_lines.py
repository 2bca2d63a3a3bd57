"""Encoding of JSON lines in C++, for one or several keys."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron import _csrc
from megatron.text.shard_writer import EncodeSettings, RejectLog, ShardWriter
from megatron.text.text_readers import MAX_PARSED_LINE, READ_BYTES, parse_text
from megatron.tokenizer.encoder import FastEncoder

MAX_LINE_IN_MEMORY = 4 << 20  # bytes; a longer line of a stream is spooled to disk


class FastLineEncoder:
    """Encode JSON lines in C++. A line that C++ refuses is parsed in Python; C++ then continues after it."""

    def __init__(
        self,
        writers: dict[str, ShardWriter],
        settings: EncodeSettings,
        encoder: FastEncoder,
        reject_log: RejectLog,
    ) -> None:
        self.writers, self.settings = dict(writers), settings
        self.encoder, self.reject_log = encoder, reject_log
        self.first_writer = next(iter(writers.values()))
        self.n_lines = 0
        self.is_wide = np.dtype(settings.dtype).itemsize == 4

    def encode_range(self, file: IO[bytes], at: int, end: int) -> None:
        """Encode the lines in bytes [at, end) of a plain file."""
        # C++ reads by descriptor with pread, so the position of `file` is free for the seeks below
        lines = functools.partial(_csrc.encode_lines, self.encoder.worker, file.fileno())
        while at < end:
            at, is_refused = self._encode_all_keys(lines, at, end)
            if is_refused:
                file.seek(at)
                n_bytes = 0  # find the end of the line in bounded memory before it is read as a whole
                # the limit ends at `end`: the next piece contains the bytes from there on
                while part := file.readline(min(READ_BYTES, end - at - n_bytes)):
                    n_bytes += len(part)
                    if part.endswith(b"\n"):
                        break
                file.seek(at)
                self._encode_refused_line(file.read(n_bytes) if n_bytes <= MAX_PARSED_LINE else None, n_bytes)
                at += n_bytes

    def encode_buffer(self, lines: bytes) -> None:
        """Encode a buffer of whole lines."""

        def encode_part(begin: int, end: int, *arguments: Any) -> tuple[int, int, int, int, bool]:
            # a view: slicing bytes would copy the rest of the buffer at every refused line
            part = memoryview(lines)[begin:end]
            result = _csrc.encode_buffer(self.encoder.worker, part, *arguments)
            # C++ counts from the start of `part`, callers from the start of `lines`
            return (begin + result[0], *result[1:])

        at = 0
        while at < len(lines):
            at, is_refused = self._encode_all_keys(encode_part, at, len(lines))
            if is_refused:
                end = lines.find(b"\n", at) + 1 or len(lines)
                self._encode_refused_line(lines[at:end], end - at)
                at = end

    def _encode_all_keys(
        self, encode: Callable[..., tuple[int, int, int, int, bool]], begin: int, end: int
    ) -> tuple[int, bool]:
        """Encode lines for all keys, up to the first line that is refused for any key.

        Returns (offset of that line, or `end`; whether a line was refused). `encode` takes begin, end and the
        arguments of C++. A key encodes only up to the earliest refusal of the keys before it. Keys that went
        past a later key's refusal are rewound and encoded again up to it.
        """
        # Keys a, b, c and lines 0 to 9: a encodes all, b refuses line 6, c is given lines 0 to 5 and refuses
        # line 4. Then stop is line 4: a and b are rewound and encode lines 0 to 3 again. No line has
        # documents for some keys only.
        results: dict[str, tuple[int, int, int, int, bool]] = {}
        stop, refused_for = (
            end,
            None,
        )  # offset of the earliest refused line so far, and the key that refused it
        for key, writer in self.writers.items():
            results[key] = encode(begin, stop, *self._encode_arguments(key, writer))
            # `stop` only decreases: this key encoded lines before the old `stop` only
            if results[key][-1]:
                stop, refused_for = results[key][0], key
        for key, writer in self.writers.items():
            if results[key][0] > stop:  # encoded past the line that a later key refused
                writer.rewind()
                results[key] = encode(begin, stop, *self._encode_arguments(key, writer))
            # results[key][1:3]: documents, tokens. Counting is what `rewind` cannot undo, so it comes last.
            writer.count_documents(*results[key][1:3])
        if refused_for is not None:
            # Check this key first from now on: the next refused line likely lacks it too, and keys before the
            # refusing key would encode that line for nothing.
            self.writers = {refused_for: self.writers[refused_for], **self.writers}
            self.n_lines += results[refused_for][3]
        else:
            self.n_lines += next(iter(results.values()))[3]
        return stop, refused_for is not None

    def _encode_arguments(self, key: str, writer: ShardWriter) -> tuple[Any, ...]:
        files = writer.ids.fileno(), writer.lengths.fileno()
        return key, self.encoder.special, self.settings.eod, self.is_wide, *files

    def encode_blocks(self, blocks: Iterator[bytes], spool: Path) -> None:
        """Encode the lines of a stream. A very long line goes through the file `spool`, not memory."""
        pending = b""
        for block in blocks:
            pending += block  # at most MAX_LINE_IN_MEMORY and one block
            # C++ takes whole lines; the incomplete last one waits for the next block
            n_whole = pending.rfind(b"\n") + 1
            if n_whole:
                self.encode_buffer(pending[:n_whole])
                pending = pending[n_whole:]
            elif len(pending) > MAX_LINE_IN_MEMORY:
                pending = self._encode_long_line(pending, blocks, spool)
            if self.first_writer.has_enough:
                return
        # the last line of a file may lack its line feed
        self.encode_buffer(pending)

    def _encode_long_line(self, line_start: bytes, blocks: Iterator[bytes], spool: Path) -> bytes:
        """Spool the rest of a line to disk and encode it; return the content after it in its last block."""
        rest = b""
        with spool.open("w+b") as file:
            file.write(line_start)
            for block in blocks:
                end = block.find(b"\n") + 1
                file.write(block[:end] if end else block)
                if end:
                    rest = block[end:]
                    break
            file.flush()
            self.encode_range(file, 0, file.tell())
        spool.unlink()
        return rest

    def _encode_refused_line(self, line: bytes | None, n_bytes: int) -> None:
        """Encode a line that C++ refused, or reject it. `line` None: too long for the Python parser."""
        try:
            if line is None:
                raise ValueError(
                    f"not plain JSON, and with {n_bytes:,} bytes too long for the general parser"
                )
            if line.strip():
                # parse all keys before the first write: a line without one of them is rejected for all
                texts = {key: parse_text(line, key) for key in self.writers}
                for key, text in texts.items():
                    self.writers[key].write(*self.encoder.encode([text], self.settings.eod))
        except ValueError as error:
            self.reject_log.add(self.n_lines, error)
        self.n_lines += 1
