"""Serve the chunks of mixtures over Arrow Flight, or ask a server how it is.

    python tools/mixture_server.py slim.yaml code.yaml --port 8815
    python tools/mixture_server.py slim.yaml --host 0.0.0.0 --token-file t --tls-cert c.pem --tls-key k.pem
    python tools/mixture_server.py slim.yaml --metrics-port 9108
    python tools/mixture_server.py --status grpc+tcp://127.0.0.1:8815 --prometheus

A mixture is named as its file without .yaml; its weights count documents. Killed and started again, a server
gives the same chunks; weights that follow a model are in slim.mixture/logs/RUN.jsonl.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megatron.command import command, failed, run

STATUS_WAIT_S = 5.0


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument(
        "mixtures", nargs="*", default=[], type=Path, metavar="MIXTURE.yaml", help="what to serve"
    )
    serving = parser.add_argument_group("serving")
    serving.add_argument("--host", default="127.0.0.1", metavar="NAME", help="address to listen on")
    serving.add_argument("--port", type=int, default=8815, metavar="N", help="0: a free one")
    serving.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of documents")
    safety = parser.add_argument_group("who may ask")
    safety.add_argument(
        "--token-file", type=Path, metavar="FILE", help="clients must know what it holds; mode 0600"
    )
    safety.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM; with --tls-key")
    safety.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM; with --tls-cert")
    safety.add_argument("--no-tls", action="store_true", help="beyond this machine, on a network you trust")
    safety.add_argument(
        "--root", type=Path, action="append", default=[], metavar="FOLDER",
        help="read files below it alone; may be given again",
    )  # fmt: skip
    metrics = parser.add_argument_group("metrics")
    metrics.add_argument("--metrics-port", type=int, metavar="N", help="answer Prometheus; 0: a free one")
    metrics.add_argument("--metrics-host", default="127.0.0.1", metavar="NAME", help="where, without a token")
    asking = parser.add_argument_group("asking")
    asking.add_argument("--prometheus", action="store_true", help="--status as Prometheus reads it")
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
    if args.prometheus and not args.status:
        parser.error("--prometheus goes with --status; a server answers it on --metrics-port")
    return args


def tell(port: int, metrics_port: int | None, host: str, metrics_host: str) -> None:
    """Where it listens: chunks last, for those who start a server and wait for the line."""
    from megatron.mixture.access import format_address

    if metrics_port is not None:
        print(f"metrics on http://{format_address(metrics_host, metrics_port)}/metrics", flush=True)
    print(f"listening on {format_address(host, port)}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve, or ask."""
    args = parse_args(argv)
    # after the words: --help should not wait for libraries
    from megatron.mixture.access import check_private, read_token
    from megatron.mixture.remote import Connection
    from megatron.mixture.service import Listening, serve

    try:
        for option in ("token_file", "tls_cert", "tls_key", "tls_roots"):
            path = getattr(args, option)
            if path is not None and not path.is_file():
                raise FileNotFoundError(f"--{option.replace('_', '-')}: {path}: no such file")
        token = None if args.token_file is None else read_token(args.token_file)
        if args.tls_key is not None:
            check_private(args.tls_key)
        if args.status:
            roots = None if args.tls_roots is None else args.tls_roots.read_bytes()
            with Connection(args.status, token, roots, STATUS_WAIT_S) as connection:
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
        return failed(error)
    return 0


if __name__ == "__main__":
    run(main)
