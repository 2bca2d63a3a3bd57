"""Addresses, tokens and secret files, and limits on requests before authentication."""

import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pyarrow.flight
import pytest

from megatron.mixture.serve import access
from megatron.mixture.serve.access import (
    check_location,
    check_token,
    format_address,
    is_loopback,
    make_socket_folder,
    read_token,
    strip_brackets,
)
from megatron.mixture.serve.proxy import CONTINUATION, DATA, HEADERS, PREFACE, RequestMeter, make_tls_context
from megatron.mixture.serve.remote import Connection, RemoteChunks
from megatron.mixture.serve.service import ListenOptions

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
            ListenOptions(host="0.0.0.0", token=token, allow_plain=True).check()
    with pytest.raises(ValueError, match="--token-file: got no token"):
        ListenOptions(token="").check()
    ListenOptions(host="[::1]", token="short").check()
    ListenOptions(host="::", token=GOOD, allow_plain=True).check()
    with pytest.raises(ValueError, match="is not a local address. Add --token-file"):
        ListenOptions(host="::").check()


def test_the_tool_refuses_unsafe_access_settings(mixture: Path, tmp_path: Path, root: Path) -> None:
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
    assert (strip_brackets("[::1]"), strip_brackets("::1"), strip_brackets("host")) == ("::1", "::1", "host")
    assert is_loopback("::1")
    assert not is_loopback("::")
    for good in ("grpc+tcp://[::1]:8815", "grpc+tls://node-1.example.org:1", "grpc+tcp://127.0.0.1:65535"):
        check_location(good)
    wrong = ("grpc+tcp://::1:8815", "grpc+tcp://[::1]", "grpc+tcp://host", "grpc+tcp://host:0", "host:1",
             "grpc+tcp://host:70000", "grpc+tcp://[::1:8815", "grpc+tcp://a b:1", "grpc+tcp://u@h:1",
             "grpc+tcp://[1::2::3]:5", "grpc+udp://host:1", "")  # fmt: skip
    for location in wrong:
        with pytest.raises(
            ValueError, match="^" + location.replace("+", r"\+").replace("[", r"\[").split("]")[0]
        ):
            check_location(location)


@pytest.mark.parametrize("host", ["::1", "[::1]", "localhost"])
def test_a_server_on_ipv6_and_on_a_name_is_reached(mixture: Path, start, host: str) -> None:
    _, location = start(mixture, "--host", host, "--port", 0)
    assert location.startswith("grpc+tcp://localhost:" if host == "localhost" else "grpc+tcp://[::1]:")
    assert len(RemoteChunks(Connection(location, patience_s=60), "code").read(0, 1)) == 512


def make_frame(kind: int, stream: int, n: int, flags: int = 0) -> bytes:
    return n.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + b"x" * n


def test_the_bytes_of_requests_are_counted_for_any_split_of_the_stream() -> None:
    request = make_frame(HEADERS, 1, 200) + make_frame(DATA, 1, 300, flags=1)
    stream = (
        PREFACE
        + make_frame(4, 0, 36)
        + b"".join(request.replace(b"\0\0\0\1", n.to_bytes(4, "big")) for n in range(1, 99, 2))
    )
    for step in (1, 7, 1000, len(stream)):
        meter = RequestMeter(600)
        for at in range(0, len(stream), step):
            meter.feed(stream[at : at + step])
        assert meter.is_http2
    for wrong in (
        b"GET / HTTP/1.1\r\n", PREFACE + make_frame(DATA, 1, 601),
        PREFACE + make_frame(HEADERS, 1, 300) + make_frame(DATA, 1, 300),  # with frame headers above 600
        PREFACE + make_frame(HEADERS, 1, 300) + make_frame(CONTINUATION, 1, 300),
        PREFACE + b"".join(make_frame(DATA, n, 500) for n in range(1, 11, 2)),  # all of them incomplete
    ):  # fmt: skip
        with pytest.raises(ValueError, match="got"):
            RequestMeter(600).feed(wrong)


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def test_large_requests_are_not_received_even_with_a_token(mixture: Path, start, tmp_path: Path) -> None:
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
    assert good.connection.request("status")["errors"] >= 4
    assert good.connection.request("status")["clients"] >= 1


def test_a_certificate_that_does_not_match_its_key_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--tls-cert, --tls-key: got files that do not match"):
        make_tls_context(b"nonsense", b"nonsense", tmp_path)
    assert not list(tmp_path.iterdir())
    assert ssl.OPENSSL_VERSION


def write_large(folder: Path) -> Path:
    from megatron.mixture.catalog.catalog import Catalog

    text = "".join(json.dumps({"text": f"{i} " + "w" * 20_000}) + "\n" for i in range(4000))
    (folder / "large.jsonl").write_text(text)
    with Catalog(folder / "large.duckdb", n_threads=1) as catalog:
        catalog.register("large", [str(folder / "large.jsonl")], (), quiet=True)
    (folder / "large.yaml").write_text("catalog: large.duckdb\ncount: documents\n")
    return folder / "large.yaml"


def test_an_unread_response_keeps_only_one_piece_in_memory(tmp_path: Path, start) -> None:
    """Eight responses of 64 chunks of 10 MB: 5 GB, none of which is read."""
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
    assert quick.read(3, 1).equals(expected)  # served while the other responses are unread
    del readers
    for client in clients:
        client.close()
    for _ in range(100):
        if quick.connection.request("status")["requests"] >= 10:
            break  # the eight unread responses were ended
        time.sleep(0.1)
    assert quick.connection.request("status")["requests"] == 10


def test_requests_beyond_the_limit_of_unread_responses_are_retried(tmp_path: Path, start, root: Path) -> None:
    script = tmp_path / "few.py"
    script.write_text(
        "import runpy, sys\nimport megatron.mixture.serve.service as service\nservice.MAX_ANSWERS = 2\n"
        f"sys.path.insert(0, {str(root)!r})\nrunpy.run_path({str(root / 'tools' / 'mixture_server.py')!r}, "
        "run_name='__main__')\n"
    )
    _, location = start(write_large(tmp_path), "--port", 0, script=script)
    remote = RemoteChunks(Connection(location, patience_s=60), "large")
    ticket = json.dumps({"mixture": "large", "identity": remote.identity, "first": 0, "n": 64}).encode()
    clients = [pyarrow.flight.connect(location) for _ in range(2)]
    readers = [client.do_get(pyarrow.flight.Ticket(ticket)) for client in clients]
    assert all(reader.read_chunk().data.num_rows for reader in readers)
    with pytest.raises(ConnectionError, match="2 responses are unread"):
        RemoteChunks(Connection(location, patience_s=1), "large").read(0, 1)
    threading.Timer(1.0, lambda: [reader.cancel() for reader in readers]).start()
    assert len(remote.read(0, 1)) == 512


def test_a_request_for_a_chunk_that_takes_forever_does_not_delay_others(mixture: Path, start) -> None:
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
    assert n < 4  # less than the time limit of the other request


@pytest.mark.parametrize(
    "first", [-1, True, 0.5, float("nan"), float("inf"), 2**63, 2**40 + 1, "1", None, [1]]
)
def test_an_invalid_chunk_number_is_refused(mixture: Path, first: object) -> None:
    from megatron.mixture.document_chunks import DocumentChunks
    from megatron.mixture.serve.protocol import parse_request

    with DocumentChunks(mixture) as source:
        request = {"mixture": "code", "identity": source.identity, "first": first, "n": 1}
        with pytest.raises(ValueError, match="first: expected an integer from 0 to 1099511627776"):
            parse_request(json.dumps(request).encode(), {"code": source})


def test_a_distant_chunk_is_returned_without_delay(mixture: Path, start) -> None:
    _, location = start(mixture, "--port", 0)
    remote = RemoteChunks(Connection(location, patience_s=30), "code")
    begin = time.monotonic()
    table = remote.read(1 << 40, 1)
    assert len(table) == 512
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_is_stopped_leaves_no_files(tmp_path: Path, start, monkeypatch, number: int) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    server, location = start(write_large(tmp_path), "--port", 0)
    assert len(list((tmp_path / "temporary").iterdir())) == 1
    remote = RemoteChunks(Connection(location), "large")
    ticket = json.dumps({"mixture": "large", "identity": remote.identity, "first": 0, "n": 64}).encode()
    reader = pyarrow.flight.connect(location).do_get(pyarrow.flight.Ticket(ticket))
    assert reader.read_chunk().data.num_rows  # the rest stays unread
    server.send_signal(number)
    assert server.wait(timeout=60) == 0
    assert not list((tmp_path / "temporary").iterdir())


def test_the_token_file_of_the_example_is_private_when_it_is_created(root: Path, tmp_path: Path) -> None:
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


def test_the_socket_of_a_server_fits_below_a_long_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with make_socket_folder() as folder, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{folder}/flight")  # refused by the kernel above 107 bytes
    assert not Path(folder).exists()
    monkeypatch.setattr(access, "MAX_SOCKET_BYTES", 26)
    with pytest.raises(OSError, match="too long for a socket, expected 2 bytes or less"):
        make_socket_folder()
