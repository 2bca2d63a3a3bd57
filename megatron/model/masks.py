"""Attention masks: documents, visible keys, and sliding windows."""

import torch
from torch import Tensor

from megatron.config.schema import ModelConfig
from megatron.kernels.range_mask import RangeMask, build_range_mask, can_use_ranges


def document_numbers(tokens: Tensor, eod_id: int) -> Tensor:
    """Return the document number of each position, [B, S], from 0; an end token is part of its document."""
    ends = (tokens == eod_id).long()
    # number of ends strictly before each position:
    # an end token itself does not count yet.
    # Tokens a b E c d, with E the end-of-document token:
    # ends 0 0 1 0 0, cumsum 0 0 1 1 1, result 0 0 0 1 1
    return ends.cumsum(1) - ends


def positions_in_document(documents: Tensor) -> Tensor:
    """Return positions counted from the start of each document: document numbers [B, S] -> [B, S]."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.ones_like(documents, dtype=torch.bool)  # True at the first position of each document
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    # cummax carries the index of the latest start forward
    # documents 0 0 0 1 1: starts at 0 and 3, cummax 0 0 0 3 3, result 0 1 2 0 1
    return index - torch.where(starts, index, 0).cummax(1).values


def build_window_mask(n_queries: int, n_keys: int, window: int, device: torch.device) -> Tensor:
    """Return the keys of a causal window, bool [n_queries, n_keys]; the queries are the last positions.

    Position p attends to positions p - window + 1 .. p (Jiang et al., arXiv 2310.06825).
    """
    # a query in row i is position n_keys - n_queries + i
    # 3 queries, 4 keys, window 2: rows 1100, 0110, 0011
    seen = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device)
    last = n_keys - n_queries
    return seen.tril(last).triu(last - window + 1)


def find_window(tokens: Tensor, positions: Tensor | None, width: int) -> Tensor:
    """Return the keys in the window of each position of tokens [B, S], bool [B, S, S].

    With explicit positions [B, S] distances are between positions: rows
    with a shared beginning have later continuations further away than their text is.
    """
    n_samples, n = tokens.shape
    if positions is None:
        return build_window_mask(n, n, width, tokens.device).expand(n_samples, n, n)
    return positions[:, :, None] - positions[:, None, :] < width


def build_attention_mask(
    tokens: Tensor,
    causal: bool,
    documents: Tensor | None,
    visible: Tensor | None,
    positions: Tensor | None,
    config: ModelConfig,
) -> Tensor | RangeMask | None:
    """Return the keys of each position of tokens [B, S], bool [B, 1, S, S]; None if `causal` describes them.

    documents [B, S]     document numbers; a position attends to its own document only
    visible   [B, S, S]  a position attends only where this is True
    positions [B, S]     positions given by the caller,
                         which the distances of a window refer to
    """
    window = config.attention_window
    if window is not None and positions is None and tokens.shape[1] <= window:
        window = None
    assert causal or window is None, "the configuration check refuses a window without causal attention"
    has_range = visible is None and (window is None or positions is None)
    has_range = has_range and (documents is not None or window is not None)
    if has_range and can_use_ranges(tokens.device, config.d_head):
        return build_range_mask(tokens.shape, tokens.device, causal, documents, window)
    if window is not None:
        near = find_window(tokens, positions, window)
        visible = near if visible is None else visible & near
    if documents is not None:
        # two documents of 2 and 1 tokens: rows 110, 110, 001;
        # `tril` then removes the key after each position
        same = documents[:, :, None] == documents[:, None, :]  # [B, S, S]
        visible = same if visible is None else visible & same
    if visible is None:
        return None  # a mask costs B S^2 bytes and is slower than plain causal or full attention
    # the softmax of a row without any key is NaN:
    # `same` always contains the position itself
    return (visible.tril() if causal else visible)[:, None]
