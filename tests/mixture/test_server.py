"""The server: everything a client asks for, refusals in a sentence, kills, TLS and full requests."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from megatron.mixture.client import MixtureClient, check_private, make_token_file, read_token
from megatron.mixture.documents import DocumentChunks
from megatron.mixture.server import ServedFolder, make_server
from tests.mixture.conftest import PROPERTIES, Start, write_lines
from tests.tool_modules import Cli

TOKEN = "0123456789abcdef"
SPEC = {"by": ["language"], "weights": {"Python": 3, "Go": 1}, "count": "documents", "chunk_size": 16}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[ServedFolder, str]]:
    """Serve a new folder in this process; return it and its location."""
    folder = tmp_path / "served"
    folder.mkdir()
    write_lines(folder / "a.jsonl", 300)
    opened = ServedFolder(folder, roots=[tmp_path / "more"])
    server = make_server(opened, TOKEN)
    yield opened, f"grpc+tcp://127.0.0.1:{server.port}"
    server.shutdown()
    opened.close()


@pytest.fixture
def client(served: tuple[ServedFolder, str]) -> Iterator[MixtureClient]:
    """A client of the server, on which the corpus `code` of 300 documents is registered."""
    with MixtureClient(served[1], TOKEN, patience_s=60) as client:
        assert client.register("code", ["a.jsonl"], PROPERTIES).n_documents == 300
        yield client


def test_a_client_registers_queries_adds_a_property_mixes_and_reads(client, served, tmp_path) -> None:
    assert client.register("code", ["*.jsonl"], PROPERTIES).n_known == 1
    assert client.count(["stars >= 150", "language <> 'C'"], ["language"]) == {
        ("Go",): (50, None), ("Python",): (50, None),
    }  # fmt: skip
    documents = list(client.find_documents("stars < 4", ["language"]))
    path = str(served[0].folder / "a.jsonl")
    assert documents == [("C", path, 0), ("C", path, 3), ("Go", path, 1), ("Python", path, 2)]
    values = {"path": [path] * 300, "row": list(range(300)), "half": ["low"] * 150 + ["high"] * 150}
    pq.write_table(pa.table(values), tmp_path / "half.parquet")
    assert client.add_property("code", "half category", tmp_path / "half.parquet") == 300
    assert client.count(by=["half"]) == {("high",): (150, None), ("low",): (150, None)}
    name = client.create_mixture(SPEC | {"where": "half = 'low'"})
    assert client.create_mixture(SPEC | {"where": "half = 'low'"}) == name
    chunks = list(islice(client.open_dataset(name), 3))
    assert {text for chunk in chunks for text in chunk.documents} <= {f"document {i}" for i in range(150)}
    with DocumentChunks(served[0].folder / f"{name}.yaml") as local:
        for i, chunk in enumerate(chunks):
            assert chunk.documents == local.read(i, 1).column("text").to_pylist()
    assert client.request("status")["mixtures"] == [name]


def test_the_ten_lines_of_the_guide_run(served, root) -> None:
    guide = (root / "examples_scaling" / "training" / "MIXTURE.md").read_text()
    lines = guide.partition("```python\n")[2].partition("```")[0]
    assert len(lines.splitlines()) == 10
    sources = ("RedPajamaC4", "RedPajamaGithub", "RedPajamaBook")
    records = [{"text": f"{i}", "meta": {"redpajama_set_name": sources[i % 3]}} for i in range(90)]
    (served[0].folder / "b.jsonl").write_text("\n".join(map(json.dumps, records)))
    lines = lines.replace("grpc+tcp://127.0.0.1:8815", served[1]).replace("/data/*", "b*")
    names = {"MixtureClient": MixtureClient, "token": TOKEN, "islice": islice,
             "DataLoader": DataLoader}  # fmt: skip
    exec(lines, names)
    numbers = [int(text) % 3 for text in names["chunk"].documents]
    assert (len(numbers), numbers.count(2)) == (512, 0)  # no books
    assert abs(numbers.count(0) / 512 - 0.7) < 0.01
    assert names["dataset"].state_dict()["next_chunk"] == 10


def test_a_mixture_keeps_the_documents_that_it_had_when_it_was_created(client, served) -> None:
    name = client.create_mixture(SPEC)
    write_lines(served[0].folder / "b.jsonl", 60)
    client.register("code", ["b.jsonl"], PROPERTIES)
    assert client.count() == {(): (360, None)}
    again = ServedFolder(served[0].folder)  # as after a restart
    assert again.open_mixture({"mixture": name}).counts.sum() == 300
    again.close()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("register", {"corpus": "x", "inputs": ["/etc/passwd"]}, "no such file|is not below"),
    ("register", {"corpus": "x", "inputs": ["../a.jsonl"]}, "is not below .* Start the server with --root"),
    ("register", {"corpus": "x", "inputs": ["a.jsonl"], "properties": ["read_text('/etc') AS p"]}, "got SQL"),
    ("create_mixture", {"spec": {"catalog": "/etc"}}, "mixture on a server: unknown key 'catalog'"),
    ("create_mixture", {"spec": {"adaptive": {"rule": "os:system"}}}, "expected ado on a server"),
    ("describe", {"mixture": "../token"}, "mixture '../token': expected one of none"),
    ("count", {"query": {"where": ["stars = (SELECT count(*) FROM read_csv('/x'))"]}}, "Permission Error"),
    ("count", {"query": {"by": ["colour"]}}, "'?\"colour\"'? not found"),
    ("nothing", {}, "action 'nothing': expected one of"),
    ("count", {"query": {"corpora": ["y"]}}, "no corpus 'y'"),
    ("report", {"mixture": "m", "chunk": -1, "nats": [], "tokens": []}, "mixture 'm'"),
]  # fmt: skip


def test_a_refused_request_is_one_sentence(client: MixtureClient, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", 3)
    for action, request, reason in REFUSED:
        with pytest.raises(ValueError, match=f"refused: .*({reason})") as caught:
            client.request(action, request)
        assert "\n" not in str(caught.value)
    assert client.count() == {(): (300, None)}  # the server answers


def test_requests_for_chunks_are_bounded_and_start_from_their_position(client: MixtureClient) -> None:
    source = client.open_chunks(client.create_mixture(SPEC))
    far = source.find_position(60_000)
    assert source.read(60_003, 2, far).equals(source.read(60_003, 2, source.find_position(60_002, far)))
    for first, n, position, reason in (
        (10**9, 1, None, r"chunk 1,000,000,000: got the nearest known position at chunk"),
        (10**9, 1, far, r"nearest known position at chunk 60,0"),
        (0, 65, None, "n: got 65 chunks, expected at most 64"),
        (-1, 1, None, "first: got -1"),
        (0, 1, {"chunk": 0, "done": [1], "lag": [0]}, "the mixture has 3"),
    ):
        with pytest.raises(ValueError, match=f"refused: .*{reason}"):
            source.read(first, n, position)
    for ticket in (b"", b"[]", b"{", b'{"first": 0}'):
        with pytest.raises(ValueError, match="refused"):
            client.call(lambda c, o, ticket=ticket: c.do_get(fl.Ticket(ticket), o).read_all())


def test_groups_of_several_clients_read_the_chunks_of_one(client) -> None:
    name = client.create_mixture(SPEC)
    alone = {chunk.number: chunk.documents for chunk in islice(client.open_dataset(name), 24)}
    with ThreadPoolExecutor(4) as pool:
        for n_groups in (2, 4):
            groups = [islice(client.open_dataset(name, i, n_groups), 24 // n_groups) for i in range(n_groups)]
            chunks = [chunk for part in pool.map(list, groups) for chunk in part]
            assert {chunk.number: chunk.documents for chunk in chunks} == alone


def test_reported_losses_change_the_weights_and_waiting_clients_get_their_chunk(client, served) -> None:
    rule = {"rule": "tests.mixture.loss_rule:LossProportional", "every_steps": 2, "delay_steps": 2}
    name = "m"  # a rule of one's own is written into the folder by hand
    spec = SPEC | {"catalog": "catalog", "adaptive": rule}
    (served[0].folder / f"{name}.yaml").write_text(json.dumps(spec))
    source = client.open_chunks(name, run="one")
    losses = np.array([0.0, 4, 40]), np.array([0.0, 4, 10])
    late = Thread(target=lambda: (time.sleep(0.5), source.report(0, *losses)))
    late.start()
    domains = []
    for i in range(6):
        # chunk 2 waits for the report of chunk 0, and chunk 4 for the one of chunk 2
        domains.append(np.bincount(source.read(i, 1).column("domain").to_numpy(), minlength=3).tolist())
        if i == 2:
            source.report(2, *losses)
    late.join()
    assert domains[0] == domains[1] == [0, 4, 12]
    assert sum(counts[1] for counts in domains[4:]) != 8
    with pytest.raises(ValueError, match="run: expected a name of letters"):
        client.open_chunks(name, run="../x")


def test_the_status_lists_mixtures_and_a_wrong_token_is_refused(cli: Cli, client, served, tmp_path) -> None:
    name = client.create_mixture(SPEC)
    with pytest.raises(ValueError, match="refused the token"), MixtureClient(served[1], "wrong") as other:
        other.request("status")
    status = {"mixtures": [name], "open": [f"('{name}', None)"]}
    assert client.request("status") == status
    (tmp_path / "t").write_text(TOKEN)
    (tmp_path / "t").chmod(0o600)
    output = cli("serve", "--status", served[1], "--token-file", tmp_path / "t").output
    assert json.loads(output) == status


@pytest.mark.slow
def test_a_kill_of_the_server_and_of_clients_changes_no_chunk(
    tmp_path: Path, start: Start, mixture: Path
) -> None:
    process, location = start(tmp_path, "--port", "0")
    token, port = read_token(tmp_path / "token"), location.rpartition(":")[2]
    script = (
        "import sys\nfrom megatron.mixture.client import MixtureClient\n"
        "for chunk in MixtureClient(*sys.argv[1:]).open_dataset('code'): print(chunk.number, flush=True)\n"
    )
    command = [sys.executable, "-c", script, location, token]
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
            assert victim.stdout is not None and victim.stdout.readline() == "0\n"
            victim.kill()
    with MixtureClient(location, token) as client:
        reading = iter(client.open_dataset("code"))
        chunks = [next(reading) for _ in range(20)]
        process.kill()
        process.wait()
        again = Thread(target=lambda: start(tmp_path, "--port", port))
        again.start()
        chunks += [next(reading) for _ in range(20)]  # waits for the server
        again.join()
    with DocumentChunks(mixture) as local:
        for i, chunk in enumerate(chunks):
            assert chunk.documents == local.read(i, 1).column("text").to_pylist()
    with pytest.raises(ConnectionError, match="no answer for 1 s .* Restart the server"):
        MixtureClient("grpc+tcp://127.0.0.1:1", token, patience_s=1).request("status")


def test_tls_is_verified_with_the_certificate(tmp_path, start: Start, mixture) -> None:
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    keys = ["-keyout", str(tmp_path / "k.pem"), "-out", str(tmp_path / "c.pem")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *keys, *subject]
    subprocess.run(command, check=True, capture_output=True)
    (tmp_path / "k.pem").chmod(0o600)
    words = ["--port", "0", "--tls-cert", tmp_path / "c.pem", "--tls-key", tmp_path / "k.pem"]
    _, location = start(tmp_path, *words)
    secure = f"grpc+tls://localhost:{location.rpartition(':')[2]}"
    token = read_token(tmp_path / "token")
    with MixtureClient(secure, token, (tmp_path / "c.pem").read_bytes()) as client:
        assert len(client.open_chunks("code").read(0, 1)) == 512
    with pytest.raises(ConnectionError, match="pass its certificate as tls_roots"):
        MixtureClient(secure, token, patience_s=1).request("status")


def test_an_open_address_without_protection_is_refused(served) -> None:
    with pytest.raises(ValueError, match="0.0.0.0: got a non-local address without TLS"):
        make_server(served[0], TOKEN, "0.0.0.0")


def test_secrets_that_others_can_read_are_refused(tmp_path) -> None:
    path = make_token_file(tmp_path)
    assert len(read_token(path)) == 32 and path.stat().st_mode & 0o777 == 0o600
    path.write_text("\n")
    with pytest.raises(ValueError, match="got 0 characters, expected a printable word of at least 16"):
        read_token(path)
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="got mode 0644, expected 0600"):
        check_private(path)
