"""Access control of a mixture server: addresses, tokens, and the files that contain secrets."""

import ipaddress
import os
import re
import stat
import tempfile
from pathlib import Path

MIN_TOKEN_CHARS = 16  # 64 bits as hexadecimal digits; required for non-local addresses
TOKEN_PATTERN = re.compile(r"[!-~]+")  # printable ASCII without spaces, as HTTP headers allow
HOST_PATTERN = r"\[[0-9A-Fa-f:.]+(?:%[\w.~-]+)?\]|[^\s:/@\[\]]+"
# IPv6 is in brackets, perhaps with a zone (fe80::1%eth0): its colons are then not the one of the port
LOCATION_PATTERN = re.compile(rf"grpc\+(tcp|tls)://({HOST_PATTERN}):(\d{{1,5}})")
MAX_SOCKET_BYTES = 107  # longest address of a Unix socket
MAKE_TOKEN_COMMAND = "(umask 077 && openssl rand -hex 16 > {})"


def is_loopback(host: str) -> bool:
    """Return whether an address belongs to this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # no other name is resolved: it counts as non-local, which requires a token
        return host == "localhost"


def strip_brackets(host: str) -> str:
    """Return a host as socket functions expect it: without the brackets of an IPv6 address in a URL."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def format_address(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    host = strip_brackets(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_location(location: str) -> None:
    """Raise ValueError unless a location is grpc+tcp://HOST:PORT or grpc+tls://HOST:PORT."""
    match = LOCATION_PATTERN.fullmatch(location)
    if match is None or not 0 < int(match[3]) < 1 << 16:
        raise ValueError(
            f"{location}: expected grpc+tcp://HOST:PORT, or grpc+tls://HOST:PORT for TLS. "
            "Write an IPv6 HOST in brackets."
        )
    if match[2].startswith("["):
        try:
            ipaddress.IPv6Address(match[2][1:-1])
        except ValueError as error:
            raise ValueError(
                f"{location}: got the host {match[2]}, expected an IPv6 address ({error})."
            ) from None


def check_private(path: Path) -> None:
    """Raise PermissionError if other users can read or write a file."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise PermissionError(
            f"{path}: got mode {mode:04o}, expected 0600, because other users can use this secret. "
            f"Run chmod 600 {path}, and make a new secret if the machine is shared."
        )


def check_token(token: str, source: str, is_local: bool) -> None:
    """Raise ValueError for an empty token or one that no HTTP header can carry.

    A token shorter than MIN_TOKEN_CHARS raises too, unless `is_local`. `source`: the file or option, for
    messages.
    """
    if not TOKEN_PATTERN.fullmatch(token):
        raise ValueError(
            f"{source}: got {'no token' if not token.strip() else 'spaces or unprintable characters'}, "
            f"expected one printable word. Make one with {MAKE_TOKEN_COMMAND.format('token')}."
        )
    # a short token is accepted on the loopback interface only
    if len(token) < MIN_TOKEN_CHARS and not is_local:
        raise ValueError(
            f"{source}: got a token of {len(token)} characters, expected at least {MIN_TOKEN_CHARS} for a "
            f"non-local address. "
            f"Make one with {MAKE_TOKEN_COMMAND.format('token')}."
        )


def read_token(path: Path) -> str:
    """Return the token in a file of mode 0600.

    Raises PermissionError as `check_private` does, and ValueError as `check_token` does.
    """
    check_private(path)
    try:
        token = path.read_bytes().decode("ascii").strip()
    except UnicodeDecodeError:
        token = " \0"  # fails the check below, whose message does not contain the token
    # the address is not known here: ListenOptions.check requires the length for a non-local one
    check_token(token, str(path), is_local=True)
    return token


def make_socket_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder whose name leaves room for that of a socket.

    The address of a Unix socket has at most 107 bytes. A long TMPDIR, as of some schedulers, exceeds it.
    """
    places = (tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR"), "/tmp", "/dev/shm")
    for place in places:
        # the name of the folder has 16 bytes, and "/flight" in it 7
        if place and os.access(place, os.W_OK) and len(os.fsencode(place)) + 24 <= MAX_SOCKET_BYTES:
            return tempfile.TemporaryDirectory(prefix="mixture-", dir=place, ignore_cleanup_errors=True)
    raise OSError(
        f"{places[0]}: got a path too long for a socket, expected {MAX_SOCKET_BYTES - 24} bytes or less. "
        "Set TMPDIR to a shorter path."
    )
