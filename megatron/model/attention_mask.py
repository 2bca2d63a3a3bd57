"""Who sees whom when attention is not simply causal or full."""

import torch
from torch import Tensor


def document_numbers(tokens: Tensor, eod_id: int) -> Tensor:
    """Which document of its sample each position is in, [B, S] from 0; the end-of-document id is its last."""
    ends = (tokens == eod_id).long()
    return ends.cumsum(1) - ends


def positions_in_document(documents: Tensor) -> Tensor:
    """Positions counted from the start of each document: documents [B, S] as above -> [B, S]."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(starts, index, 0).cummax(1).values


def attention_mask(causal: bool, documents: Tensor | None, visible: Tensor | None) -> Tensor | None:
    """What each position sees, bool [B, 1, S, S]; None where `causal` says it all.

    documents [B, S]     a position sees its own document only
    visible   [B, S, S]  a position sees only where this is true
    """
    seen = visible
    if documents is not None:
        same = documents[:, :, None] == documents[:, None, :]
        seen = same if seen is None else seen & same
    if seen is None:
        return None
    return (seen.tril() if causal else seen)[:, None]
