"""Which tokenizer a corpus was made with, whether it is the model's, and what its text is counted with."""

from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.weights import Weights
from megatron.config.datapaths import Corpus
from megatron.data.indexed import IndexedTokens
from megatron.evaluation.windows import TextIds
from megatron.log import get_logger
from megatron.parallel.reduce import any_rank
from megatron.parallel.world import World
from megatron.tokenizer.kinds import Tokenizer, load_by_name

log = get_logger(__name__)


def sidecar_tokenizer(corpus: IndexedTokens) -> dict[str, Any]:
    found = (corpus.sidecar or {}).get("tokenizer")
    return found if isinstance(found, dict) else {}


def find_other_tokenizers(
    opened: Mapping[Corpus, IndexedTokens], weights: Weights, allowed: bool, world: World
) -> list[str]:
    """Corpora made with another tokenizer than the model's, where both sums are known, for the result.

    ValueError where there is one and it was not allowed.
    """
    known = {corpus: sidecar_tokenizer(tokens).get("sha256") for corpus, tokens in opened.items()}
    if not any(known.values()):
        return []
    wanted = weights.tokenizer_sha256
    if wanted is None and weights.tokenizer is not None:
        try:
            wanted = load_by_name(weights.tokenizer).sha256
        except (OSError, ValueError):
            wanted = None
    if any_rank(wanted is None, world):  # what one rank cannot compare, none does
        return []
    other = []
    for corpus, found in known.items():
        if found is None or found == wanted:
            continue
        told = (
            f"{corpus.prefix}: got a corpus of tokenizer {found[:12]}, expected {str(wanted)[:12]}, "
            f"that of {weights.source}"
        )
        if not allowed:
            raise ValueError(
                f"{told}. Preprocess with the model's tokenizer, or pass --allow-other-tokenizer."
            )
        if world.is_first:
            log.warning("%s; its ids may mean other text to the model", told)
        other.append(told)
    return other


def load_byte_tokenizer(
    corpus: IndexedTokens, weights: Weights, asked: str | None, world: World
) -> Tokenizer | None:
    """To count bytes with: as asked, or what corpus or model say; None, told, where a rank has none.

    Raises ValueError or FileNotFoundError where the one asked for is not to be had.
    """
    if asked is not None:
        return load_by_name(asked)
    named = [sidecar_tokenizer(corpus).get("name"), weights.tokenizer]
    why, found = "neither corpus nor model names a tokenizer", None
    for name in (name for name in named if name):
        try:
            found = load_by_name(name)
            break
        except (OSError, ValueError) as error:
            why = str(error)
    if not any_rank(found is None, world):  # they count together, or not at all
        return found
    why = why if found is None else f"a rank has no {found.name}"
    if world.is_first:
        log.warning("no bits per byte: %s; --tokenizer names one", why)
    return None


def text_ids(corpus: IndexedTokens, eod_id: int | None, tokenizer: Tokenizer | None) -> TextIds:
    """The ids before and behind a text, as for downstream tasks. ValueError where none is known."""
    if eod_id is None:
        raise ValueError(
            f"--windows document: got no end-of-document id for {corpus.prefix}, expected one in its sidecar "
            "or its tokenizer. Name the tokenizer with --tokenizer."
        )
    begin_id = getattr(tokenizer, "bos_id", None)
    return TextIds(eod_id if begin_id is None else begin_id, eod_id)
