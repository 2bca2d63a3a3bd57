"""EncodeToMegatron in datatrove's pipelines: its merged parts are the dataset of the preprocessing tool."""

import gzip
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.data.sidecar import read_sidecar
from megatron.text.inspect_dataset import find_faults
from megatron.text.merge import merge_datasets
from megatron.text.preprocess import PreprocessOptions, preprocess
from megatron.tokenizer.kinds import TokenizerSpec

pytest.importorskip("datatrove", reason="no datatrove: pip install 'megatron-scaling[datatrove]'")

from datatrove.data import Document
from datatrove.pipeline.filters import LambdaFilter

from megatron.text.datatrove_step import EncodeToMegatron, StrictJsonlReader
from tests.conftest import run_process
from tests.datasets import read_documents

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


def run_tasks(steps: list, n_tasks: int) -> None:
    """Run all tasks as an executor does, without its processes."""
    for rank in range(n_tasks):
        data = None
        for step in steps:
            data = step(data, rank, n_tasks)
        for _ in data:
            pass


def list_parts(prefix: Path, n_tasks: int) -> list[str]:
    return [f"{prefix}-part-{rank:05d}-of-{n_tasks:05d}_text_document" for rank in range(n_tasks)]


def merge_parts(prefix: Path, n_tasks: int) -> bytes:
    """Return .bin and .idx of the merged parts, each checked."""
    parts = list_parts(prefix, n_tasks)
    assert not [fault for part in parts for fault in find_faults(part)]
    merge_datasets(parts, Path(f"{prefix}-merged"))
    return read_bytes(f"{prefix}-merged")


def read_bytes(prefix: str) -> bytes:
    return Path(f"{prefix}.bin").read_bytes() + Path(f"{prefix}.idx").read_bytes()


def encode_with_tool(sources: list[Path], out: Path, **options: object) -> bytes:
    """Return .bin and .idx of the preprocessing tool."""
    preprocess([str(path) for path in sources], out, "gpt2", PreprocessOptions(quiet=True, **options))
    return read_bytes(f"{out}_text_document")


def write_part(step: EncodeToMegatron, *texts: str) -> None:
    list(step.run(iter([Document(text=text, id=str(i)) for i, text in enumerate(texts)])))


@pytest.mark.parametrize("n_tasks", [1, 3, 8])
def test_any_number_of_tasks_gives_the_bytes_of_the_tool(corpus: Path, tmp_path: Path, n_tasks: int) -> None:
    files = sorted(corpus.iterdir())
    prefix = tmp_path / "out" / "c4"
    steps = [StrictJsonlReader(str(corpus)), EncodeToMegatron(prefix, append_eod=True)]
    run_tasks(steps, n_tasks)
    # task r reads the files r, r + n_tasks, r + 2 n_tasks, ...
    ordered = [path for rank in range(n_tasks) for path in files[rank::n_tasks]]
    assert merge_parts(prefix, n_tasks) == encode_with_tool(ordered, tmp_path / "ours", append_eod=True)


def test_only_documents_that_pass_a_filter_are_encoded_and_passed_on(corpus: Path, tmp_path: Path) -> None:
    seen: list[str] = []

    def collect(data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        for document in data:
            seen.append(document.text)
            yield document

    keep, step = LambdaFilter(lambda document: "blue" in document.text), EncodeToMegatron(tmp_path / "blue")
    run_tasks([StrictJsonlReader(str(corpus)), keep, step, collect], 1)
    sidecar = read_sidecar(list_parts(tmp_path / "blue", 1)[0])
    assert (seen, sidecar["documents"]) == (["blue fish"] * 10, 10)
    read = {entry["path"]: entry["documents_read"] for entry in sidecar["sources"]}
    assert read == {"0.jsonl.gz": 1, "1.jsonl": 2, "2.jsonl.gz": 3, "3.jsonl": 4}
    assert step.stats.stats["tokens"].total == sidecar["tokens"]


def test_a_step_that_fails_or_stops_leaves_no_part_and_another_attempt_is_refused(tmp_path: Path) -> None:
    def documents() -> Iterator[Document]:
        yield from (Document(text="fish", id="") for _ in range(500))
        raise RuntimeError("no more fish")

    prefix = tmp_path / "out" / "c4"
    with pytest.raises(RuntimeError, match="no more fish"):
        list(EncodeToMegatron(prefix).run(documents()))
    running = EncodeToMegatron(prefix).run(documents())
    next(running)
    with pytest.raises(ValueError, match="in use by another process"):
        write_part(EncodeToMegatron(prefix), "red fish")
    running.close()  # as a later step with a limit does
    assert not list((tmp_path / "out").iterdir())
    for append_eod in (False, True):  # an existing part is replaced
        write_part(EncodeToMegatron(prefix, append_eod=append_eod), "red fish")
    assert read_documents(list_parts(prefix, 1)[0])[0][-1] == 50256
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".bin", ".idx", ".json"}


def test_a_bad_line_stops_the_strict_reader(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for line, message in ((b'{"text": "a"', "not JSON"), (b'["text"]', "got list, expected an object")):
        (tmp_path / "text" / "1.jsonl").write_bytes(b'{"text": "fish"}\n\n' + line + b"\n")
        with pytest.raises(ValueError, match=rf"1\.jsonl, line 3: {message}"):
            run_tasks([StrictJsonlReader(str(tmp_path / "text")), EncodeToMegatron(tmp_path / "out")], 1)
    assert not list(tmp_path.glob("out*"))


def test_a_tokenizer_without_cpp_code_gives_its_own_ids_and_names_a_bad_document(tmp_path: Path) -> None:
    spec = TokenizerSpec(kind="NullTokenizer", vocab_size=9)
    step = EncodeToMegatron(tmp_path / "n", spec, append_eod=True)
    write_part(step, "1 2", "", "8")
    (part,) = list_parts(tmp_path / "n", 1)
    assert read_documents(part) == [[1, 2, 9], [9], [8, 9]]
    assert read_sidecar(part)["empty_documents"] == 1
    document = Document(text="9", id="b", metadata={"file_path": "s3://bucket/x.jsonl"})
    step = EncodeToMegatron(tmp_path / "m", spec)
    with pytest.raises(ValueError, match="s3://bucket/x.jsonl, id b: NullTokenizer: got '9'"):
        list(step.run(iter([document])))
    with pytest.raises(ValueError, match="document, id c: 'text' is NoneType, expected a string"):
        list(step.run(iter([Document(text=None, id="c")])))  # type: ignore[arg-type]  # a faulty step


def test_wrong_arguments_are_errors_before_a_task_starts() -> None:
    for words, message in (
        (("s3://bucket/c4",), "got 's3://bucket/c4', expected the first part of"),
        (("tokens/",), "got 'tokens/', expected the first part of a file name"),
        (("c4", TokenizerSpec(eod_token="<no>", model="gpt2")), "--eod-token: got"),
        (("c4", "./no-such-folder"), "no-such-folder"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            EncodeToMegatron(*words)


def test_the_program_of_the_guide_encodes_a_folder(root: Path, tmp_path: Path, corpus: Path) -> None:
    program = root / "examples_scaling/training/prepare_datatrove.py"
    words = [str(corpus), str(tmp_path / "c4"), "--glob"]
    done = run_process([sys.executable, program, *words, "*.jsonl*"], PYTHONPATH=str(root))
    assert done.returncode == 0, done.stderr
    assert merge_parts(tmp_path / "c4", 5) == encode_with_tool([corpus], tmp_path / "ours", append_eod=True)
    module = runpy.run_path(str(program))
    with pytest.raises(SystemExit, match=r"error: .* no file matches \*\.parquet"):
        module["build_steps"](module["build_parser"]().parse_args([*words, "*.parquet"]))
