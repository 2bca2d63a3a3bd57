"""Register corpora with the properties of their documents, and inspect the catalog.

    python tools/register_corpus.py catalog add slim data/*.jsonl.zst --preset slimpajama
    python tools/register_corpus.py catalog add code data/code.parquet \\
        --property 'meta.language AS language category' --text-key content \\
        --property "length(record->>'$.content') AS characters integer"
    python tools/register_corpus.py catalog add pictures shards/*.tar --tokenizer-model gpt2
    python tools/register_corpus.py catalog add slim data/*.jsonl --function my_parser:parse_record \\
        --property 'length_bucket'
    python tools/register_corpus.py catalog add-property slim values.parquet --property 'quality float'
    python tools/register_corpus.py catalog list
    python tools/register_corpus.py catalog describe slim
    python tools/register_corpus.py catalog broken slim
    python tools/register_corpus.py s3://bucket/catalog add slim data/*.jsonl.zst --shard 3/16
    python tools/register_corpus.py catalog snapshots
    python tools/register_corpus.py catalog prune --keep slim=3

When rerun, `add` registers only new and changed files, and it resumes after an interruption. `--function`
runs the code of the function that you name with each record. Any number of processes and machines may add
files to the same catalog at the same time. Versions from before an update can be used until `prune` deletes
them. To remove a corpus, delete its folder in the catalog.
"""

import argparse
import importlib
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.cli import add_action, create_parser, positive_int, report_error, run_main
from megatron.mixture.catalog import Catalog
from megatron.mixture.properties import PRESETS, TYPES, read_properties
from megatron.mixture.records import RecordFunction
from megatron.mixture.registration import RegistrationResult
from megatron.text.token_counts import TokenCounter
from megatron.tokenizer.kinds import TokenizerSpec, add_tokenizer_options, parse_tokenizer_spec

BAR = 40


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument(
        "catalog",
        metavar="CATALOG",
        help="a folder, or a URL such as s3://bucket/catalog; created if missing",
    )
    actions = parser.add_subparsers(dest="action", required=True, help="action")
    example = "python tools/register_corpus.py catalog"
    add = add_action(
        actions,
        "add",
        "register new and changed files",
        f"{example} add slim slimpajama --preset slimpajama --tokenizer-model gpt2",
    )
    add.add_argument("corpus", metavar="NAME", help="name of the corpus")
    add.add_argument(
        "inputs",
        nargs="+",
        metavar="PATH",
        help=".jsonl, .tar (plain, .gz, .zst), .parquet, datasets (.bin); folders, patterns",
    )
    add.add_argument("--preset", choices=sorted(PRESETS), help="the properties of a known data set")
    add.add_argument(
        "--property", action="append", default=[], metavar="'PATH AS NAME TYPE'",
        help=f"a path (meta.source) or SQL over `record`; types: {', '.join(TYPES)}; default: string",
    )  # fmt: skip
    add.add_argument("--text-key", metavar="KEY", default="text", help="key or column of the text")
    add.add_argument(
        "--threads",
        type=positive_int,
        metavar="N",
        help="threads of DuckDB and of the token counter; default: all cores",
    )
    add.add_argument(
        "--shard", type=parse_shard, default=(0, 1), metavar="K/N",
        help="only every N-th file, from the K-th on (K from 0), for N processes at once",
    )  # fmt: skip
    add.add_argument(
        "--function", metavar="MODULE:NAME",
        help="function that gets each record as a dict and returns a dict, which is merged into the record; "
        "its module is imported from PYTHONPATH and run",
    )  # fmt: skip
    add_tokenizer_options(add)
    added = add_action(
        actions,
        "add-property",
        "add a property of registered documents from a parquet file, or replace it",
        f"{example} add-property slim values.parquet --property 'quality float'",
    )
    added.add_argument("corpus", metavar="NAME", help="name of the corpus")
    added.add_argument(
        "values",
        type=Path,
        metavar="FILE.parquet",
        help="columns path, row (from 0) and the property",
    )
    added.add_argument(
        "--property", required=True, metavar="'NAME TYPE'", help=f"types: {', '.join(TYPES)}; default: string"
    )
    add_action(actions, "list", "list the corpora, with files, documents and tokens", f"{example} list")
    for name, what in (
        ("describe", "count documents and tokens by the values of each property"),
        ("broken", "list file, line and reason of each broken line"),
    ):
        subparser = add_action(actions, name, what, f"{example} {name} slim")
        subparser.add_argument("corpus", metavar="NAME", help="name of the corpus")
    add_action(actions, "snapshots", "list the snapshots that can be opened", f"{example} snapshots")
    prune = add_action(
        actions, "prune", "delete what only older snapshots need", f"{example} prune --keep slim=3"
    )
    prune.add_argument(
        "--keep", action="append", default=[], type=parse_version, metavar="NAME=VERSION",
        help="a version of a corpus that stays; may be repeated",
    )  # fmt: skip
    return parser


def parse_shard(word: str) -> tuple[int, int]:
    """Parse K/N with 0 <= K < N. Raise ArgumentTypeError for another word."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", word)
    if match is None or not int(match[1]) < int(match[2]):
        raise argparse.ArgumentTypeError(f"got {word!r}, expected K/N with K from 0 to N - 1, such as 0/4")
    return int(match[1]), int(match[2])


def parse_version(word: str) -> tuple[str, int]:
    """Parse NAME=VERSION. Raise ArgumentTypeError for another word."""
    name, _, version = word.rpartition("=")
    if not name or not version.isdecimal():
        raise argparse.ArgumentTypeError(
            f"got {word!r}, expected NAME=VERSION as `snapshots` lists, such as slim=3"
        )
    return name, int(version)


def import_function(word: str) -> RecordFunction:
    """Return the function MODULE:NAME. Raise ValueError if it cannot be imported."""
    module, _, name = word.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # the code of the user may raise anything
        raise ValueError(
            f"--function: got {word!r} ({error!r}), expected MODULE:NAME. Add its folder to PYTHONPATH."
        ) from error
    return function  # type: ignore[no-any-return]


def build_counter(args: argparse.Namespace) -> TokenCounter | None:
    """Return a token counter;

    None without a tokenizer. Raise ValueError for its options without a tokenizer.
    """
    spec = parse_tokenizer_spec(args)
    if spec == TokenizerSpec():
        if args.append_eod or args.special_text != "token":
            raise ValueError(
                "--append-eod, --special-text: got no tokenizer. Name it with --tokenizer-model."
            )
        return None
    n_threads = args.threads or len(os.sched_getaffinity(0))
    return TokenCounter(spec, args.append_eod, args.special_text == "token", n_threads)


def format_corpora(catalog: Catalog) -> str:
    """Format one line per corpus."""
    lines = []
    for corpus in catalog.list_corpora():
        files, n_tokens = catalog.list_files(corpus.name), catalog.count_tokens(corpus.name)
        tokens = "" if n_tokens is None else f", {n_tokens:,} tokens"
        lines.append(
            f"{corpus.name}: {sum(file.n_documents for file in files):,} documents in {len(files):,} "
            f"files{tokens}, {sum(file.n_broken for file in files):,} broken lines; "
            f"{', '.join(prop.name for prop in corpus.all_properties) or 'no properties'}"
        )
    return "\n".join(lines) or "no corpora"


def format_values(catalog: Catalog, corpus: str) -> str:
    """Format a histogram of each property."""
    lines = []
    for name, values in catalog.describe_corpus(corpus).items():
        lines.append(name)
        most = max((n for _, n, _ in values), default=1)
        for value, n, tokens in values:
            counted = "" if tokens is None else f" {tokens:>14,} tokens"
            bar = "#" * round(BAR * n / most)
            lines.append(f"  {str(value)[:24]:<24} {n:>12,}{counted}  {bar}".rstrip())
    return "\n".join(lines) or "no properties"


def add_property(catalog: Catalog, args: argparse.Namespace) -> None:
    """Add a property, and print the number of documents."""
    n = catalog.add_property(args.corpus, args.property, args.values)
    print(f"{args.catalog}: {args.corpus}: {args.property.split()[0]} of {n:,} documents")


def print_warnings(args: argparse.Namespace, done: RegistrationResult) -> None:
    """Print warnings about broken lines and properties without values."""
    if done.n_broken:
        # on standard error, so that the output of `add` is one line
        print(f"list them: tools/register_corpus.py {args.catalog} broken {args.corpus}", file=sys.stderr)
    for name in done.absent:
        print(f"warning: no document has a value of '{name}'; check its path", file=sys.stderr)


def format_snapshots(catalog: Catalog) -> str:
    """Format one line per version of each corpus."""
    lines = []
    for name, table in sorted(catalog.tables.items()):
        for version, seconds, operation in table.list_versions():
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
            current = "  current" * (version == table.version)
            lines.append(f"{{{name}: {version}}}  {when} UTC  {operation.lower()}{current}")
    return "\n".join(lines) or "no corpora"


def add_files(catalog: Catalog, args: argparse.Namespace) -> None:
    """Register files, and print the counts."""
    properties = read_properties(args.property, args.preset)
    done = catalog.register(
        args.corpus, args.inputs, properties, args.text_key, counter=build_counter(args),
        shard=args.shard, function=None if args.function is None else import_function(args.function),
    )  # fmt: skip
    print(
        f"{args.catalog}: {args.corpus}: {done.n_documents:,} documents of {done.n_files:,} "
        f"files registered, {done.n_known:,} files unchanged, {done.n_broken:,} broken lines"
    )
    print_warnings(args, done)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one action, and print its result."""
    args = build_parser().parse_args(argv)
    try:
        writes = args.action in ("add", "add-property", "prune")
        with Catalog(args.catalog, read_only=not writes, n_threads=getattr(args, "threads", None)) as catalog:
            if args.action == "add":
                add_files(catalog, args)
            elif args.action == "list":
                print(format_corpora(catalog))
            elif args.action == "describe":
                print(format_values(catalog, args.corpus))
            elif args.action == "broken":
                lines = [f"{path}:{line}: {why}" for path, line, why in catalog.list_broken(args.corpus)]
                print("\n".join(lines) or "no broken lines")
            elif args.action == "snapshots":
                print(format_snapshots(catalog))
            elif args.action == "prune":
                print(f"{args.catalog}: {catalog.prune(dict(args.keep)):,} files deleted")
            else:
                add_property(catalog, args)
    except (OSError, ValueError) as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    run_main(main)
