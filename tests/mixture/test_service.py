"""Documents in chunks, here and from a server: killed, restarted, asked nonsense, asked by many."""

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
from megatron.mixture.catalog import Catalog
from megatron.mixture.client import Chunk, MixtureDataset
from megatron.mixture.documents import DocumentChunks
from megatron.mixture.remote import Connection, RemoteChunks
from megatron.mixture.service import Listening, read_request, serve

SIZE = 512  # documents of a chunk
LATE = Path(__file__).with_name("server_with_random_waits.py")


def number_of(text: str) -> int:
    return int(text.removeprefix("document "))


def test_a_chunk_holds_documents_of_its_domains_in_proportion(mixture) -> None:
    source = DocumentChunks(mixture)
    assert source.names == ("C", "Go", "Python")
    table = source.read(0, 12)
    assert len(table) == 12 * SIZE
    domains, numbers = (
        table.column("domain").to_pylist(),
        [number_of(t) for t in table.column("text").to_pylist()],
    )
    assert all(number % 3 == domain for number, domain in zip(numbers, domains, strict=True))
    assert Counter(domains) == {2: 6 * SIZE, 1: 4 * SIZE, 0: 2 * SIZE}
    of_c = [number for number, domain in zip(numbers, domains, strict=True) if domain == 0]
    assert sorted(of_c[:1000]) == list(range(0, 3000, 3))  # an epoch has each once
    assert of_c[:1000] != sorted(of_c[:1000])


def test_a_port_that_another_has_is_told_in_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for where in (Listening(port=port), Listening(port=0, metrics_port=port)):
            with pytest.raises(
                ValueError, match=f"^127.0.0.1:{port}: cannot be listened on .Address already in use."
            ):
                where.check_free()
    Listening(port=port).check_free()


def test_parts_read_alone_are_those_of_the_whole(mixture) -> None:
    whole = DocumentChunks(mixture).read(0, 9)
    for first in (4, 0, 7):
        assert DocumentChunks(mixture).read(first, 2).equals(whole.slice(first * SIZE, 2 * SIZE))


def test_pairs_come_as_ids_and_parquet_as_text(tmp_path) -> None:
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


def chunks(dataset: MixtureDataset, n: int, **loader: object) -> list[Chunk]:
    found = []
    for chunk in DataLoader(dataset, batch_size=None, **loader):
        found.append(chunk)
        if len(found) == n:
            return found
    return found


def test_groups_and_workers_change_who_reads_but_not_what(mixture) -> None:
    opened = partial(DocumentChunks, mixture)
    one = chunks(MixtureDataset(opened), 8)
    assert [chunk.number for chunk in one] == list(range(8))
    for n_groups in (2, 4):
        for group in range(n_groups):
            assert chunks(MixtureDataset(opened, group, n_groups), 8 // n_groups) == one[group::n_groups]
    workers = {"num_workers": 2, "multiprocessing_context": "spawn"}
    assert chunks(MixtureDataset(opened), 5, **workers) == one[:5]


def test_a_state_goes_on_with_another_number_of_groups(mixture) -> None:
    opened = partial(DocumentChunks, mixture)
    one = chunks(MixtureDataset(opened), 8)
    halves = [MixtureDataset(opened, group, 2) for group in (0, 1)]
    states = [half.state_dict(chunks(half, 3)[1]) for half in halves]  # the third was only fetched
    assert states[0] == states[1]
    again = MixtureDataset(opened)
    again.load_state_dict(json.loads(json.dumps(states[0])))
    assert chunks(again, 4) == one[4:]
    again.load_state_dict({"next_chunk": 0, "identity": "another"})
    with pytest.raises(ValueError, match="have changed"):
        next(iter(again))


def test_a_mixture_that_stops_ends_with_the_last_document_of_a_domain(mixture) -> None:
    mixture.write_text(mixture.read_text() + "dry: stop\n")
    found = chunks(MixtureDataset(partial(DocumentChunks, mixture)), 99)
    assert [chunk.number for chunk in found] == [0, 1, 2, 3]  # 1000 of Python are 3.9 chunks
    n_python = sum(chunk.domains.count(2) for chunk in found)
    assert n_python == 1000
    assert sum(len(chunk.documents) for chunk in found) in (2000, 2001)  # half of them, 1001 are not there


def test_a_server_killed_and_restarted_goes_on_with_the_same_chunks(mixture, start) -> None:
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
    assert remote.connection.ask("status")["chunks"] == 3


def test_who_does_not_know_the_token_gets_nothing(mixture, start, tmp_path) -> None:
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "token").chmod(0o600)
    _, location = start(mixture, "--port", 0, "--token-file", tmp_path / "token")
    for token in (None, "wrong", ""):
        with pytest.raises(ValueError, match="refuses the token"):
            Connection(location, token, patience_s=60).ask("status")
    assert Connection(location, "secret").ask("status")["mixtures"] == ["code"]


def test_what_goes_over_tls_is_for_those_who_know_the_certificate(mixture, start, tmp_path) -> None:
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
    with pytest.raises(ConnectionError, match="certificate is not trusted .self-signed certificate.; give"):
        Connection(location, patience_s=60).ask("status")
    with pytest.raises(ConnectionError, match="no answer"):  # without TLS
        Connection(location.replace("+tls", "+tcp"), patience_s=1).ask("status")


def test_a_connection_that_was_closed_connects_again_and_closed_documents_are_read_no_more(
    mixture, start
) -> None:
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


def test_nonsense_is_refused_and_the_server_lives(mixture, start) -> None:
    _, location = start(mixture, "--port", 0)
    good = RemoteChunks(Connection(location), "code")
    client = pyarrow.flight.connect(location)
    rng = np.random.default_rng(0)
    ticket = {"mixture": "code", "identity": good.identity, "first": 0, "n": 1}
    wrong = [rng.bytes(int(n)) for n in rng.integers(0, 300, 60)]
    wrong += [json.dumps(told).encode() for told in (
        [], {}, {**ticket, "n": 10**9}, {**ticket, "first": -1}, {**ticket, "n": True}, {**ticket, "n": "1"},
        {**ticket, "mixture": "../code"}, {**ticket, "mixture": ["code"]}, {**ticket, "identity": "x"},
        {**ticket, "path": "/etc/passwd"},
    )] + [b"[" * 10_000]  # fmt: skip
    for one in wrong:
        with pytest.raises(pyarrow.flight.FlightServerError, match="refused"):
            client.do_get(pyarrow.flight.Ticket(one)).read_all()
    with pytest.raises(pyarrow.flight.FlightServerError, match="refused"):
        list(client.do_action("stop"))
    assert len(good.read(0, 1)) == SIZE
    with pytest.raises(ValueError, match=r"^host:1: wanted grpc\+tcp://HOST:PORT, or grpc\+tls"):
        Connection("host:1")
    with pytest.raises(ValueError, match="has no mixture 'cod', only code"):
        RemoteChunks(Connection(location), "cod")


def test_sixty_four_clients_at_once_with_any_timing_get_what_one_would(mixture, start) -> None:
    local = DocumentChunks(mixture)
    expected = [local.read(i, 1) for i in range(8)]
    _, location = start(mixture, "--port", 0, script=LATE)

    def client(number: int) -> bool:
        remote, rng, same = remote_of(location), np.random.default_rng(number), True
        for i in rng.permutation(8).tolist():
            time.sleep(float(rng.uniform(0, 0.05)))
            same = same and remote.read(i, 1).equals(expected[i])
        return same

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(client, range(64)))
    assert Connection(location).ask("status")["documents"] == 64 * 8 * SIZE


def test_beyond_this_machine_a_token_and_tls_are_wanted(mixture) -> None:
    def begin(token: str | None, allow_plain: bool = False) -> None:
        where = Listening(host="0.0.0.0", token=token, allow_plain=allow_plain)
        serve([mixture], where, 0, (), ready=lambda port, metrics: None)

    with pytest.raises(ValueError, match="give --token-file"):
        begin(None, allow_plain=True)
    with pytest.raises(ValueError, match="give --tls-cert"):
        begin("0123456789abcdef")


def test_a_request_is_checked_before_anything_is_read(mixture) -> None:
    source = DocumentChunks(mixture)
    asked = {"mixture": "code", "identity": source.identity, "first": 5, "n": 2}
    assert read_request(json.dumps(asked).encode(), {"code": source}) == asked


def test_groups_and_servers_with_any_timing_give_the_same_bytes(mixture, start) -> None:
    """1, 2 and 4 groups that wait at random, of a server that answers late at random."""
    local = DocumentChunks(mixture)
    expected = [local.read(i, 1) for i in range(8)]
    _, location = start(mixture, "--port", 0, script=LATE)

    def group(words: tuple[int, int]) -> list[Chunk]:
        rng, found = np.random.default_rng(words), []
        for chunk in islice(MixtureDataset(partial(remote_of, location), *words), 8 // words[1]):
            time.sleep(float(rng.uniform(0, 0.05)))
            found.append(chunk)
        return found

    for n_groups in (1, 2, 4):
        with ThreadPoolExecutor(n_groups) as pool:
            parts = [*pool.map(group, [(k, n_groups) for k in range(n_groups)])]
        for number, table in enumerate(expected):
            chunk = parts[number % n_groups][number // n_groups]
            assert chunk.number == number
            assert chunk.documents == table.column("text").to_pylist()
            assert chunk.domains == table.column("domain").to_pylist()


def remote_of(location: str) -> RemoteChunks:
    return RemoteChunks(Connection(location, patience_s=120), "code")


def test_a_client_killed_and_back_goes_on_after_its_last_checkpoint(mixture, start, tmp_path) -> None:
    _, location = start(mixture, "--port", 0)
    saved = tmp_path / "state.json"
    code = (
        "import json, sys, time\n"
        "from pathlib import Path\n"
        "from megatron.mixture.client import MixtureDataset\n"
        "from megatron.mixture.remote import Connection, RemoteChunks\n"
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
    local, told = DocumentChunks(mixture), dict(line.split() for line in lines if line.count(" ") == 1)
    numbers = [int(line.split()[0]) for line in lines]
    assert sorted(set(numbers)) == [*range(max(numbers) + 1)]  # none is left out
    for number, digest in told.items():
        text = "".join(local.read(int(number), 1).column("text").to_pylist())
        assert hashlib.sha256(text.encode()).hexdigest() == digest
    assert Connection(location).ask("status")["errors"] == 0


def test_a_client_that_reads_slowly_keeps_nobody_waiting(mixture, start) -> None:
    _, location = start(mixture, "--port", 0)
    quick = remote_of(location)
    asked = {"mixture": "code", "identity": quick.identity, "first": 0, "n": 200}
    client = pyarrow.flight.connect(location)
    stuck = [client.do_get(pyarrow.flight.Ticket(json.dumps(asked).encode())) for _ in range(8)]
    begun = [reader.read_chunk().data.num_rows for reader in stuck]  # and then they look elsewhere
    assert all(begun)
    assert quick.read(0, 8).equals(DocumentChunks(mixture).read(0, 8))
    rest = stuck[0].read_all()
    assert len(rest) + begun[0] == 200 * SIZE


def test_only_files_below_the_roots_and_no_links_are_read(mixture, tmp_path) -> None:
    assert len(DocumentChunks(mixture, roots=[tmp_path]).read(0, 1)) == SIZE
    with pytest.raises(ValueError, match="lies in none of .*elsewhere; add its folder as a --root"):
        DocumentChunks(mixture, roots=[tmp_path / "elsewhere"])
    told = (tmp_path / "a.jsonl").stat()
    secret = tmp_path.parent / f"{tmp_path.name}-secret"
    (tmp_path / "a.jsonl").rename(secret)
    (tmp_path / "a.jsonl").symlink_to(secret)
    os.utime(secret, ns=(told.st_atime_ns, told.st_mtime_ns))
    with pytest.raises(ValueError, match="is a link to"):
        DocumentChunks(mixture)


def test_prometheus_reads_what_the_server_did(mixture, start) -> None:
    process, location = start(mixture, "--port", 0, "--metrics-port", 0)
    (line,) = process.told
    address = line.removeprefix("metrics on ").strip()
    remote = remote_of(location)
    remote.read(0, 3)
    remote.read(3, 1)
    with pytest.raises(ValueError, match="refused"):
        remote.connection.ask("stop")
    with urllib.request.urlopen(address, timeout=240) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values["mixture_requests_total"] == "2"
    assert values["mixture_chunks_total"] == "4"
    assert values["mixture_documents_total"] == str(4 * SIZE)
    assert values['mixture_errors_total{kind="refused"}'] == "1"
    assert values["mixture_request_seconds_count"] == "2"
    assert values['mixture_request_seconds_bucket{le="+Inf"}'] == "2"
    assert values['mixture_catalog_documents{mixture="code",domain="Go"}'] == "1000"
    assert float(values['mixture_weight{mixture="code",run="",domain="Python"}']) == pytest.approx(0.5)
    assert values["mixture_clients"] == "1"
    assert float(values["mixture_documents_per_second"]) > 0
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(address.replace("/metrics", "/etc/passwd"), timeout=240)
    tool = Path(__file__).parents[2] / "tools" / "mixture_server.py"
    command = [sys.executable, str(tool), "--status", location, "--prometheus"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert "mixture_chunks_total 4\n" in done.stdout


def test_a_server_that_is_told_to_stop_ends_in_silence(mixture, start, capfd) -> None:
    process, location = start(mixture, "--port", 0, "--metrics-port", 0)
    assert len(remote_of(location).read(0, 1)) == SIZE
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=240) == 0
    assert capfd.readouterr().err == ""
