"""BERT's WordPiece tokenizers, from a vocab.txt, through the `tokenizers` library."""

from pathlib import Path

from megatron.tokenizer.bpe import BpeTokenizer

UNKNOWN = "[UNK]"
MAX_WORD = 200  # characters of a word; a longer one is [UNK], in Google's tokenizer as in Megatron's


class WordPieceTokenizer(BpeTokenizer):
    """WordPiece: words are split greedily into the longest pieces of the vocabulary.

    The text of a special token, such as [SEP], is ordinary characters within a document, as in Megatron. No
    token ends documents unless --eod-token or --eod-id names one.
    """

    def __init__(self, vocab: Path, lower_case: bool) -> None:
        """`lower_case`: also strip accents. Raises FileNotFoundError, or ValueError for another file."""
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

        if not vocab.is_file():
            raise FileNotFoundError(f"{vocab}: no such vocabulary of a BERT tokenizer")
        try:
            # the id of a token is the number of its line; of a repeated token, that of the last line
            pieces = {line.strip(): i for i, line in enumerate(vocab.read_text("utf-8").splitlines())}
        except UnicodeDecodeError as error:
            raise ValueError(f"{vocab}: got bytes that are not UTF-8, expected one token a line.") from error
        if UNKNOWN not in pieces:
            raise ValueError(f"{vocab}: got no line {UNKNOWN}, expected the vocab.txt of a BERT tokenizer.")
        inner = Tokenizer(models.WordPiece(pieces, unk_token=UNKNOWN, max_input_chars_per_word=MAX_WORD))
        inner.normalizer = normalizers.BertNormalizer(
            clean_text=True, handle_chinese_chars=True, strip_accents=lower_case, lowercase=lower_case
        )
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        inner.decoder = decoders.WordPiece()
        super().__init__(inner, str(vocab))
