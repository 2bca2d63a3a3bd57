"""WebDataset archives: a document is a sample, the members of a tar that share a name up to its first dot.

`3/cat.json`, `3/cat.txt` and `3/cat.jpg`, in adjacent positions, are the sample `3/cat`. Its record is the
object in `.json`, with the key `__key__` added. The content of `.txt` becomes its text if `.json` has none.
In the catalog a sample is the byte span from its first header to the end of its last member (of the
decompressed content, if the archive is compressed). Headers are the standard library's, and what its `data`
filter refuses is refused here: links outside of the archive, devices, absolute names.
"""

import io
import json
import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

TAR_SUFFIXES = (".tar", ".tar.gz", ".tar.zst")
KEY_FIELD = "__key__"
# 3/cat.seg.png: key 3/cat, extension seg.png. A name such as 3/.hidden has no key.
MEMBER_NAME = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)")  # files with other names belong to no sample
TEXT_EXTENSIONS = ("json", "txt")  # members that registration reads
BLOCK_BYTES = 512  # members are padded to multiples of it
MAX_SAMPLE_BYTES = 256 << 20  # limit of a sample with all its members, because it is read as a whole
TAR_ERRORS = (tarfile.TarError, EOFError, OSError, zlib.error, ArithmeticError)


class _Header(tarfile.TarInfo):
    """Tar header that raises an error for damage that tarfile treats as the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "_Header":
        try:
            return super().fromtarfile(archive)
        except (tarfile.EOFHeaderError, tarfile.EmptyHeaderError):  # type: ignore[attr-defined]  # as below
            raise  # the regular ends of an archive
        except tarfile.HeaderError as error:  # not in typeshed
            raise tarfile.ReadError(str(error)) from error


@dataclass
class TarSample:
    """Adjacent members with a common name.

    text_members   content of the members in TEXT_EXTENSIONS
    fault          reason why it is not a sample
    """

    key: str
    begin: int
    end: int
    text_members: dict[str, bytes] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    fault: str | None = None

    def build_record(self, text_key: str) -> dict[str, Any]:
        """Return the record over which properties are evaluated. Raises ValueError for a broken sample."""
        if self.fault is not None:
            raise ValueError(self.fault)
        return build_record(self.key, self.text_members, text_key)


def build_record(key: str, members: dict[str, bytes], text_key: str) -> dict[str, Any]:
    """Return the record of a sample's members. Raises ValueError if they contain no text."""
    try:
        record = json.loads(members.get("json", b"{}"))
    except (ValueError, RecursionError):
        raise ValueError("its .json is not JSON") from None
    if not isinstance(record, dict):
        raise ValueError("its .json is not an object")
    if not isinstance(record.get(text_key), str):
        if "txt" not in members:
            raise ValueError(f"no text under '{text_key}' in its .json, and no .txt")
        try:
            record[text_key] = members["txt"].decode()
        except UnicodeDecodeError:
            raise ValueError("its .txt is not UTF-8") from None
    # last, so that a `__key__` in the .json does not replace the key
    return {**record, KEY_FIELD: key}


def iter_samples(path: Path, stream: IO[bytes], max_bytes: int = MAX_SAMPLE_BYTES) -> Iterator[TarSample]:
    """Yield the samples of an archive in order, read forwards from its decompressed content.

    Raises ValueError for an archive that cannot be read to its end, that contains a member which the `data`
    filter refuses, or with a sample of more than `max_bytes` bytes. Memory is bounded by one sample and the
    names of all.
    """
    try:
        # "r|" reads forwards only, and does not require a file that can seek
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as archive:
            yield from _group_members(archive, max_bytes)
    except TAR_ERRORS as error:
        raise ValueError(f"{path}: cannot be read to its end ({error}). Pack it again.") from error


def _group_members(archive: tarfile.TarFile, max_bytes: int) -> Iterator[TarSample]:
    seen: set[str] = set()
    sample: TarSample | None = None
    while (member := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined]  # typeshed lacks it; the list would only grow
        if tarfile.data_filter(member, "/archive") is None or member.issparse():
            raise tarfile.ReadError(f"{member.name}: got a sparse member, expected a plain one")
        named = MEMBER_NAME.fullmatch(member.name)
        if not member.isfile() or named is None:
            continue
        key, extension = named[1], named[2].lower()
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            # `offset` is the first header of the member, including a long name or PAX record before it
            sample = TarSample(key, member.offset, 0)
            # members of the sample that are not adjacent cannot be one span of bytes
            if key in seen:
                sample.fault = "not adjacent to other members of its name; sort them (tar --sort=name)"
            seen.add(key)
        # rounded up to a multiple of the block size
        sample.end = member.offset_data + -(-member.size // BLOCK_BYTES) * BLOCK_BYTES
        if sample.end - sample.begin > max_bytes:
            raise tarfile.ReadError(
                f"{member.name}: got a sample of {sample.end - sample.begin:,} bytes, expected at most "
                f"{max_bytes:,}; if the sample is valid, raise --max-sample-mb"
            )
        if extension in sample.names:
            sample.fault = f"two members .{extension}"
        sample.names.add(extension)
        if extension in TEXT_EXTENSIONS:
            sample.text_members[extension] = _read_member(archive, member)
    if sample is not None:
        yield sample


def _read_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None, "extractfile returns None for non-files only"
    return file.read()


def read_sample(span: bytes, text_key: str) -> dict[str, Any]:
    """Return the bytes of one sample as a document: `__key__`, `text`, and each member by its extension.

    Raises ValueError for bytes that are not one sample.
    """
    try:
        # a span has no end-of-archive blocks: tarfile also ends where the bytes end
        with tarfile.open(fileobj=io.BytesIO(span), mode="r:", tarinfo=_Header) as archive:
            members = [(MEMBER_NAME.fullmatch(member.name), member) for member in archive if member.isfile()]
            content = {
                named[2].lower(): _read_member(archive, member)
                for named, member in members
                if named is not None
            }
    except TAR_ERRORS as error:
        raise ValueError(f"got bytes that are not a sample ({error})") from error
    keys = {named[1] for named, _ in members if named is not None}
    if len(keys) != 1:
        raise ValueError(f"got members of {len(keys)} samples, expected one")
    key = keys.pop()
    return {**content, KEY_FIELD: key, "text": build_record(key, content, text_key)[text_key]}
