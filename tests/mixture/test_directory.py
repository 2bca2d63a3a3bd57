"""A server of a folder: clients register, query and mix at run time, and cannot leave the folder."""

import json
import os
import stat
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from megatron.mixture.catalog import registration
from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.expression import field
from megatron.mixture.catalog.properties import read_properties
from megatron.mixture.catalog.query import Query
from megatron.mixture.document_chunks import DocumentChunks
from megatron.mixture.serve import directory as served
from megatron.mixture.serve.access import read_token
from megatron.mixture.serve.catalog_protocol import format_condition, name_mixture, read_registration
from megatron.mixture.serve.directory import ServedDirectory, make_token_file
from megatron.mixture.serve.jobs import BusyError, JobQueue, RateLimiter
from megatron.mixture.serve.mixture_client import MixtureClient
from tests.mixture.conftest import LANGUAGES, PROPERTIES, write_lines

SPEC = {"by": ["language"], "weights": {"Python": 3, "Go": 2, "C": 1}, "count": "documents"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with 3,000 documents in two files, to be served."""
    path = tmp_path / "served"
    path.mkdir()
    write_lines(path / "a.jsonl", 1500)
    write_lines(path / "b.jsonl", 1500, first=1500)
    return path


def connect(location: str, folder: Path) -> MixtureClient:
    return MixtureClient(location, read_token(folder / "token"), patience_s=30)


def test_a_client_registers_queries_and_mixes_over_the_wire(folder, start) -> None:
    _, location = start(folder, "--port", 0)
    with connect(location, folder) as client:
        assert client.list_corpora() == []
        done = client.register("code", ["a.jsonl", "b.jsonl"], PROPERTIES)
        assert (done.n_files, done.n_documents, done.absent) == (2, 3000, ())
        assert client.register("code", ["*.jsonl"], PROPERTIES).n_known == 2
        assert [corpus.n_documents for corpus in client.list_corpora()] == [3000]
        assert client.describe_corpus("code")["language"][0] == ("C", 1000, None)
        assert client.list_broken("code") == []
        condition = field("language").isin(["C", "Go"]) & (field("stars") < 30)
        assert client.count(condition, by=["language"]) == {("C",): (10, None), ("Go",): (10, None)}
        assert client.count("stars >= 2999") == {(): (1, None)}
        rows = list(client.find_documents("stars BETWEEN 1499 AND 1501", by=["language"]))
        assert rows == [
            ("C", str(folder / "b.jsonl"), 0), ("Go", str(folder / "b.jsonl"), 1),
            ("Python", str(folder / "a.jsonl"), 1499),
        ]  # fmt: skip
        name = client.create_mixture(SPEC)
        assert name == name_mixture(SPEC) == client.create_mixture(dict(reversed(SPEC.items())))
        assert client.create_mixture({**SPEC, "where": [field("stars") < 30]}, "few") == "few"
        assert client.list_mixtures() == sorted(["few", name])
        chunks = list(islice(client.open_dataset(name), 3))
    assert Counter(domain for chunk in chunks for domain in chunk.domains) == {2: 768, 1: 512, 0: 256}
    # the same documents as without a server
    (folder / "mixtures" / "plain.yaml").write_text(json.dumps({**SPEC, "catalog": "../other"}))
    with Catalog(folder / "other", n_threads=1) as catalog:
        files = [str(folder / "a.jsonl"), str(folder / "b.jsonl")]
        catalog.register("code", files, read_properties(PROPERTIES), quiet=True)
    with DocumentChunks(folder / "mixtures" / "plain.yaml") as source:
        assert chunks[2].documents == source.read(2, 1).column("text").to_pylist()


def test_a_mixture_keeps_its_documents_over_registrations_and_restarts(folder, start) -> None:
    process, location = start(folder, "--port", 0)
    port = location.rpartition(":")[2]
    with connect(location, folder) as client:
        client.register("code", ["a.jsonl"], PROPERTIES)
        name = client.create_mixture(SPEC)
        dataset = client.open_dataset(name)
        first = list(islice(iter(dataset), 4))
        client.register("code", ["b.jsonl"], PROPERTIES)
        process.kill()
        process.wait()
        start(folder, "--port", port)
        # the client reconnects; its mixture has the documents of its creation, and a new one has them all
        again = list(islice(iter(client.open_dataset(name)), 4))
        assert [chunk.documents for chunk in again] == [chunk.documents for chunk in first]
        assert client.create_mixture(SPEC) == name
        assert client.count() == {(): (3000, None)}
        client.create_mixture({**SPEC, "dry": "stop"}, "all")
        names = client.open_chunks("all")
        assert names.identity != first[0].identity
        names.connection.close()
        client.remove_corpus("code")
        assert client.list_corpora() == []
        assert next(iter(client.open_dataset(name))).documents == first[0].documents
        with pytest.raises(ValueError, match="got 'all', which another mixture has"):
            client.create_mixture(SPEC, "all")
        client.remove_mixture("all")
        assert client.list_mixtures() == [name]
        with pytest.raises(ValueError, match="got mixture 'all', expected one of"):
            client.open_dataset("all")


@pytest.mark.slow  # two processes import torch
def test_workers_of_a_dataloader_connect_and_read_in_order(folder, start) -> None:
    _, location = start(folder, "--port", 0)
    with connect(location, folder) as client:
        client.register("code", ["a.jsonl"], PROPERTIES)
        dataset = client.open_dataset(client.create_mixture({**SPEC, "dry": "stop"}))
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    assert [chunk.number for chunk in loader] == [0, 1]


def test_the_token_is_created_for_this_user_alone_and_required(folder, start) -> None:
    _, location = start(folder, "--port", 0)
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
    for token in (None, "0" * 32):
        with (
            MixtureClient(location, token, patience_s=5) as client,
            pytest.raises(ValueError, match="refused the token"),
        ):
            client.list_corpora()
    before = read_token(folder / "token")
    assert read_token(make_token_file(folder)) == before


def test_hostile_requests_are_refused_in_one_sentence(folder, start, tmp_path) -> None:
    (tmp_path / "secret.jsonl").write_text('{"text": "secret"}\n')
    (folder / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (folder / "code.yaml").write_text("a: 1")
    _, location = start(folder, "--port", 0)
    with connect(location, folder) as client:
        client.register("code", ["a.jsonl"], PROPERTIES)
        for inputs in (["../secret.jsonl"], ["/etc/passwd"], ["link.jsonl"], [f"{tmp_path}/*"], ["a\0b"]):
            with pytest.raises(ValueError, match=r"refused: .*(in none of|zero byte)"):
                client.register("other", inputs)
        for properties, why in (
            (["read_text('/etc/passwd') AS x"], "expected a path"),
            (["(SELECT 1) AS x integer"], "expected a path"),
            (["meta.language AS corpus"], "reserved"),
        ):
            with pytest.raises(ValueError, match=why):
                client.register("other", ["a.jsonl"], properties)
        with pytest.raises(ValueError, match="tokenizer: .*|in none of"):
            client.register("other", ["a.jsonl"], tokenizer="/etc")
        with pytest.raises(ValueError, match="corpus: expected a name"):
            client.register("../x", ["a.jsonl"])
        for where in (
            "true; DROP TABLE files", "stars IN (SELECT 1)", "getenv('HOME') = ''", "1 = 1) UNION (SELECT 1",
            "NOT " * 400 + "true", "no_such = 1",
        ):  # fmt: skip
            with pytest.raises(ValueError, match="refused: where"):
                client.count(where)
        with pytest.raises(ValueError, match="no property 'nothing'"):
            client.count(by=["nothing"])
        for spec, why in (
            ({"catalog": "/etc/passwd"}, "the server has one catalog"),
            ({**SPEC, "adaptive": {"rule": "os:system"}}, "expected ado or loss"),
            ({**SPEC, "tokenizer": "gpt2"}, "whole documents"),
            ({**SPEC, "where": "corpus = '${oc.env:HOME}'"}, "reference"),
            ({**SPEC, "wheights": 1}, "wheights"),
            ({**SPEC, "weights": {"Rust": 1}}, "no document has language=Rust"),
            ({"by": ["stars"] * 2}, "twice"),
        ):
            with pytest.raises(ValueError, match=why):
                client.create_mixture(spec)
        for name in ("../x", ".hidden", "a/b", "x" * 65):
            with pytest.raises(ValueError, match="expected a name"):
                client.create_mixture(SPEC, name)
        with pytest.raises(ValueError, match="expected a JSON object of at most"):
            client.connection.request("query", {"documents": {"where": ["x" * (1 << 17)]}})
        with pytest.raises(ValueError, match="expected corpus"):
            client.connection.request("describe_corpus", {"corpora": 1})
        assert client.list_mixtures() == []
        assert [corpus.name for corpus in client.list_corpora()] == ["code"]
        assert not list((folder / "mixtures").glob("*.yaml"))


def test_queries_and_chunks_are_answered_during_a_registration(folder, tmp_path, monkeypatch) -> None:
    directory = ServedDirectory(folder, 0, [])
    finish(directory, "register", {"corpus": "a", "inputs": ["a.jsonl"]})
    gate, entered = threading.Event(), threading.Event()
    plain = registration._write_documents

    def wait_inside(targets):
        entered.set()
        assert gate.wait(60)
        return plain(targets)

    monkeypatch.setattr(registration, "_write_documents", wait_inside)
    job = directory.handle("register", json.dumps({"corpus": "b", "inputs": ["b.jsonl"]}).encode())
    assert entered.wait(60)
    begin = time.monotonic()
    reply = directory.handle("query", json.dumps({"documents": {"where": "size > 0"}}).encode())
    assert reply["documents"] == [1500]
    created = directory.handle("create_mixture", json.dumps({"spec": {"count": "documents"}}).encode())
    while directory.handle("job", json.dumps({"job": created["job"]}).encode())["state"] == "running":
        time.sleep(0.01)
    assert len(directory.mixtures[created["mixture"]].read(0, 1)) == 512
    assert time.monotonic() - begin < 30
    assert directory.handle("job", json.dumps(job).encode()) == {"state": "running"}
    gate.set()
    while directory.handle("job", json.dumps(job).encode())["state"] == "running":
        time.sleep(0.01)
    reply = directory.handle("query", b"{}")
    assert reply["documents"] == [3000]
    directory.close()


def test_clients_create_and_query_at_once(folder, start) -> None:
    _, location = start(folder, "--port", 0)
    with connect(location, folder) as client:
        client.register("code", ["*.jsonl"], PROPERTIES)

    def work(i: int) -> tuple[str, dict, int]:
        with connect(location, folder) as client:
            name = client.create_mixture({**SPEC, "where": f"stars < {300 + 300 * (i % 3)}"})
            chunk = next(iter(client.open_dataset(name)))
            return name, client.count(by=["language"]), len(chunk.documents)

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(work, range(12)))
    assert len({name for name, _, _ in results}) == 3
    assert all(counts == {(name,): (1000, None) for name in LANGUAGES} for _, counts, _ in results)


def test_work_is_limited(folder, monkeypatch) -> None:
    clock = iter([0.0, 0.0, 0.0, 0.0, 0.5, 0.5]).__next__
    limit = RateLimiter(2.0, 2, clock)
    limit.take()
    limit.take()
    with pytest.raises(BusyError, match="more than 2 requests"):
        limit.take()
    limit.take()  # half a second later there is one more
    jobs, gate = JobQueue("test"), threading.Event()
    for i in range(32):
        jobs.start(str(i), lambda: {"waited": gate.wait(60)})
    jobs.start("0", dict)  # runs already
    with pytest.raises(BusyError, match="32 jobs are waiting"):
        jobs.start("32", dict)
    gate.set()
    jobs.close()
    assert jobs.get("0", ()) == {"state": "done", "result": {"waited": True}}
    assert jobs.get("40", ()) is None
    monkeypatch.setattr(served, "MAX_MIXTURES", 1)
    monkeypatch.setattr(served, "MAX_DOMAINS", 2)
    directory = ServedDirectory(folder, 0, [])
    finish(directory, "register", {"corpus": "a", "inputs": ["a.jsonl"], "properties": list(PROPERTIES)})
    with pytest.raises(ValueError, match="got 3 domains, expected at most 2"):
        directory.handle("query", json.dumps({"documents": {"by": ["language"]}}).encode())
    assert "got 3 domains" in finish(directory, "create_mixture", {"spec": SPEC})["error"]
    assert finish(directory, "create_mixture", {"spec": {"count": "documents"}})["state"] == "done"
    second = {"spec": {"count": "documents", "dry": "stop"}}
    assert "1 mixtures exist" in finish(directory, "create_mixture", second)["error"]
    directory.close()


def finish(directory: ServedDirectory, action: str, request: dict) -> dict:
    """Start a job and return its end."""
    job = json.dumps({"job": directory.handle(action, json.dumps(request).encode())["job"]}).encode()
    while (state := directory.handle("job", job))["state"] == "running":
        time.sleep(0.01)
    return state


def test_a_mixture_that_cannot_be_opened_does_not_stop_the_others(folder) -> None:
    directory = ServedDirectory(folder, 0, [])
    finish(directory, "register", {"corpus": "a", "inputs": ["a.jsonl"], "properties": list(PROPERTIES)})
    finish(directory, "create_mixture", {"spec": SPEC, "name": "good"})
    directory.close()
    (folder / "mixtures" / "bad.yaml").write_text("catalog: /etc/passwd\n")
    again = ServedDirectory(folder, 0, [])
    assert sorted(again.mixtures) == ["good"]
    assert "expected ../catalog" in again.handle("mixtures", b"")["failures"]["bad"]
    os.truncate(folder / "a.jsonl", 10)
    again.close()
    last = ServedDirectory(folder, 0, [])
    assert sorted(last.failures) == ["bad", "good"]
    last.close()


def test_a_condition_of_python_selects_what_its_sql_selects(catalog) -> None:
    conditions = [
        field("language").isin(["C", "it's"]), (field("stars") >= 10) & ~field("language").is_null(),
        field("stars").between(3, 20) | (field("language") != "Go"), field("language").contains("y"),
    ]  # fmt: skip
    with Catalog(catalog, read_only=True) as opened:
        for condition in conditions:
            expected = Query().where(condition).run(opened).compute_identity()
            assert Query().where(format_condition(condition)).run(opened).compute_identity() == expected


def test_files_of_a_registration_are_resolved_below_the_roots(folder) -> None:
    body = json.dumps({"corpus": "a", "inputs": ["."], "preset": "pile"}).encode()
    request = read_registration(body, folder, [folder])
    assert request.files == (str(folder / "a.jsonl"), str(folder / "b.jsonl"))
    assert [prop.name for prop in request.properties] == ["source"]
