"""Compare the tokenizers of corpus and model, and load the tokenizer that counts text bytes."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from megatron.checkpoint.model_weights import Weights
from megatron.data.indexed import IndexedTokens
from megatron.evaluation.windows import TextIds
from megatron.log import get_logger
from megatron.parallel.collectives import any_rank
from megatron.parallel.world import World
from megatron.plan.datapaths import WeightedCorpus
from megatron.tokenizer.kinds import Tokenizer, load_tokenizer_by_name

log = get_logger(__name__)


def get_sidecar_tokenizer(corpus: IndexedTokens) -> dict[str, Any]:
    """Return the `tokenizer` entry of a corpus sidecar, or an empty dictionary."""
    value = (corpus.sidecar or {}).get("tokenizer")
    return value if isinstance(value, dict) else {}


def find_mismatches(
    opened: Mapping[WeightedCorpus, IndexedTokens], weights: Weights, allowed: bool, world: World
) -> list[str]:
    """Return messages about corpora whose tokenizer differs from the model's, if both sha256 are known.

    Raises ValueError for such a corpus unless `allowed`.
    """
    digests = {corpus: get_sidecar_tokenizer(tokens).get("sha256") for corpus, tokens in opened.items()}
    if not any(digests.values()):
        return []
    expected = weights.tokenizer_sha256
    if expected is None and weights.tokenizer is not None:
        with suppress(OSError, ValueError):
            expected = load_tokenizer_by_name(weights.tokenizer).sha256
    if any_rank(expected is None, world):  # all ranks compare, or none: they must return the same list
        return []
    mismatched = []
    for corpus, digest in digests.items():
        if digest is None or digest == expected:
            continue
        message = f"{corpus.prefix}: got a corpus of tokenizer {digest[:12]}"
        message += f", expected {str(expected)[:12]} as in {weights.source}"
        if not allowed:
            hint = "Preprocess with the model's tokenizer, or pass --allow-other-tokenizer."
            raise ValueError(f"{message}. {hint}")
        if world.is_first:
            log.warning("%s; the model may read its ids as other text", message)
        mismatched.append(message)
    return mismatched


def load_byte_tokenizer(
    corpus: IndexedTokens, weights: Weights, requested: str | None, world: World, *, warn: bool = True
) -> Tokenizer | None:
    """Load the tokenizer for counting text bytes: `requested`, else the corpus's, else the model's.

    Returns None, with a warning if `warn`, if any rank has none. Raises
    ValueError or FileNotFoundError if `requested` cannot be loaded.
    """
    if requested is not None:
        return load_tokenizer_by_name(requested)
    reason, tokenizer = "neither corpus nor model names a tokenizer", None
    for name in filter(None, (get_sidecar_tokenizer(corpus).get("name"), weights.tokenizer)):
        try:
            tokenizer = load_tokenizer_by_name(name)
            break
        except (OSError, ValueError) as error:
            reason = str(error)
    if not any_rank(tokenizer is None, world):  # the count is a sum over ranks: all take part, or none
        return tokenizer
    reason = reason if tokenizer is None else f"a rank cannot load {tokenizer.name}"
    if warn and world.is_first:
        log.warning("no bits per byte: %s; give --tokenizer", reason)
    return None


def resolve_text_ids(corpus: IndexedTokens, eod_id: int | None, tokenizer: Tokenizer | None) -> TextIds:
    """Return the ids before and after a text, as for downstream tasks. Raises ValueError if unknown."""
    if eod_id is None:
        raise ValueError(
            f"--windows document: got no end-of-document id for {corpus.prefix}, expected one in its sidecar "
            "or its tokenizer. Give --tokenizer."
        )
    begin_id = getattr(tokenizer, "bos_id", None)
    return TextIds(eod_id if begin_id is None else begin_id, eod_id)
