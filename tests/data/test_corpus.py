"""Texts for a small study."""

import json
from pathlib import Path

import pytest

from megatron.data import corpus
from megatron.data.corpus import choose, prepare_corpus, standard_library


def read(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_the_split_is_by_text_and_copies_never_lie_on_both_sides(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    texts = [f"document {i % 700}" for i in range(1000)]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    told = prepare_corpus(str(source), tmp_path / "out", 10**6)
    train, held_out = read(tmp_path / "out" / "train.jsonl"), read(tmp_path / "out" / "held_out.jsonl")
    assert len(train) + len(held_out) == len(set(train) | set(held_out)) == 700
    assert (told["documents"], told["copies_dropped"]) == (700, 300)
    assert 15 <= len(held_out) <= 60  # 5 % of 700, +- 4 standard deviations
    # a document's side depends on its own text alone
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in reversed(texts[:350])))
    prepare_corpus(str(source), tmp_path / "other", 10**6)
    assert set(read(tmp_path / "other" / "held_out.jsonl")) == set(held_out) & set(texts[:350])


def test_a_second_call_leaves_what_is_there(tmp_path: Path) -> None:
    prepare_corpus("stdlib", tmp_path / "out", 2_000_000)
    before = (tmp_path / "out" / "train.jsonl").stat().st_mtime_ns
    prepare_corpus("stdlib", tmp_path / "out", 2_000_000)
    assert (tmp_path / "out" / "train.jsonl").stat().st_mtime_ns == before
    told = prepare_corpus("stdlib", tmp_path / "out", 2_200_000)
    assert told["train_bytes"] + told["held_out_bytes"] >= 2_200_000


def test_every_machine_has_the_text_of_the_standard_library() -> None:
    n_bytes = n_documents = 0
    for text in standard_library():
        assert text.strip()
        n_documents += 1
        n_bytes += len(text)
        if n_bytes > 5_000_000:
            break
    assert n_bytes > 5_000_000
    assert n_documents > 100


def test_without_sample_and_network_the_library_is_taken_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        first, reason = None, "no network"

    monkeypatch.setenv("SCALING_DATA", str(tmp_path))
    monkeypatch.setattr(corpus, "C4Stream", Silent)
    source = choose("auto")
    assert "standard library" in source.name
    assert "does not answer" in source.why
    with pytest.raises(ConnectionError, match="no network"):
        choose("c4")


def test_the_sample_is_taken_where_there_is_one(scaling_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALING_DATA", str(scaling_data))
    source = choose("auto")
    assert "sample of C4" in source.name
    assert sum(1 for _ in source.texts()) == 2000


def test_too_little_text_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "only one"}\n')
    with pytest.raises(ValueError, match="too few to hold any out"):
        prepare_corpus(str(source), tmp_path / "out", 10**6)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_paragraphs_of_a_plain_text_are_its_documents(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("one\ntwo\n\n\nthree\n\n")
    assert list(choose(str(tmp_path / "book.txt")).texts()) == ["one\ntwo", "three"]
    with pytest.raises(FileNotFoundError, match="no such text file"):
        choose(str(tmp_path / "none.txt"))
