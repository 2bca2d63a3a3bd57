"""tools/preprocess_data_many_cores.py, run as a command."""

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer

from megatron.data.indexed import IndexedTokens
from megatron.text import preprocess as module
from megatron.text.inputs import find_inputs
from megatron.text.text_readers import iter_lines, parse_text, replace_lone_surrogates, split_into_pieces
from megatron.tokenizer.bpe import load_hf_tokenizer
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


def write_records(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run_tool(
    root: Path, source: object, tokenizer: Path, out: Path, *words: object, timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """Tokenise `source` into <out>/out_text_document."""
    tool = root / "tools" / "preprocess_data_many_cores.py"
    named = {"--input": source, "--output-prefix": "out", "--root": out, "--tokenizer-model": tokenizer}
    flat = [word for pair in named.items() for word in pair]
    command = [sys.executable, str(tool), *map(str, flat), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_ids_are_those_of_tokenizers_in_the_order_of_the_input(
    root: Path, tmp_path: Path, tokenizer: Path
) -> None:
    source = write_records(tmp_path / "in.jsonl", [{"text": text, "id": i} for i, text in enumerate(TEXTS)])
    done = run_tool(
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
    reference = load_hf_tokenizer(str(tokenizer))
    assert [tokens.get_document(i).tolist() for i in range(len(TEXTS))] == [
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
    source.write_text("\n".join(lines))  # without a final newline
    gpt2 = scaling_data / "gpt2_tokenizer"
    done = run_tool(root, source, gpt2, tmp_path)
    assert done.returncode == 0, done.stderr
    tokens = IndexedTokens(tmp_path / "out_text_document")
    reference = ByteLevelBPETokenizer(str(gpt2 / "vocab.json"), str(gpt2 / "merges.txt"))
    assert tokens.n_documents == 200
    for i, line in enumerate(lines):
        assert tokens.get_document(i).tolist() == reference.encode(json.loads(line)["text"]).ids


@pytest.mark.parametrize("n_workers", [2, 3])
def test_any_number_of_workers_gives_the_same_bytes(
    tmp_path: Path, tokenizer: Path, scaling_data: Path, monkeypatch: pytest.MonkeyPatch, n_workers: int
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 150_000)  # at least 16 pieces
    sources = [str(scaling_data / "c4" / name) for name in ("c4_en_shard00000_first1000.jsonl", "*.json.gz")]
    for n in (1, n_workers):
        module.preprocess(
            sources,
            tmp_path / str(n) / "c4",
            str(tokenizer),
            module.PreprocessOptions(append_eod=True, n_workers=n),
        )
    for suffix in ("bin", "idx", "json"):
        single, many = (tmp_path / str(n) / f"c4_text_document.{suffix}" for n in (1, n_workers))
        assert single.read_bytes() == many.read_bytes()
    meta = json.loads((tmp_path / "1" / "c4_text_document.json").read_text())
    assert meta["documents"] == 1030
    assert [source["documents_read"] for source in meta["sources"]] == [1000, 10, 10, 10]


def test_each_key_gets_its_own_dataset(root: Path, tmp_path: Path, tokenizer: Path) -> None:
    source = write_records(tmp_path / "in.jsonl", [{"a": "fish", "b": "two fish"}, {"a": "", "b": "red"}])
    done = run_tool(root, source, tokenizer, tmp_path, "--json-keys", "a", "b")
    assert done.returncode == 0, done.stderr
    reference = load_hf_tokenizer(str(tokenizer))
    assert IndexedTokens(tmp_path / "out_b_document").get_document(1).tolist() == reference.encode("red")
    assert IndexedTokens(tmp_path / "out_a_document").document_tokens.tolist()[1] == 0


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "half', "not JSON"),
        ('{"body": "x"}', "no key 'text'; it has 'body'"),
        ('{"text": 7}', "'text' is a number, expected a string"),
        ("[1]", "got an array, expected an object; jq -c '.[]' FILE writes each element"),
        (
            "{",
            "not JSON (Expecting property name enclosed in double quotes at character 3: the line ends); jq",
        ),
        ('{"text": null}', "'text' is null, expected a string"),
        ("\0" * 8, r"not JSON (Expecting value at character 1: '\x00\x00\x00\x00\x00\x00\x00\x00\n')"),
        ('{"text": "x"} and more', "not JSON (Extra data at character 15: 'and more\\n')"),
    ],
)
@pytest.mark.parametrize("n_workers", [1, 2])
def test_a_bad_line_is_named_and_nothing_is_left(
    root: Path, tmp_path: Path, tokenizer: Path, line: str, reason: str, n_workers: int
) -> None:
    source = tmp_path / "in.jsonl"
    good = json.dumps({"text": "fish " * 2000}) + "\n"
    source.write_text(good * 600 + line + "\n" + good)
    done = run_tool(root, source, tokenizer, tmp_path / "tokens", "--workers", n_workers)
    assert done.returncode == 1
    sentence = done.stderr.strip().splitlines()[-1]
    assert f"{source}, line 601: " in sentence
    assert reason in sentence
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "tokens").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["--input", "nowhere.jsonl"], 1, "nowhere.jsonl: no such file"),
        (["--tokenizer-model", "./nowhere"], 1, "nowhere: no such tokenizer folder"),
        (["--workers", "0"], 2, "--workers: got '0', expected a whole number of 1 or more"),
    ],
)
def test_bad_arguments_give_one_sentence(
    root: Path, tmp_path: Path, tokenizer: Path, words: list, status: int, sentence: str
) -> None:
    source = write_records(tmp_path / "in.jsonl", [{"text": "x"}])
    done = run_tool(root, source, tokenizer, tmp_path / "tokens", *words)
    assert done.returncode == status
    assert done.stderr.count("\n") == 1
    assert sentence in done.stderr
    assert not list(tmp_path.glob("tokens/*"))


def test_pieces_end_at_line_ends_and_cover_the_whole_file(tmp_path: Path) -> None:
    lines = [b"x" * n for n in (3, 0, 50, 7, 1, 200, 4)]
    path = tmp_path / "lines.jsonl"
    for last in (b"\n", b""):
        path.write_bytes(b"\n".join(lines) + last)
        for piece_bytes in (1, 10, 64, 1000):
            pieces = split_into_pieces([path], piece_bytes)
            assert [line for piece in pieces for _, line in iter_lines(piece)] == lines


def test_folders_and_patterns_are_read_in_order_and_truncated_gzip_is_reported(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.json.gz", "c.txt"):
        (tmp_path / name).write_bytes(gzip.compress(b'{"text": "x"}\n' * 100)[:-10])
    assert [path.name for path in find_inputs([str(tmp_path)])] == ["a.json.gz", "b.jsonl"]
    assert [path.name for path in find_inputs([str(tmp_path / "*.jsonl")])] == ["b.jsonl"]
    with pytest.raises(ValueError, match="c.txt: expected one of"):
        find_inputs([str(tmp_path / "c.txt")])
    with pytest.raises(ValueError, match="a.json.gz: got damaged content"):
        list(iter_lines(split_into_pieces([tmp_path / "a.json.gz"], 1000)[0]))


def list_names(words: list[object]) -> list[str]:
    return [path.name for path in find_inputs([str(word) for word in words])]


def test_a_folder_gives_all_files_below_except_hidden_ones_and_outputs(
    tmp_path: Path, tokenizer: Path
) -> None:
    for name in ("x.jsonl", "a/y.jsonl", "a/b/z.json", ".hidden/h.jsonl", "a/.h.jsonl", "a/readme.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text('{"text": "fish"}\nno JSON\n')
    assert list_names([tmp_path]) == ["z.json", "y.jsonl", "x.jsonl"]
    options = module.PreprocessOptions(skip_bad_lines=True, quiet=True)
    for _ in range(2):  # outputs of the first call are not inputs of the second
        result = module.preprocess([str(tmp_path)], tmp_path / "a" / "out", str(tokenizer), options)
        assert (result.outputs[0].n_documents, result.n_rejected) == (3, 3)
    assert list_names([tmp_path / "*"]) == ["z.json", "y.jsonl", "x.jsonl"]
    assert list_names([tmp_path / "**/*.jsonl"]) == ["y.jsonl", "x.jsonl"]
    with pytest.raises(ValueError, match="x.jsonl: got this file twice"):
        list_names([tmp_path / "x.jsonl", tmp_path / "a" / ".." / "x.jsonl"])
    with pytest.raises(FileNotFoundError, match="no such file, and no folder or pattern"):
        list_names([tmp_path / "q*"])


def test_documents_of_a_folder_saved_by_datasets_are_read_once(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    corpus = datasets.Dataset.from_dict({"text": [f"document {i}" for i in range(30)]})
    corpus.save_to_disk(tmp_path / "one", num_shards=3)
    assert list_names([tmp_path / "one"]) == [f"data-0000{i}-of-00003.arrow" for i in range(3)]
    datasets.load_from_disk(tmp_path / "one").map(lambda row: {"text": row["text"] + "!"})
    assert any(
        path.name.startswith("cache-") for path in (tmp_path / "one").iterdir()
    )  # a cache beside the data
    assert list_names([tmp_path / "one"]) == [f"data-0000{i}-of-00003.arrow" for i in range(3)]
    datasets.DatasetDict(train=corpus, test=corpus.select(range(3))).save_to_disk(tmp_path / "splits")
    with pytest.raises(
        ValueError, match=r"several splits of datasets, expected one. Give a split: .*train \S+test"
    ):
        list_names([tmp_path / "splits"])
    assert list_names([tmp_path / "splits" / "train"]) == ["data-00000-of-00001.arrow"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1"])
def test_text_in_another_encoding_is_refused_and_not_guessed(encoding: str) -> None:
    with pytest.raises(ValueError, match="not UTF-8|not JSON"):
        parse_text('{"text": "caf\u00e9"}'.encode(encoding), "text")


def test_a_byte_order_mark_and_windows_line_ends_are_not_part_of_the_text(
    tmp_path: Path, tokenizer: Path
) -> None:
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / "plain.jsonl").write_text("\n".join(lines))  # without a final newline
    (tmp_path / "windows.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines, "", ""]).encode())
    for name in ("plain", "windows"):
        module.preprocess(
            [str(tmp_path / f"{name}.jsonl")], tmp_path / name, str(tokenizer), module.PreprocessOptions()
        )
    for suffix in ("bin", "idx"):
        plain, windows = (tmp_path / f"{name}_text_document.{suffix}" for name in ("plain", "windows"))
        assert plain.read_bytes() == windows.read_bytes()


def test_an_output_that_would_overwrite_its_input_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    for name in ("x_text_document.json", "x.rejects.jsonl"):
        (tmp_path / name).write_text('{"text": "fish"}\n')
        with pytest.raises(ValueError, match="is an input, and would be overwritten"):
            module.preprocess(
                [str(tmp_path / name)], tmp_path / "x", str(tokenizer), module.PreprocessOptions()
            )
        assert (tmp_path / name).read_text() == '{"text": "fish"}\n'
    with pytest.raises(ValueError, match="got 'a/b', expected a key without a slash"):
        module.preprocess(
            [str(tmp_path)], tmp_path / "x", str(tokenizer), module.PreprocessOptions(keys=("a/b",))
        )


def test_an_unpaired_surrogate_becomes_the_replacement_character(tmp_path: Path, tokenizer: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a\\ud800b \\ud83d\\udc1f"}\n')
    module.preprocess([str(source)], tmp_path / "out", str(tokenizer), module.PreprocessOptions(quiet=True))
    reference = load_hf_tokenizer(str(tokenizer))
    ids = IndexedTokens(tmp_path / "out_text_document").get_document(0).tolist()
    assert ids == reference.encode("a\ufffdb \U0001f41f")


@pytest.mark.parametrize("change", ["append", "same size"])
def test_an_input_that_changes_while_it_is_read_is_an_error_and_leaves_nothing(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    source = write_records(tmp_path / "in.jsonl", [{"text": text} for text in TEXTS])
    check = module.check_not_empty

    def check_and_change(*args: object) -> None:  # called after the last document was read
        check(*args)
        text = source.read_bytes()
        source.write_bytes(text + text if change == "append" else text.replace(b"one", b"two"))

    monkeypatch.setattr(module, "check_not_empty", check_and_change)
    with pytest.raises(ValueError, match=r"in.jsonl: got another size or time .* while it was read"):
        module.preprocess(
            [str(source)], tmp_path / "out", str(tokenizer), module.PreprocessOptions(quiet=True)
        )
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_input_without_a_document_is_an_error_and_leaves_nothing(
    tmp_path: Path, tokenizer: Path, content: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(content)
    with pytest.raises(ValueError, match="in.jsonl: got no document"):
        module.preprocess(
            [str(source)], tmp_path / "out", str(tokenizer), module.PreprocessOptions(quiet=True)
        )
    assert not list(tmp_path.glob("*out*"))


def test_a_bad_lines_reason_counts_characters_of_that_line() -> None:
    with pytest.raises(
        ValueError, match=r"not JSON \(Expecting ',' delimiter at character 13: the line ends\)"
    ):
        parse_text(b'{"text": "a"', "text")
    with pytest.raises(
        ValueError, match=r"not JSON \(Expecting ',' delimiter at character 14: the line ends\)"
    ):
        parse_text(b'{"text": "a"\n', "text")


def test_lone_surrogates_are_replaced_as_in_parse_text() -> None:
    rng = random.Random(0)
    parts = ["\\ud83d", "\\udc1f", "\\\\", "\\n", "ud800", "\\uD800", "\\u00e9", '\\"', "x", "\u00e9"]
    for _ in range(2000):
        line = ('{"text": "' + "".join(rng.choices(parts, k=rng.randrange(9))) + '"}').encode()
        mended = replace_lone_surrogates(line)
        assert len(mended) == len(line)
        assert json.loads(mended)["text"] == parse_text(line, "text")


def test_a_text_that_cannot_be_encoded_is_a_bad_line(root: Path, tmp_path: Path) -> None:
    source = write_records(
        tmp_path / "in.jsonl", [{"text": "1 2"}, {"text": "3 four"}, {"text": "5"}, {"no": 1}]
    )
    words = ["--tokenizer-type", "NullTokenizer", "--vocab-size", 9]
    done = run_tool(root, source, "none", tmp_path / "failed", *words)
    assert done.returncode == 1
    assert "in.jsonl, line 2: " in done.stderr
    assert "'four'" in done.stderr
    done = run_tool(root, source, "none", tmp_path / "tokens", *words, "--on-error", "skip")
    assert done.returncode == 0, done.stderr
    rejects = [json.loads(line) for line in (tmp_path / "tokens" / "out.rejects.jsonl").open()]
    assert [record["line"] for record in rejects] == [2, 4]
    tokens = IndexedTokens(tmp_path / "tokens" / "out_text_document")
    assert [tokens.get_document(i).tolist() for i in range(2)] == [[1, 2], [5]]


def test_a_line_too_long_for_the_general_parser_is_a_bad_line(
    root: Path, tmp_path: Path, tokenizer: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "x"}\n{"text": "' + b"y" * (17 << 20) + b'\n{"text": "z"}\n')
    done = run_tool(root, source, tokenizer, tmp_path / "tokens", "--on-error", "skip")
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
    done = run_tool(root, source, tokenizer, tmp_path / "failed")
    assert done.returncode == 1
    assert f"in.parquet, row {len(TEXTS) + 1}: 'text' is null" in done.stderr
    done = run_tool(root, source, tokenizer, tmp_path / "tokens", "--on-error", "skip")
    assert done.returncode == 0, done.stderr
    tokens, reference = (
        IndexedTokens(tmp_path / "tokens" / "out_text_document"),
        load_hf_tokenizer(str(tokenizer)),
    )
    expected = [reference.encode(text) for text in [*TEXTS, "fish"]]
    assert [tokens.get_document(i).tolist() for i in range(len(expected))] == expected
