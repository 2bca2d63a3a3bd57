"""Tests of the text for a small study: its sources, the split, and tools/prepare_corpus.py."""

import gzip
import json
import os
import re
import sysconfig
from pathlib import Path

import pytest

from megatron.io import open_partial_folder
from megatron.text import corpus, local_text
from megatron.text.corpus import CorpusLimits, choose_source, find_paths, prepare_corpus
from megatron.text.local_text import MAX_BYTES, MIN_BYTES, PACKAGES, read_local_text
from tests.datasets import write_texts
from tests.tool_modules import Cli

LIMITS = CorpusLimits(10**6)


def read(which: str | Path) -> list[str]:
    return list(choose_source(str(which), find_paths(str(which)))[1])


def read_texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_the_split_is_by_text_and_copies_are_never_on_both_sides(tmp_path: Path) -> None:
    texts = [f"document {i % 4000}" for i in range(5000)]
    source = write_texts(tmp_path / "in.jsonl", texts)
    sides = []
    for share, least, most in ((0.05, 145, 255), (0.2, 699, 901)):  # 200 and 800, +- 4 standard deviations
        limits = CorpusLimits(10**6, held_out_share=share)
        content, _ = prepare_corpus(source, tmp_path / "out", limits)
        train, held_out = (read_texts(tmp_path / "out" / f"{side}.jsonl") for side in ("train", "held_out"))
        assert len(train) + len(held_out) == len(set(train) | set(held_out)) == content["documents"] == 4000
        assert content["n_skipped"] == 1000 and least <= len(held_out) <= most
        sides.append(set(held_out))
    assert sides[0] < sides[1]
    # a document's side depends on its own text alone
    write_texts(tmp_path / "in.jsonl", texts[:350][::-1])
    prepare_corpus(source, tmp_path / "other", limits)
    assert set(read_texts(tmp_path / "other" / "held_out.jsonl")) == sides[1] & set(texts[:350])


def test_only_a_changed_source_limit_or_output_is_written_again(tmp_path: Path) -> None:
    source, out = write_texts(tmp_path / "in.jsonl", [f"document {i}" for i in range(100)]), tmp_path / "out"
    assert prepare_corpus(source, out, LIMITS)[1] and not prepare_corpus(source, out, LIMITS)[1]
    before = (out / "train.jsonl").read_bytes()
    for damage in (lambda: (out / "train.jsonl").write_bytes(before[:-5]), (out / "train.jsonl").unlink):
        damage()
        assert prepare_corpus(source, out, LIMITS)[1] and (out / "train.jsonl").read_bytes() == before
    write_texts(tmp_path / "in.jsonl", [f"document {i}" for i in range(200)])
    assert prepare_corpus(source, out, LIMITS)[0]["documents"] == 200
    assert prepare_corpus(source, out, CorpusLimits(500))[0]["documents"] < 50
    with open_partial_folder(out, replace=True), pytest.raises(ValueError, match="another process writing"):
        prepare_corpus(source, out, LIMITS)


def test_sources_are_the_sample_then_the_hub_then_local_text(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SCALING_DATA", str(tmp_path))
    monkeypatch.setattr(corpus, "find_hub_error", lambda: "no network")
    assert "numpy" in choose_source("auto", find_paths("auto"))[0]
    monkeypatch.setattr(corpus, "find_hub_error", lambda: None)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: iter([{"text": "streamed"}]))
    assert read("auto") == read("c4") == ["streamed"]
    (tmp_path / "c4").mkdir()
    write_texts(tmp_path / "c4" / "c4_en_1.jsonl", ["y"])
    assert read("auto") == ["y"]


def test_a_small_sample_is_filled_with_local_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = [f"{i:04} " + "x" * 995 for i in range(100)]  # 1,000 bytes each
    monkeypatch.setattr(corpus, "read_local_text", lambda: local)
    texts, out = [f"document {i:03}" + "." * 88 for i in range(200)], tmp_path / "out"  # 100 bytes each
    monkeypatch.setenv("SCALING_DATA", str(tmp_path))
    (tmp_path / "c4").mkdir()
    source = write_texts(tmp_path / "c4" / "c4_en_1.jsonl", texts)
    content, _ = prepare_corpus("auto", out, CorpusLimits(10**6, min_bytes=60_500))
    # 41: the smallest number of documents with 60,500 - 20,000 bytes
    assert (content["added_documents"], content["added_bytes"]) == (41, 41_000)
    assert re.match(r"Python 3\.\d+\.\d+'s library, .*numpy \d", content["added"])
    written = [read_texts(out / f"{side}.jsonl") for side in ("train", "held_out")]
    assert set(written[0] + written[1]) == set(texts + local[:41])
    assert (content["documents"], content["held_out_documents"]) == (241, len(written[1]))
    before = (out / "corpus.json").read_bytes()
    with pytest.raises(ValueError, match=r"got 20,000 bytes .* at least 0\.1 MB\."):
        prepare_corpus(source, out, CorpusLimits(10**6, min_bytes=60_500))
    with pytest.raises(ValueError, match=r"got 120,000 bytes .* at least 0\.5 MB\."):
        prepare_corpus("auto", out, CorpusLimits(10**6, min_bytes=500_000))
    assert (out / "corpus.json").read_bytes() == before and not (tmp_path / "out.partial").exists()


REFUSED = [
    (["--held-out-share", "0.51"], "", "--held-out-share: got 0.51, expected 0.001 to 0.5"),
    (["--min-mb", "9"], "", "Raise --max-mb or lower --min-mb"),
    (["--corpus", "nowhere.jsonl"], "", "nowhere.jsonl: no such file"),
    (["--corpus", "c4"], "", "not available from the Hugging Face hub (http://127.0.0.1:9: "),
    (["--corpus", "in.jsonl.gz"], '{"text": "only one"}\n', "got 1 documents and none in held_out.jsonl"),
    (["--corpus", "in.jsonl.gz"], '{"text": "one"}\noops\n', "in.jsonl.gz, line 2: not JSON"),
]


def test_the_tool_refuses_unusable_text_and_writes_nothing(cli: Cli, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the port of `discard`: refused
    for words, content, sentence in REFUSED:
        (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(content.encode()))
        errors = cli("corpus", *words, "--out", "text", status=1, cwd=tmp_path).error
        assert sentence in errors and errors.count("\n") == 1
        assert os.listdir(tmp_path) == ["in.jsonl.gz"]


def make_body(i: int) -> str:
    return f"# module {i}\n" * 40


def test_usable_files_of_packages_are_read_in_an_order_independent_of_the_split(
    tmp_path: Path, monkeypatch
) -> None:
    files = {f"some/m{i}.py": make_body(i).encode() for i in range(400)}
    files |= {"some/long.py": b"x" * (MAX_BYTES + 1), "some/longest.py": b"y" * MAX_BYTES}
    files |= {"some/short.py": b"z" * (MIN_BYTES - 1), "some/shortest.py": b"z" * MIN_BYTES}
    files |= {"some/same.py": files["some/m0.py"], "some/latin.py": files["some/m1.py"] + b"\xe9"}
    files |= {"../outside.py": make_body(-1).encode(), "some/data.txt": make_body(-2).encode()}
    site, info = tmp_path / "site", tmp_path / "site" / "some-1.5.dist-info"
    for path, content in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)
    info.mkdir()
    os.mkfifo(site / "some" / "pipe.py")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some\nVersion: 1.5\n")
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in (*files, "some/pipe.py", "some/gone.py")))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(local_text, "PACKAGES", ("some",))
    monkeypatch.setattr(local_text, "_iter_standard_library", lambda: iter(()))
    texts = read_local_text()
    # not: too large, too small, not UTF-8, a pipe, a missing file, a copy
    expected = [*map(make_body, range(400)), "y" * MAX_BYTES, "z" * MIN_BYTES]
    assert sorted(texts) == sorted(expected) and texts != sorted(texts)
    # in the first quarter of this order 5 % are held out, not all: 5 of 100, +- 4 standard deviations of 2.2
    content, _ = prepare_corpus("local", tmp_path / "o", CorpusLimits(100 * len(make_body(100))))
    assert 1 <= content["held_out_documents"] <= 14


def test_the_standard_library_excludes_tests_build_settings_and_packages(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(local_text, "PACKAGES", ())
    assert sum(map(len, read_local_text())) > 5_000_000
    others = ("json/tests/test_json.py", "test/a.py", "site-packages/other/a.py", "_sysconfigdata_x.py")
    for i, name in enumerate(("json/decoder.py", "this.py", *others)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(make_body(i))
    (tmp_path / "json" / "again").symlink_to(tmp_path)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert set(read_local_text()) == {make_body(0), make_body(1)}


def test_the_packages_are_in_the_requirements(root: Path) -> None:
    text = (root / "requirements.txt").read_text()
    assert set(PACKAGES) <= set(re.findall(r"^([\w-]+)[=>]=", text, re.MULTILINE))
