"""Windows of a corpus that are read and scored together.

corpus     documents are concatenated, and windows cross document ends
document   each document is read alone, after the id that begins a text;
           its end-of-document token is not text and is skipped. The windows
           are as in lm-eval's rolling log-likelihood: a window scores the tokens
           that the previous one did not, and the last window is as long as the others
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.data.indexed import IndexedTokens


@dataclass(frozen=True)
class Window:
    """Tokens [begin, end) of a corpus that are read; those from `scored` on are scored.

    number      index of the window, which keys the noise
    prefix_id   id that is read before `begin`; None: none
    """

    number: int
    begin: int
    scored: int
    end: int
    prefix_id: int | None = None

    @property
    def n_context(self) -> int:
        """Number of ids that are read but not scored."""
        return self.scored - self.begin + (self.prefix_id is not None)

    @property
    def n_read(self) -> int:
        """Number of ids that are read."""
        return self.n_context + self.end - self.scored


@dataclass(frozen=True)
class TextIds:
    """Ids that delimit the text of a document.

    prefix_id   id read before each document, as before a text without context
    eod_id      end-of-document id in the corpus
    """

    prefix_id: int
    eod_id: int


def iter_strided_windows(corpus: IndexedTokens, seq_len: int, stride: int) -> Iterator[Window]:
    """Yield windows of seq_len + 1 tokens with one context token, one window per `stride` tokens.

    The last window ends at the end of the corpus and has the full
    length. Raises ValueError for fewer than two tokens.
    """
    if corpus.n_tokens < 2:
        raise ValueError(f"{corpus.prefix}: got {corpus.n_tokens} tokens, expected at least 2")
    for number, (begin, scored, end) in enumerate(_iter_spans(corpus.n_tokens, seq_len + 1, stride)):
        yield Window(number, begin, scored, end)


def iter_disjoint_windows(corpus: IndexedTokens, seq_len: int) -> Iterator[Window]:
    """Yield disjoint windows of seq_len tokens, all scored. Raises ValueError for an empty corpus."""
    if not corpus.n_tokens:
        raise ValueError(f"{corpus.prefix}: got an empty corpus, expected at least one token")
    for number, begin in enumerate(range(0, corpus.n_tokens, seq_len)):
        yield Window(number, begin, begin, min(begin + seq_len, corpus.n_tokens))


def iter_document_windows(corpus: IndexedTokens, n_read: int, stride: int, text: TextIds) -> Iterator[Window]:
    """Yield windows of up to n_read ids with one context id, one window per `stride` tokens of a document.

    Raises ValueError if no document has any text.
    """
    number = end = 0
    for n in corpus.document_tokens.tolist():
        first, end = end, end + n
        if n and int(corpus.tokens[end - 1 : end][0]) == text.eod_id:
            n -= 1
        # The spans index the document with its prefix
        # id at place 0: place p is token first + p - 1.
        for a, b, c in _iter_spans(n + 1, n_read, stride):
            prefix_id = text.prefix_id if a == 0 else None
            yield Window(number, first + max(a - 1, 0), first + b - 1, first + c - 1, prefix_id)
            number += 1
    if not number:
        raise ValueError(f"{corpus.prefix}: got no document with text, expected at least one")


def _iter_spans(n: int, n_read: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, scored, end) of windows over n tokens; all tokens but the first are scored once."""
    # [begin, end) are read, [scored, end) are scored;
    # `scored` continues where the previous window ended.
    # For n = 10, n_read = 5, stride 2: (0, 1, 5), (2, 5, 7),
    # (4, 7, 9), (5, 9, 10). The last window reads 5 tokens as well.
    scored, end = 1, min(n_read, n)
    while scored < n:
        yield max(0, end - n_read), scored, end
        scored, end = end, min(end + stride, n)


def read_window(corpus: IndexedTokens, window: Window) -> np.ndarray:
    """Return the ids of a window, int64 [n_read]."""
    ids = corpus.tokens[window.begin : window.end].astype(np.int64)
    corpus.check_ids(ids)
    return ids if window.prefix_id is None else np.concatenate([[window.prefix_id], ids])


def pad_rows(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of different lengths padded with zeros, int64 [B, S], and their lengths, int64 [B]."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    whole = np.zeros((len(rows), int(lengths.max())), dtype=np.int64)
    for target, row in zip(whole, rows, strict=True):
        target[: len(row)] = row
    return whole, lengths


def count_scored_tokens(corpus: IndexedTokens, windows: Sequence[Window]) -> np.ndarray:
    """Return the number of scored tokens per document, int64 [n_documents]."""
    ends = np.cumsum(corpus.document_tokens)
    tokens = np.zeros(len(ends), dtype=np.int64)
    for window in windows:
        # documents of 3 and 7 tokens: ends 3 10, place 2 is in
        # document 0 and place 3 in document 1
        places = np.arange(window.scored, window.end)
        np.add.at(tokens, np.searchsorted(ends, places, side="right"), 1)
    return tokens
