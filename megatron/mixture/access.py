"""Who may connect to a mixture server: addresses, tokens, and the files that keep secrets."""

import ipaddress
import re
import stat
from pathlib import Path

LEAST_TOKEN = 16  # characters, beyond this machine: 64 bits of hexadecimal digits
TOKEN = re.compile(r"[!-~]+")  # what a header can carry
NAME = r"\[[0-9A-Fa-f:.]+(?:%[\w.~-]+)?\]|[^\s:/@\[\]]+"
LOCATION = re.compile(rf"grpc\+(tcp|tls)://({NAME}):(\d{{1,5}})")
MAKE_TOKEN = "(umask 077 && openssl rand -hex 16 > {})"


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def plain_host(host: str) -> str:
    """A host as socket functions expect it: without the brackets of an IPv6 address in a URL."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def format_address(host: str, port: int) -> str:
    """host:port, an IPv6 address in brackets."""
    host = plain_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_location(location: str) -> None:
    """ValueError for a location that is not grpc+tcp://HOST:PORT or grpc+tls://HOST:PORT."""
    parts = LOCATION.fullmatch(location)
    if parts is None or not 0 < int(parts[3]) < 1 << 16:
        raise ValueError(
            f"{location}: wanted grpc+tcp://HOST:PORT, or grpc+tls://HOST:PORT for TLS; an IPv6 HOST "
            "in brackets"
        )
    if parts[2].startswith("["):
        try:
            ipaddress.IPv6Address(parts[2][1:-1])
        except ValueError as error:
            raise ValueError(
                f"{location}: got the host {parts[2]}, expected an IPv6 address ({error})."
            ) from None


def check_private(path: Path) -> None:
    """PermissionError for a file that other users can read or write."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise PermissionError(
            f"{path}: got mode {mode:04o}, expected 0600, because other users can use this secret. "
            f"Run chmod 600 {path}, and make a new secret if the machine is shared."
        )


def check_token(token: str, place: str, is_local: bool) -> None:
    """ValueError for an empty token, one that no header can carry, or a short one unless `is_local`."""
    if not TOKEN.fullmatch(token):
        raise ValueError(
            f"{place}: got {'no token' if not token.strip() else 'spaces or unprintable characters'}, "
            f"expected one printable word. Make one with {MAKE_TOKEN.format('token')}."
        )
    if len(token) < LEAST_TOKEN and not is_local:
        raise ValueError(
            f"{place}: got a token of {len(token)} characters, expected at least {LEAST_TOKEN} beyond this "
            f"machine. "
            f"Make one with {MAKE_TOKEN.format('token')}."
        )


def read_token(path: Path) -> str:
    """The token in a file of mode 0600. PermissionError or ValueError as `check_private` and `check_token`
    raise."""
    check_private(path)
    try:
        token = path.read_bytes().decode("ascii").strip()
    except UnicodeDecodeError:
        token = " \0"  # reported without its content
    check_token(token, str(path), is_local=True)
    return token
