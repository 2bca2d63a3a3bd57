"""Which tokens of a corpus are read and scored together, and in which batches.

corpus     documents are laid end to end, and windows run across their ends
document   a document is read alone, behind the id that begins a text; its end-of-document token is no text
           and is left out. The windows are those of lm-eval's rolling log-likelihood: a window scores what
           the one before has not, and the last reads as much as the others
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from megatron.data.indexed import IndexedTokens
from megatron.evaluation.likelihood import Progress
from megatron.parallel.world import World


@dataclass(frozen=True)
class Window:
    """Tokens begin..end of a corpus are read, those from `scored` on are scored; `number` keys the noise.

    prefix_id   id that is read before `begin`, None: none is
    """

    number: int
    begin: int
    scored: int
    end: int
    prefix_id: int | None = None

    @property
    def n_context(self) -> int:
        """Ids that are read and not scored."""
        return self.scored - self.begin + (self.prefix_id is not None)

    @property
    def n_read(self) -> int:
        """Ids that are read."""
        return self.n_context + self.end - self.scored


@dataclass(frozen=True)
class TextIds:
    """The ids between which a document is text.

    prefix_id   read before each document, as before a text without context
    eod_id      what ends a document in the corpus
    """

    prefix_id: int
    eod_id: int


def strided(corpus: IndexedTokens, seq_len: int, stride: int) -> Iterator[Window]:
    """Windows of seq_len + 1 tokens, the first of which is context, a new one every `stride`.

    The last window ends with the corpus, on a full context. ValueError for fewer than two tokens.
    """
    if corpus.n_tokens < 2:
        raise ValueError(f"{corpus.prefix}: {corpus.n_tokens} tokens, of which none can be predicted")
    for number, (begin, scored, end) in enumerate(_spans(corpus.n_tokens, seq_len + 1, stride)):
        yield Window(number, begin, scored, end)


def end_to_end(corpus: IndexedTokens, seq_len: int) -> Iterator[Window]:
    """Windows of seq_len tokens, all scored; the last has the rest. ValueError for an empty corpus."""
    if not corpus.n_tokens:
        raise ValueError(f"{corpus.prefix}: holds no token")
    for number, begin in enumerate(range(0, corpus.n_tokens, seq_len)):
        yield Window(number, begin, begin, min(begin + seq_len, corpus.n_tokens))


def of_documents(corpus: IndexedTokens, n_read: int, stride: int, text: TextIds) -> Iterator[Window]:
    """Windows of up to n_read ids, the first of which is context, a new one every `stride`.

    ValueError where no document has any text.
    """
    number = end = 0
    for n in corpus.document_tokens.tolist():
        first, end = end, end + n
        if n and int(corpus.read(0, end - 1, 1)[0]) == text.eod_id:
            n -= 1
        # place p of the document with its prefix is token first + p - 1
        for a, b, c in _spans(n + 1, n_read, stride):
            prefix_id = text.prefix_id if a == 0 else None
            yield Window(number, first + max(a - 1, 0), first + b - 1, first + c - 1, prefix_id)
            number += 1
    if not number:
        raise ValueError(f"{corpus.prefix}: got no document with text, expected one or more")


def _spans(n: int, n_read: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, scored, end) of windows over n tokens, of which all but the first are scored."""
    scored, end = 1, min(n_read, n)
    while scored < n:
        yield max(0, end - n_read), scored, end
        scored, end = end, min(end + stride, n)


def read(corpus: IndexedTokens, window: Window) -> np.ndarray:
    """The ids of a window, int64 [n_read]."""
    ids = corpus.read(0, window.begin, window.end - window.begin).astype(np.int64)
    corpus.check_ids(ids)
    return ids if window.prefix_id is None else np.concatenate([[window.prefix_id], ids])


def padded(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(rows of unlike lengths with zeros behind them, int64 [B, S]; how long each was, int64 [B])."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    whole = np.zeros((len(rows), int(lengths.max())), dtype=np.int64)
    for target, row in zip(whole, rows, strict=True):
        target[: len(row)] = row
    return whole, lengths


def scored_tokens(corpus: IndexedTokens, windows: Sequence[Window]) -> np.ndarray:
    """How many tokens of each document `windows`, in the order of the corpus, score: int64 [n_documents]."""
    begins = np.array([window.scored for window in windows], dtype=np.int64)
    lengths = np.array([window.end - window.scored for window in windows], dtype=np.int64)
    before = np.cumsum(lengths) - lengths
    edges = np.concatenate([[0], np.cumsum(corpus.document_tokens)])
    of = np.searchsorted(begins, edges, side="right") - 1  # the last window that begins at an edge or before
    there = np.maximum(of, 0)
    until = before[there] + np.clip(edges - begins[there], 0, lengths[there])
    return np.diff(np.where(of < 0, 0, until))


Row = TypeVar("Row", Window, tuple[Window, int])


def batches(rows: Sequence[Row], batch_size: int, world: World, progress: Progress) -> Iterator[list[Row]]:
    """This rank's batches of rows, the longest first; batches are the same whatever the number of ranks."""
    order = sorted(range(len(rows)), key=lambda i: -_window_of(rows[i]).n_read)  # stable
    for turn, begin in enumerate(range(0, len(order), batch_size)):
        batch = [rows[i] for i in order[begin : begin + batch_size]]
        if turn % world.n_ranks == world.rank:
            yield batch
        progress(len(batch))


def _window_of(row: Window | tuple[Window, int]) -> Window:
    return row[0] if isinstance(row, tuple) else row
