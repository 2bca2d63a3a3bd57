"""Addresses, tokens and secret files; and what a server receives before it knows who asks."""

import json
import os
import secrets
import signal
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow.flight
import pytest

from megatron.mixture.access import (
    check_location,
    check_token,
    format_address,
    is_loopback,
    plain_host,
    read_token,
)
from megatron.mixture.front import CONTINUATION, DATA, HEADERS, PREFACE, RequestMeter, tls_context
from megatron.mixture.remote import Connection, RemoteChunks
from megatron.mixture.service import Listening

GOOD = "0123456789abcdef"


def write_token(path: Path, content: str, mode: int = 0o600) -> Path:
    path.write_text(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("content", ["", "\n", "  \t\n", "two words\n", "gr\u00fcn\n", "a\0b\n"])
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(
        ValueError, match=r"token: got .*, expected one printable word. Make one with .umask 077"
    ):
        read_token(write_token(tmp_path / "token", content))


@pytest.mark.parametrize("mode", [0o666, 0o644, 0o640, 0o604, 0o620])
def test_a_token_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(
        PermissionError, match=rf"got mode {mode:04o}, expected 0600.* Run chmod 600 .*/token"
    ):
        read_token(write_token(tmp_path / "token", GOOD, mode))
    assert read_token(write_token(tmp_path / "token", GOOD + "\n")) == GOOD


def test_a_short_token_is_for_this_machine_alone() -> None:
    check_token("short", "t", is_local=True)
    with pytest.raises(ValueError, match="got a token of 5 characters, expected at least 16"):
        check_token("short", "t", is_local=False)
    check_token(GOOD, "t", is_local=False)
    for token in ("", " ", "short"):
        with pytest.raises(ValueError, match="--token-file: got"):
            Listening(host="0.0.0.0", token=token, allow_plain=True).check()
    with pytest.raises(ValueError, match="--token-file: got no token"):
        Listening(token="").check()
    Listening(host="[::1]", token="short").check()
    Listening(host="::", token=GOOD, allow_plain=True).check()
    with pytest.raises(ValueError, match="beyond this machine; give --token-file"):
        Listening(host="::").check()


def test_the_tool_refuses_an_open_door(mixture: Path, tmp_path: Path, root: Path) -> None:
    cases = [
        (write_token(tmp_path / "empty", "\n"), "got no token"),
        (write_token(tmp_path / "open", GOOD, 0o644), "chmod 600"),
        (write_token(tmp_path / "short", "abc"), "at least 16"),
    ]
    for file, sentence in cases:
        words = [str(mixture), "--host", "0.0.0.0", "--no-tls", "--port", "0", "--token-file", str(file)]
        command = [sys.executable, str(root / "tools" / "mixture_server.py"), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 1, done.stdout
        assert sentence in done.stderr
        assert "Traceback" not in done.stderr


def test_hosts_are_written_and_read_with_ipv6() -> None:
    assert format_address("::1", 80) == format_address("[::1]", 80) == "[::1]:80"
    assert format_address("node-1.example.org", 80) == "node-1.example.org:80"
    assert (plain_host("[::1]"), plain_host("::1"), plain_host("host")) == ("::1", "::1", "host")
    assert is_loopback("::1")
    assert not is_loopback("::")
    for good in ("grpc+tcp://[::1]:8815", "grpc+tls://node-1.example.org:1", "grpc+tcp://127.0.0.1:65535"):
        check_location(good)
    wrong = ("grpc+tcp://::1:8815", "grpc+tcp://[::1]", "grpc+tcp://host", "grpc+tcp://host:0", "host:1",
             "grpc+tcp://host:70000", "grpc+tcp://[::1:8815", "grpc+tcp://a b:1", "grpc+tcp://u@h:1",
             "grpc+tcp://[1::2::3]:5", "grpc+udp://host:1", "")  # fmt: skip
    for one in wrong:
        with pytest.raises(ValueError, match="^" + one.replace("+", r"\+").replace("[", r"\[").split("]")[0]):
            check_location(one)


@pytest.mark.parametrize("host", ["::1", "[::1]", "localhost"])
def test_a_server_on_ipv6_and_on_a_name_is_reached(mixture: Path, start, host: str) -> None:
    _, location = start(mixture, "--host", host, "--port", 0)
    assert location.startswith("grpc+tcp://localhost:" if host == "localhost" else "grpc+tcp://[::1]:")
    assert len(RemoteChunks(Connection(location, patience_s=60), "code").read(0, 1)) == 512


def frame(kind: int, stream: int, n: int, flags: int = 0) -> bytes:
    return n.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + b"x" * n


def test_requests_are_counted_frame_by_frame_however_they_are_cut() -> None:
    request = frame(HEADERS, 1, 200) + frame(DATA, 1, 300, flags=1)
    stream = (
        PREFACE
        + frame(4, 0, 36)
        + b"".join(request.replace(b"\0\0\0\1", n.to_bytes(4, "big")) for n in range(1, 99, 2))
    )
    for step in (1, 7, 1000, len(stream)):
        meter = RequestMeter(600)
        for at in range(0, len(stream), step):
            meter.feed(stream[at : at + step])
        assert meter.has_begun
    for wrong in (
        b"GET / HTTP/1.1\r\n", PREFACE + frame(DATA, 1, 601),
        PREFACE + frame(HEADERS, 1, 300) + frame(DATA, 1, 300),  # with their heads more than 600
        PREFACE + frame(HEADERS, 1, 300) + frame(CONTINUATION, 1, 300),
        PREFACE + b"".join(frame(DATA, n, 500) for n in range(1, 11, 2)),  # none of them ended
    ):  # fmt: skip
        with pytest.raises(ValueError, match="got"):
            RequestMeter(600).feed(wrong)


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def test_what_clients_without_a_token_send_is_not_received(mixture: Path, start, tmp_path: Path) -> None:
    file = write_token(tmp_path / "token", GOOD)
    server, location = start(mixture, "--port", 0, "--token-file", file)
    good = RemoteChunks(Connection(location, GOOD), "code")
    good.read(0, 1)
    before, most = resident_mb(server.pid), 0.0
    content = b"x" * (64 << 20)
    for make in (
        lambda client, options: client.do_get(pyarrow.flight.Ticket(content), options).read_all(),
        lambda client, options: list(client.do_action(("describe", content), options)),
    ):
        for headers in ([], [(b"authorization", f"Bearer {GOOD}".encode())]):
            client = pyarrow.flight.connect(location)
            options = pyarrow.flight.FlightCallOptions(timeout=60, headers=headers)
            with pytest.raises(
                (pyarrow.flight.FlightUnavailableError, pyarrow.flight.FlightUnauthenticatedError)
            ):
                make(client, options)
            most = max(most, resident_mb(server.pid))
    assert most - before < 40
    assert len(good.read(1, 1)) == 512
    assert good.connection.ask("status")["errors"] >= 4
    assert good.connection.ask("status")["clients"] >= 1


def test_a_certificate_and_a_key_that_do_not_fit_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--tls-cert, --tls-key: got files that do not fit"):
        tls_context(b"nonsense", b"nonsense", tmp_path)
    assert not list(tmp_path.iterdir())
    assert ssl.OPENSSL_VERSION


def write_large(folder: Path) -> Path:
    from megatron.mixture.catalog import Catalog

    text = "".join(json.dumps({"text": f"{i} " + "w" * 20_000}) + "\n" for i in range(4000))
    (folder / "large.jsonl").write_text(text)
    with Catalog(folder / "large.duckdb", n_threads=1) as catalog:
        catalog.register("large", [str(folder / "large.jsonl")], (), quiet=True)
    (folder / "large.yaml").write_text("catalog: large.duckdb\ncount: documents\n")
    return folder / "large.yaml"


def test_unread_answers_hold_a_piece_each(tmp_path: Path, start) -> None:
    """Eight answers of 64 chunks of 10 MB: 5 GB, none of them read."""
    server, location = start(write_large(tmp_path), "--port", 0)
    quick = RemoteChunks(Connection(location), "large")
    expected = quick.read(3, 1)
    before = resident_mb(server.pid)
    ticket = json.dumps({"mixture": "large", "identity": quick.identity, "first": 0, "n": 64}).encode()
    clients = [pyarrow.flight.connect(location) for _ in range(8)]
    readers = [client.do_get(pyarrow.flight.Ticket(ticket)) for client in clients]
    assert all(reader.read_chunk().data.num_rows for reader in readers)
    time.sleep(1)
    assert resident_mb(server.pid) - before < 200
    assert quick.read(3, 1).equals(expected)  # served meanwhile
    del readers
    for client in clients:
        client.close()
    for _ in range(100):
        if quick.connection.ask("status")["requests"] >= 10:
            break  # eight were ended, though nobody read them
        time.sleep(0.1)
    assert quick.connection.ask("status")["requests"] == 10


def test_too_many_unread_answers_are_put_off_and_not_refused_for_good(
    tmp_path: Path, start, root: Path
) -> None:
    script = tmp_path / "few.py"
    script.write_text(
        "import runpy, sys\nimport megatron.mixture.service as service\nservice.MOST_ANSWERS = 2\n"
        f"sys.path.insert(0, {str(root)!r})\nrunpy.run_path({str(root / 'tools' / 'mixture_server.py')!r}, "
        "run_name='__main__')\n"
    )
    _, location = start(write_large(tmp_path), "--port", 0, script=script)
    remote = RemoteChunks(Connection(location, patience_s=60), "large")
    ticket = json.dumps({"mixture": "large", "identity": remote.identity, "first": 0, "n": 64}).encode()
    clients = [pyarrow.flight.connect(location) for _ in range(2)]
    readers = [client.do_get(pyarrow.flight.Ticket(ticket)) for client in clients]
    assert all(reader.read_chunk().data.num_rows for reader in readers)
    with pytest.raises(ConnectionError, match="2 answers are unread"):
        RemoteChunks(Connection(location, patience_s=1), "large").read(0, 1)
    threading.Timer(1.0, lambda: [reader.cancel() for reader in readers]).start()
    assert len(remote.read(0, 1)) == 512


def test_a_request_for_a_chunk_that_takes_for_ever_keeps_nobody_waiting(mixture: Path, start) -> None:
    mixture.write_text(mixture.read_text().replace("C: 1", "C: 1.0e-12"))
    _, location = start(mixture, "--port", 0)
    remote = RemoteChunks(Connection(location), "code")
    ticket = {"mixture": "code", "identity": remote.identity, "first": 1 << 40, "n": 1}
    client, failed = pyarrow.flight.connect(location), []

    def ask() -> None:
        try:
            client.do_get(pyarrow.flight.Ticket(json.dumps(ticket).encode())).read_all()
        except pyarrow.flight.FlightServerError as error:
            failed.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.5)
    begin = time.monotonic()
    assert len(remote.read(0, 1)) == 512
    n = time.monotonic() - begin
    thread.join(timeout=120)
    assert "not yet: chunk 1099511627776: its position is computed as far as chunk" in failed[0]
    assert n < 4  # less than the other request may compute


@pytest.mark.parametrize(
    "first", [-1, True, 0.5, float("nan"), float("inf"), 2**63, 2**40 + 1, "1", None, [1]]
)
def test_a_chunk_number_that_is_none_is_refused(mixture: Path, first: object) -> None:
    from megatron.mixture.documents import DocumentChunks
    from megatron.mixture.service import read_request

    with DocumentChunks(mixture) as source:
        asked = {"mixture": "code", "identity": source.identity, "first": first, "n": 1}
        with pytest.raises(ValueError, match="first is a number from 0 to 1099511627776"):
            read_request(json.dumps(asked).encode(), {"code": source})


def test_a_far_chunk_is_answered_at_once(mixture: Path, start) -> None:
    _, location = start(mixture, "--port", 0)
    remote = RemoteChunks(Connection(location, patience_s=30), "code")
    begin = time.monotonic()
    table = remote.read(1 << 40, 1)
    assert len(table) == 512
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_is_stopped_leaves_nothing_behind(
    tmp_path: Path, start, monkeypatch, number: int
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    server, location = start(write_large(tmp_path), "--port", 0)
    assert len(list((tmp_path / "temporary").iterdir())) == 1
    remote = RemoteChunks(Connection(location), "large")
    ticket = json.dumps({"mixture": "large", "identity": remote.identity, "first": 0, "n": 64}).encode()
    reader = pyarrow.flight.connect(location).do_get(pyarrow.flight.Ticket(ticket))
    assert reader.read_chunk().data.num_rows  # and it is not read to its end
    server.send_signal(number)
    assert server.wait(timeout=60) == 0
    assert not list((tmp_path / "temporary").iterdir())


def test_the_example_writes_its_token_for_one_user_from_the_start(root: Path, tmp_path: Path) -> None:
    script = (root / "examples_scaling" / "mixture" / "server.py").read_text()
    lines = [line.strip() for line in script.splitlines() if "token_file." in line]
    namespace = {"token_file": write_token(tmp_path / "m.token", "old", 0o644), "secrets": secrets}
    modes = []
    for line in lines[:3]:
        exec(line, namespace)  # noqa: S102
        if (tmp_path / "m.token").exists():
            modes.append((tmp_path / "m.token").stat().st_mode & 0o777)
    assert modes == [0o600, 0o600]
    assert len(read_token(tmp_path / "m.token")) == 32
