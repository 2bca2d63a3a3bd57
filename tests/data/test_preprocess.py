"""tools/preprocess_data_many_cores.py, run as a person runs it."""

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer

from megatron.data import preprocess as module
from megatron.data.documents import cut, find_inputs, lines_of, text_of, without_lone_surrogates
from megatron.data.indexed import IndexedTokens
from megatron.tokenizer.bpe import load_tokenizer
from megatron.tokenizer.train_bpe import train_bpe

TEXTS = [
    "one fish two fish",
    "",
    "red fish <|endoftext|> blue fish",
    "\u00e9t\u00e9 \U0001f41f\n\n  fish",
    "fish" * 300,
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(TEXTS * 5, 270, folder)
    return folder


def write(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run(
    root: Path, source: object, tokenizer: Path, out: Path, *words: object, timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """Tokenise `source` into <out>/out_text_document."""
    tool = root / "tools" / "preprocess_data_many_cores.py"
    named = {"--input": source, "--output-prefix": "out", "--root": out, "--tokenizer-model": tokenizer}
    flat = [word for pair in named.items() for word in pair]
    command = [sys.executable, str(tool), *map(str, flat), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_ids_are_those_of_tokenizers_and_order_is_the_inputs(
    root: Path, tmp_path: Path, tokenizer: Path
) -> None:
    source = write(tmp_path / "in.jsonl", [{"text": text, "id": i} for i, text in enumerate(TEXTS)])
    done = run(
        root,
        source,
        tokenizer,
        tmp_path / "tokens",
        "--dataset-impl",
        "mmap",
        "--tokenizer-type",
        "HFTokenizer",
        "--append-eod",
    )
    assert done.returncode == 0, done.stderr
    tokens = IndexedTokens(tmp_path / "tokens" / "out_text_document")
    reference = load_tokenizer(str(tokenizer))
    assert [tokens.document(i).tolist() for i in range(len(TEXTS))] == [
        [*reference.inner.encode(text).ids, reference.eod_id] for text in TEXTS
    ]
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == [
        f"out_text_document.{suffix}" for suffix in ("bin", "idx", "json")
    ]


def test_real_c4_under_gpt2_gives_the_ids_of_tokenizers(
    root: Path, tmp_path: Path, scaling_data: Path
) -> None:
    source = tmp_path / "c4.jsonl"
    lines = (scaling_data / "c4" / "c4_en_shard00000_first1000.jsonl").read_text().splitlines()[:200]
    source.write_text("\n".join(lines))  # without a last line end
    gpt2 = scaling_data / "gpt2_tokenizer"
    done = run(root, source, gpt2, tmp_path)
    assert done.returncode == 0, done.stderr
    tokens = IndexedTokens(tmp_path / "out_text_document")
    reference = ByteLevelBPETokenizer(str(gpt2 / "vocab.json"), str(gpt2 / "merges.txt"))
    assert tokens.n_documents == 200
    for i, line in enumerate(lines):
        assert tokens.document(i).tolist() == reference.encode(json.loads(line)["text"]).ids


@pytest.mark.parametrize("n_workers", [2, 3])
def test_any_number_of_workers_gives_the_same_bytes(
    tmp_path: Path, tokenizer: Path, scaling_data: Path, monkeypatch: pytest.MonkeyPatch, n_workers: int
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 150_000)  # 16 pieces and more
    sources = [str(scaling_data / "c4" / name) for name in ("c4_en_shard00000_first1000.jsonl", "*.json.gz")]
    for n in (1, n_workers):
        module.preprocess(
            sources, tmp_path / str(n) / "c4", str(tokenizer), module.Options(append_eod=True, n_workers=n)
        )
    for suffix in ("bin", "idx", "json"):
        one, many = (tmp_path / str(n) / f"c4_text_document.{suffix}" for n in (1, n_workers))
        assert one.read_bytes() == many.read_bytes()
    told = json.loads((tmp_path / "1" / "c4_text_document.json").read_text())
    assert told["documents"] == 1030
    assert [source["documents_read"] for source in told["sources"]] == [1000, 10, 10, 10]


def test_each_key_gets_its_own_pair(root: Path, tmp_path: Path, tokenizer: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"a": "fish", "b": "two fish"}, {"a": "", "b": "red"}])
    done = run(root, source, tokenizer, tmp_path, "--json-keys", "a", "b")
    assert done.returncode == 0, done.stderr
    reference = load_tokenizer(str(tokenizer))
    assert IndexedTokens(tmp_path / "out_b_document").document(1).tolist() == reference.encode("red")
    assert IndexedTokens(tmp_path / "out_a_document").document_tokens.tolist()[1] == 0


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "half', "not JSON"),
        ('{"body": "x"}', "no key 'text'; it has 'body'"),
        ('{"text": 7}', "'text' is int, wanted a string"),
        ("[1]", "wanted an object, found list"),
    ],
)
@pytest.mark.parametrize("n_workers", [1, 2])
def test_a_bad_line_is_named_and_nothing_is_left(
    root: Path, tmp_path: Path, tokenizer: Path, line: str, reason: str, n_workers: int
) -> None:
    source = tmp_path / "in.jsonl"
    good = json.dumps({"text": "fish " * 2000}) + "\n"
    source.write_text(good * 600 + line + "\n" + good)
    done = run(root, source, tokenizer, tmp_path / "tokens", "--workers", n_workers)
    assert done.returncode == 1
    sentence = done.stderr.strip().splitlines()[-1]
    assert f"{source}, line 601: " in sentence
    assert reason in sentence
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "tokens").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--input", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--tokenizer-model", "./nowhere"], "nowhere: no such tokenizer folder"),
        (["--workers", "0"], "workers: found 0, wanted 1 or more"),
    ],
)
def test_bad_words_are_one_sentence(
    root: Path, tmp_path: Path, tokenizer: Path, words: list, sentence: str
) -> None:
    source = write(tmp_path / "in.jsonl", [{"text": "x"}])
    done = run(root, source, tokenizer, tmp_path / "tokens", *words)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert sentence in done.stderr
    assert not list(tmp_path.glob("tokens/*"))


def test_pieces_end_at_line_ends_and_leave_nothing_out(tmp_path: Path) -> None:
    lines = [b"x" * n for n in (3, 0, 50, 7, 1, 200, 4)]
    path = tmp_path / "lines.jsonl"
    for last in (b"\n", b""):
        path.write_bytes(b"\n".join(lines) + last)
        for piece_bytes in (1, 10, 64, 1000):
            pieces = cut([path], piece_bytes)
            assert [line for piece in pieces for _, line in lines_of(piece)] == lines


def test_folders_and_patterns_are_read_in_order_and_gzip_that_breaks_off_is_said(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.json.gz", "c.txt"):
        (tmp_path / name).write_bytes(gzip.compress(b'{"text": "x"}\n' * 100)[:-10])
    assert [path.name for path in find_inputs([str(tmp_path)])] == ["a.json.gz", "b.jsonl"]
    assert [path.name for path in find_inputs([str(tmp_path / "*.jsonl")])] == ["b.jsonl"]
    with pytest.raises(ValueError, match="c.txt: wanted one of"):
        find_inputs([str(tmp_path / "c.txt")])
    with pytest.raises(ValueError, match="cannot be read to its end"):
        list(lines_of(cut([tmp_path / "a.json.gz"], 1000)[0]))


def test_an_unpaired_surrogate_becomes_the_replacement_character(tmp_path: Path, tokenizer: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a\\ud800b \\ud83d\\udc1f"}\n')
    module.preprocess([str(source)], tmp_path / "out", str(tokenizer), module.Options(quiet=True))
    reference = load_tokenizer(str(tokenizer))
    found = IndexedTokens(tmp_path / "out_text_document").document(0).tolist()
    assert found == reference.encode("a\ufffdb \U0001f41f")


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_input_without_a_document_is_an_error_and_leaves_nothing(
    tmp_path: Path, tokenizer: Path, content: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(content)
    with pytest.raises(ValueError, match="in.jsonl: no document there"):
        module.preprocess([str(source)], tmp_path / "out", str(tokenizer), module.Options(quiet=True))
    assert not list(tmp_path.glob("*out*"))


def test_a_bad_lines_reason_counts_characters_of_that_line() -> None:
    with pytest.raises(ValueError, match=r"not JSON \(Expecting ',' delimiter at character 13\)"):
        text_of(b'{"text": "a"', "text")
    with pytest.raises(ValueError, match=r"not JSON \(Expecting ',' delimiter at character 14\)"):
        text_of(b'{"text": "a"\n', "text")


def test_lone_surrogates_are_mended_as_the_reader_of_text_mends_them() -> None:
    rng = random.Random(0)
    parts = ["\\ud83d", "\\udc1f", "\\\\", "\\n", "ud800", "\\uD800", "\\u00e9", '\\"', "x", "\u00e9"]
    for _ in range(2000):
        line = ('{"text": "' + "".join(rng.choices(parts, k=rng.randrange(9))) + '"}').encode()
        mended = without_lone_surrogates(line)
        assert len(mended) == len(line)
        assert json.loads(mended)["text"] == text_of(line, "text")


def test_a_text_that_cannot_be_encoded_is_a_bad_line_of_its_own(root: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"text": "1 2"}, {"text": "3 four"}, {"text": "5"}, {"no": 1}])
    words = ["--tokenizer-type", "NullTokenizer", "--vocab-size", 9]
    done = run(root, source, "none", tmp_path / "failed", *words)
    assert done.returncode == 1
    assert "in.jsonl, line 2: " in done.stderr
    assert "'four'" in done.stderr
    done = run(root, source, "none", tmp_path / "tokens", *words, "--on-error", "skip")
    assert done.returncode == 0, done.stderr
    rejects = [json.loads(line) for line in (tmp_path / "tokens" / "out.rejects.jsonl").open()]
    assert [one["line"] for one in rejects] == [2, 4]
    tokens = IndexedTokens(tmp_path / "tokens" / "out_text_document")
    assert [tokens.document(i).tolist() for i in range(2)] == [[1, 2], [5]]


# the system's own peak counts pages of files too, and what pytest had before the child became a program
WATCHED = """
import pathlib, re, runpy, sys, threading, time
sys.argv, peak = sys.argv[1:], 0
def watch():
    global peak
    while True:
        told = pathlib.Path("/proc/self/status").read_text()
        peak = max(peak, int(re.search(r"RssAnon:\\s+(\\d+) kB", told)[1]))
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
try: runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end: assert not end.code
print(peak)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's own memory apart")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "part", [b"one fish two \\n fish ", "\u4e2d\u6587".encode()], ids=["words", "one word"]
)
def test_memory_stays_while_a_document_grows(
    root: Path, tmp_path: Path, tokenizer: Path, part: bytes, packed: bool
) -> None:
    def peak_mb(n_bytes: int) -> float:
        """Largest memory of its own while one document of so many bytes is tokenised."""
        line = b'{"text": "' + part * (n_bytes // len(part)) + b'"}\n'
        source = tmp_path / ("in.jsonl.gz" if packed else "in.jsonl")
        source.write_bytes(gzip.compress(line, 1) if packed else line)
        tool = root / "tools" / "preprocess_data_many_cores.py"
        command = [sys.executable, "-c", WATCHED, tool, "--input", source, "--output-prefix", "out", "--root",
                   tmp_path, "--tokenizer-model", tokenizer]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
        return int(done.stdout.split()[-1]) / 1024

    assert peak_mb(60_000_000) < peak_mb(1000) + 30


def test_a_line_too_long_to_be_parsed_otherwise_is_a_bad_one(
    root: Path, tmp_path: Path, tokenizer: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "x"}\n{"text": "' + b"y" * (17 << 20) + b'\n{"text": "z"}\n')
    done = run(root, source, tokenizer, tmp_path / "tokens", "--on-error", "skip")
    assert done.returncode == 0, done.stderr
    assert IndexedTokens(tmp_path / "tokens" / "out_text_document").n_documents == 2
    rejects = (tmp_path / "tokens" / "out.rejects.jsonl").read_text()
    assert json.loads(rejects)["line"] == 2
    assert "17,825,803 bytes too long" in rejects


def test_parquet_with_holes_names_the_row(root: Path, tmp_path: Path, tokenizer: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    source = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.table({"text": [*TEXTS, None, "fish"]}), source)
    done = run(root, source, tokenizer, tmp_path / "failed")
    assert done.returncode == 1
    assert f"in.parquet, row {len(TEXTS) + 1}: 'text' is NoneType" in done.stderr
    done = run(root, source, tokenizer, tmp_path / "tokens", "--on-error", "skip")
    assert done.returncode == 0, done.stderr
    tokens, reference = (
        IndexedTokens(tmp_path / "tokens" / "out_text_document"),
        load_tokenizer(str(tokenizer)),
    )
    wanted = [reference.encode(text) for text in [*TEXTS, "fish"]]
    assert [tokens.document(i).tolist() for i in range(len(wanted))] == wanted
