"""Read a mixture from a server, as ranks without access to the data do.

    python examples_scaling/mixture/server.py work/mixture.yaml

Starts scaling serve for the folder of the mixture, reads chunks from it, kills it, starts it again,
and compares the chunks with those read from disk.
"""

import subprocess
import sys
from pathlib import Path

from megatron.mixture.client import MixtureClient, RemoteChunks, make_token_file, read_token
from megatron.mixture.documents import DocumentChunks

SERVER = Path(__file__).resolve().parents[2] / "tools" / "mixtures.py"


def start_server(folder: Path, port: str = "0") -> tuple[subprocess.Popen[str], str]:
    """Start a server and return it with its host:port."""
    command = [sys.executable, str(SERVER), "serve", str(folder), "--port", port]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().split()[-1]


def main(path: str) -> None:
    """Serve, read, kill, serve again, compare."""
    mixture = Path(path)
    token = read_token(make_token_file(mixture.parent))
    server, address = start_server(mixture.parent)
    try:
        with MixtureClient(f"grpc+tcp://{address}", token) as client:
            remote = RemoteChunks(client, mixture.stem)
            parts = [remote.read(i, 1) for i in range(4)]
            server.kill()
            server.wait()
            server, _ = start_server(mixture.parent, port=address.rpartition(":")[2])
            parts += [remote.read(i, 1) for i in range(4, 8)]  # reconnects automatically
        with DocumentChunks(mixture) as local:
            same = all(part.equals(local.read(i, 1)) for i, part in enumerate(parts))
        verdict = "the same" if same else "NOT the same"
        print(f"{len(parts)} chunks of {remote.chunk_size} documents, {verdict}")
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    main(*sys.argv[1:])
