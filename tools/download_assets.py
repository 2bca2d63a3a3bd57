"""Download text, tokenizers and pretrained weights from the Hugging Face hub.

python tools/download_assets.py c4 --split train --documents 20K --out c4
python tools/download_assets.py c4 --split validation --shards 1 --format packed --out c4
python tools/download_assets.py slimpajama --split train --max-bytes 500M --format parquet --out slimpajama
python tools/download_assets.py tokenizer gpt2 --out tokenizers/gpt2
python tools/download_assets.py weights Qwen/Qwen3-0.6B --out weights/qwen3

Text arrives shard by shard as OUT/SPLIT-00000.jsonl and so on. A file appears when it is whole; stopped in
the middle of one, the same command goes on there. A token for private or gated repositories is read from the
environment, never from the command line, and is shown nowhere. HF_ENDPOINT names another hub.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import megatron.early_stop  # noqa: F401  # before what takes long
from megatron.command import action, command, failed, run, stop_when_told
from megatron.data.amounts import amount
from megatron.data.hub_assets import (
    STYLES,
    TEXTS,
    TOKENIZER_CORE,
    TOKENIZER_FILES,
    WEIGHT_CORE,
    WEIGHT_FILES,
    Limit,
    fetch_folder,
    fetch_text,
)

FOLDERS = {
    "tokenizer": (TOKENIZER_FILES, TOKENIZER_CORE),
    "weights": (WEIGHT_FILES + TOKENIZER_FILES, WEIGHT_CORE),
}


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__, may_stop=True)
    actions = parser.add_subparsers(dest="what", required=True, help="what to download")
    for name, (repo, files) in TEXTS.items():
        example = f"python tools/download_assets.py {name} --documents 20K --out {name}"
        text = action(actions, name, f"download text, by itself of {repo}", example)
        part = text.add_argument_group("which part (K, M, B, T are 10^3, 10^6, 10^9, 10^12)")
        part.add_argument("--split", choices=("train", "validation"), default="train", help="which documents")
        part.add_argument("--shards", type=amount, metavar="N", help="the first N files; by itself all")
        part.add_argument("--documents", type=amount, metavar="N", help="the first N; by itself all")
        part.add_argument(
            "--max-bytes", type=amount, metavar="N", help="of JSON lines, unpacked; by itself all"
        )
        where = text.add_argument_group("where from, and as what")
        where.add_argument("--repo", default=repo, metavar="OWNER/NAME", help="data set on the hub")
        where.add_argument(
            "--files", default=files, metavar="PATTERN", help="its files; {split} is the split's name"
        )
        where.add_argument(
            "--format",
            choices=STYLES,
            default="jsonl",
            help="packed: as the hub has it, which the tools read too",
        )
        _add_common(text)
    for name, what in (
        ("tokenizer", "download the files of a tokenizer"),
        ("weights", "download a model's safetensors, with its tokenizer"),
    ):
        folder = action(actions, name, what, f"python tools/download_assets.py {name} gpt2 --out gpt2")
        folder.add_argument("repo", metavar="NAME", help="model on the hub, as gpt2 or Qwen/Qwen3-0.6B")
        _add_common(folder)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the files go")
    parser.add_argument(
        "--revision", default="main", metavar="NAME", help="branch, tag or commit of the repository"
    )
    parser.add_argument(
        "--token-variable",
        default="HF_TOKEN",
        metavar="NAME",
        help="variable of the environment with the token",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Download, with a line for each file."""
    args = build_parser().parse_args(argv)
    stop_when_told()
    try:
        _download(args)
    except (OSError, ValueError) as error:
        return failed(error)
    return 0


def _download(args: argparse.Namespace) -> None:
    from megatron.data.hub import Repository  # after the words: HTTP is slow to import

    is_text = args.what in TEXTS
    token = os.environ.get(args.token_variable) or None
    repository = Repository(args.repo, "datasets" if is_text else "models", args.revision, token)
    print(f"{args.repo} at {repository.commit[:12]}", flush=True)
    if not is_text:
        for path in fetch_folder(repository, *FOLDERS[args.what], args.out):
            print(f"{path}: {path.stat().st_size:,} bytes", flush=True)
        return
    limit = Limit(args.documents, args.max_bytes, args.shards)
    pattern = args.files.replace("{split}", args.split)
    for path, n_documents, is_new in fetch_text(
        repository, pattern, args.out, args.split, args.format, limit
    ):
        told = f"{n_documents:,} documents" if args.format != "packed" else f"{path.stat().st_size:,} bytes"
        print(f"{path}: {told}{'' if is_new else ', already there'}", flush=True)


if __name__ == "__main__":
    run(main)
