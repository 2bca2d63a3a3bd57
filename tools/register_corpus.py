"""Register corpora with the properties of their documents, inspect the catalog, or remove a corpus.

    python tools/register_corpus.py catalog add slim data/*.jsonl.zst --preset slimpajama
    python tools/register_corpus.py catalog add code data/code.parquet \\
        --property 'meta.language AS language category' --property 'length(content) AS characters integer' \\
        --text-key content
    python tools/register_corpus.py catalog add pictures shards/*.tar --tokenizer-model gpt2
    python tools/register_corpus.py catalog add-property slim --name length_bucket \\
        --function my_properties:length_bucket --type category --processes 8
    python tools/register_corpus.py catalog list
    python tools/register_corpus.py catalog describe slim
    python tools/register_corpus.py catalog broken slim
    python tools/register_corpus.py catalog remove slim
    python tools/register_corpus.py s3://bucket/catalog add slim data/*.jsonl.zst --shard 3/16
    python tools/register_corpus.py catalog snapshots
    python tools/register_corpus.py catalog prune --keep 5b482d8e
    python tools/register_corpus.py catalog convert catalog.duckdb

When rerun, `add` registers only new and changed files, `add-property` computes only missing values, and both
resume after an interruption. `add-property` runs the code of the function that you name. Any number of
processes and machines may add files to the same catalog at the same time. Runs can use a snapshot from before
a removal or an update until `prune` deletes it.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.cli import add_action, create_parser, positive_int, report_error, run_main
from megatron.mixture.catalog.catalog import Catalog, RegistrationResult
from megatron.mixture.catalog.computed import list_computed
from megatron.mixture.catalog.convert import convert_catalog
from megatron.mixture.catalog.properties import PRESETS, TYPES, read_properties
from megatron.mixture.catalog.tars import MAX_SAMPLE_BYTES
from megatron.mixture.compute_property import compute_property, describe_corpus, remove_computed
from megatron.text.token_counts import TokenCounter
from megatron.tokenizer.cli_options import add_tokenizer_options, parse_tokenizer_spec
from megatron.tokenizer.kinds import TokenizerSpec

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
        "--verify", action="store_true",
        help="also read registered files, and register those whose content has changed again",
    )  # fmt: skip
    add.add_argument(
        "--max-sample-mb", type=positive_int, default=MAX_SAMPLE_BYTES >> 20, metavar="N",
        help="largest sample of a tar with all its members, in MiB (default: %(default)s)",
    )  # fmt: skip
    add.add_argument(
        "--shard", type=parse_shard, default=(0, 1), metavar="K/N",
        help="only every N-th file, from the K-th on (K from 0), for N processes at once",
    )  # fmt: skip
    add_tokenizer_options(add)
    computed = add_action(
        actions,
        "add-property",
        "compute a property of all documents by a Python function, in processes",
        f"{example} add-property slim --name length_bucket --function my_properties:length_bucket",
    )
    computed.add_argument("corpus", metavar="NAME", help="name of the corpus")
    computed.add_argument("--name", required=True, metavar="NAME", help="name of the property")
    computed.add_argument(
        "--function", required=True, metavar="MODULE:NAME",
        help="function, or class whose instances are called: it gets a list of documents and returns as many "
        "values; its module is imported from PYTHONPATH and run",
    )  # fmt: skip
    computed.add_argument("--type", choices=sorted(TYPES), default="string", help="type of the values")
    computed.add_argument(
        "--processes", type=positive_int, default=1, metavar="N", help="processes that call the function"
    )
    computed.add_argument("--batch", type=positive_int, default=256, metavar="N", help="documents per call")
    computed.add_argument(
        "--replace", action="store_true",
        help="compute all values again, by another function or another version of it",
    )  # fmt: skip
    removed = add_action(
        actions,
        "remove-property",
        "remove a computed property",
        f"{example} remove-property slim --name length_bucket",
    )
    removed.add_argument("corpus", metavar="NAME", help="name of the corpus")
    removed.add_argument("--name", required=True, metavar="NAME", help="name of the property")
    add_action(actions, "list", "list the corpora, with files, documents and tokens", f"{example} list")
    for name, what in (
        ("describe", "count documents and tokens by the values of each property"),
        ("broken", "list file, line and reason of each broken line"),
        ("remove", "remove a corpus from the catalog; its files are kept"),
    ):
        subparser = add_action(actions, name, what, f"{example} {name} slim")
        subparser.add_argument("corpus", metavar="NAME", help="name of the corpus")
    add_action(actions, "snapshots", "list the snapshots that can be opened", f"{example} snapshots")
    prune = add_action(
        actions, "prune", "delete what only older snapshots need", f"{example} prune --keep 5b482d8e"
    )
    prune.add_argument(
        "--keep", action="append", default=[], metavar="ID", help="a snapshot that stays; may be repeated"
    )
    convert = add_action(
        actions, "convert", "convert a DuckDB file of an earlier version", f"{example} convert catalog.duckdb"
    )
    convert.add_argument("source", type=Path, metavar="FILE", help="the DuckDB file; it stays as it is")
    return parser


def parse_shard(word: str) -> tuple[int, int]:
    """Parse K/N with 0 <= K < N. Raise ArgumentTypeError for another word."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", word)
    if match is None or not int(match[1]) < int(match[2]):
        raise argparse.ArgumentTypeError(f"got {word!r}, expected K/N with K from 0 to N - 1, such as 0/4")
    return int(match[1]), int(match[2])


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
    for corpus in catalog.summarize_corpora():
        tokens = "" if corpus.n_tokens is None else f", {corpus.n_tokens:,} tokens"
        lines.append(
            f"{corpus.name}: {corpus.n_documents:,} documents in {corpus.n_files:,} files{tokens}, "
            f"{corpus.n_broken:,} broken lines; "
            f"{', '.join([*corpus.properties, *list_computed(catalog.path, corpus.name)]) or 'no properties'}"
        )
    return "\n".join(lines) or "no corpora"


def format_values(catalog: Catalog, corpus: str) -> str:
    """Format a histogram of each property."""
    lines = []
    for name, values in describe_corpus(catalog, corpus).items():
        lines.append(name)
        most = max((n for _, n, _ in values), default=1)
        for value, n, tokens in values:
            counted = "" if tokens is None else f" {tokens:>14,} tokens"
            bar = "#" * round(BAR * n / most)
            lines.append(f"  {str(value)[:24]:<24} {n:>12,}{counted}  {bar}".rstrip())
    return "\n".join(lines) or "no properties"


def change_computed_property(args: argparse.Namespace) -> None:
    """Compute or remove a property. The catalog is only read."""
    if args.action == "remove-property":
        remove_computed(args.catalog, args.corpus, args.name)
        print(f"{args.catalog}: {args.corpus}: {args.name} removed")
        return
    done = compute_property(
        args.catalog, args.corpus, args.name, args.function, args.type, args.processes, args.batch,
        args.replace,
    )  # fmt: skip
    print(
        f"{args.catalog}: {args.corpus}: {args.name} of {done.n_documents:,} documents in {done.n_files:,} "
        f"files, {done.n_known:,} known before"
    )


def print_warnings(args: argparse.Namespace, done: RegistrationResult) -> None:
    """Print warnings about broken lines, changed files and properties without values."""
    if done.n_broken:
        # on standard error, so that the output of `add` is one line
        print(f"list them: tools/register_corpus.py {args.catalog} broken {args.corpus}", file=sys.stderr)
    if done.n_duplicates:
        print(
            f"{done.n_duplicates:,} files were registered by another process at the same time",
            file=sys.stderr,
        )
    if done.n_edited:
        print(
            f"warning: {done.n_edited:,} files had the same size and time but other content; they were "
            "registered again",
            file=sys.stderr,
        )
    for name in done.absent:
        print(f"warning: no document has a value of '{name}'; check its path", file=sys.stderr)


def format_snapshots(catalog: Catalog) -> str:
    """Format one line per stored snapshot, and the current one."""
    lines = [
        f"{id[:16]}  {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(stored.time))} UTC  "
        f"{stored.documents:,} documents{'  current' * (id == catalog.snapshot.id)}"
        for id, stored in catalog.list_snapshots().items()
    ]
    if not any(line.endswith("current") for line in lines):
        n_documents = catalog.count_documents(catalog.list_corpora())
        lines.append(
            f"{catalog.snapshot.id[:16]}  not stored yet           {n_documents:,} documents  current"
        )
    return "\n".join(lines)


def add_files(catalog: Catalog, args: argparse.Namespace) -> None:
    """Register files, and print the counts."""
    properties = read_properties(args.property, args.preset)
    done = catalog.register(
        args.corpus, args.inputs, properties, args.text_key, counter=build_counter(args),
        verify=args.verify, member_bytes=args.max_sample_mb << 20, shard=args.shard,
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
        if args.action in ("add-property", "remove-property"):
            change_computed_property(args)
            return 0
        writes = args.action in ("add", "remove", "prune", "convert")
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
                n_files, n_bytes = catalog.prune(args.keep)
                print(f"{args.catalog}: {n_files:,} files of {n_bytes:,} bytes deleted")
            elif args.action == "convert":
                print(f"{args.catalog}: {convert_catalog(catalog, args.source):,} documents converted")
            else:
                catalog.remove(args.corpus)
                remove_computed(args.catalog, args.corpus)
                print(f"{args.catalog}: {args.corpus} removed")
    except (OSError, ValueError) as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    run_main(main)
