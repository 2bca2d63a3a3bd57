"""WebDataset archives: a document is a sample, the members of a tar that share a name up to its first dot.

`3/cat.json`, `3/cat.txt` and `3/cat.jpg`, in adjacent positions, are the sample `3/cat`. Its record is the
object in `.json`, with the key `__key__` added. The content of `.txt` becomes its text if `.json` has none.
In the catalog a sample is the byte span from its first header to the end of its last member (of the
decompressed content, if the archive is compressed).
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

from megatron.mixture.lazy_imports import import_pyarrow
from megatron.text.text_readers import check_text, open_decompressed

TAR_SUFFIXES = (".tar", ".tar.gz", ".tar.zst")
KEY_FIELD = "__key__"
# 3/cat.seg.png: key 3/cat, extension seg.png. A name such as 3/.hidden has no key.
MEMBER_NAME = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)")  # files with other names belong to no sample
TEXT_EXTENSIONS = ("json", "txt")  # members that registration reads
BLOCK_BYTES = 512  # size of headers; members are padded to multiples of it
MAX_SAMPLE_BYTES = 256 << 20  # limit of a sample with all its members, because it is read as a whole
MAX_JSON_BYTES = 64 << 20  # of a sample's .json, which takes several times the memory when parsed
MAX_HEADER_BYTES = 256 << 10  # limit of long names and of PAX records, which tarfile reads as a whole
MAX_GLOBAL_RECORDS = 100  # limit of global PAX records, which tarfile keeps for the whole archive
LONG_HEADERS = (
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
)  # fmt: skip


class _Header(tarfile.TarInfo):
    """Tar header that raises an error for damage that tarfile treats as the end of the archive.

    It also refuses a header that would make tarfile read without bound: a sparse member, whose content may be
    much larger than the file, and a member with records of more than MAX_HEADER_BYTES.
    """

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        # before tarfile reads the records: the size in this header is what it would allocate
        if self.size < 0 or self.type in LONG_HEADERS and self.size > MAX_HEADER_BYTES:
            raise tarfile.ReadError(
                f"at byte {self.offset:,}: got {self.size:,} bytes of header, "
                f"expected 0 to {MAX_HEADER_BYTES:,}"
            )
        member = super()._proc_member(archive)  # type: ignore[misc]  # not in typeshed
        # from a PAX record: tarfile would seek back to a header that was read before
        if member.size < 0:
            raise tarfile.ReadError(
                f"{member.name}: got a member of {member.size:,} bytes, expected 0 or more"
            )
        # they accumulate over the archive
        if len(archive.pax_headers) > MAX_GLOBAL_RECORDS:
            raise tarfile.ReadError(f"got more than {MAX_GLOBAL_RECORDS} global PAX records")
        return member

    def _proc_sparse(self, *_: Any) -> Any:
        """Replace the readers of the hole maps of all formats of sparse members."""
        raise _make_sparse_error(self)

    # PAX formats: tarfile calls them on the record, with the sparse member as the first argument
    def _proc_gnusparse_00(self, member: tarfile.TarInfo, *_: Any) -> Any:
        raise _make_sparse_error(member)

    _proc_gnusparse_01 = _proc_gnusparse_10 = _proc_gnusparse_00

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "_Header":
        at = archive.offset
        try:
            return super().fromtarfile(archive)
        # regular ends of an archive
        except (tarfile.EOFHeaderError, tarfile.EmptyHeaderError):  # type: ignore[attr-defined]  # not in typeshed
            raise
        except (tarfile.HeaderError, ValueError, RecursionError) as error:
            raise tarfile.ReadError(f"at byte {at:,}: {error}") from error


def _make_sparse_error(member: tarfile.TarInfo) -> tarfile.ReadError:
    return tarfile.ReadError(
        f"at byte {member.offset:,}: got the sparse member '{member.name}', expected a plain one. "
        "Pack it without --sparse"
    )


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


def iter_samples(path: Path, member_bytes: int = MAX_SAMPLE_BYTES) -> Iterator[TarSample]:
    """Yield the samples of an archive in order.

    Raises ValueError for an archive that cannot be read to its end, with a sample of more than `member_bytes`
    bytes, or with a sparse member. Memory is bounded by one sample and the names of all, whatever the headers
    claim and however the file is compressed.
    """
    try:
        if path.name.endswith(".tar"):
            # random access: tarfile seeks over the content of members that are not read
            with tarfile.open(path, "r:", tarinfo=_Header) as archive:
                yield from _group_members(archive, member_bytes, path.stat().st_size)
        else:
            with (
                open_decompressed(path) as stream,
                # a decompressed stream has no cheap seek: "r|" reads forwards only
                tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as archive,
            ):
                yield from _group_members(archive, member_bytes)
    except (tarfile.TarError, EOFError, OSError, zlib.error, ArithmeticError) as error:
        raise ValueError(f"{path}: cannot be read to its end ({error})") from error


def _check_size(member: tarfile.TarInfo, begin: int, member_bytes: int, file_bytes: int | None) -> None:
    """Raise ReadError for a member that is larger than its file, or that makes its sample too large."""
    end = member.offset_data + member.size
    if file_bytes is not None and end > file_bytes:
        raise tarfile.ReadError(
            f"{member.name}: got {member.size:,} bytes in its header, and a file of {file_bytes:,} bytes"
        )
    if end - begin > member_bytes:
        raise tarfile.ReadError(
            f"{member.name}: got a sample of {end - begin:,} bytes up to its end, expected at most "
            f"{member_bytes:,}. If the sample is valid, raise --max-sample-mb"
        )
    if member.name.lower().endswith(".json") and member.size > MAX_JSON_BYTES:
        raise tarfile.ReadError(
            f"{member.name}: got {member.size:,} bytes of JSON, expected at most {MAX_JSON_BYTES:,}"
        )


def _group_members(
    archive: tarfile.TarFile, member_bytes: int, file_bytes: int | None = None
) -> Iterator[TarSample]:
    seen: set[str] = set()
    sample: TarSample | None = None
    while (member := archive.next()) is not None:
        # tarfile would keep all members in memory
        archive.members.clear()  # type: ignore[attr-defined]  # typeshed lacks the attribute
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
        _check_size(member, sample.begin, member_bytes, file_bytes)
        # rounded up to a multiple of the block size
        sample.end = member.offset_data + -(-member.size // BLOCK_BYTES) * BLOCK_BYTES
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


def read_sample(span: bytes) -> tuple[str, dict[str, bytes]]:
    """Return (key, content of each member by its extension) of the bytes of one sample."""
    # a span has no end-of-archive blocks: tarfile also ends where the bytes end
    with tarfile.open(fileobj=io.BytesIO(span), mode="r:", tarinfo=_Header) as archive:
        members_by_name = [
            (MEMBER_NAME.fullmatch(member.name), member) for member in archive if member.isfile()
        ]
        members = {
            named[2].lower(): _read_member(archive, member)
            for named, member in members_by_name
            if named is not None
        }
    keys = {named[1] for named, _ in members_by_name if named is not None}
    if len(keys) != 1:
        raise ValueError(f"got members of {len(keys)} samples, expected one.")
    return keys.pop(), members


def samples_to_arrow(spans: list[bytes], text_key: str) -> Any:
    """Return samples as an Arrow column: struct of key, text, and members (extension to bytes)."""
    arrow = import_pyarrow()
    keys, texts, members = [], [], []
    for span in spans:
        key, content = read_sample(span)
        keys.append(key)
        texts.append(check_text(build_record(key, content, text_key)[text_key], text_key))
        members.append(list(content.items()))
    map_type = arrow.map_(arrow.string(), arrow.large_binary())
    columns = (keys, arrow.string()), (texts, arrow.large_string()), (members, map_type)
    return arrow.StructArray.from_arrays(
        [arrow.array(values, kind) for values, kind in columns], [KEY_FIELD, "text", "members"]
    )


def sample_to_document(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample of `samples_to_arrow` as clients get it: `__key__`, `text`, each member's bytes."""
    return {**dict(sample["members"]), KEY_FIELD: sample[KEY_FIELD], "text": sample["text"]}


def write_texts(path: Path, places: Iterable[tuple[int, int]], text_key: str, lines: Path) -> None:
    """Write the texts of samples at (begin, size) of an archive as lines of JSON."""
    with path.open("rb") as archive, lines.open("w") as sink:
        for begin, size in places:
            archive.seek(begin)
            key, members = read_sample(archive.read(size))
            sink.write(json.dumps({text_key: build_record(key, members, text_key)[text_key]}) + "\n")
