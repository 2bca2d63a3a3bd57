"""Files of a repository of the Hugging Face hub, fetched so that a killed download goes on where it was.

huggingface_hub 2.4 begins a file anew when it was killed within it, and a shard of C4 has 319 MB. This asks
for the rest by an HTTP range, at the commit where it began, and compares the whole with the hash that the hub
lists.
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

ENDPOINT = "https://huggingface.co"
BLOCK = 1 << 20
ANSWER_S = 60.0  # without a byte, after which a connection counts as lost
RETRIES = 5  # in a row without a byte


@dataclass(frozen=True)
class HubFile:
    """A file as the hub lists it: sha256 of large files, else the SHA-1 that git gives a blob."""

    path: str
    n_bytes: int
    sha256: str | None
    git_sha1: str


class _KeepTheTokenHome(urllib.request.HTTPRedirectHandler):
    """Large files lie on other hosts; the token goes on to the same host only."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        asked, given = (urllib.parse.urlsplit(url)[:2] for url in (req.full_url, newurl))
        token = req.unredirected_hdrs.get("Authorization")
        if new is not None and token is not None and asked == given:
            new.add_unredirected_header("Authorization", token)
        return new


class Repository:
    """The files of one repository at the commit that `revision` names now."""

    def __init__(self, repo: str, kind: str, revision: str = "main", token: str | None = None) -> None:
        """`kind`: datasets or models. Raises ConnectionError or FileNotFoundError in a sentence."""
        self.repo, self.kind, self._token = repo, kind, token
        self.endpoint = os.environ.get("HF_ENDPOINT", ENDPOINT).rstrip("/")
        self._opener = urllib.request.build_opener(_KeepTheTokenHome())
        told, _ = self._ask(f"/api/{kind}/{repo}/revision/{urllib.parse.quote(revision, safe='')}")
        self.commit = str(told["sha"])

    def files(self, pattern: str) -> list[HubFile]:
        """Those that match, sorted; a `*` stays within one folder. FileNotFoundError for none."""
        folder = urllib.parse.quote(pattern.rpartition("/")[0])
        url: str | None = f"/api/{self.kind}/{self.repo}/tree/{self.commit}/{folder}".rstrip("/")
        found = []
        while url is not None:
            listed, headers = self._ask(url)
            for one in listed:
                if one["type"] == "file" and fnmatch.fnmatchcase(one["path"], pattern):
                    sha256 = (one.get("lfs") or {}).get("oid")
                    found.append(HubFile(one["path"], int(one["size"]), sha256, one["oid"]))
            following = re.search(r'<([^>]+)>;\s*rel="next"', headers.get("Link") or "")
            url = following[1] if following else None
        if not found:
            raise FileNotFoundError(
                f"{self.repo}: no file {pattern}; its page on the hub shows which there are"
            )
        return sorted(found, key=lambda one: one.path)

    def fetch(self, file: HubFile, target: Path) -> None:
        """Write `target`, which appears whole. What an earlier call left in `target`.partial is gone on with.

        Raises ConnectionError, FileNotFoundError, or ValueError where what came is not what the hub lists.
        """
        partial = target.with_name(target.name + ".partial")
        target.parent.mkdir(parents=True, exist_ok=True)
        self._complete(file, partial)
        partial.touch()  # of an empty file nothing comes
        if not _is(file, partial):
            partial.unlink()
            raise ValueError(
                f"{self.repo}/{file.path}: what came has another hash than the hub lists; try again"
            )
        with partial.open("rb+") as written:
            os.fsync(written.fileno())
        partial.rename(target)

    def _complete(self, file: HubFile, partial: Path) -> None:
        """Ask for what is missing of `partial` until nothing is, or until nothing comes."""
        from tqdm import tqdm

        tries, reason = 0, "the connection ends"
        # disable=None: none where nobody looks
        with tqdm(total=file.n_bytes, unit="B", unit_scale=True, disable=None, desc=file.path) as bar:
            while (held := partial.stat().st_size if partial.is_file() else 0) < file.n_bytes:
                try:
                    self._append(file, partial, held, bar)
                except RefusedError:
                    raise
                except (ConnectionError, TimeoutError, ssl.SSLError, http.client.HTTPException) as error:
                    reason = str(error) or type(error).__name__
                moved = partial.is_file() and partial.stat().st_size > held
                tries = 0 if moved else tries + 1
                if tries > RETRIES:
                    raise ConnectionError(
                        f"{self.endpoint}: no byte of {self.repo}/{file.path} in {RETRIES} tries ({reason}); "
                        f"{held:,} of {file.n_bytes:,} bytes are there; the same command goes on from them"
                    )
                time.sleep(0.0 if moved else min(2.0**tries, 30.0) / 4)

    def _append(self, file: HubFile, partial: Path, held: int, bar: Any) -> None:
        kind = "" if self.kind == "models" else f"{self.kind}/"
        url = f"/{kind}{self.repo}/resolve/{self.commit}/{urllib.parse.quote(file.path)}"
        with self._open(url, {"Range": f"bytes={held}-"} if held else {}) as answer:
            goes_on = answer.status == 206
            bar.n = held if goes_on else 0
            with partial.open("ab" if goes_on else "wb") as written:
                while block := answer.read(BLOCK):
                    written.write(block)
                    bar.update(len(block))

    def _ask(self, url: str) -> tuple[Any, Mapping[str, str]]:
        with self._open(url, {}) as answer:
            return json.loads(answer.read()), answer.headers

    def _open(self, url: str, headers: dict[str, str]) -> Any:
        request = urllib.request.Request(urllib.parse.urljoin(self.endpoint + "/", url))
        for name, value in {
            **headers,
            "Accept-Encoding": "identity",
            "User-Agent": "megatron-scaling",
        }.items():
            request.add_header(name, value)
        if self._token is not None and request.full_url.startswith(self.endpoint + "/"):
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            return self._opener.open(request, timeout=ANSWER_S)
        except urllib.error.HTTPError as error:
            if error.code in (408, 416, 429) or error.code >= 500:
                raise ConnectionError(
                    f"{self.endpoint}: answers {error.code} for {self.repo}; try again"
                ) from None
            if error.code in (401, 403):
                raise RefusedError(
                    f"{self.endpoint}: does not give {self.repo} ({error.code}): it is private, wants "
                    "consent on its page, or is not there; set HF_TOKEN to a token that may read it"
                ) from None
            raise AbsentError(
                f"{self.endpoint}: has no {self.repo} ({error.code}); look up its name there"
            ) from None
        except (urllib.error.URLError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            told = getattr(reason, "strerror", None) or reason
            raise ConnectionError(f"{self.endpoint}: {told}; run the same command again to go on") from None


class RefusedError(ConnectionError):
    """Asking again would not help."""


class AbsentError(RefusedError, FileNotFoundError):
    """There is no such repository or revision."""


def _is(file: HubFile, path: Path) -> bool:
    """Whether the bytes are those that the hub lists."""
    if path.stat().st_size != file.n_bytes:
        return False
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(f"blob {file.n_bytes}\0".encode())
    with path.open("rb") as held:
        while block := held.read(BLOCK):
            digest.update(block)
    return digest.hexdigest() == (file.sha256 or file.git_sha1)
