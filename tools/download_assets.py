"""Download text, tokenizers and pretrained weights.

python tools/download_assets.py c4 --split train --shards 10 --out c4
python tools/download_assets.py c4 --split validation --shards 1 --out c4
python tools/download_assets.py slimpajama --split train --shards 1 --out slimpajama
python tools/download_assets.py subset 100M --out data
python tools/download_assets.py tokenizer gpt2 --out tokenizers/gpt2
python tools/download_assets.py weights Qwen/Qwen3-0.6B --out weights/qwen3

Text is stored as on the hub, in OUT/SPLIT-00000.json.gz and so on, which all tools read. A file gets its
final name when it is complete; after an interruption, the same command downloads the missing files. The
access token for private or gated repositories is read from an environment variable and never printed.
HF_ENDPOINT selects another hub.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import megatron.cli  # noqa: F401  # before slow imports, so that a signal during them is handled
from megatron.cli import add_action, create_parser, install_stop_handlers, report_error, run_main
from megatron.config.presets import load_epoch_tokens
from megatron.text.arguments import parse_count
from megatron.text.hub import (
    TEXT_DATASETS,
    TOKENIZER_FILES,
    TOKENIZER_REQUIRED,
    WEIGHT_FILES,
    WEIGHT_REQUIRED,
    HubRepository,
    fetch_folder,
    fetch_text,
)
from megatron.text.published_subsets import SUBSETS_REPO, VALIDATION, fetch_subset, locate_subset

FOLDERS = {
    "tokenizer": (TOKENIZER_FILES, TOKENIZER_REQUIRED),
    "weights": (WEIGHT_FILES + TOKENIZER_FILES, WEIGHT_REQUIRED),
}


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__, may_stop=True)
    actions = parser.add_subparsers(dest="what", required=True, help="what to download")
    for name, (repo, files) in TEXT_DATASETS.items():
        example = f"python tools/download_assets.py {name} --shards 1 --out {name}"
        text = add_action(actions, name, f"download text, by default from {repo}", example)
        part = text.add_argument_group("part of the text (K, M, B, T are 10^3, 10^6, 10^9, 10^12)")
        part.add_argument(
            "--split",
            choices=("train", "validation"),
            default="train",
            help="training or validation documents",
        )
        part.add_argument("--shards", type=parse_count, metavar="N", help="the first N files; default: all")
        for option in ("--documents", "--max-bytes"):  # removed options
            part.add_argument(option, type=refuse_limit, metavar="N", help=argparse.SUPPRESS)
        where = text.add_argument_group("source and format")
        where.add_argument("--repo", default=repo, metavar="OWNER/NAME", help="data set on the hub")
        where.add_argument(
            "--files",
            default=files,
            metavar="PATTERN",
            help="files of the data set; {split} is replaced by the split",
        )
        where.add_argument(
            "--format", type=check_style, metavar="NAME", help=argparse.SUPPRESS
        )  # removed option
        _add_common(text)
    for name, what in (
        ("tokenizer", "download the files of a tokenizer"),
        ("weights", "download a model's safetensors, with its tokenizer"),
    ):
        folder = add_action(actions, name, what, f"python tools/download_assets.py {name} gpt2 --out gpt2")
        folder.add_argument(
            "repo", metavar="NAME", help="model on the hub, for example gpt2 or Qwen/Qwen3-0.6B"
        )
        _add_common(folder)
    _add_subset(actions)
    return parser


def check_style(word: str) -> str:
    """Accept the only format of text files. Raises argparse's error for a removed one."""
    if word != "packed":
        raise argparse.ArgumentTypeError(
            f"got {word}, expected packed, the default: all tools read such files. Write JSON lines "
            "with tools/subset_corpus.py"
        )
    return word


def refuse_limit(word: str) -> str:
    """Raise argparse's error for the removed options."""
    raise argparse.ArgumentTypeError(
        "no longer supported. Limit --shards, and select documents with tools/subset_corpus.py --documents"
    )


def _add_subset(actions: Any) -> None:
    example = "python tools/download_assets.py subset 100M --out data"
    subset = add_action(actions, "subset", "download published tokens, and check how many they are", example)
    subset.add_argument(
        "name",
        choices=(*load_epoch_tokens(), VALIDATION),
        metavar="NAME",
        help=f"100M or another name of utils/epoch_tokens.yaml, or {VALIDATION}",
    )
    subset.add_argument(
        "--repo", metavar="OWNER/NAME", help=f"data set on the hub with --prefix; default: {SUBSETS_REPO}"
    )
    subset.add_argument(
        "--prefix", metavar="PATH", help="a dataset of --repo, without .bin, with the tokens of NAME"
    )
    _add_common(subset)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="output folder")
    parser.add_argument(
        "--revision", default="main", metavar="NAME", help="branch, tag or commit of the repository"
    )
    parser.add_argument(
        "--token-variable",
        default="HF_TOKEN",
        metavar="NAME",
        help="environment variable that contains the access token",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Download, and print a line for each file."""
    parser = build_parser()
    if (sys.argv[1:] if argv is None else argv)[:1] == ["tasks"]:
        parser.error(
            "tasks: no longer supported. Write the files for --data-dir with `datasets`, as in "
            "examples_scaling/downstream/DOWNSTREAM.md"
        )
    args = parser.parse_args(argv)
    install_stop_handlers()
    try:
        _download_assets(args)
    except (OSError, ValueError) as error:
        return report_error(error)
    return 0


def _download_assets(args: argparse.Namespace) -> None:
    is_text = args.what in TEXT_DATASETS
    if args.what == "subset":
        args.repo, args.prefix = locate_subset(args.name, args.repo, args.prefix)
    # from the environment: an argument would be visible in the list of processes
    token = os.environ.get(args.token_variable) or None
    repository = HubRepository(
        args.repo, "dataset" if is_text or args.what == "subset" else "model", args.revision, token
    )
    print(f"{args.repo} at {repository.commit[:12]}", flush=True)
    if args.what == "subset":
        prefix, n_tokens = fetch_subset(repository, args.name, args.prefix, args.out)
        print(f"{prefix}: {n_tokens:,} tokens", flush=True)
        return
    if not is_text:
        for path in fetch_folder(repository, *FOLDERS[args.what], args.out):
            print(f"{path}: {path.stat().st_size:,} bytes", flush=True)
        return
    # not str.format: a pattern of files may contain other braces
    pattern = args.files.replace("{split}", args.split)
    for path, is_new in fetch_text(repository, pattern, args.out, args.split, args.shards):
        note = "" if is_new else ", already there"
        print(f"{path}: {path.stat().st_size:,} bytes{note}", flush=True)


if __name__ == "__main__":
    run_main(main)
