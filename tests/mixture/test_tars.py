"""WebDataset archives: samples are registered where they stand, and come back with all their members."""

import gzip
import io
import json
import subprocess
import sys
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from megatron.mixture import records
from megatron.mixture.catalog import Catalog
from megatron.mixture.client import MixtureDataset
from megatron.mixture.documents import DocumentChunks
from megatron.mixture.hugging_face import hugging_face
from megatron.mixture.properties import read_properties
from megatron.mixture.spec import prepare
from megatron.mixture.tars import read_sample, samples_of

PROPERTIES = ("width AS width integer", "lang AS lang category", "__key__ AS key")
LONG = "a/" + "very_long_directory/" * 8 + "name"  # more than the 100 bytes of a plain header


def image(i: int) -> bytes:
    """Bytes that are no text."""
    return bytes([0xFF, 0xD8, i % 256]) * (i * 37 % 900)


def write_tar(path: Path, members: list[tuple[str, bytes]], how: int = tarfile.GNU_FORMAT) -> None:
    """An archive, gzipped where its name says so."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=how) as archive:
        for name, content in members:
            told = tarfile.TarInfo(name)
            told.size = len(content)
            archive.addfile(told, io.BytesIO(content))
    path.write_bytes(gzip.compress(held.getvalue()) if path.suffix == ".gz" else held.getvalue())


def some_members(n: int) -> list[tuple[str, bytes]]:
    """Samples 0 .. n - 1 with an image; text in the txt of even ones, in the json of odd ones."""
    members = []
    for i in range(n):
        told = {"width": i, "lang": "de" if i % 3 else "en"} | ({"text": f"caption {i}"} if i % 2 else {})
        members += [(f"d/{i:04}.jpg", image(i)), (f"d/{i:04}.json", json.dumps(told).encode())]
        members += [] if i % 2 else [(f"d/{i:04}.txt", f"caption {i}".encode())]
    return members


def register(folder: Path, *paths: Path) -> Path:
    """A mixture of all samples of archives."""
    with Catalog(folder / "catalog.duckdb", n_threads=1) as catalog:
        catalog.register("pictures", list(map(str, paths)), read_properties(PROPERTIES), quiet=True)
    mixture = folder / "mixture.yaml"
    mixture.write_text("catalog: catalog.duckdb\nby: [lang]\ncount: documents\ndry: stop\nshuffle: false\n")
    return mixture


@pytest.mark.parametrize("name", ["s.tar", "s.tar.gz"])
@pytest.mark.parametrize("how", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_come_back_with_their_text_and_every_member_as_bytes(tmp_path, name, how) -> None:
    write_tar(tmp_path / name, some_members(60), how)
    source = DocumentChunks(register(tmp_path, tmp_path / name), chunk_size=3)
    (*chunks,) = MixtureDataset(lambda: source)
    found = {one["__key__"]: one for chunk in chunks for one in chunk.documents}
    assert len(found) == 60
    for i in range(60):
        told = found[f"d/{i:04}"]
        assert told["text"] == f"caption {i}"
        assert told["jpg"] == image(i)
        assert json.loads(told["json"])["width"] == i
        assert ("txt" in told) == (i % 2 == 0)
    assert [source.names[k] for k in chunks[0].domains].count("de") == 2  # two of three are
    (row,) = hugging_face(MixtureDataset(lambda: source)).take(1)
    assert row["sample"] == chunks[0].documents[0]


@pytest.mark.parametrize("block_bytes", [1, 500, 1 << 20])
def test_properties_are_read_from_the_json_whatever_the_blocks(tmp_path, monkeypatch, block_bytes) -> None:
    monkeypatch.setattr(records, "BLOCK_BYTES", block_bytes)
    write_tar(tmp_path / "s.tar", some_members(20))
    register(tmp_path, tmp_path / "s.tar")
    with Catalog(tmp_path / "catalog.duckdb", read_only=True) as catalog:
        rows = catalog.connection.execute("SELECT row, width, key FROM documents_1 ORDER BY row").fetchall()
    assert rows == [(i, i, f"d/{i:04}") for i in range(20)]


def test_spans_hold_whole_samples_with_names_of_any_length(tmp_path) -> None:
    members = [(f"{LONG}{i}.tar.ext", b"x" * i) for i in range(3)] + [(f"{LONG}2.txt", b"t")]
    for how in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        write_tar(tmp_path / "s.tar", members, how)
        whole = (tmp_path / "s.tar").read_bytes()
        found = [read_sample(whole[one.begin : one.end]) for one in samples_of(tmp_path / "s.tar")]
        assert [key for key, _ in found] == [f"{LONG}{i}" for i in range(3)]
        assert found[2][1] == {"tar.ext": b"xx", "txt": b"t"}


def test_broken_samples_are_counted_and_named_and_the_others_stay(tmp_path) -> None:
    fine = [("a.txt", b"a"), ("a.json", b'{"width": 1}')]
    broken = [
        ("b.json", b"{"), ("c.jpg", b""), ("d.txt", b"\xff"), ("e.json", b"[]"),
        ("f.json", b'{"text": "f", "width": "wide"}'), ("g.txt", b"g"), ("g.TXT", b"g"), ("a.png", b"late"),
    ]  # fmt: skip
    others = [("README", b"of no sample"), (".hidden", b""), ("h.txt", b"h")]
    write_tar(tmp_path / "s.tar", fine + broken + others)
    register(tmp_path, tmp_path / "s.tar")
    with Catalog(tmp_path / "catalog.duckdb", read_only=True) as catalog:
        (listed,) = catalog.summary()
        told = [(number, reason) for _, number, reason in catalog.broken("pictures")]
    assert (listed.n_documents, listed.n_broken) == (2, 7)
    assert told == [
        (2, "b: its json is not JSON"), (3, "c: no text under 'text' in its json, and no txt"),
        (4, "d: its txt is not UTF-8"), (5, "e: its json is no object"), (6, "f: 'width' is no integer"),
        (7, "g: two members .txt"),
        (8, "a: apart from others of its name; put them one after another (tar --sort=name)"),
    ]  # fmt: skip


@pytest.mark.parametrize("damage", ["truncated member", "truncated header", "wrong checksum"])
def test_an_archive_that_is_cut_or_damaged_is_refused_whole(tmp_path, damage) -> None:
    write_tar(tmp_path / "s.tar", some_members(5))
    whole = bytearray((tmp_path / "s.tar").read_bytes())
    *_, last = samples_of(tmp_path / "s.tar")
    if damage == "wrong checksum":
        whole[last.begin] ^= 1
    else:
        del whole[last.end - 500 if damage == "truncated member" else last.begin + 300 :]
    (tmp_path / "s.tar").write_bytes(whole)
    (tmp_path / "s.tar.gz").write_bytes(gzip.compress(whole))
    for name in ("s.tar", "s.tar.gz"):
        with pytest.raises(ValueError, match=rf"{name}: cannot be read to its end"):
            register(tmp_path, tmp_path / name)
    with Catalog(tmp_path / "catalog.duckdb", read_only=True) as catalog:
        assert catalog.summary()[0].n_documents == 0


def test_only_new_and_changed_archives_of_a_folder_are_taken(tmp_path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    write_tar(folder / "0.tar", some_members(3))
    register(tmp_path, folder)
    write_tar(folder / "1.tar.gz", some_members(4))
    with Catalog(tmp_path / "catalog.duckdb", n_threads=1) as catalog:
        done = catalog.register("pictures", [str(folder)], read_properties(PROPERTIES), quiet=True)
    assert (done.n_files, done.n_known, done.n_documents) == (1, 1, 4)


def test_captions_are_trained_on_like_any_text(tmp_path, scaling_data) -> None:
    write_tar(tmp_path / "s.tar.gz", some_members(6))
    mixture = register(tmp_path, tmp_path / "s.tar.gz")
    mixture.write_text(f"catalog: catalog.duckdb\nby: [lang]\ntokenizer: {scaling_data / 'gpt2_tokenizer'}\n")
    resolved = prepare(mixture, quiet=True)
    # "caption" is two tokens of GPT-2, " 3" one, the end another; 0 and 3 are English
    assert (resolved.domains, resolved.documents) == (("de", "en"), (4, 2))
    assert resolved.tokens == (4 * 4, 2 * 4)


def pax(archive: tarfile.TarFile, name: str, content: bytes, records: dict[str, str]) -> None:
    """A member with PAX records of its own."""
    told = tarfile.TarInfo(name)
    told.size, told.pax_headers = len(content), records
    archive.addfile(told, io.BytesIO(content))


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A header that promises any size."""
    told = tarfile.TarInfo(name)
    told.size, told.type = size, kind
    return told.tobuf(tarfile.GNU_FORMAT)


def hostile(kind: str) -> bytes:
    """An archive that is much smaller than what it promises."""
    if kind == "1 TB member":
        return header("big.txt", 1 << 40) + b"x" * 1024
    if kind == "1 TB long name":
        return header("././@LongLink", 1 << 40, tarfile.GNUTYPE_LONGNAME) + b"x" * 1024
    if kind == "1 TB PAX record":
        return header("big.txt", 1 << 40, tarfile.XHDTYPE) + b"x" * 1024
    if kind == "GNU sparse":
        return header("big.txt", 0, tarfile.GNUTYPE_SPARSE) + b"\0" * 1024
    if kind == "negative size":
        return header("big.txt", -1024) + b"\0" * 1024
    records = {
        "sparse 0.0": {"GNU.sparse.size": str(6 << 30), "GNU.sparse.numblocks": "0"},
        "sparse 0.1": {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(6 << 30)},
        "sparse 1.0": {
            "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "big.txt",
            "GNU.sparse.realsize": str(6 << 30),
        },
        "real size": {"GNU.sparse.realsize": str(6 << 30)},
        "negative PAX size": {"size": "-1024"},
        "no number": {"GNU.sparse.realsize": "many"},
        "many digits": {"GNU.sparse.realsize": "9" * 5000},
    }[kind]  # fmt: skip
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=tarfile.PAX_FORMAT) as archive:
        pax(archive, "big.txt", b"0\n".ljust(512, b"\0"), records)
    return held.getvalue()


HOSTILE = (
    "1 TB member", "1 TB long name", "1 TB PAX record", "GNU sparse", "negative size", "sparse 0.0",
    "sparse 0.1", "sparse 1.0", "real size", "negative PAX size", "no number", "many digits",
)  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_archive_that_promises_more_than_it_holds_is_refused_with_little_memory(tmp_path, kind) -> None:
    content = hostile(kind)
    (tmp_path / "s.tar").write_bytes(content)
    (tmp_path / "s.tar.gz").write_bytes(gzip.compress(content))
    for name in ("s.tar", "s.tar.gz"):
        tracemalloc.start()
        try:
            with pytest.raises(
                ValueError, match=rf"{name}: cannot be read to its end \(.*(big\.txt|at byte)"
            ):
                list(samples_of(tmp_path / name))
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()
        with pytest.raises((ValueError, tarfile.TarError)):
            read_sample(content)


@pytest.mark.parametrize("name", ["s.tar", "s.tar.gz"])
def test_a_sample_that_is_too_large_is_refused_by_name_and_may_be_allowed(tmp_path, root, name) -> None:
    mb = 1 << 20
    write_tar(tmp_path / name, [("a.txt", b"a"), ("b.jpg", bytes(mb)), ("b.png", bytes(mb)), ("b.txt", b"b")])
    words = [
        sys.executable,
        str(root / "tools" / "register_corpus.py"),
        str(tmp_path / "c.duckdb"),
        "add",
        "x",
    ]
    words += [str(tmp_path / name), "--max-sample-mb"]
    done = subprocess.run([*words, "2"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert f"{name}: cannot be read to its end (b.png: got a sample of" in done.stderr
    assert "Raise --max-sample-mb" in done.stderr
    assert subprocess.run([*words, "3"], capture_output=True, timeout=240).returncode == 0


def test_a_bomb_of_many_members_takes_the_memory_of_one(tmp_path) -> None:
    with gzip.open(tmp_path / "bomb.tar.gz", "wb", compresslevel=1) as sink:
        for i in range(60):
            sink.write(header(f"{i}.txt", 1 << 20) + b"a" * (1 << 20))
        sink.write(header("last.txt", 300 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"bomb\.tar\.gz: .*last\.txt: got a sample of 314,"):
            for sample in samples_of(tmp_path / "bomb.tar.gz"):
                assert len(sample.words["txt"]) == 1 << 20
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
