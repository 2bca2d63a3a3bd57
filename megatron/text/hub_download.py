"""Resumable downloads of files of a Hugging Face hub repository.

huggingface_hub 2.4 restarts a file from scratch if it was killed during the download, because each call
writes to a partial file of a new random name: killed after 8 of 40 MB, it requested all 40 again, with
cache_dir and with local_dir. A shard of C4 has 319 MB. This module requests the rest by an HTTP range at the
same commit, and verifies the whole file against the hash that the hub lists. httpx would replace the redirect
handler and little else: ranges, retries and the hash are not part of it.
"""

import fnmatch
import hashlib
import http.client
import json
import os
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.cli import ProgressBar
from megatron.io import atomic_path

ENDPOINT = "https://huggingface.co"
BLOCK_BYTES = 1 << 20
TIMEOUT_S = 60.0  # without a byte
RETRIES = 5  # consecutive attempts without a byte


@dataclass(frozen=True)
class HubFile:
    """Entry of a hub listing. Large files have a sha256, others only the SHA-1 of a git blob."""

    path: str
    n_bytes: int
    sha256: str | None
    git_sha1: str


class _SameHostAuth(urllib.request.HTTPRedirectHandler):
    """Redirect handler that passes the token only to the same host; large files are on other hosts."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        source, target = (urllib.parse.urlsplit(url)[:2] for url in (req.full_url, newurl))
        token = req.unredirected_hdrs.get("Authorization")
        # scheme and host must match: the header would otherwise be sent to a storage host
        if new is not None and token is not None and source == target:
            new.add_unredirected_header("Authorization", token)
        return new


class HubRepository:
    """A repository at the commit that `revision` refers to at construction."""

    def __init__(self, repo: str, kind: str, revision: str = "main", token: str | None = None) -> None:
        """`kind`: datasets or models. Raises ConnectionError or FileNotFoundError."""
        self.repo, self.kind, self._token = repo, kind, token
        self.endpoint = os.environ.get("HF_ENDPOINT", ENDPOINT).rstrip("/")
        self._opener = urllib.request.build_opener(_SameHostAuth())
        # Resolve the branch once. All later requests name the commit, so that two parts of a file, or two
        # calls, never mix versions of a branch that has moved.
        info, _ = self._get_json(f"/api/{kind}/{repo}/revision/{urllib.parse.quote(revision, safe='')}")
        self.commit = str(info["sha"])

    def list_files(self, pattern: str) -> list[HubFile]:
        """List matching files, sorted; `*` does not match a slash. Raises FileNotFoundError for none."""
        folder = urllib.parse.quote(pattern.rpartition("/")[0])
        url: str | None = f"/api/{self.kind}/{self.repo}/tree/{self.commit}/{folder}".rstrip("/")
        files = []
        while url is not None:
            entries, headers = self._get_json(url)
            for entry in entries:
                if entry["type"] == "file" and fnmatch.fnmatchcase(entry["path"], pattern):
                    sha256 = (entry.get("lfs") or {}).get("oid")
                    files.append(HubFile(entry["path"], int(entry["size"]), sha256, entry["oid"]))
            # paged listing: the header `Link: <url>; rel="next"` names the next page
            following = re.search(r'<([^>]+)>;\s*rel="next"', headers.get("Link") or "")
            url = following[1] if following else None
        if not files:
            raise FileNotFoundError(
                f"{self.repo}: no file {pattern}. See the list of files on the repository's page."
            )
        return sorted(files, key=lambda entry: entry.path)

    def fetch(self, file: HubFile, target: Path) -> None:
        """Download to `target` atomically; resume from `target`.partial if an earlier call left one.

        Raises ConnectionError, FileNotFoundError, or ValueError if the content differs from the hub's hash or
        another process downloads to `target`.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(target, resume=True) as partial:
            self._download_rest(file, partial)
            # parts of several connections, maybe of several calls: only the hash of the whole file shows that
            # they fit
            if not _matches_hash(file, partial):
                # else every later call would resume the same wrong bytes
                partial.unlink()
                raise ValueError(
                    f"{self.repo}/{file.path}: got content with another hash than the hub lists. Try again."
                )

    def _download_rest(self, file: HubFile, partial: Path) -> None:
        """Request the rest of `partial` until it is complete, or until RETRIES attempts return no byte."""
        tries, reason = 0, "the connection was closed"
        with ProgressBar(file.path, file.n_bytes, "B") as bar:
            # the size on disk is the only state of a download, so that a kill at any moment needs
            # no repair
            while (n_bytes := partial.stat().st_size if partial.is_file() else 0) < file.n_bytes:
                try:
                    self._append_range(file, partial, n_bytes, bar)
                except RefusedError:
                    raise
                except (ConnectionError, TimeoutError, ssl.SSLError, http.client.HTTPException) as error:
                    reason = str(error) or type(error).__name__
                moved = partial.is_file() and partial.stat().st_size > n_bytes
                # any progress resets the counter; otherwise back off exponentially, at most 7.5 s
                tries = 0 if moved else tries + 1
                if tries >= RETRIES:
                    raise ConnectionError(
                        f"{self.endpoint}: got no byte of {self.repo}/{file.path} in {RETRIES} tries "
                        f"({reason}). {n_bytes:,} of {file.n_bytes:,} bytes are on disk; run the same "
                        "command to resume."
                    )
                time.sleep(0.0 if moved else min(2.0**tries, 30.0) / 4)

    def _append_range(self, file: HubFile, partial: Path, n_bytes: int, bar: ProgressBar) -> None:
        kind = "" if self.kind == "models" else f"{self.kind}/"
        url = f"/{kind}{self.repo}/resolve/{self.commit}/{urllib.parse.quote(file.path)}"
        with self._open_url(url, {"Range": f"bytes={n_bytes}-"} if n_bytes else {}) as response:
            is_partial = response.status == 206  # else the server ignored the range and sends the whole file
            bar.done = n_bytes if is_partial else 0
            with partial.open("ab" if is_partial else "wb") as written:
                while block := response.read(BLOCK_BYTES):
                    written.write(block)
                    bar.update(len(block))

    def _get_json(self, url: str) -> tuple[Any, Mapping[str, str]]:
        with self._open_url(url, {}) as response:
            return json.loads(response.read()), response.headers

    def _open_url(self, url: str, headers: dict[str, str]) -> Any:
        request = urllib.request.Request(urllib.parse.urljoin(self.endpoint + "/", url))
        for name, value in {
            **headers,
            "Accept-Encoding": "identity",
            "User-Agent": "megatron-scaling",
        }.items():
            request.add_header(name, value)
        # A `next` link may be an absolute URL of another host: no token for it. Unredirected: urllib would
        # copy other headers to the target of a redirect.
        if self._token is not None and request.full_url.startswith(self.endpoint + "/"):
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            return self._opener.open(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            # 408 timeout, 416 range not satisfiable, 429 rate limit, 5xx server error: worth a retry
            if error.code in (408, 416, 429) or error.code >= 500:
                raise ConnectionError(
                    f"{self.endpoint}: got HTTP {error.code} for {self.repo}. Try again."
                ) from None
            if error.code in (401, 403):
                raise RefusedError(
                    f"{self.endpoint}: access to {self.repo} refused ({error.code}): it is private, requires "
                    "consent on its page, or does not exist. Set HF_TOKEN to a token with read access."
                ) from None
            raise AbsentError(
                f"{self.endpoint}: {self.repo} does not exist ({error.code}). Check its name."
            ) from None
        except (urllib.error.URLError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            message = getattr(reason, "strerror", None) or reason
            raise ConnectionError(
                f"{self.endpoint}: {message}. Run the same command again to resume."
            ) from None


class RefusedError(ConnectionError):
    """The hub refused the request; a retry would not help."""


class AbsentError(RefusedError, FileNotFoundError):
    """The repository or revision does not exist."""


def _matches_hash(file: HubFile, path: Path) -> bool:
    """Return whether a file has the size and hash that the hub lists."""
    if path.stat().st_size != file.n_bytes:
        return False
    # git's name of a blob: SHA-1 of "blob <size>\0" and the content
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(f"blob {file.n_bytes}\0".encode())
    with path.open("rb") as content:
        while block := content.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest() == (file.sha256 or file.git_sha1)
