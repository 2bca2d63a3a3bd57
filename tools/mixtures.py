r"""Register corpora in a catalog, prepare mixtures of their documents, and serve them.

    scaling register catalog add slim data/*.jsonl.zst --preset slimpajama
    scaling register catalog add code data/code.parquet --text-key content \
        --property 'meta.language AS language category' \
        --property "length(record->>'$.content') AS characters integer"
    scaling register catalog add pictures shards/*.tar --tokenizer-model gpt2
    scaling register catalog add-property slim values.parquet --property 'quality float'
    scaling register catalog describe slim
    scaling register s3://bucket/catalog add slim data/*.jsonl.zst --shard 3/16
    scaling register catalog prune --keep slim=3
    scaling mixture slim.yaml
    scaling serve data --port 8815 --root /corpora
    scaling serve data --host 0.0.0.0 --tls-cert c.pem --tls-key k.pem
    scaling serve --status grpc+tcp://127.0.0.1:8815 --token-file data/token

`python tools/mixtures.py ACTION ...` is the same. When rerun, `register CATALOG add` registers only new and
changed files, and it resumes after an interruption; any number of processes and machines may add files to a
catalog at the same time. Its --function runs the code of the function that you name with each record.
`mixture` writes slim.mixture/ next to the file and does only what is missing, as tools/pretrain.py
dataset.mixture=slim.yaml does.

`serve` has a folder with a catalog, mixtures NAME.yaml and a token of mode 0600, which is created; clients
use MixtureClient and may register files below the folder and every --root. A server that is killed and
restarted serves the same chunks; adaptive weights are stored in NAME.mixture/logs/RUN.jsonl. It is for a
trusted network.
"""

import argparse
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.cli import add_action, create_parser, positive_int, print_table, run_main
from megatron.mixture.catalog import Catalog
from megatron.mixture.prepare import prepare_mixture
from megatron.mixture.properties import PRESETS, TYPES, read_properties
from megatron.mixture.records import RecordFunction
from megatron.plan.mixture_use import mixture_folder
from megatron.text.inputs import Part, parse_part
from megatron.text.token_counts import TokenCounter
from megatron.tokenizer.kinds import TokenizerSpec, add_tokenizer_options, parse_tokenizer_spec

BAR = 40
STATUS_WAIT_S = 5.0
METRICS = "Read the counts of `scaling serve --status`"
COMPUTE = "Compute values with any program, or with `add --function` at registration"
REMOVED = {
    "convert": "Catalogs of earlier versions cannot be read: register their files again with add",
    "remove": "Delete the folder of the corpus in the catalog",
    "remove-property": "Replace the values with add-property",
    "--max-sample-mb": "A text has at most 256 MiB",
    "--follow": "A mixture has one server: connect all clients to it",
    "--metrics-host": METRICS,
    "--metrics-port": METRICS,
    "--name": COMPUTE,
    "--processes": COMPUTE,
    "--prometheus": METRICS,
}


def add_register(actions: Any) -> None:
    """Add the action register, with actions of its own."""
    parser = add_action(actions, "register", run_register)
    parser.add_argument("catalog", metavar="CATALOG", help="folder or URL; created if missing")
    steps = parser.add_subparsers(dest="step", required=True, metavar="STEP", help="what to do")
    add_files_parser(steps)
    parser = add_step(steps, "add-property", add_property)
    parser.add_argument("corpus", metavar="NAME", help="name of the corpus")
    columns = "columns path, row (from 0) and the property"
    parser.add_argument("values", type=Path, metavar="FILE.parquet", help=columns)
    types = f"types: {', '.join(TYPES)}; default: string"
    parser.add_argument("--property", required=True, metavar="'NAME TYPE'", help=types)
    add_step(steps, "list", list_corpora)
    for name, run in (("describe", describe_corpus), ("broken", list_broken)):
        parser = add_step(steps, name, run)
        parser.add_argument("corpus", metavar="NAME", help="name of the corpus")
    add_step(steps, "snapshots", list_snapshots)
    parser = add_step(steps, "prune", prune_catalog)
    keep = "a version of a corpus that stays; may be repeated"
    add = parser.add_argument
    add("--keep", action="append", default=[], type=parse_version, metavar="NAME=VERSION", help=keep)


def add_step(steps: Any, name: str, run: Callable[..., None]) -> argparse.ArgumentParser:
    """Add an action on the catalog, and return its parser."""
    parser = add_action(steps, name, run)
    parser.set_defaults(run=run_register, run_step=run)
    return parser


def add_files_parser(steps: Any) -> None:
    """Add the action `register CATALOG add`."""
    parser = add_step(steps, "add", add_files)
    add = parser.add_argument
    add("corpus", metavar="NAME", help="name of the corpus")
    files = ".jsonl, .tar (plain, .gz, .zst), .parquet, datasets (.bin); folders, patterns"
    add("inputs", nargs="+", metavar="PATH", help=files)
    add("--preset", choices=sorted(PRESETS), help="the properties of a known data set")
    path = f"a path (meta.source) or SQL over `record`; types: {', '.join(TYPES)}; default: string"
    add("--property", action="append", default=[], metavar="'PATH AS NAME TYPE'", help=path)
    add("--text-key", metavar="KEY", default="text", help="key or column of the text")
    threads = "threads of DuckDB and of the token counter; default: all cores"
    add("--threads", type=positive_int, metavar="N", help=threads)
    shard = "only every N-th file, from the I-th on (I from 1), for N processes at once"
    add("--shard", type=parse_part, default=Part(1, 1), metavar="I/N", help=shard)
    function = "its code is run: gets each record as a dict and returns a dict, merged into the record"
    add("--function", metavar="MODULE:NAME", help=function)
    add_tokenizer_options(parser)


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
    """Return a token counter; None without a tokenizer. Raise ValueError for its options without one."""
    spec = parse_tokenizer_spec(args)
    if spec == TokenizerSpec():
        if args.append_eod or args.special_text != "token":
            raise ValueError(
                "--append-eod, --special-text: got no tokenizer. Name it with --tokenizer-model."
            )
        return None
    n_threads = args.threads or len(os.sched_getaffinity(0))
    return TokenCounter(spec, args.append_eod, args.special_text == "token", n_threads)


def run_register(args: argparse.Namespace) -> None:
    """Register corpora with the properties of their documents in a catalog, or inspect it.

    scaling register catalog list
    """
    writes = args.step in ("add", "add-property", "prune")
    with Catalog(args.catalog, read_only=not writes, n_threads=getattr(args, "threads", None)) as catalog:
        args.run_step(catalog, args)


def add_files(catalog: Catalog, args: argparse.Namespace) -> None:
    """Register new and changed files.

    scaling register catalog add slim slimpajama --preset slimpajama --tokenizer-model gpt2
    """
    done = catalog.register(
        args.corpus, args.inputs, read_properties(args.property, args.preset), args.text_key,
        counter=build_counter(args), shard=(args.shard.number - 1, args.shard.count),
        function=None if args.function is None else import_function(args.function),
    )  # fmt: skip
    print(
        f"{args.catalog}: {args.corpus}: {done.n_documents:,} documents of {done.n_files:,} "
        f"files registered, {done.n_known:,} files unchanged, {done.n_broken:,} broken lines"
    )
    if done.n_broken:
        print(f"list them: scaling register {args.catalog} broken {args.corpus}", file=sys.stderr)
    for name in done.absent:
        print(f"warning: no document has a value of '{name}'; check its path", file=sys.stderr)


def add_property(catalog: Catalog, args: argparse.Namespace) -> None:
    """Add a property of registered documents from a parquet file, or replace it.

    scaling register catalog add-property slim values.parquet --property 'quality float'
    """
    n = catalog.add_property(args.corpus, args.property, args.values)
    print(f"{args.catalog}: {args.corpus}: {args.property.split()[0]} of {n:,} documents")


def list_corpora(catalog: Catalog, args: argparse.Namespace) -> None:
    """List the corpora, with files, documents and tokens.

    scaling register catalog list
    """
    for corpus in catalog.list_corpora():
        files, n_tokens = catalog.list_files(corpus.name), catalog.count_tokens(corpus.name)
        tokens = "" if n_tokens is None else f", {n_tokens:,} tokens"
        print(
            f"{corpus.name}: {sum(file.n_documents for file in files):,} documents in {len(files):,} "
            f"files{tokens}, {sum(file.n_broken for file in files):,} broken lines; "
            f"{', '.join(prop.name for prop in corpus.all_properties) or 'no properties'}"
        )
    if not catalog.tables:
        print("no corpora")


def describe_corpus(catalog: Catalog, args: argparse.Namespace) -> None:
    """Count documents and tokens by the values of each property.

    scaling register catalog describe slim
    """
    histograms = catalog.describe_corpus(args.corpus)
    for name, values in histograms.items():
        print(name)
        most = max((n for _, n, _ in values), default=1)
        for value, n, tokens in values:
            counted = "" if tokens is None else f" {tokens:>14,} tokens"
            bar = "#" * round(BAR * n / most)
            print(f"  {str(value)[:24]:<24} {n:>12,}{counted}  {bar}".rstrip())
    if not histograms:
        print("no properties")


def list_broken(catalog: Catalog, args: argparse.Namespace) -> None:
    """List file, line and reason of each broken line.

    scaling register catalog broken slim
    """
    lines = [f"{path}:{line}: {why}" for path, line, why in catalog.list_broken(args.corpus)]
    print("\n".join(lines) or "no broken lines")


def list_snapshots(catalog: Catalog, args: argparse.Namespace) -> None:
    """List the snapshots that can be opened.

    scaling register catalog snapshots
    """
    for name, table in sorted(catalog.tables.items()):
        for version, seconds, operation in table.list_versions():
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
            current = "  current" * (version == table.version)
            print(f"{{{name}: {version}}}  {when} UTC  {operation.lower()}{current}")
    if not catalog.tables:
        print("no corpora")


def prune_catalog(catalog: Catalog, args: argparse.Namespace) -> None:
    """Delete what only older snapshots need.

    scaling register catalog prune --keep slim=3
    """
    print(f"{args.catalog}: {catalog.prune(dict(args.keep)):,} files deleted")


def add_mixture(actions: Any) -> None:
    """Add the action mixture."""
    parser = add_action(actions, "mixture", run_mixture)
    keys = "mixture file; megatron/mixture/spec.py lists its keys"
    parser.add_argument("mixture", metavar="MIXTURE.yaml", help=keys)
    verify = "read all files and compare their content with the catalog's sums"
    parser.add_argument("--verify", action="store_true", help=verify)


def run_mixture(args: argparse.Namespace) -> None:
    """Select a mixture's documents from the catalog, tokenize their text, and list the domains.

    scaling mixture slim.yaml
    """
    resolved = prepare_mixture(args.mixture, verify=args.verify)
    columns = (resolved.domains, resolved.documents, resolved.tokens, resolved.weights)
    rows = [[name, f"{n:,}", f"{tokens:,}", f"{w:.2%}"] for name, n, tokens, w in zip(*columns, strict=True)]
    print_table(["domain", "documents", "tokens", "weight"], rows, ["domain"])
    print(f"{mixture_folder(args.mixture)}: ready for dataset.mixture={args.mixture}")


def add_serve(actions: Any) -> None:
    """Add the action serve."""
    parser = add_action(actions, "serve", run_serve)
    add = parser.add_argument
    folder = "folder with a catalog and mixtures, created if missing"
    add("folder", nargs="?", type=Path, metavar="DIR", help=folder)
    add("--host", default="127.0.0.1", metavar="NAME", help="address to listen on")
    add("--port", type=int, default=8815, metavar="N", help="port; 0 chooses a free one")
    add("--seed", type=int, default=0, metavar="N", help="seed of the document order")
    token = "access token that clients must send; mode 0600; default: DIR/token"
    add("--token-file", type=Path, metavar="FILE", help=token)
    add("--tls-cert", type=Path, metavar="FILE", help="PEM; with --tls-key")
    add("--tls-key", type=Path, metavar="FILE", help="PEM; with --tls-cert")
    add("--no-tls", action="store_true", help="accept other machines without TLS, on a trusted network")
    root = "read and register only files below this folder; may be repeated"
    add("--root", type=Path, action="append", default=[], metavar="FOLDER", help=root)
    add("--status", metavar="LOCATION", help="print the status of a running server")
    add("--tls-roots", type=Path, metavar="FILE", help="PEM, for --status of a server with TLS")


def run_serve(args: argparse.Namespace) -> None:
    """Serve the mixtures of a folder over Arrow Flight, or print the status of a server.

    scaling serve data --port 8815 --root /corpora
    """
    # exactly one of the two
    if bool(args.folder) == bool(args.status):
        args.refuse("give either a folder to serve, or --status of a server")
    if (args.tls_cert is None) != (args.tls_key is None):
        args.refuse("--tls-cert and --tls-key go together")
    if args.folder is not None and args.folder.is_file():
        args.refuse(f"{args.folder} is a mixture: serve its folder, {args.folder.parent}")
    # imported after parsing, so that --help does not load these libraries
    from megatron.mixture.client import MixtureClient, check_private, make_token_file, read_token
    from megatron.mixture.server import ServedFolder, make_server

    if args.folder is not None:
        args.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        args.token_file = args.token_file or make_token_file(args.folder)
    token = None if args.token_file is None else read_token(args.token_file)
    if args.tls_key is not None:
        # before the server listens: a key that other users can read is refused
        check_private(args.tls_key)
    if args.status:
        roots = None if args.tls_roots is None else args.tls_roots.read_bytes()
        with MixtureClient(args.status, token, roots, STATUS_WAIT_S) as client:
            print(json.dumps(client.request("status"), indent=1))
        return
    tls = None if args.tls_cert is None else (args.tls_cert.read_bytes(), args.tls_key.read_bytes())
    served = ServedFolder(args.folder, args.seed, args.root)
    assert token is not None, "the folder has a token file"
    with suppress(KeyboardInterrupt):  # a server runs until it is stopped, so a stop is success
        server = make_server(served, token, args.host, args.port, tls, args.no_tls)
        # flush: a caller reads this line from a pipe, where output is buffered by blocks
        print(f"listening on {args.host}:{server.port}", flush=True)
        # until the process is killed: what a run depends on is on disk before a
        # client gets a reply
        threading.Event().wait()


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__, removed=REMOVED)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", help="what to do")
    for add in (add_register, add_mixture, add_serve):
        add(actions)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one action, and print its result."""
    args = build_parser().parse_args(argv)
    args.run(args)
    return 0


if __name__ == "__main__":
    run_main(main)
