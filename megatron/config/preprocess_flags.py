"""Options of Megatron's preprocessing scripts that have no effect here, and why.

tools/preprocess_data_many_cores.py accepts them with a warning, so that scripts that worked there work here.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SWITCH, COUNT, TEXT = "switch", "count", "text"
FORMATS = ("mmap", "lazy", "cached")  # of --dataset-impl; the first is written


@dataclass(frozen=True)
class PreprocessFlag:
    """An option by its name without dashes at the start. kind: SWITCH has no value. reason: of no effect."""

    name: str
    kind: str
    reason: str


WHOLE = "documents are stored whole, as NAME_text_document"
PREPROCESS_FLAGS = (
    PreprocessFlag("log-interval", COUNT, "progress is a bar on a terminal, which needs no interval"),
    PreprocessFlag("split-sentences", SWITCH, f"{WHOLE}. Only BERT's training reads sentences"),
    PreprocessFlag("keep-newlines", SWITCH, f"{WHOLE}, with their newlines"),
    PreprocessFlag("lang", TEXT, f"{WHOLE}, in every language"),
    PreprocessFlag(
        "pad-vocab-size-to", COUNT, "padding belongs to the model. Set model.vocab_rows when training"
    ),
    PreprocessFlag(
        "make-vocab-size-divisible-by",
        COUNT,
        "padding belongs to the model: a multiple of 128, or model.vocab_rows when training",
    ),
    PreprocessFlag("seq-length", COUNT, "documents are never cut. Set dataset.seq_len when training"),
    PreprocessFlag("partitions", COUNT, "the workers share the input, and the output is one dataset"),
    PreprocessFlag(
        "trust-remote-code", SWITCH, "a tokenizer is read from its files, and its code is not run"
    ),
)
# kind of tokenizer -> the options that name its files
TOKENIZER_FILES = {
    "HFTokenizer": ("tokenizer_model",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "NullTokenizer": ("vocab_size",),
}


def add_preprocess_flags(parser: argparse.ArgumentParser, read_count: Callable[[str], int]) -> None:
    """Add the group of options without effect. read_count: reader of a COUNT."""
    group = parser.add_argument_group("of Megatron's scripts: accepted, without effect")
    for flag in PREPROCESS_FLAGS:
        if flag.kind == SWITCH:
            group.add_argument(f"--{flag.name}", action="store_true", help=flag.reason)
        elif flag.kind == COUNT:
            group.add_argument(f"--{flag.name}", type=read_count, metavar="N", help=flag.reason)
        else:
            group.add_argument(f"--{flag.name}", metavar="NAME", help=flag.reason)


def list_ignored_flags(args: argparse.Namespace) -> Iterator[str]:
    """Yield a sentence for each given option that has no effect."""
    for flag in PREPROCESS_FLAGS:
        # a switch that is not given is False, another option None
        if getattr(args, flag.name.replace("-", "_")) not in (None, False):
            yield f"--{flag.name}: no effect: {flag.reason}."
    if args.dataset_impl != FORMATS[0]:
        yield f"--dataset-impl: got {args.dataset_impl}, writing {FORMATS[0]}, the only format that is read."
    options = " and ".join(f"--{option.replace('_', '-')}" for option in TOKENIZER_FILES[args.tokenizer_type])
    for name in _list_unused_files(args):
        yield f"--{name.replace('_', '-')}: no effect: {args.tokenizer_type} is read from {options}."


def drop_unused_files(args: argparse.Namespace) -> None:
    """Remove the files of other kinds of tokenizer, which the reader of a tokenizer refuses."""
    for name in _list_unused_files(args):
        setattr(args, name, None)


def _list_unused_files(args: argparse.Namespace) -> list[str]:
    used = TOKENIZER_FILES[args.tokenizer_type]
    names = dict.fromkeys(name for names in TOKENIZER_FILES.values() for name in names)
    return [name for name in names if getattr(args, name) is not None and name not in used]
