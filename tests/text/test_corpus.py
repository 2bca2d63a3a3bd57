"""Text for a small study."""

import gzip
import hashlib
import json
import time
from pathlib import Path

import pytest

from megatron.io import open_partial_folder
from megatron.text import corpus
from megatron.text.corpus import choose_source, prepare_corpus
from megatron.text.local_text import REASONS, LocalText


def read_texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_the_split_is_by_text_and_copies_are_never_on_both_sides(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    texts = [f"document {i % 700}" for i in range(1000)]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    content, is_new = prepare_corpus(str(source), tmp_path / "out", 10**6)
    assert is_new
    train, held_out = (
        read_texts(tmp_path / "out" / "train.jsonl"),
        read_texts(tmp_path / "out" / "held_out.jsonl"),
    )
    assert len(train) + len(held_out) == len(set(train) | set(held_out)) == 700
    assert (content["documents"], content["copies_dropped"]) == (700, 300)
    assert 15 <= len(held_out) <= 60  # 5 % of 700, +- 4 standard deviations
    # a document's side depends on its own text alone
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in reversed(texts[:350])))
    prepare_corpus(str(source), tmp_path / "other", 10**6)
    assert set(read_texts(tmp_path / "other" / "held_out.jsonl")) == set(held_out) & set(texts[:350])


def test_a_second_call_leaves_existing_files_unchanged(tmp_path: Path) -> None:
    prepare_corpus("stdlib", tmp_path / "out", 2_000_000)
    before = (tmp_path / "out" / "train.jsonl").stat().st_mtime_ns
    prepare_corpus("stdlib", tmp_path / "out", 2_000_000)
    assert (tmp_path / "out" / "train.jsonl").stat().st_mtime_ns == before
    content, _ = prepare_corpus("stdlib", tmp_path / "out", 2_200_000)
    assert content["train_bytes"] + content["held_out_bytes"] >= 2_200_000


def test_without_sample_and_network_local_text_is_used_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        first, reason = None, "no network"

    monkeypatch.setenv("SCALING_DATA", str(tmp_path))
    monkeypatch.setattr(corpus, "C4Stream", Silent)
    source = choose_source("auto")
    assert "standard library" in source.name
    assert source.installed == corpus.LOCAL_SOURCES
    assert "numpy" in source.name
    assert "no network" in source.reason
    with pytest.raises(ConnectionError, match="no network"):
        choose_source("c4")


def test_an_existing_sample_is_used(scaling_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALING_DATA", str(scaling_data))
    source = choose_source("auto")
    assert "sample of C4" in source.name
    assert sum(1 for _ in source.texts()) == 2000


def test_too_little_text_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "only one"}\n')
    with pytest.raises(ValueError, match="too few to hold any out"):
        prepare_corpus(str(source), tmp_path / "out", 10**6)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_changed_source_is_read_again_and_an_unchanged_one_is_not(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    for n, is_new in ((100, True), (100, False), (200, True)):
        if is_new:
            source.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(n)))
        content, was_new = prepare_corpus(str(source), tmp_path / "out", 10**6)
        assert (content["documents"], was_new) == (n, is_new)
    assert prepare_corpus(str(source), tmp_path / "out", 10**6, max_documents=50)[0]["documents"] == 50


def test_a_bad_line_of_the_source_leaves_the_old_text_unchanged(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(gzip.compress(b'{"text": "one"}\noops\n'))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.jsonl").write_text("as before")
    with pytest.raises(ValueError, match="in.jsonl.gz, line 2: not JSON"):
        prepare_corpus(str(source), tmp_path / "out", 10**6)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.jsonl"]
    assert not (tmp_path / "out.partial").exists()


def test_paragraphs_of_one_plain_text_or_several_whole_ones_are_the_documents(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("one\ntwo\n\n \nthree\n\n")
    assert [text for text in choose_source(str(tmp_path / "book.txt")).texts() if text] == [
        "one\ntwo",
        "three",
    ]
    (tmp_path / "poem.txt").write_text("four\n\nfive")
    for words in (tmp_path, tmp_path / "*.txt"):
        assert list(choose_source(str(words)).texts()) == ["one\ntwo\n\n \nthree\n\n", "four\n\nfive"]
    with pytest.raises(FileNotFoundError, match="no such file"):
        choose_source(str(tmp_path / "none.txt"))


def test_an_unreachable_hub_is_detected_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # other tests set it and do not reset it
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the port of `discard`: refused
    begun = time.monotonic()
    stream = corpus.C4Stream()
    assert stream.first is None
    assert "127.0.0.1:9" in stream.reason
    assert (
        time.monotonic() - begun < 20
    )  # the hub's own library retries for 24 s; a child process starts in 1 s


def write_lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """100 documents of 1,000 bytes instead of the installed text."""
    texts = [f"{i:04} " + "x" * 995 for i in range(100)]

    def read_texts(sources: tuple[str, ...]) -> LocalText:
        documents = [("python", text) for text in texts]
        counts = dict.fromkeys(REASONS, 0)
        return LocalText(documents, {"python": counts | {"too_large": 3}}, {"torch": "not installed"})

    monkeypatch.setattr(corpus, "read_local_text", read_texts)
    return texts


def test_a_corpus_that_is_too_small_is_extended_with_local_text_and_this_is_declared(
    tmp_path: Path, local: list[str]
) -> None:
    texts = [f"document {i:03}" + "." * 88 for i in range(200)]  # 100 bytes each
    write_lines(tmp_path / "in.jsonl", texts)
    content, _ = prepare_corpus(
        str(tmp_path / "in.jsonl"), tmp_path / "out", 10**6, min_bytes=60_500, fill=True
    )
    assert (content["added_documents"], content["added_bytes"]) == (
        41,
        41_000,
    )  # the smallest number of documents with 60,500 - 20,000 bytes
    assert "standard library" in content["added"]
    assert "torch" not in content["added"]
    assert content["missing"] == {"torch": "not installed"}
    first, second = content["sources"]
    assert (first["name"], first["version"], first["documents"], first["bytes"]) == (
        str(tmp_path / "in.jsonl"), None, 200, 20_000,
    )  # fmt: skip
    assert (second["name"], second["documents"], second["bytes"]) == ("python", 41, 41_000)
    assert second["version"].count(".") == 2
    assert second["skipped"]["too_large"] == 3
    digests = [hashlib.sha256(text.encode()).digest() for text in local[:41]]
    assert second["sha256"] == hashlib.sha256(b"".join(digests)).hexdigest()
    train, held_out = (read_texts(tmp_path / "out" / f"{side}.jsonl") for side in ("train", "held_out"))
    assert set(train + held_out) == set(texts + local[:41])
    for name, written in content["files"].items():
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == written
    # documents of both sources are held out
    assert first["held_out_documents"] + second["held_out_documents"] == len(held_out)


def test_a_corpus_that_is_large_enough_gets_nothing_added(tmp_path: Path, local: list[str]) -> None:
    write_lines(tmp_path / "in.jsonl", [f"document {i:03}" for i in range(200)])
    content, _ = prepare_corpus(str(tmp_path / "in.jsonl"), tmp_path / "out", 10**6, min_bytes=2_400)
    assert "added" not in content
    assert [source["documents"] for source in content["sources"]] == [200]


def test_less_text_than_required_is_refused_with_what_is_missing(tmp_path: Path, local: list[str]) -> None:
    write_lines(tmp_path / "in.jsonl", [f"document {i:03}" for i in range(200)])
    with pytest.raises(ValueError, match=r"got 0\.1 MB .*torch: not installed.*, expected at least 0\.5 MB"):
        prepare_corpus(str(tmp_path / "in.jsonl"), tmp_path / "out", 10**6, min_bytes=500_000, fill=True)
    assert not (tmp_path / "out").exists()


def test_a_small_text_of_the_user_is_refused_with_its_size_and_never_filled_up(
    tmp_path: Path, local: list[str]
) -> None:
    write_lines(tmp_path / "in.jsonl", ["y" * 32])
    out = tmp_path / "out"
    prepare_corpus(str(tmp_path / "in.jsonl"), out, 10**6, min_bytes=90_000, fill=True)
    before = (out / "corpus.json").read_bytes()
    # the filled text of another call is not used either, and stays as it was
    sentence = r"in\.jsonl: got 32 bytes \(0\.0 MB\) .* at least 0\.1 MB\. .*--fill \(make quickstart: FILL=1"
    with pytest.raises(ValueError, match=sentence):
        prepare_corpus(str(tmp_path / "in.jsonl"), out, 10**6, min_bytes=90_000)
    assert (out / "corpus.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out"]


def test_auto_is_filled_up_without_an_option(
    tmp_path: Path, local: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c4").mkdir()
    write_lines(tmp_path / "c4" / "c4_en_1.jsonl", ["y" * 500] * 3)
    monkeypatch.setenv("SCALING_DATA", str(tmp_path))
    content, _ = prepare_corpus("auto", tmp_path / "out", 10**6, min_bytes=90_000)
    assert (content["copies_dropped"], content["added_bytes"]) == (2, 90_000)


def test_the_held_out_share_is_that_of_documents_and_a_larger_one_contains_the_smaller(
    tmp_path: Path,
) -> None:
    write_lines(tmp_path / "in.jsonl", [f"document {i}" for i in range(4000)])
    sides = []
    for share, least, most in ((0.05, 145, 255), (0.2, 699, 901)):  # 200 and 800, +- 4 standard deviations
        prepare_corpus(str(tmp_path / "in.jsonl"), tmp_path / "out", 10**6, held_out_share=share)
        sides.append(set(read_texts(tmp_path / "out" / "held_out.jsonl")))
        assert least <= len(sides[-1]) <= most
    assert sides[0] < sides[1]


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"held_out_share": 0.0}, "got 0 as the share of held-out documents, expected 0.001 to 0.5"),
        ({"held_out_share": 0.51}, "got 0.51 as the share"),
        ({"held_out_share": float("nan")}, "got nan as the share"),
        ({"min_bytes": 10**6 + 1}, "Raise --max-mb or lower --min-mb"),
        ({"min_bytes": -1}, "got at least -1"),
    ],
)
def test_limits_that_no_text_can_satisfy_are_refused(
    tmp_path: Path, limits: dict[str, float], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        prepare_corpus("stdlib", tmp_path / "out", 10**6, **limits)
    assert list(tmp_path.iterdir()) == []


def test_text_that_was_altered_or_deleted_since_is_written_again(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [f"document {i}" for i in range(200)])
    path = tmp_path / "out" / "train.jsonl"
    prepare_corpus(str(tmp_path / "in.jsonl"), tmp_path / "out", 10**6)
    before = path.read_bytes()
    for damage in (lambda: path.write_bytes(before[:-5]), path.unlink):
        damage()
        _, is_new = prepare_corpus(str(tmp_path / "in.jsonl"), tmp_path / "out", 10**6)
        assert is_new
        assert path.read_bytes() == before


def test_a_second_process_with_the_same_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "one"}\n')
    with open_partial_folder(tmp_path / "out", replace=True) as partial:  # as another process that writes it
        (partial / "train.jsonl").write_text("theirs")
        with pytest.raises(ValueError, match="out: got another process writing it"):
            prepare_corpus(str(tmp_path / "in.jsonl"), tmp_path / "out", 10**6)
        assert (partial / "train.jsonl").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
