"""WebDataset archives: samples, their documents, and what is refused."""

import io
import tarfile
from pathlib import Path

import pytest

from megatron.mixture.files import TarSample, iter_samples, open_decompressed, read_sample


def write_tar(path: Path, samples: list[tuple[str, dict[str, bytes]]]) -> None:
    with tarfile.open(path, "w") as archive:
        for key, members in samples:
            for extension, content in members.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


def read_all(path: Path, **options: int) -> list[TarSample]:
    with open_decompressed(path) as stream:
        return list(iter_samples(path, stream, **options))


def test_a_sample_is_one_span_of_bytes_with_all_its_members(tmp_path) -> None:
    samples = [
        ("a/1", {"txt": b"a cat", "jpg": b"\xff\xd8" * 400}),
        ("a/" + "long" * 40, {"json": b'{"text": "a dog"}'}),
    ]
    write_tar(tmp_path / "x.tar", samples)
    content = (tmp_path / "x.tar").read_bytes()
    places = read_all(tmp_path / "x.tar")
    documents = [read_sample(content[sample.begin : sample.end], "text") for sample in places]
    assert documents == [
        {"__key__": "a/1", "text": "a cat", "txt": b"a cat", "jpg": b"\xff\xd8" * 400},
        {"__key__": samples[1][0], "text": "a dog", "json": b'{"text": "a dog"}'},
    ]


def test_samples_without_text_and_samples_apart_are_broken(tmp_path) -> None:
    write_tar(tmp_path / "x.tar", [("1", {"jpg": b"x"}), ("2", {"txt": b"b"}), ("1", {"txt": b"a"})])
    reasons = []
    for sample in read_all(tmp_path / "x.tar"):
        try:
            sample.build_record("text")
        except ValueError as error:
            reasons.append(str(error))
    assert reasons == [
        "no text under 'text' in its .json, and no .txt",
        "not adjacent to other members of its name; sort them (tar --sort=name)",
    ]


def test_damage_links_out_of_the_archive_and_large_samples_are_refused(tmp_path) -> None:
    write_tar(tmp_path / "x.tar", [(str(i), {"txt": b"x" * 600}) for i in range(4)])
    content = bytearray((tmp_path / "x.tar").read_bytes())
    content[1536 + 100] ^= 255  # in the header of the second member
    (tmp_path / "damaged.tar").write_bytes(content)
    (tmp_path / "cut.tar").write_bytes(bytes(content[:1000]))
    for name in ("damaged.tar", "cut.tar"):
        with pytest.raises(ValueError, match=f"{name}: cannot be read to its end .* Pack it again"):
            read_all(tmp_path / name)
    for kind, target in ((tarfile.SYMTYPE, "../../etc/passwd"), (tarfile.CHRTYPE, "")):
        with tarfile.open(tmp_path / "link.tar", "w") as archive:
            info = tarfile.TarInfo("1.txt")
            info.type, info.linkname = kind, target
            archive.addfile(info)
        with pytest.raises(ValueError, match="link.tar: cannot be read"):
            read_all(tmp_path / "link.tar")
    with pytest.raises(ValueError, match="got a sample of 1,536 bytes, expected at most 1,000"):
        read_all(tmp_path / "x.tar", max_bytes=1000)
