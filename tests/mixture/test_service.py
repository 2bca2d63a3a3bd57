"""Documents in chunks, locally and from a server: restarts, invalid requests, concurrent clients."""

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.flight
import pytest
from torch.utils.data import DataLoader

from megatron.data.indexed_writer import IndexedWriter
from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.document_chunks import DocumentChunks
from megatron.mixture.serve.client import Chunk, MixtureDataset
from megatron.mixture.serve.protocol import parse_request
from megatron.mixture.serve.remote import Connection, RemoteChunks
from megatron.mixture.serve.service import ListenOptions, serve

SIZE = 512  # documents of a chunk
LATE = Path(__file__).with_name("server_with_random_waits.py")


def parse_number(text: str) -> int:
    return int(text.removeprefix("document "))


def test_a_chunk_holds_documents_of_its_domains_in_proportion(mixture) -> None:
    source = DocumentChunks(mixture)
    assert source.names == ("C", "Go", "Python")
    table = source.read(0, 12)
    assert len(table) == 12 * SIZE
    domains, numbers = (
        table.column("domain").to_pylist(),
        [parse_number(t) for t in table.column("text").to_pylist()],
    )
    assert all(number % 3 == domain for number, domain in zip(numbers, domains, strict=True))
    assert Counter(domains) == {2: 6 * SIZE, 1: 4 * SIZE, 0: 2 * SIZE}
    of_c = [number for number, domain in zip(numbers, domains, strict=True) if domain == 0]
    assert sorted(of_c[:1000]) == list(range(0, 3000, 3))  # each document once per epoch
    assert of_c[:1000] != sorted(of_c[:1000])


def test_a_port_in_use_is_reported_in_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        for where in (ListenOptions(port=port), ListenOptions(port=0, metrics_port=port)):
            with pytest.raises(
                ValueError, match=f"^127.0.0.1:{port}: cannot be listened on .Address already in use."
            ):
                where.check_ports_free()
    ListenOptions(port=port).check_ports_free()


def test_chunks_read_separately_equal_those_read_together(mixture) -> None:
    whole = DocumentChunks(mixture).read(0, 9)
    for first in (4, 0, 7):
        assert DocumentChunks(mixture).read(first, 2).equals(whole.slice(first * SIZE, 2 * SIZE))


def test_indexed_datasets_are_read_as_ids_and_parquet_as_text(tmp_path) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"body": [f"t{i}" for i in range(9)]}), tmp_path / "t.parquet")
    with IndexedWriter(tmp_path / "pair", np.dtype(np.uint16), {}) as writer:
        for i in range(9):
            writer.add_document(np.full(i, i))
    for corpus, inputs, key in (("rows", "t.parquet", "body"), ("ids", "pair", "text")):
        with Catalog(tmp_path / "c.duckdb", n_threads=1) as catalog:
            catalog.register(corpus, [str(tmp_path / inputs)], (), key, quiet=True)
        path = tmp_path / f"{corpus}.yaml"
        path.write_text(f"catalog: c.duckdb\ncorpora: [{corpus}]\ncount: documents\n")
        documents = DocumentChunks(path, chunk_size=9).read(0, 1).column(1).to_pylist()
        expected = [f"t{i}" for i in range(9)] if corpus == "rows" else [[i] * i for i in range(9)]
        assert sorted(documents, key=str) == sorted(expected, key=str)


def load_chunks(dataset: MixtureDataset, n: int, **loader: object) -> list[Chunk]:
    result = []
    for chunk in DataLoader(dataset, batch_size=None, **loader):
        result.append(chunk)
        if len(result) == n:
            return result
    return result


def test_groups_and_workers_do_not_change_the_chunks(mixture) -> None:
    opened = partial(DocumentChunks, mixture)
    whole = load_chunks(MixtureDataset(opened), 8)
    assert [chunk.number for chunk in whole] == list(range(8))
    for n_groups in (2, 4):
        for group in range(n_groups):
            assert (
                load_chunks(MixtureDataset(opened, group, n_groups), 8 // n_groups) == whole[group::n_groups]
            )
    workers = {"num_workers": 2, "multiprocessing_context": "spawn"}
    assert load_chunks(MixtureDataset(opened), 5, **workers) == whole[:5]


def test_a_state_resumes_on_another_number_of_groups(mixture) -> None:
    opened = partial(DocumentChunks, mixture)
    whole = load_chunks(MixtureDataset(opened), 8)
    halves = [MixtureDataset(opened, group, 2) for group in (0, 1)]
    states = [half.state_dict(load_chunks(half, 3)[1]) for half in halves]  # the third was prefetched only
    assert states[0] == states[1]
    again = MixtureDataset(opened)
    again.load_state_dict(json.loads(json.dumps(states[0])))
    assert load_chunks(again, 4) == whole[4:]
    again.load_state_dict({"next_chunk": 0, "identity": "another"})
    with pytest.raises(ValueError, match="have changed"):
        next(iter(again))


def test_a_mixture_that_stops_ends_with_the_last_document_of_a_domain(mixture) -> None:
    mixture.write_text(mixture.read_text() + "dry: stop\n")
    result = load_chunks(MixtureDataset(partial(DocumentChunks, mixture)), 99)
    assert [chunk.number for chunk in result] == [0, 1, 2, 3]  # 1000 Python documents last 3.9 chunks
    n_python = sum(chunk.domains.count(2) for chunk in result)
    assert n_python == 1000
    assert sum(len(chunk.documents) for chunk in result) in (2000, 2001)  # half are Python


def test_a_server_killed_and_restarted_returns_the_same_chunks(mixture, start) -> None:
    local = DocumentChunks(mixture, seed=3)
    server, location = start(mixture, "--port", 0, "--seed", 3)
    remote = RemoteChunks(Connection(location, patience_s=60), "code")
    assert remote.read(0, 3).equals(local.read(0, 3))
    server.send_signal(signal.SIGKILL)
    server.wait(timeout=240)
    with pytest.raises(ConnectionError, match="no answer"):
        RemoteChunks(Connection(location, patience_s=1), "code")
    start(mixture, "--port", location.rpartition(":")[2], "--seed", 3)
    assert remote.read(3, 3).equals(local.read(3, 3))
    assert remote.connection.request("status")["chunks"] == 3


def test_clients_without_the_token_are_refused(mixture, start, tmp_path) -> None:
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "token").chmod(0o600)
    _, location = start(mixture, "--port", 0, "--token-file", tmp_path / "token")
    for token in (None, "wrong", ""):
        with pytest.raises(ValueError, match="refused the token"):
            Connection(location, token, patience_s=60).request("status")
    assert Connection(location, "secret").request("status")["mixtures"] == ["code"]


def test_tls_requires_a_client_that_trusts_the_certificate(mixture, start, tmp_path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate,
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True, timeout=240,
    )  # fmt: skip
    _, location = start(mixture, "--port", 0, "--tls-cert", certificate, "--tls-key", key)
    location = location.replace("+tcp", "+tls")
    roots = certificate.read_bytes()
    assert len(RemoteChunks(Connection(location, tls_roots=roots), "code").read(0, 1)) == SIZE
    with pytest.raises(ConnectionError, match="certificate is not trusted .self-signed certificate.. Pass"):
        Connection(location, patience_s=60).request("status")
    with pytest.raises(ConnectionError, match="no answer"):  # without TLS
        Connection(location.replace("+tls", "+tcp"), patience_s=1).request("status")


def test_a_closed_connection_reconnects_and_closed_documents_cannot_be_read(mixture, start) -> None:
    _, location = start(mixture, "--port", 0)
    with Connection(location) as connection:
        remote = RemoteChunks(connection, "code")
        first = remote.read(0, 1)
        connection.close()
        assert remote.read(0, 1).equals(first)
    with DocumentChunks(mixture) as local:
        assert local.read(0, 1).equals(first)
    with pytest.raises(ValueError, match="were closed"):
        local.read(0, 1)


def test_invalid_requests_are_refused_and_the_server_continues(mixture, start) -> None:
    _, location = start(mixture, "--port", 0)
    good = RemoteChunks(Connection(location), "code")
    client = pyarrow.flight.connect(location)
    rng = np.random.default_rng(0)
    ticket = {"mixture": "code", "identity": good.identity, "first": 0, "n": 1}
    wrong = [rng.bytes(int(n)) for n in rng.integers(0, 300, 60)]
    wrong += [json.dumps(request).encode() for request in (
        [], {}, {**ticket, "n": 10**9}, {**ticket, "first": -1}, {**ticket, "n": True}, {**ticket, "n": "1"},
        {**ticket, "mixture": "../code"}, {**ticket, "mixture": ["code"]}, {**ticket, "identity": "x"},
        {**ticket, "path": "/etc/passwd"},
    )] + [b"[" * 10_000]  # fmt: skip
    for content in wrong:
        with pytest.raises(pyarrow.flight.FlightServerError, match="refused"):
            client.do_get(pyarrow.flight.Ticket(content)).read_all()
    with pytest.raises(pyarrow.flight.FlightServerError, match="refused"):
        list(client.do_action("stop"))
    assert len(good.read(0, 1)) == SIZE
    with pytest.raises(ValueError, match=r"^host:1: expected grpc\+tcp://HOST:PORT, or grpc\+tls"):
        Connection("host:1")
    with pytest.raises(ValueError, match="got mixture 'cod', expected one of code"):
        RemoteChunks(Connection(location), "cod")


def test_sixty_four_concurrent_clients_get_the_same_chunks(mixture, start) -> None:
    local = DocumentChunks(mixture)
    expected = [local.read(i, 1) for i in range(8)]
    _, location = start(mixture, "--port", 0, script=LATE)

    def client(number: int) -> bool:
        remote, rng, same = connect_remote(location), np.random.default_rng(number), True
        for i in rng.permutation(8).tolist():
            time.sleep(float(rng.uniform(0, 0.05)))
            same = same and remote.read(i, 1).equals(expected[i])
        return same

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(client, range(64)))
    assert Connection(location).request("status")["documents"] == 64 * 8 * SIZE


def test_a_non_local_address_requires_a_token_and_tls(mixture) -> None:
    def begin(token: str | None, allow_plain: bool = False) -> None:
        where = ListenOptions(host="0.0.0.0", token=token, allow_plain=allow_plain)
        serve([mixture], where, 0, (), on_ready=lambda port, metrics: None)

    with pytest.raises(ValueError, match="Add --token-file"):
        begin(None, allow_plain=True)
    with pytest.raises(ValueError, match="Add --tls-cert"):
        begin("0123456789abcdef")


def test_a_request_is_checked_before_anything_is_read(mixture) -> None:
    source = DocumentChunks(mixture)
    request = {"mixture": "code", "identity": source.identity, "first": 5, "n": 2}
    assert parse_request(json.dumps(request).encode(), {"code": source}) == request


def test_groups_and_servers_with_any_timing_return_the_same_bytes(mixture, start) -> None:
    """1, 2 and 4 groups with random delays, and a server with random delays."""
    local = DocumentChunks(mixture)
    expected = [local.read(i, 1) for i in range(8)]
    _, location = start(mixture, "--port", 0, script=LATE)

    def group(words: tuple[int, int]) -> list[Chunk]:
        rng, result = np.random.default_rng(words), []
        for chunk in islice(MixtureDataset(partial(connect_remote, location), *words), 8 // words[1]):
            time.sleep(float(rng.uniform(0, 0.05)))
            result.append(chunk)
        return result

    for n_groups in (1, 2, 4):
        with ThreadPoolExecutor(n_groups) as pool:
            parts = [*pool.map(group, [(k, n_groups) for k in range(n_groups)])]
        for number, table in enumerate(expected):
            chunk = parts[number % n_groups][number // n_groups]
            assert chunk.number == number
            assert chunk.documents == table.column("text").to_pylist()
            assert chunk.domains == table.column("domain").to_pylist()


def connect_remote(location: str) -> RemoteChunks:
    return RemoteChunks(Connection(location, patience_s=120), "code")


def test_a_killed_client_resumes_after_its_last_checkpoint(mixture, start, tmp_path) -> None:
    _, location = start(mixture, "--port", 0)
    saved = tmp_path / "state.json"
    code = (
        "import json, sys, time\n"
        "from pathlib import Path\n"
        "from megatron.mixture.serve.client import MixtureDataset\n"
        "from megatron.mixture.serve.remote import Connection, RemoteChunks\n"
        "source, saved = RemoteChunks(Connection(sys.argv[1]), 'code'), Path(sys.argv[2])\n"
        "dataset = MixtureDataset(lambda: source)\n"
        "if saved.is_file(): dataset.load_state_dict(json.loads(saved.read_text()))\n"
        "for chunk in dataset:\n"
        "    print(chunk.number, hash_of(chunk), flush=True)\n"
        "    saved.with_suffix('.new').write_text(json.dumps(dataset.state_dict(chunk)))\n"
        "    saved.with_suffix('.new').rename(saved)\n"
        "    time.sleep(0.05)\n"
    ).replace("hash_of(chunk)", "hashlib.sha256(''.join(chunk.documents).encode()).hexdigest()")
    code = code.replace("import json,", "import hashlib, json,")
    lines: list[str] = []
    for _ in range(2):
        command = [sys.executable, "-c", code, location, str(saved)]
        client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
        assert client.stdout is not None
        lines += [client.stdout.readline() for _ in range(3)]
        client.kill()
        lines += client.stdout.readlines()
        client.wait(timeout=240)
    local, digests = DocumentChunks(mixture), dict(line.split() for line in lines if line.count(" ") == 1)
    numbers = [int(line.split()[0]) for line in lines]
    assert sorted(set(numbers)) == [*range(max(numbers) + 1)]  # no chunk is skipped
    for number, digest in digests.items():
        text = "".join(local.read(int(number), 1).column("text").to_pylist())
        assert hashlib.sha256(text.encode()).hexdigest() == digest
    assert Connection(location).request("status")["errors"] == 0


def test_a_client_that_reads_slowly_does_not_delay_others(mixture, start) -> None:
    _, location = start(mixture, "--port", 0)
    quick = connect_remote(location)
    request = {"mixture": "code", "identity": quick.identity, "first": 0, "n": 200}
    client = pyarrow.flight.connect(location)
    stuck = [client.do_get(pyarrow.flight.Ticket(json.dumps(request).encode())) for _ in range(8)]
    begun = [reader.read_chunk().data.num_rows for reader in stuck]  # the rest stays unread for now
    assert all(begun)
    assert quick.read(0, 8).equals(DocumentChunks(mixture).read(0, 8))
    rest = stuck[0].read_all()
    assert len(rest) + begun[0] == 200 * SIZE


def test_only_files_below_the_roots_and_no_links_are_read(mixture, tmp_path) -> None:
    assert len(DocumentChunks(mixture, roots=[tmp_path]).read(0, 1)) == SIZE
    with pytest.raises(ValueError, match="is in none of .*elsewhere. Add its folder as a --root"):
        DocumentChunks(mixture, roots=[tmp_path / "elsewhere"])
    status = (tmp_path / "a.jsonl").stat()
    secret = tmp_path.parent / f"{tmp_path.name}-secret"
    (tmp_path / "a.jsonl").rename(secret)
    (tmp_path / "a.jsonl").symlink_to(secret)
    os.utime(secret, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ValueError, match="got a link to"):
        DocumentChunks(mixture)


def test_prometheus_metrics_count_the_requests(mixture, start) -> None:
    process, location = start(mixture, "--port", 0, "--metrics-port", 0)
    (line,) = process.metrics_lines
    address = line.removeprefix("metrics on ").strip()
    remote = connect_remote(location)
    remote.read(0, 3)
    remote.read(3, 1)
    with pytest.raises(ValueError, match="refused"):
        remote.connection.request("stop")
    with urllib.request.urlopen(address, timeout=240) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values["mixture_requests_total"] == "2.0"
    assert values["mixture_chunks_total"] == "4.0"
    assert values["mixture_documents_total"] == str(4.0 * SIZE)
    assert values['mixture_errors_total{kind="refused"}'] == "1.0"
    assert values["mixture_request_seconds_count"] == "2.0"
    assert values['mixture_request_seconds_bucket{le="+Inf"}'] == "2.0"
    assert values['mixture_catalog_documents{domain="Go",mixture="code"}'] == "1000.0"
    assert float(values['mixture_weight{domain="Python",mixture="code",run=""}']) == pytest.approx(0.5)
    assert values["mixture_clients"] == "1.0"
    assert float(values["mixture_documents_per_second"]) > 0
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(address.replace("/metrics", "/etc/passwd"), timeout=240)
    tool = Path(__file__).parents[2] / "tools" / "mixture_server.py"
    command = [sys.executable, str(tool), "--status", location, "--prometheus"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert "mixture_chunks_total 4.0\n" in done.stdout


def test_a_server_stopped_by_sigint_prints_nothing(mixture, start, capfd) -> None:
    process, location = start(mixture, "--port", 0, "--metrics-port", 0)
    assert len(connect_remote(location).read(0, 1)) == SIZE
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=240) == 0
    assert capfd.readouterr().err == ""
