"""Register corpora with the properties of their documents, look into the catalog, or remove one.

    python tools/register_corpus.py catalog.duckdb add slim data/*.jsonl.zst --preset slimpajama
    python tools/register_corpus.py catalog.duckdb add code data/code.parquet \\
        --property 'meta.language AS language category' --property 'length(content) AS characters integer' \\
        --text-key content
    python tools/register_corpus.py catalog.duckdb add pictures shards/*.tar --tokenizer-model gpt2
    python tools/register_corpus.py catalog.duckdb list
    python tools/register_corpus.py catalog.duckdb describe slim
    python tools/register_corpus.py catalog.duckdb broken slim
    python tools/register_corpus.py catalog.duckdb remove slim

The same `add` again takes new and changed files only, and goes on where one was killed.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.command import action, command, count, failed, run
from megatron.data.token_counts import TokenCounter
from megatron.mixture.catalog import Catalog, Registered
from megatron.mixture.properties import PRESETS, TYPES, read_properties
from megatron.mixture.tars import MEMBER_BYTES
from megatron.tokenizer.kinds import TokenizerSpec
from megatron.tokenizer.options import add_tokenizer_options, tokenizer_of

BAR = 40


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument("catalog", type=Path, metavar="CATALOG", help="a DuckDB file, made when missing")
    actions = parser.add_subparsers(dest="action", required=True, help="what to do")
    example = "python tools/register_corpus.py catalog.duckdb"
    add = action(
        actions,
        "add",
        "register new and changed files",
        f"{example} add slim slimpajama --preset slimpajama --tokenizer-model gpt2",
    )
    add.add_argument("corpus", metavar="NAME", help="of the corpus")
    add.add_argument(
        "inputs",
        nargs="+",
        metavar="PATH",
        help=".jsonl, .tar (plain, .gz, .zst), .parquet, pairs (.bin); folders, patterns",
    )
    add.add_argument("--preset", choices=sorted(PRESETS), help="the properties of a known data set")
    add.add_argument(
        "--property", action="append", default=[], metavar="'PATH AS NAME TYPE'",
        help=f"a path (meta.source) or SQL over `record`; types: {', '.join(TYPES)}; by itself string",
    )  # fmt: skip
    add.add_argument("--text-key", metavar="KEY", default="text", help="key or column of the text")
    add.add_argument(
        "--threads", type=count, metavar="N", help="of DuckDB and of counting; by itself all cores"
    )
    add.add_argument(
        "--verify", action="store_true",
        help="read files that are known, too, and take those whose content has changed",
    )  # fmt: skip
    add.add_argument(
        "--max-sample-mb", type=count, default=MEMBER_BYTES >> 20, metavar="N",
        help="largest sample of a tar, with all its members (default: %(default)s)",
    )  # fmt: skip
    add_tokenizer_options(add)
    action(actions, "list", "list the corpora, with files, documents and tokens", f"{example} list")
    for name, what in (
        ("describe", "count documents and tokens of each value of each property"),
        ("broken", "list file and line of what was no document, and why"),
        ("remove", "forget a corpus; its files are left alone"),
    ):
        one = action(actions, name, what, f"{example} {name} slim")
        one.add_argument("corpus", metavar="NAME", help="of the corpus")
    return parser


def counter_of(args: argparse.Namespace) -> TokenCounter | None:
    """What counts tokens, where a tokenizer is named. ValueError for options of one that is not named."""
    spec = tokenizer_of(args)
    if spec == TokenizerSpec():
        if args.append_eod or args.special_text != "token":
            raise ValueError("--append-eod, --special-text: no tokenizer; name one with --tokenizer-model")
        return None
    n_threads = args.threads or len(os.sched_getaffinity(0))
    return TokenCounter(spec, args.append_eod, args.special_text == "token", n_threads)


def told_list(catalog: Catalog) -> str:
    """A line for each corpus."""
    lines = []
    for one in catalog.summary():
        tokens = "" if one.n_tokens is None else f", {one.n_tokens:,} tokens"
        lines.append(
            f"{one.name}: {one.n_documents:,} documents in {one.n_files:,} files{tokens}, "
            f"{one.n_broken:,} broken lines; {', '.join(one.properties) or 'no properties'}"
        )
    return "\n".join(lines) or "no corpus"


def told_values(catalog: Catalog, corpus: str) -> str:
    """A histogram of each property."""
    lines = []
    for name, values in catalog.describe(corpus).items():
        lines.append(name)
        most = max((n for _, n, _ in values), default=1)
        for value, n, tokens in values:
            counted = "" if tokens is None else f" {tokens:>14,} tokens"
            bar = "#" * round(BAR * n / most)
            lines.append(f"  {str(value)[:24]:<24} {n:>12,}{counted}  {bar}".rstrip())
    return "\n".join(lines) or "no properties"


def tell_oddities(args: argparse.Namespace, done: Registered) -> None:
    """What a registration that did not fail may still have got wrong."""
    if done.n_broken:
        print(f"why: tools/register_corpus.py {args.catalog} broken {args.corpus}", file=sys.stderr)
    if done.n_edited:
        print(
            f"warning: {done.n_edited:,} files had the size and time they had, and other content; they were "
            "registered again",
            file=sys.stderr,
        )
    for name in done.absent:
        print(f"warning: no document has a value of '{name}'; is its path right?", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Do one thing, and print what came of it."""
    args = build_parser().parse_args(argv)
    try:
        writes = args.action in ("add", "remove")
        with Catalog(args.catalog, read_only=not writes, n_threads=getattr(args, "threads", None)) as catalog:
            if args.action == "add":
                properties = read_properties(args.property, args.preset)
                counter = counter_of(args)
                done = catalog.register(
                    args.corpus, args.inputs, properties, args.text_key, counter=counter,
                    verify=args.verify, member_bytes=args.max_sample_mb << 20,
                )  # fmt: skip
                print(
                    f"{args.catalog}: {args.corpus}: {done.n_documents:,} documents of {done.n_files:,} "
                    f"files registered, {done.n_known:,} files known already, {done.n_broken:,} broken lines"
                )
                tell_oddities(args, done)
            elif args.action == "list":
                print(told_list(catalog))
            elif args.action == "describe":
                print(told_values(catalog, args.corpus))
            elif args.action == "broken":
                told = [f"{path}:{line}: {why}" for path, line, why in catalog.broken(args.corpus)]
                print("\n".join(told) or "no broken line")
            else:
                catalog.remove(args.corpus)
                print(f"{args.catalog}: {args.corpus} removed")
    except (OSError, ValueError) as error:
        return failed(error)
    return 0


if __name__ == "__main__":
    run(main)
