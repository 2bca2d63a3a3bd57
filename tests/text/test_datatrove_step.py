"""EncodeToMegatron in datatrove's pipelines: its merged parts are the dataset of the preprocessing tool."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.indexed import IndexedTokens
from megatron.text.inspect_dataset import find_faults
from megatron.text.merge import merge_datasets
from megatron.text.preprocess import PreprocessOptions, preprocess
from megatron.tokenizer.kinds import TokenizerSpec

pytest.importorskip("datatrove", reason="no datatrove: pip install 'megatron-scaling[datatrove]'")

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.filters import LambdaFilter

from megatron.text.datatrove_step import EncodeToMegatron, StrictJsonlReader

LIMIT_S = 120
N_FILES = 5
# special text, no text, a surrogate and NaN (orjson refuses both), a blank line, all planes, a long word
LINES = [
    r'{"text": "one fish <|endoftext|> two fish", "url": "a"}',
    r'{"text": ""}',
    r'{"text": "red \ud800 fish", "id": "7"}',
    r'{"text": "blue fish", "score": NaN}',
    "",
    '{"text": "\u00e9t\u00e9 \U0001f41f\\n\\n  \U000e0001 \u0661 fish\\u0000"}',
    json.dumps({"text": "fish" * 5000, "metadata": {"source": "x"}}),
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Folder of compressed and plain files of different lengths, and one without documents."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(N_FILES - 1):
        text = "".join(f"{line}\n" for line in LINES[i:] * (i + 1)).encode()
        if i % 2:
            (folder / f"{i}.jsonl").write_bytes(text)
        else:
            (folder / f"{i}.jsonl.gz").write_bytes(gzip.compress(text))
    (folder / f"{N_FILES - 1}.jsonl").touch()
    return folder


def run_pipeline(tmp_path: Path, steps: list, n_tasks: int, workers: int = 1) -> None:
    LocalPipelineExecutor(steps, tasks=n_tasks, workers=workers, logging_dir=str(tmp_path / "logs")).run()


def run_tasks(steps: list, n_tasks: int) -> None:
    """Run all tasks as an executor does, without its processes."""
    for rank in range(n_tasks):
        data = None
        for step in steps:
            data = step(data, rank, n_tasks)
        for _ in data:
            pass


def read_parts(prefix: Path, n_tasks: int) -> list[Path]:
    return [
        prefix.with_name(f"{prefix.name}-part-{rank:05d}-of-{n_tasks:05d}_text_document")
        for rank in range(n_tasks)
    ]


def merge_parts(prefix: Path, n_tasks: int) -> bytes:
    """Return .bin and .idx of the merged parts, each checked."""
    parts = read_parts(prefix, n_tasks)
    for part in parts:
        assert not list(find_faults(part))
    merged = prefix.with_name(f"{prefix.name}-merged-{n_tasks}")
    merge_datasets([str(part) for part in parts], merged)
    return read_bytes(merged)


def read_bytes(prefix: Path) -> bytes:
    return Path(f"{prefix}.bin").read_bytes() + Path(f"{prefix}.idx").read_bytes()


def encode_with_tool(sources: list[Path], out: Path, **options: object) -> bytes:
    """Return .bin and .idx of the preprocessing tool."""
    preprocess([str(path) for path in sources], out, "gpt2", PreprocessOptions(quiet=True, **options))
    return read_bytes(out.with_name(f"{out.name}_text_document"))


def make_documents(*texts: str) -> Iterator[Document]:
    return iter([Document(text=text, id=str(i)) for i, text in enumerate(texts)])


def write_part(step: EncodeToMegatron, *texts: str) -> None:
    for _ in step.run(make_documents(*texts)):
        pass


@pytest.mark.parametrize("n_tasks", [1, 2, 3, 8])
def test_any_number_of_tasks_gives_the_bytes_of_the_tool_for_the_files_in_their_order(
    corpus: Path, tmp_path: Path, n_tasks: int
) -> None:
    files = sorted(corpus.iterdir())
    prefix = tmp_path / "out" / "c4"
    steps = [StrictJsonlReader(str(corpus)), EncodeToMegatron(prefix, append_eod=True)]
    if n_tasks == 3:
        run_pipeline(tmp_path, steps, n_tasks, workers=2)
    else:
        run_tasks(steps, n_tasks)
    # task r reads the files r, r + n_tasks, r + 2 n_tasks, ...
    ordered = [path for rank in range(n_tasks) for path in files[rank::n_tasks]]
    assert merge_parts(prefix, n_tasks) == encode_with_tool(ordered, tmp_path / "ours", append_eod=True)


def test_only_documents_that_pass_a_filter_are_encoded_and_they_are_passed_on(
    corpus: Path, tmp_path: Path
) -> None:
    seen: list[str] = []

    def count(data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        for document in data:
            seen.append(document.text)
            yield document

    keep = LambdaFilter(lambda document: "blue" in document.text)
    step = EncodeToMegatron(tmp_path / "blue")
    run_pipeline(tmp_path, [StrictJsonlReader(str(corpus)), keep, step, count], n_tasks=1)
    tokens = IndexedTokens(read_parts(tmp_path / "blue", 1)[0])
    assert (seen, tokens.n_documents) == (["blue fish"] * 10, 10)
    assert tokens.sidecar is not None
    read = {entry["path"]: entry["documents_read"] for entry in tokens.sidecar["sources"]}
    assert read == {"0.jsonl.gz": 1, "1.jsonl": 2, "2.jsonl.gz": 3, "3.jsonl": 4}
    stats = json.loads((tmp_path / "logs" / "stats.json").read_text())
    assert stats[2]["stats"]["tokens"]["total"] == tokens.n_tokens


def test_a_failing_step_leaves_no_part(tmp_path: Path) -> None:
    def documents() -> Iterator[Document]:
        yield from make_documents(*["fish"] * 500)
        raise RuntimeError("no more fish")

    with pytest.raises(RuntimeError, match="no more fish"):
        list(EncodeToMegatron(tmp_path / "out" / "c4").run(documents()))
    stopped = EncodeToMegatron(tmp_path / "out" / "c4").run(make_documents(*["fish"] * 500))
    next(stopped)
    stopped.close()  # as a later step with a limit does
    assert not list((tmp_path / "out").iterdir())


def test_an_existing_part_is_replaced(tmp_path: Path) -> None:
    for append_eod in (False, True):
        write_part(EncodeToMegatron(tmp_path / "c4", append_eod=append_eod), "red fish")
    assert IndexedTokens(read_parts(tmp_path / "c4", 1)[0]).get_document(0)[-1] == 50256
    assert {path.suffix for path in tmp_path.iterdir()} == {".bin", ".idx", ".json"}


def test_a_second_attempt_is_refused_while_the_first_one_writes(tmp_path: Path) -> None:
    first = EncodeToMegatron(tmp_path / "c4").run(make_documents("red fish"))
    next(first)
    with pytest.raises(ValueError, match="in use by another process"):
        write_part(EncodeToMegatron(tmp_path / "c4"), "red fish")
    assert list(first) == []
    assert IndexedTokens(read_parts(tmp_path / "c4", 1)[0]).n_documents == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"1\.jsonl, line 3: not JSON"),
        (b'["text"]', r"1\.jsonl, line 3: got list, expected an object"),
    ],
)
def test_a_bad_line_stops_the_strict_reader(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "1.jsonl").write_bytes(b'{"text": "fish"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        run_tasks([StrictJsonlReader(str(tmp_path / "text")), EncodeToMegatron(tmp_path / "out")], 1)
    assert not list(tmp_path.glob("out*"))


def test_a_tokenizer_without_cpp_code_gives_its_own_ids_and_names_a_bad_document(tmp_path: Path) -> None:
    spec = TokenizerSpec(kind="NullTokenizer", vocab_size=9)
    step = EncodeToMegatron(tmp_path / "n", spec, append_eod=True)
    write_part(step, "1 2", "", "8")
    tokens = IndexedTokens(read_parts(tmp_path / "n", 1)[0])
    np.testing.assert_array_equal(tokens.tokens, [1, 2, 9, 9, 8, 9])
    assert tokens.sidecar is not None and tokens.sidecar["empty_documents"] == 1
    document = Document(text="9", id="b", metadata={"file_path": "s3://bucket/x.jsonl"})
    step = EncodeToMegatron(tmp_path / "m", spec)
    with pytest.raises(ValueError, match="s3://bucket/x.jsonl, id b: NullTokenizer: got '9'"):
        list(step.run(iter([document])))
    with pytest.raises(ValueError, match="document, id c: 'text' is NoneType, expected a string"):
        list(step.run(iter([Document(text=None, id="c")])))  # type: ignore[arg-type]  # a faulty step


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EncodeToMegatron("s3://bucket/c4"), "got 's3://bucket/c4', expected the first part of"),
        (lambda: EncodeToMegatron("tokens/"), "got 'tokens/', expected the first part of a file name"),
        (lambda: EncodeToMegatron("c4", TokenizerSpec(eod_token="<no>", model="gpt2")), "--eod-token: got"),
        (lambda: EncodeToMegatron("c4", "./no-such-folder"), "no-such-folder"),
    ],
)
def test_wrong_arguments_are_errors_before_a_task_starts(
    make: Callable[[], EncodeToMegatron], message: str
) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        make()


def test_the_program_of_the_guide_gives_the_parts_of_a_folder(
    root: Path, tmp_path: Path, corpus: Path
) -> None:
    program = str(root / "examples_scaling/training/prepare_datatrove.py")
    variables = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, program, str(corpus), str(tmp_path / "c4"), "--glob"]
    options: dict[str, Any] = {"env": variables, "timeout": LIMIT_S, "capture_output": True, "text": True}
    subprocess.run([*command, "*.jsonl*"], check=True, **options)
    assert merge_parts(tmp_path / "c4", 5) == encode_with_tool([corpus], tmp_path / "ours", append_eod=True)
    done = subprocess.run(
        [*command, "*.parquet"], env=variables, timeout=LIMIT_S, capture_output=True, text=True
    )
    assert done.returncode == 1 and "error: " in done.stderr and "no file matches *.parquet" in done.stderr
