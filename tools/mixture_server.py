"""Serve the mixtures of a folder over Arrow Flight to clients that register, query, mix and read chunks.

    python tools/mixture_server.py data --port 8815 --root /corpora
    python tools/mixture_server.py data --host 0.0.0.0 --tls-cert c.pem --tls-key k.pem
    python tools/mixture_server.py --status grpc+tcp://127.0.0.1:8815 --token-file data/token

The folder has a catalog, mixtures NAME.yaml and a token of mode 0600, which is created; clients use
MixtureClient. Clients may register files below the folder and every --root. A server that is killed and
restarted serves the same chunks; adaptive weights are stored in NAME.mixture/logs/RUN.jsonl. It is for a
trusted network.
"""

import argparse
import json
import threading
from collections.abc import Sequence
from pathlib import Path

from megatron.cli import create_parser, report_error, run_main

STATUS_WAIT_S = 5.0


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="DIR",
        help="folder with a catalog and mixtures, created if missing",
    )  # fmt: skip
    serving = parser.add_argument_group("serving")
    serving.add_argument("--host", default="127.0.0.1", metavar="NAME", help="address to listen on")
    serving.add_argument("--port", type=int, default=8815, metavar="N", help="port; 0 chooses a free one")
    serving.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the document order")
    safety = parser.add_argument_group("access")
    safety.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the access token that clients must send; mode 0600; default: DIR/token",
    )
    safety.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM; with --tls-key")
    safety.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM; with --tls-cert")
    safety.add_argument(
        "--no-tls", action="store_true", help="accept other machines without TLS, on a trusted network"
    )
    safety.add_argument(
        "--root", type=Path, action="append", default=[], metavar="FOLDER",
        help="read and register only files below this folder; may be repeated",
    )  # fmt: skip
    status = parser.add_argument_group("status of a server")
    status.add_argument("--status", metavar="LOCATION", help="print the status of a running server")
    status.add_argument(
        "--tls-roots", type=Path, metavar="FILE", help="PEM, for --status of a server with TLS"
    )
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments and check their combinations."""
    parser = build_parser()
    args = parser.parse_args(argv)
    # exactly one of the two
    if bool(args.folder) == bool(args.status):
        parser.error("give either a folder to serve, or --status of a server")
    if (args.tls_cert is None) != (args.tls_key is None):
        parser.error("--tls-cert and --tls-key go together")
    if args.folder is not None and args.folder.is_file():
        parser.error(f"{args.folder} is a mixture: serve its folder, {args.folder.parent}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Serve mixtures, or print the status of a server."""
    args = parse_args(argv)
    # imported after parsing, so that --help does not load these libraries
    from megatron.mixture.client import MixtureClient, check_private, make_token_file, read_token
    from megatron.mixture.server import ServedFolder, make_server

    try:
        for option in ("token_file", "tls_cert", "tls_key", "tls_roots"):
            path = getattr(args, option)
            if path is not None and not path.is_file():
                raise FileNotFoundError(f"--{option.replace('_', '-')}: {path}: no such file")
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
            return 0
        tls = None if args.tls_cert is None else (args.tls_cert.read_bytes(), args.tls_key.read_bytes())
        served = ServedFolder(args.folder, args.seed, args.root)
        assert token is not None, "the folder has a token file"
        server = make_server(served, token, args.host, args.port, tls, args.no_tls)
        # flush: a caller reads this line from a pipe, where output is buffered by blocks
        print(f"listening on {args.host}:{server.port}", flush=True)
        # until the process is killed: what a run depends on is on disk before a
        # client gets a reply
        threading.Event().wait()
    # a server runs until it is stopped, so a stop is success
    except KeyboardInterrupt:
        return 0
    except (OSError, ValueError) as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    run_main(main)
