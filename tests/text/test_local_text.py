"""Text of installed packages, read from installations that the tests create."""

import base64
import hashlib
import json
import os
import re
import sys
import sysconfig
from pathlib import Path

import pytest

from megatron.text import local_text
from megatron.text.corpus import prepare_corpus
from megatron.text.local_text import MAX_BYTES, MIN_BYTES, PACKAGES, read_local_text


def make_body(i: int, n_bytes: int = 400) -> str:
    return (f"# module {i}\n" * n_bytes)[:n_bytes]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages at the front of the import path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def install_package(site: Path, name: str, files: dict[str, bytes], **metadata: str) -> Path:
    """Install a package as pip does: its files, and RECORD with the sha256 of each."""
    info = site / f"{name}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    rows = []
    for path, content in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(content)}\n")
    (info / "RECORD").write_text("".join(rows))
    for file, content in metadata.items():
        (info / f"{file}.json").write_text(content)
    return info


def test_every_machine_has_megabytes_of_the_standard_library() -> None:
    text = read_local_text(["python"])
    assert not text.missing
    assert sum(len(document) for _, document in text.documents) > 5_000_000
    assert len(text.documents) > 100


def test_the_packages_are_pinned_in_the_requirements(root: Path) -> None:
    text = "".join((root / name).read_text() for name in ("requirements.txt", "constraints.txt"))
    pinned = re.findall(r"^([\w-]+)==", text, re.MULTILINE)
    assert set(PACKAGES) <= set(pinned)


def test_skipped_files_are_counted_by_reason(site: Path) -> None:
    files = {
        "some/a.py": make_body(0).encode(),
        "some/same.py": make_body(0).encode(),
        "some/long.py": b"x" * (MAX_BYTES + 1),
        "some/longest.py": b"y" * MAX_BYTES,
        "some/short.py": b"z" * (MIN_BYTES - 1),
        "some/shortest.py": b"z" * MIN_BYTES,
        "some/latin.py": make_body(1).encode() + b"\xe9",
        "some/edited.py": make_body(2).encode(),
        "some/gone.py": make_body(3).encode(),
        "some/folder.py": make_body(4).encode(),
        "some/loop.py": make_body(5).encode(),
        "some/pipe.py": make_body(6).encode(),
        "some/data.txt": make_body(7).encode(),
    }
    install_package(site, "some", files)
    (site / "some" / "edited.py").write_text(make_body(8))
    for name in ("gone", "folder", "loop", "pipe"):
        (site / "some" / f"{name}.py").unlink()
    (site / "some" / "folder.py").mkdir()
    (site / "some" / "loop.py").symlink_to("loop.py")
    os.mkfifo(site / "some" / "pipe.py")
    text = read_local_text(["some"])
    assert {document for _, document in text.documents} == {make_body(0), "y" * MAX_BYTES, "z" * MIN_BYTES}
    assert text.skipped["some"] == {
        "too_large": 1, "too_small": 1, "not_utf8": 1, "unreadable": 4, "unverified": 1, "copies": 1,
    }  # fmt: skip


def test_the_order_is_independent_of_file_names_and_of_the_split(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_package(site, "one", {f"one/m{i}.py": make_body(i).encode() for i in range(400)})
    install_package(site, "two", {f"two/m{(7 * i) % 400}.py": make_body(i).encode() for i in range(400)})
    texts, again = ([text for _, text in read_local_text([name]).documents] for name in ("one", "two"))
    assert texts == again
    assert texts != sorted(texts)
    # in the first quarter of this order 5 % are held out, not all: 5 of 100, +- 4 standard deviations of 2.2
    monkeypatch.setattr("megatron.text.corpus.LOCAL_SOURCES", ("one",))
    content, _ = prepare_corpus("local", tmp_path / "out", 10**6, max_documents=100)
    assert 1 <= content["held_out_documents"] <= 14


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("absent", "not installed"),
        ("inplace", "an editable install"),
        ("bare", "without a list of its files"),
        ("garbled", "cannot be read"),
        ("zipped", "none of its 1 Python files can be used"),
        ("empty", "no Python file"),
    ],
)
def test_a_package_without_usable_files_is_reported_and_not_an_error(
    site: Path, name: str, reason: str
) -> None:
    install_package(
        site,
        "inplace",
        {"m.py": make_body(0).encode()},
        direct_url=json.dumps({"dir_info": {"editable": True}}),
    )
    (install_package(site, "bare", {"n.py": make_body(1).encode()}) / "RECORD").unlink()
    install_package(site, "garbled", {"o.py": make_body(2).encode()}, direct_url="{")
    install_package(site, "zipped", {"p.py": make_body(3).encode()})
    (site / "p.py").unlink()
    install_package(site, "empty", {"q.txt": make_body(4).encode()})
    install_package(site, "good", {"r.py": make_body(5).encode()})
    text = read_local_text([name, "good"])
    assert list(text.missing) == [name]
    assert reason in text.missing[name]
    assert text.documents == [("good", make_body(5))]


def test_a_record_cannot_name_files_outside_the_installation(site: Path) -> None:
    install_package(
        site,
        "climbing",
        {"../outside.py": make_body(0).encode(), f"{site.parent}/rooted.py": make_body(1).encode()},
    )
    assert read_local_text(["climbing"]).missing == {"climbing": "no Python file"}


def test_packages_of_one_namespace_are_read_separately_and_equal_texts_count_once(site: Path) -> None:
    install_package(site, "first", {"space/a.py": make_body(0).encode(), "space/b.py": make_body(1).encode()})
    install_package(
        site, "second", {"space/c.py": make_body(2).encode(), "space/d.py": make_body(1).encode()}
    )
    text = read_local_text(["first", "second"])
    assert sorted(text.documents) == [
        ("first", make_body(0)),
        ("first", make_body(1)),
        ("second", make_body(2)),
    ]
    assert text.skipped["second"]["copies"] == 1


def test_the_standard_library_excludes_tests_build_settings_and_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    included = ("json/decoder.py", "this.py")
    others = (
        "json/tests/test_json.py",
        "test/test_json.py",
        "site-packages/other/a.py",
        "_sysconfigdata_x.py",
    )
    for i, name in enumerate(included + others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(make_body(i))
    (tmp_path / "json" / "again").symlink_to(tmp_path)
    (tmp_path / "abc.py").mkdir()
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert {text for _, text in read_local_text(["python"]).documents} == {make_body(0), make_body(1)}
    monkeypatch.setattr(sysconfig, "get_path", lambda _: f"{tmp_path}/python311.zip")
    assert "python311.zip is not a folder" in read_local_text(["python"]).missing["python"]


def test_sources_are_described_with_their_versions(site: Path) -> None:
    for name in ("one", "two", "three"):
        install_package(site, name, {f"{name}.py": make_body(0).encode()})
    python = ".".join(map(str, sys.version_info[:3]))
    assert local_text.describe_sources(["python"]) == f"the standard library of Python {python}"
    assert local_text.describe_sources(["one"]) == "the sources of one 1.5"
    assert local_text.describe_sources(["python", "one", "two", "three"]) == (
        f"the standard library of Python {python} and the sources of one 1.5, two 1.5 and three 1.5"
    )
