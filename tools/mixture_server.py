"""Serve the chunks of mixtures over Arrow Flight, or ask a server how it is.

    python tools/mixture_server.py slim.yaml code.yaml --port 8815
    python tools/mixture_server.py slim.yaml --host 0.0.0.0 --token-file t --tls-cert c.pem --tls-key k.pem
    python tools/mixture_server.py --status grpc+tcp://127.0.0.1:8815

A mixture is named as its file without .yaml; its weights count documents. Killed and started again, a server
gives the same chunks.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.command import command, run

STATUS_WAIT_S = 5.0


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument("mixtures", nargs="*", type=Path, metavar="MIXTURE.yaml", help="what to serve")
    serving = parser.add_argument_group("serving")
    serving.add_argument("--host", default="127.0.0.1", metavar="NAME", help="address to listen on")
    serving.add_argument("--port", type=int, default=8815, metavar="N", help="0: a free one")
    serving.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of documents")
    safety = parser.add_argument_group("who may ask")
    safety.add_argument("--token-file", type=Path, metavar="FILE", help="clients must know what it holds")
    safety.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM; with --tls-key")
    safety.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM; with --tls-cert")
    safety.add_argument("--no-tls", action="store_true", help="beyond this machine, on a network you trust")
    asking = parser.add_argument_group("asking")
    asking.add_argument("--status", metavar="LOCATION", help="ask a running server, and print what it says")
    asking.add_argument(
        "--tls-roots", type=Path, metavar="FILE", help="PEM, for --status of a server with TLS"
    )
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Words that go together."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if bool(args.mixtures) == bool(args.status):
        parser.error("give mixtures to serve, or --status of a server")
    if (args.tls_cert is None) != (args.tls_key is None):
        parser.error("--tls-cert and --tls-key go together")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Serve, or ask."""
    args = parse_args(argv)
    # after the words: --help should not wait for torch
    from megatron.mixture.client import Connection
    from megatron.mixture.service import serve

    try:
        token = None if args.token_file is None else args.token_file.read_text().strip()
        if args.status:
            roots = None if args.tls_roots is None else args.tls_roots.read_bytes()
            print(json.dumps(Connection(args.status, token, roots, STATUS_WAIT_S).ask("status"), indent=1))
            return 0
        tls = None if args.tls_cert is None else (args.tls_cert.read_bytes(), args.tls_key.read_bytes())
        serve(
            args.mixtures, args.host, args.port, args.seed, token, tls, args.no_tls,
            ready=lambda port: print(f"listening on {args.host}:{port}", flush=True),
        )  # fmt: skip
    except KeyboardInterrupt:
        return 0
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run(main)
