"""WebDataset archives: samples are registered in place, and read with all their members."""

import gzip
import io
import json
import subprocess
import sys
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from megatron.mixture.catalog import records
from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.properties import read_properties
from megatron.mixture.catalog.tars import iter_samples, read_sample
from megatron.mixture.document_chunks import DocumentChunks
from megatron.mixture.serve.client import MixtureDataset
from megatron.mixture.serve.hugging_face import hugging_face
from megatron.mixture.spec import prepare_mixture

PROPERTIES = ("width AS width integer", "lang AS lang category", "__key__ AS key")
LONG = "a/" + "very_long_directory/" * 8 + "name"  # more than the 100 bytes of a plain header


def make_image(i: int) -> bytes:
    """Return bytes that are not text."""
    return bytes([0xFF, 0xD8, i % 256]) * (i * 37 % 900)


def write_tar(path: Path, members: list[tuple[str, bytes]], how: int = tarfile.GNU_FORMAT) -> None:
    """Write an archive, gzipped if its name ends with .gz."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=how) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    path.write_bytes(gzip.compress(buffer.getvalue()) if path.suffix == ".gz" else buffer.getvalue())


def make_members(n: int) -> list[tuple[str, bytes]]:
    """Return samples 0 .. n - 1 with an image; text in .txt of even ones, in .json of odd ones."""
    members = []
    for i in range(n):
        record = {"width": i, "lang": "de" if i % 3 else "en"} | ({"text": f"caption {i}"} if i % 2 else {})
        members += [(f"d/{i:04}.jpg", make_image(i)), (f"d/{i:04}.json", json.dumps(record).encode())]
        members += [] if i % 2 else [(f"d/{i:04}.txt", f"caption {i}".encode())]
    return members


def register(folder: Path, *paths: Path) -> Path:
    """Return a mixture of all samples of archives."""
    with Catalog(folder / "catalog", n_threads=1) as catalog:
        catalog.register("pictures", list(map(str, paths)), read_properties(PROPERTIES), quiet=True)
    mixture = folder / "mixture.yaml"
    mixture.write_text("catalog: catalog\nby: [lang]\ncount: documents\ndry: stop\nshuffle: false\n")
    return mixture


@pytest.mark.parametrize("name", ["s.tar", "s.tar.gz"])
@pytest.mark.parametrize("how", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_are_read_with_their_text_and_every_member_as_bytes(tmp_path, name, how) -> None:
    write_tar(tmp_path / name, make_members(60), how)
    source = DocumentChunks(register(tmp_path, tmp_path / name), chunk_size=3)
    (*chunks,) = MixtureDataset(lambda: source)
    documents = {document["__key__"]: document for chunk in chunks for document in chunk.documents}
    assert len(documents) == 60
    for i in range(60):
        document = documents[f"d/{i:04}"]
        assert document["text"] == f"caption {i}"
        assert document["jpg"] == make_image(i)
        assert json.loads(document["json"])["width"] == i
        assert ("txt" in document) == (i % 2 == 0)
    assert [source.names[k] for k in chunks[0].domains].count("de") == 2  # two of three samples are in German
    (row,) = hugging_face(MixtureDataset(lambda: source)).take(1)
    assert row["sample"] == chunks[0].documents[0]


@pytest.mark.parametrize("block_bytes", [1, 500, 1 << 20])
def test_properties_are_read_from_the_json_for_any_block_size(tmp_path, monkeypatch, block_bytes) -> None:
    monkeypatch.setattr(records, "BLOCK_BYTES", block_bytes)
    write_tar(tmp_path / "s.tar", make_members(20))
    register(tmp_path, tmp_path / "s.tar")
    with Catalog(tmp_path / "catalog", read_only=True) as catalog:
        rows = catalog.connection.execute("SELECT row, width, key FROM documents_1 ORDER BY row").fetchall()
    assert rows == [(i, i, f"d/{i:04}") for i in range(20)]


def test_spans_hold_whole_samples_with_names_of_any_length(tmp_path) -> None:
    members = [(f"{LONG}{i}.tar.ext", b"x" * i) for i in range(3)] + [(f"{LONG}2.txt", b"t")]
    for how in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        write_tar(tmp_path / "s.tar", members, how)
        whole = (tmp_path / "s.tar").read_bytes()
        samples = [
            read_sample(whole[sample.begin : sample.end]) for sample in iter_samples(tmp_path / "s.tar")
        ]
        assert [key for key, _ in samples] == [f"{LONG}{i}" for i in range(3)]
        assert samples[2][1] == {"tar.ext": b"xx", "txt": b"t"}


def test_broken_samples_are_counted_and_named_and_the_others_registered(tmp_path) -> None:
    fine = [("a.txt", b"a"), ("a.json", b'{"width": 1}')]
    broken = [
        ("b.json", b"{"), ("c.jpg", b""), ("d.txt", b"\xff"), ("e.json", b"[]"),
        ("f.json", b'{"text": "f", "width": "wide"}'), ("g.txt", b"g"), ("g.TXT", b"g"), ("a.png", b"late"),
    ]  # fmt: skip
    others = [("README", b"of no sample"), (".hidden", b""), ("h.txt", b"h")]
    write_tar(tmp_path / "s.tar", fine + broken + others)
    register(tmp_path, tmp_path / "s.tar")
    with Catalog(tmp_path / "catalog", read_only=True) as catalog:
        (listed,) = catalog.summarize_corpora()
        broken_samples = [(number, reason) for _, number, reason in catalog.list_broken("pictures")]
    assert (listed.n_documents, listed.n_broken) == (2, 7)
    assert broken_samples == [
        (2, "b: its .json is not JSON"), (3, "c: no text under 'text' in its .json, and no .txt"),
        (4, "d: its .txt is not UTF-8"), (5, "e: its .json is not an object"),
        (6, "f: 'width' is no integer"),
        (7, "g: two members .txt"),
        (8, "a: not adjacent to other members of its name; sort them (tar --sort=name)"),
    ]  # fmt: skip


@pytest.mark.parametrize("damage", ["truncated member", "truncated header", "wrong checksum"])
def test_a_truncated_or_damaged_archive_is_refused_entirely(tmp_path, damage) -> None:
    write_tar(tmp_path / "s.tar", make_members(5))
    whole = bytearray((tmp_path / "s.tar").read_bytes())
    *_, last = iter_samples(tmp_path / "s.tar")
    if damage == "wrong checksum":
        whole[last.begin] ^= 1
    else:
        del whole[last.end - 500 if damage == "truncated member" else last.begin + 300 :]
    (tmp_path / "s.tar").write_bytes(whole)
    (tmp_path / "s.tar.gz").write_bytes(gzip.compress(whole))
    for name in ("s.tar", "s.tar.gz"):
        with pytest.raises(ValueError, match=rf"{name}: cannot be read to its end"):
            register(tmp_path, tmp_path / name)
    with Catalog(tmp_path / "catalog", read_only=True) as catalog:
        assert catalog.summarize_corpora() == []


def test_only_new_and_changed_archives_of_a_folder_are_registered(tmp_path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    write_tar(folder / "0.tar", make_members(3))
    register(tmp_path, folder)
    write_tar(folder / "1.tar.gz", make_members(4))
    with Catalog(tmp_path / "catalog", n_threads=1) as catalog:
        done = catalog.register("pictures", [str(folder)], read_properties(PROPERTIES), quiet=True)
    assert (done.n_files, done.n_known, done.n_documents) == (1, 1, 4)


def test_captions_are_trained_on_like_any_text(tmp_path, scaling_data) -> None:
    write_tar(tmp_path / "s.tar.gz", make_members(6))
    mixture = register(tmp_path, tmp_path / "s.tar.gz")
    mixture.write_text(f"catalog: catalog\nby: [lang]\ntokenizer: {scaling_data / 'gpt2_tokenizer'}\n")
    resolved = prepare_mixture(mixture, quiet=True)
    # GPT-2 tokens: "caption" 2, " 3" 1, end of document 1; samples 0 and 3 are English
    assert (resolved.domains, resolved.documents) == (("de", "en"), (4, 2))
    assert resolved.tokens == (4 * 4, 2 * 4)


def add_pax_member(archive: tarfile.TarFile, name: str, content: bytes, records: dict[str, str]) -> None:
    """Add a member with its own PAX records."""
    info = tarfile.TarInfo(name)
    info.size, info.pax_headers = len(content), records
    archive.addfile(info, io.BytesIO(content))


def make_header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return a header that claims any size."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def make_hostile_archive(kind: str) -> bytes:
    """Return an archive that is much smaller than its headers claim."""
    if kind == "1 TB member":
        return make_header("big.txt", 1 << 40) + b"x" * 1024
    if kind == "1 TB long name":
        return make_header("././@LongLink", 1 << 40, tarfile.GNUTYPE_LONGNAME) + b"x" * 1024
    if kind == "1 TB PAX record":
        return make_header("big.txt", 1 << 40, tarfile.XHDTYPE) + b"x" * 1024
    if kind == "GNU sparse":
        return make_header("big.txt", 0, tarfile.GNUTYPE_SPARSE) + b"\0" * 1024
    if kind == "negative size":
        return make_header("big.txt", -1024) + b"\0" * 1024
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
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        add_pax_member(archive, "big.txt", b"0\n".ljust(512, b"\0"), records)
    return buffer.getvalue()


HOSTILE = (
    "1 TB member", "1 TB long name", "1 TB PAX record", "GNU sparse", "negative size", "sparse 0.0",
    "sparse 0.1", "sparse 1.0", "real size", "negative PAX size", "no number", "many digits",
)  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_archive_whose_headers_claim_too_much_is_refused_with_little_memory(tmp_path, kind) -> None:
    content = make_hostile_archive(kind)
    (tmp_path / "s.tar").write_bytes(content)
    (tmp_path / "s.tar.gz").write_bytes(gzip.compress(content))
    for name in ("s.tar", "s.tar.gz"):
        tracemalloc.start()
        try:
            with pytest.raises(
                ValueError, match=rf"{name}: cannot be read to its end \(.*(big\.txt|at byte)"
            ):
                list(iter_samples(tmp_path / name))
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
        str(tmp_path / "c"),
        "add",
        "x",
    ]
    words += [str(tmp_path / name), "--max-sample-mb"]
    done = subprocess.run([*words, "2"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert f"{name}: cannot be read to its end (b.png: got a sample of" in done.stderr
    assert "raise --max-sample-mb" in done.stderr
    assert subprocess.run([*words, "3"], capture_output=True, timeout=240).returncode == 0


def test_a_decompression_bomb_takes_the_memory_of_one_member(tmp_path) -> None:
    with gzip.open(tmp_path / "bomb.tar.gz", "wb", compresslevel=1) as sink:
        for i in range(60):
            sink.write(make_header(f"{i}.txt", 1 << 20) + b"a" * (1 << 20))
        sink.write(make_header("last.txt", 300 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"bomb\.tar\.gz: .*last\.txt: got a sample of 314,"):
            for sample in iter_samples(tmp_path / "bomb.tar.gz"):
                assert len(sample.text_members["txt"]) == 1 << 20
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
