"""Serve the chunks of mixtures over Arrow Flight, or ask a server how it is.

    python tools/mixture_server.py slim.yaml code.yaml --port 8815
    python tools/mixture_server.py slim.yaml --host 0.0.0.0 --token-file t --tls-cert c.pem --tls-key k.pem
    python tools/mixture_server.py slim.yaml --metrics-port 9108      and Prometheus reads /metrics there
    python tools/mixture_server.py --status grpc+tcp://127.0.0.1:8815 [--prometheus]

A mixture is named as its file without .yaml; its weights count documents. Killed and started again, a server
gives the same chunks; weights that follow a model are in slim.mixture/logs/RUN.jsonl. Exit status: 0 done,
1 failed, 2 wrong usage.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.mixture.remote import Connection
from megatron.mixture.service import Listening, serve

STATUS_WAIT_S = 5.0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command-line words."""
    parser = argparse.ArgumentParser(
        description="Serve the chunks of mixtures.",
        epilog=__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("mixtures", nargs="*", type=Path, metavar="MIXTURE.yaml")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8815, help="0: a free one (8815)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of documents (0)")
    parser.add_argument("--token-file", type=Path, help="clients must know what it holds")
    parser.add_argument("--tls-cert", type=Path, help="PEM; with --tls-key")
    parser.add_argument("--tls-key", type=Path, help="PEM; with --tls-cert")
    parser.add_argument("--no-tls", action="store_true", help="beyond this machine, on a network you trust")
    parser.add_argument("--root", type=Path, action="append", default=[], metavar="FOLDER",
                        help="read files below it alone; may be given again")  # fmt: skip
    parser.add_argument("--metrics-port", type=int, help="answer Prometheus over HTTP; 0: a free one")
    parser.add_argument("--metrics-host", default="127.0.0.1", help="where, without a token (127.0.0.1)")
    parser.add_argument("--prometheus", action="store_true", help="with --status: as Prometheus reads it")
    parser.add_argument("--status", metavar="LOCATION", help="ask a running server, and print what it says")
    parser.add_argument("--tls-roots", type=Path, help="PEM, for --status of a server with TLS")
    args = parser.parse_args(argv)
    if bool(args.mixtures) == bool(args.status):
        parser.error("give mixtures to serve, or --status of a server")
    if (args.tls_cert is None) != (args.tls_key is None):
        parser.error("--tls-cert and --tls-key go together")
    if args.prometheus and not args.status:
        parser.error("--prometheus goes with --status; a server answers it on --metrics-port")
    return args


def tell(port: int, metrics_port: int | None, host: str, metrics_host: str) -> None:
    """Where it listens: chunks last, for those who start a server and wait for the line."""
    if metrics_port is not None:
        print(f"metrics on http://{metrics_host}:{metrics_port}/metrics", flush=True)
    print(f"listening on {host}:{port}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve, or ask."""
    args = parse_args(argv)
    try:
        token = None if args.token_file is None else args.token_file.read_text().strip()
        if args.status:
            roots = None if args.tls_roots is None else args.tls_roots.read_bytes()
            connection = Connection(args.status, token, roots, STATUS_WAIT_S)
            if args.prometheus:
                print(connection.ask("metrics")["text"], end="")
            else:
                print(json.dumps(connection.ask("status"), indent=1))
            return 0
        tls = None if args.tls_cert is None else (args.tls_cert.read_bytes(), args.tls_key.read_bytes())
        where = Listening(
            host=args.host, port=args.port, token=token, tls=tls, allow_plain=args.no_tls,
            metrics_host=args.metrics_host, metrics_port=args.metrics_port,
        )  # fmt: skip
        serve(
            args.mixtures, where, args.seed, args.root,
            ready=lambda port, metrics: tell(port, metrics, args.host, args.metrics_host),
        )  # fmt: skip
    except KeyboardInterrupt:
        return 0
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
