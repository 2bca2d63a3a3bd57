"""Requests to object stores and web servers by fsspec: retries, errors as sentences, file versions.

Credentials come from the environment, as the libraries define it (AWS_*, GOOGLE_*, HF_TOKEN). User names,
passwords and queries of a URL, which may contain a token, are removed from all messages.
"""

import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from megatron.log import get_logger

log = get_logger(__name__)
ResultT = TypeVar("ResultT")

# scheme: package that fsspec requires for it
PACKAGES = {
    "s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "https": "aiohttp",
    "http": "aiohttp",
}  # fmt: skip
WEB = ("http", "https")  # without folders
SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://")
URL_IN_TEXT = re.compile(r"([a-z][a-z0-9+.-]*://)(?:[^\s/'\"@]*@)?([^\s'\"?#<>]*)(?:[?#][^\s'\"<>)]*)?")
VERSION_KEYS = (  # of fsspec's file information, in order of preference; backends have different ones
    "ETag", "etag", "generation", "md5Hash", "blob_id", "Content-MD5", "Digest", "Last-Modified",
    "LastModified", "last_modified", "updated", "mtime",
)  # fmt: skip
ATTEMPTS = 8  # of a request, about a minute in total
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 30.0  # between attempts: doubled each time
TIMEOUT_S = 60.0  # for a connection, and between two packets
PERMANENT = (TypeError, AttributeError, NotImplementedError, ImportError)  # raised before a request


class RemoteError(OSError):
    """A remote file that cannot be used. The message has the URL without its secrets."""

    is_temporary = False  # whether the same command may succeed later


class RemoteMissingError(RemoteError, FileNotFoundError):
    """No such remote file."""


class RemoteDeniedError(RemoteError, PermissionError):
    """The server refuses the access."""


class RemoteChangedError(RemoteError):
    """The content has changed since the file was found."""


class RemoteUnreachableError(RemoteError):
    """All attempts of a request have failed."""

    is_temporary = True


class ShortReadError(OSError):
    """A response with fewer or more bytes than requested; retried."""


@dataclass(frozen=True)
class RemoteInfo:
    """Size in bytes, and version: etag, or time of the last change; None if the server has neither."""

    size: int
    version: str | None


def is_url(word: object) -> bool:
    """Return whether a word is a URL, of any scheme."""
    return SCHEME.match(str(word)) is not None


def strip_secrets(url: str) -> str:
    """Return a URL without user name, password, query and fragment."""
    return redact(url) if urlsplit(url).scheme in WEB else url


def redact(text: str) -> str:
    """Remove user names, passwords, queries and fragments from all URLs in a text."""
    return URL_IN_TEXT.sub(r"\1\2", text)


def check_url(url: str) -> None:
    """Raise ValueError for a scheme that is not supported, and for credentials in the URL of a store."""
    scheme = SCHEME.match(url)
    if scheme is None or scheme[1] not in PACKAGES:
        raise ValueError(
            f"{redact(url)}: got an unsupported kind of URL, expected "
            f"{', '.join(f'{name}://' for name in PACKAGES)} or a file on this machine."
        )
    if scheme[1] not in WEB and "@" in urlsplit(url).netloc:
        raise ValueError(
            f"{redact(url)}: got credentials in a URL. Set them in the environment, as described in DATA.md."
        )


def describe_info(info: RemoteInfo) -> str:
    """Format size and version for a message."""
    return f"{info.size:,} bytes ({info.version or 'no version'})"


def connect(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it. Raises ValueError for a missing package."""
    scheme = urlsplit(url).scheme
    options: dict[str, Any] = {"use_listings_cache": False}  # a cached version would hide a change
    try:
        import fsspec

        if scheme in WEB:
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)
            options["client_kwargs"] = {"timeout": timeout}
        filesystem, path = fsspec.url_to_fs(url, **options)
    except ImportError as error:
        raise ValueError(
            f"{scheme}://: the package {PACKAGES[scheme]} is missing ({error}). "
            f"Install it with: pip install {PACKAGES[scheme]}"
        ) from error
    return filesystem, path


def request_info(url: str) -> RemoteInfo:
    """Request the size and version of a remote file. Raises RemoteError."""

    def request() -> RemoteInfo:
        filesystem, path = connect(url)
        filesystem.invalidate_cache(path)
        record = filesystem.info(path)
        if record.get("type") == "directory":
            raise FileNotFoundError("it is a folder")
        return parse_info(url, record)

    return retry(url, request)


def parse_info(url: str, record: dict[str, Any]) -> RemoteInfo:
    """Return size and version of fsspec's information. Raises RemoteError for an unknown size."""
    if not isinstance(record.get("size"), int):
        raise RemoteError(
            f"{strip_secrets(url)}: the server does not report a size. Download the file first."
        )
    lfs = record.get("lfs")  # of the Hugging Face hub: the sha256 of the content
    version = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
    names = [name for name in VERSION_KEYS if record.get(name)]
    return RemoteInfo(record["size"], str(version or record[names[0]]) if version or names else None)


def retry(url: str, request: Callable[[], ResultT], stop: threading.Event | None = None) -> ResultT:
    """Return the result of a request, repeated after failures of the network and the server.

    Raises RemoteError: at once for a missing file and a denied access, else after ATTEMPTS attempts.
    """
    wait_s = FIRST_WAIT_S
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return request()
        except (RemoteError, *PERMANENT):
            raise
        except Exception as error:  # each backend has its own exceptions
            _raise_permanent(url, error)
            reason = _describe_error(error)
            if attempt == ATTEMPTS or (stop is not None and stop.is_set()):
                raise RemoteUnreachableError(
                    f"{strip_secrets(url)}: not readable after {attempt} attempts ({reason}). "
                    "Check the network, then run the same command again."
                ) from error
        log.warning(
            "%s: attempt %d of %d failed (%s); again in %.1f s",
            strip_secrets(url), attempt, ATTEMPTS, reason, wait_s,
        )  # fmt: skip
        # random: the workers of several machines do not repeat their requests together
        (stop or threading.Event()).wait(wait_s * random.uniform(0.7, 1.0))
        wait_s = min(2 * wait_s, MAX_WAIT_S)
    raise AssertionError("the last attempt returns or raises")


def _describe_error(error: BaseException) -> str:
    words = redact(str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return words if type(error).__name__ in words else f"{type(error).__name__}: {words}"


def _raise_permanent(url: str, error: BaseException) -> None:
    """Raise RemoteError if another attempt is useless, as for a missing file."""
    label = strip_secrets(url)
    cause: BaseException | None = error
    status: int | None = None
    while cause is not None and status is None:  # fsspec hides the status of a web server in the cause
        response = getattr(cause, "response", None)
        if isinstance(response, dict):  # of botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            status = getattr(cause, "status", None) or getattr(response, "status_code", None)
        status = status if isinstance(status, int) else None
        cause = cause.__cause__ or cause.__context__
    is_missing = isinstance(error, FileNotFoundError) and error.__cause__ is None
    if status in (404, 410) or (is_missing and status is None):
        raise RemoteMissingError(
            f"{label}: no such file ({_describe_error(error)}). Correct the URL."
        ) from error
    is_denied = isinstance(error, PermissionError) or "Credentials" in type(error).__name__
    if status in (401, 403) or (is_denied and status is None):
        _raise_denied(label, error)
    if status is not None and 400 <= status < 500 and status not in (408, 425, 429):
        raise RemoteError(
            f"{label}: the server refuses the request with status {status} ({_describe_error(error)})."
        ) from error


def _raise_denied(label: str, error: BaseException) -> None:
    raise RemoteDeniedError(
        f"{label}: access denied ({_describe_error(error)}). Set credentials that may read it in the "
        "environment (AWS_*, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN); DATA.md lists them."
    ) from error
