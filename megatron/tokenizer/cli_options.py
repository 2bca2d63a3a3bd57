"""Command-line options that describe a tokenizer."""

import argparse

from megatron.cli import non_negative_int, positive_int
from megatron.tokenizer.eod import EOD_NAMES
from megatron.tokenizer.kinds import KINDS, TokenizerSpec


def add_tokenizer_options(parser: argparse.ArgumentParser) -> None:
    """Add the group of options that `parse_tokenizer_spec` reads."""
    group = parser.add_argument_group("tokenizer")
    kinds = "{" + ",".join(KINDS) + "}"
    add = group.add_argument
    add("--tokenizer-type", type=parse_kind, default=KINDS[0], metavar=kinds, help="kind of tokenizer")
    add(
        "--tokenizer-model",
        metavar="NAME",
        help="HFTokenizer: a tokenizer.json, a folder with one or with vocab.json and merges.txt, or a name "
        "on the Hugging Face hub (gpt2 needs no network); SentencePieceTokenizer: a .model file",
    )
    add("--vocab-file", metavar="PATH", help="GPT2BPETokenizer: vocab.json; Bert*: vocab.txt")
    add("--merge-file", metavar="PATH", help="GPT2BPETokenizer: its merges.txt")
    text = "NullTokenizer: the text is numbers from 0 to N - 1"
    add("--vocab-size", type=positive_int, metavar="N", help=text)
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    end = group.add_mutually_exclusive_group()
    end.add_argument(
        "--eod-token",
        metavar="TOKEN",
        help="the end-of-document token; default: eos_token of the tokenizer_config.json beside the "
        f"tokenizer, else the only one that its vocabulary has of {', '.join(EOD_NAMES)}",
    )
    end.add_argument("--eod-id", type=non_negative_int, metavar="ID", help="the same, by its id")
    add(
        "--special-text",
        choices=["token", "text"],
        default="token",
        help="encoding of a special token's text such as <|endoftext|> within a document: token, its id, as "
        "in the tokenizers library; text, ordinary characters, as in tiktoken",
    )


def parse_kind(text: str) -> str:
    """Return a kind of tokenizer. Raises argparse's error, which names a replacement for a removed kind."""
    if text not in KINDS:
        hint = " Convert the file to a tokenizer.json for HFTokenizer." if text == "Llama2cTokenizer" else ""
        raise argparse.ArgumentTypeError(f"got {text}, expected {', '.join(KINDS)}.{hint}")
    return text


def parse_tokenizer_spec(args: argparse.Namespace) -> TokenizerSpec:
    """Return the tokenizer that the options describe."""
    return TokenizerSpec(
        args.tokenizer_type, args.tokenizer_model, args.vocab_file, args.merge_file, args.vocab_size,
        args.eod_token, args.eod_id,
    )  # fmt: skip
