"""Attention masks beyond plain causal or full attention."""

import torch
from torch import Tensor


def document_numbers(tokens: Tensor, eod_id: int) -> Tensor:
    """Return the document index of each position within its sample, [B, S], counted from 0.

    The end-of-document token belongs to the document that it ends.
    """
    ends = (tokens == eod_id).long()
    # number of ends strictly before each position: an end token itself does not count yet
    # tokens a b E c d, with E the end-of-document token: ends 0 0 1 0 0, cumsum 0 0 1 1 1, result 0 0 0 1 1
    return ends.cumsum(1) - ends


def positions_in_document(documents: Tensor) -> Tensor:
    """Return positions counted from the start of each document: document numbers [B, S] -> [B, S]."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    # True at the first position of each document, always at position 0
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    # cummax carries the index of the latest document start forward
    # documents 0 0 0 1 1: starts at 0 and 3, cummax 0 0 0 3 3, result 0 1 2 0 1
    return index - torch.where(starts, index, 0).cummax(1).values


def build_attention_mask(causal: bool, documents: Tensor | None, visible: Tensor | None) -> Tensor | None:
    """Return the keys visible to each query, bool [B, 1, S, S]; None if `causal` alone describes them.

    documents [B, S]     document numbers; a position attends to its own document only
    visible   [B, S, S]  a position attends only where this is True
    """
    seen = visible
    if documents is not None:
        # two documents of 2 and 1 tokens: rows 110, 110, 001; `tril` then removes the key after each position
        same = documents[:, :, None] == documents[:, None, :]  # [B, S, S]
        seen = same if seen is None else seen & same
    if seen is None:
        return None
    # the softmax of a row without any key is NaN: `same` always contains the position itself
    return (seen.tril() if causal else seen)[:, None]
