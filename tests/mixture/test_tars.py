"""WebDataset archives: the records of samples, and what is refused."""

import io
import json
import tarfile
from pathlib import Path

import pytest

from megatron.mixture import files
from megatron.mixture.files import iter_sample_lines


def write_tar(path: Path, samples: list[tuple[str, dict[str, bytes]]]) -> None:
    with tarfile.open(path, "w") as archive:
        for key, members in samples:
            for extension, content in members.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


def read_all(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in iter_sample_lines(path, "text")]


def test_a_sample_is_a_record_with_the_text_of_its_members(tmp_path) -> None:
    samples = [
        ("a/1", {"txt": b"a cat", "jpg": b"\xff\xd8" * 400}),
        ("a/" + "long" * 40, {"json": b'{"text": "a dog", "__key__": "x", "n": 3}'}),
        ("a/2", {"json": b'{"n": 4}', "txt": b"a bird", "seg.png": b""}),
    ]
    write_tar(tmp_path / "x.tar", samples)
    assert read_all(tmp_path / "x.tar") == [
        {"__key__": "a/1", "text": "a cat"},
        {"__key__": samples[1][0], "text": "a dog", "n": 3},
        {"__key__": "a/2", "text": "a bird", "n": 4},
    ]


def test_samples_without_text_have_records_without_text(tmp_path) -> None:
    broken = [{"jpg": b"x"}, {"txt": b"\xff"}, {"json": b"{"}, {"json": b"[1]", "txt": b"a"}]
    write_tar(tmp_path / "x.tar", [(str(i), members) for i, members in enumerate(broken)])
    assert read_all(tmp_path / "x.tar") == [{"__key__": str(i)} for i in range(4)]


def test_damage_links_out_of_the_archive_and_large_texts_are_refused(tmp_path, monkeypatch) -> None:
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
    monkeypatch.setattr(files, "MAX_MEMBER_BYTES", 500)
    with pytest.raises(ValueError, match="0.txt: got a text of over 500 bytes"):
        read_all(tmp_path / "x.tar")
