"""WebDataset archives: a document is a sample, the members of a tar that share a name up to its first dot.

`3/cat.json`, `3/cat.txt` and `3/cat.jpg`, one after another, are the sample `3/cat`. Its record is the object
in `.json`, with the key `__key__` added, and with the content of `.txt` as its text where `.json` has none.
In the catalog a sample is the span of bytes from its first header to the end of its last member (of what is
unpacked, where the archive is compressed).
"""

import io
import json
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.data.documents import checked_text, opened
from megatron.mixture.libraries import pyarrow

TARS = (".tar", ".tar.gz", ".tar.zst")
KEY = "__key__"
NAME = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)")  # files of other names belong to no sample
WORDS = ("json", "txt")  # members that are read when a file is registered
BLOCK = 512  # headers and members fill whole ones
MEMBER_BYTES = 256 << 20  # the largest sample, with all its members: it is read as a whole
JSON_BYTES = 64 << 20  # of a sample's .json: in Python it takes many times as much
HEADER_BYTES = 256 << 10  # of long names and of PAX records, which tarfile reads as a whole
GLOBAL_RECORDS = 100  # of PAX, which tarfile keeps for the whole archive
LONG_HEADERS = (
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
)  # fmt: skip


class _Header(tarfile.TarInfo):
    """A header that is damaged ends the reading with an error, where tarfile takes it for the end.

    So does a header that would make tarfile read without bound: of a sparse member, whose content may be any
    number of times what the file holds, and one with records of more than HEADER_BYTES.
    """

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.size < 0 or self.type in LONG_HEADERS and self.size > HEADER_BYTES:
            raise tarfile.ReadError(
                f"at byte {self.offset:,}: got {self.size:,} bytes of header, expected 0 to {HEADER_BYTES:,}"
            )
        member = super()._proc_member(archive)  # type: ignore[misc]
        if member.size < 0:  # as a PAX record has it: the next header would be one that was read
            raise tarfile.ReadError(
                f"{member.name}: got a member of {member.size:,} bytes, expected 0 or more"
            )
        if len(archive.pax_headers) > GLOBAL_RECORDS:
            raise tarfile.ReadError(f"got more than {GLOBAL_RECORDS} global PAX records")
        return member

    def _proc_sparse(self, *_: Any) -> Any:
        """In place of what reads the map of holes of every format of sparse members."""
        raise tarfile.ReadError(
            f"at byte {self.offset:,}: got the sparse member '{self.name}', expected a plain one. "
            "Pack it without --sparse"
        )

    def _proc_gnusparse_00(self, member: tarfile.TarInfo, *_: Any) -> Any:
        _Header._proc_sparse(member)

    _proc_gnusparse_01 = _proc_gnusparse_10 = _proc_gnusparse_00

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "_Header":
        at = archive.offset
        try:
            return super().fromtarfile(archive)
        except (tarfile.EOFHeaderError, tarfile.EmptyHeaderError):  # type: ignore[attr-defined]
            raise
        except (tarfile.HeaderError, ValueError, RecursionError) as error:
            raise tarfile.ReadError(f"at byte {at:,}: {error}") from error


@dataclass
class Sample:
    """Members that stand together. `words`: content of those in WORDS; `fault`: why it is no sample."""

    key: str
    begin: int
    end: int
    words: dict[str, bytes] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    fault: str | None = None

    def record(self, text_key: str) -> dict[str, Any]:
        """What properties are evaluated over. ValueError says what is wrong with the sample."""
        if self.fault is not None:
            raise ValueError(self.fault)
        return record_of(self.key, self.words, text_key)


def record_of(key: str, members: dict[str, bytes], text_key: str) -> dict[str, Any]:
    """The record of a sample's members. ValueError where they give no text."""
    try:
        told = json.loads(members.get("json", b"{}"))
    except (ValueError, RecursionError):
        raise ValueError("its json is not JSON") from None
    if not isinstance(told, dict):
        raise ValueError("its json is no object")
    if not isinstance(told.get(text_key), str):
        if "txt" not in members:
            raise ValueError(f"no text under '{text_key}' in its json, and no txt")
        try:
            told[text_key] = members["txt"].decode()
        except UnicodeDecodeError:
            raise ValueError("its txt is not UTF-8") from None
    return {**told, KEY: key}


def samples_of(path: Path, member_bytes: int = MEMBER_BYTES) -> Iterator[Sample]:
    """The samples of an archive in their order.

    ValueError for one that cannot be read to its end, with a sample of more than `member_bytes` bytes, or
    with a sparse member. Memory is a sample's, whatever the headers promise and however the file is packed.
    """
    try:
        if path.name.endswith(".tar"):
            with tarfile.open(path, "r:", tarinfo=_Header) as archive:
                yield from _grouped(archive, member_bytes, path.stat().st_size)
        else:
            with opened(path) as stream, tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as archive:
                yield from _grouped(archive, member_bytes)
    except (tarfile.TarError, EOFError, OSError, zlib.error, ArithmeticError) as error:
        raise ValueError(f"{path}: cannot be read to its end ({error})") from error


def _check_size(member: tarfile.TarInfo, begin: int, member_bytes: int, file_bytes: int | None) -> None:
    """ReadError for a member that is larger than its file, or ends a sample that is too large."""
    end = member.offset_data + member.size
    if file_bytes is not None and end > file_bytes:
        raise tarfile.ReadError(
            f"{member.name}: got {member.size:,} bytes in its header, and a file of {file_bytes:,} bytes"
        )
    if end - begin > member_bytes:
        raise tarfile.ReadError(
            f"{member.name}: got a sample of {end - begin:,} bytes up to its end, expected at most "
            f"{member_bytes:,}. Raise --max-sample-mb if it is one"
        )
    if member.name.lower().endswith(".json") and member.size > JSON_BYTES:
        raise tarfile.ReadError(
            f"{member.name}: got {member.size:,} bytes of JSON, expected at most {JSON_BYTES:,}"
        )


def _grouped(archive: tarfile.TarFile, member_bytes: int, file_bytes: int | None = None) -> Iterator[Sample]:
    seen: set[str] = set()
    sample: Sample | None = None
    while (member := archive.next()) is not None:
        archive.members.clear()  # it would hold them all
        named = NAME.fullmatch(member.name)
        if not member.isfile() or named is None:
            continue
        key, extension = named[1], named[2].lower()
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = Sample(key, member.offset, 0)
            if key in seen:
                sample.fault = "apart from others of its name; put them one after another (tar --sort=name)"
            seen.add(key)
        _check_size(member, sample.begin, member_bytes, file_bytes)
        sample.end = member.offset_data + -(-member.size // BLOCK) * BLOCK
        if extension in sample.names:
            sample.fault = f"two members .{extension}"
        sample.names.add(extension)
        if extension in WORDS:
            sample.words[extension] = _content(archive, member)
    if sample is not None:
        yield sample


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None, "a file has content"
    return file.read()


def read_sample(span: bytes) -> tuple[str, dict[str, bytes]]:
    """(key, content of each member by its extension) of the bytes of one sample."""
    with tarfile.open(fileobj=io.BytesIO(span), mode="r:", tarinfo=_Header) as archive:
        found = [(NAME.fullmatch(one.name), one) for one in archive if one.isfile()]
        members = {named[2].lower(): _content(archive, one) for named, one in found if named is not None}
    keys = {named[1] for named, _ in found if named is not None}
    if len(keys) != 1:
        raise ValueError(f"got members of {len(keys)} samples, expected one")
    return keys.pop(), members


def column_of(spans: list[bytes], text_key: str) -> Any:
    """Samples as an Arrow column: struct of key, text, and members (extension to bytes)."""
    arrow = pyarrow()
    keys, texts, members = [], [], []
    for span in spans:
        key, held = read_sample(span)
        keys.append(key)
        texts.append(checked_text(record_of(key, held, text_key)[text_key], text_key))
        members.append(list(held.items()))
    of = arrow.map_(arrow.string(), arrow.large_binary())
    columns = (keys, arrow.string()), (texts, arrow.large_string()), (members, of)
    return arrow.StructArray.from_arrays(
        [arrow.array(values, kind) for values, kind in columns], [KEY, "text", "members"]
    )


def as_document(told: dict[str, Any]) -> dict[str, Any]:
    """A sample of `column_of` as clients have it: `__key__`, `text`, each member's bytes by extension."""
    return {**dict(told["members"]), KEY: told[KEY], "text": told["text"]}


def write_texts(path: Path, places: Iterable[tuple[int, int]], text_key: str, lines: Path) -> None:
    """The texts of samples at (begin, size) of an archive as lines of JSON."""
    with path.open("rb") as archive, lines.open("w") as sink:
        for begin, size in places:
            archive.seek(begin)
            key, members = read_sample(archive.read(size))
            sink.write(json.dumps({text_key: record_of(key, members, text_key)[text_key]}) + "\n")
