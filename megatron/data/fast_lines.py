"""JSON lines to shards through C++, for one key or several."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron import _csrc
from megatron.data.documents import LINE_PART, LONGEST_ODD_LINE, text_of
from megatron.data.sink import BadLines, Settings, Sink
from megatron.tokenizer.encoder import FastEncoder

HELD_LINE = 4 << 20  # bytes of a line of a stream that are held in memory


class FastLines:
    """JSON lines to shards in C++. A line that it refuses is judged here, then it goes on behind that."""

    def __init__(
        self, sinks: dict[str, Sink], settings: Settings, encoder: FastEncoder, bad: BadLines
    ) -> None:
        self.sinks, self.settings, self.encoder, self.bad = dict(sinks), settings, encoder, bad
        self.first = next(iter(sinks.values()))
        self.n_lines = 0
        self.is_wide = np.dtype(settings.dtype).itemsize == 4

    def of_range(self, file: IO[bytes], at: int, end: int) -> None:
        """The lines in bytes [at, end) of a plain file."""
        lines = functools.partial(_csrc.encode_lines, self.encoder.worker, file.fileno())
        while at < end:
            at, is_refused = self._encode(lines, at, end)
            if is_refused:
                file.seek(at)
                n_bytes = 0
                while part := file.readline(min(LINE_PART, end - at - n_bytes)):
                    n_bytes += len(part)
                    if part.endswith(b"\n"):
                        break
                file.seek(at)
                self._judge(file.read(n_bytes) if n_bytes <= LONGEST_ODD_LINE else None, n_bytes)
                at += n_bytes

    def of_buffer(self, lines: bytes) -> None:
        """Whole lines."""

        def encode(begin: int, end: int, *how: Any) -> tuple[int, int, int, int, bool]:
            part = memoryview(lines)[begin:end]
            following, *counts = _csrc.encode_buffer(self.encoder.worker, part, *how)
            return (begin + following, *counts)

        at = 0
        while at < len(lines):
            at, is_refused = self._encode(encode, at, len(lines))
            if is_refused:
                end = lines.find(b"\n", at) + 1 or len(lines)
                self._judge(lines[at:end], end - at)
                at = end

    def _encode(
        self, encode: Callable[..., tuple[int, int, int, int, bool]], begin: int, end: int
    ) -> tuple[int, bool]:
        """Encode lines from `begin` on, up to one that is refused for any key; (its place or `end`, whether).

        `encode` takes (begin, end, what is asked of C++).
        """
        told: dict[str, tuple[int, int, int, int, bool]] = {}
        stop, refused_for = end, None
        for key, sink in self.sinks.items():
            told[key] = encode(begin, stop, *self._how(key, sink))
            if told[key][-1]:
                stop, refused_for = told[key][0], key
        for key, sink in self.sinks.items():
            if told[key][0] > stop:  # it went on where a later key did not
                sink.rewind()
                told[key] = encode(begin, stop, *self._how(key, sink))
            sink.count(*told[key][1:3])
        if refused_for is not None:  # the key that the next one likely lacks, too, comes first from now on
            self.sinks = {refused_for: self.sinks[refused_for], **self.sinks}
            self.n_lines += told[refused_for][3]
        else:
            self.n_lines += next(iter(told.values()))[3]
        return stop, refused_for is not None

    def _how(self, key: str, sink: Sink) -> tuple[Any, ...]:
        files = sink.ids.fileno(), sink.lengths.fileno()
        return key, self.encoder.special, self.settings.eod, self.is_wide, *files

    def of_blocks(self, blocks: Iterator[bytes], spool: Path) -> None:
        """The lines of a stream; a very long one goes through a file of its own, not through memory."""
        held = b""
        for block in blocks:
            held += block
            n_whole = held.rfind(b"\n") + 1
            if n_whole:
                self.of_buffer(held[:n_whole])
                held = held[n_whole:]
            elif len(held) > HELD_LINE:
                held = self._of_long_line(held, blocks, spool)
            if self.first.has_enough:
                return
        self.of_buffer(held)

    def _of_long_line(self, begun: bytes, blocks: Iterator[bytes], spool: Path) -> bytes:
        """Spool a line that has begun to its end; returns what follows it in its last block."""
        rest = b""
        with spool.open("w+b") as file:
            file.write(begun)
            for block in blocks:
                end = block.find(b"\n") + 1
                file.write(block[:end] if end else block)
                if end:
                    rest = block[end:]
                    break
            file.flush()
            self.of_range(file, 0, file.tell())
        spool.unlink()
        return rest

    def _judge(self, line: bytes | None, n_bytes: int) -> None:
        """Encode a line that the C++ refused, or say what is wrong with it."""
        try:
            if line is None:
                raise ValueError(f"no plain JSON, and with {n_bytes:,} bytes too long to be parsed otherwise")
            if line.strip():
                texts = {key: text_of(line, key) for key in self.sinks}
                for key, text in texts.items():
                    self.sinks[key].write(*self.encoder.encode([text], self.settings.eod))
        except ValueError as error:
            self.bad.add(self.n_lines, error)
        self.n_lines += 1
