"""Restarts of preprocessing: kills, a full disk, changed inputs and a second process."""

import errno
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.io import open_exclusive
from megatron.text import preprocess as module
from megatron.text import workers
from tests.conftest import limit_file_size
from tests.text import preprocessing

RNG = random.Random(1)
TEXTS = [" ".join(RNG.choices(["red", "fish", "blue", "12", "7"], k=RNG.randrange(60))) for _ in range(3000)]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "PIECE_BYTES", 20_000)
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"text": text, "url": f"fish {i}"}) for i, text in enumerate(TEXTS)]
    lines[100] = lines[2000] = "bad"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def units(source: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files of the finished units of a job `out` of the source that was interrupted."""

    def stop_before_join(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module.UnitJoiner, "join", stop_before_join)
        run(source, source.with_name("out"), tokenizer)
    return sorted(source.with_name(".out.shards").iterdir())


run = partial(preprocessing.run, skip_bad_lines=True, n_workers=2)


def read_outputs(prefix: Path) -> dict[str, bytes]:
    """Return the content of all files of a job by suffix, and check that no other file is there."""
    assert not list(prefix.parent.glob(f".{prefix.name}*"))
    names = prefix.parent.glob(f"{prefix.name}[._]*")
    return {path.name.removeprefix(prefix.name): path.read_bytes() for path in names}


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the name of each unit that this process encodes is added."""
    encode, encoded = workers.encode_piece, list[str]()

    def counted(piece: Any, path: Path, *rest: Any) -> Any:
        encoded.append(path.name)
        return encode(piece, path, *rest)

    monkeypatch.setattr(workers, "encode_piece", counted)
    return encoded


def test_a_restart_encodes_only_what_is_not_finished(
    tmp_path: Path, source: Path, tokenizer: str, units: list[Path], encoded: list[str]
) -> None:
    run(source, tmp_path / "whole", tokenizer)
    units = [path for path in units if path.suffix == ".unit"]
    units[3].unlink()
    # incomplete after a crash of the system
    for path in (units[5].with_suffix(".0.ids"), units[6].with_suffix(".0.lengths"), units[7]):
        path.write_bytes(path.read_bytes()[:-1])
    encoded.clear()
    run(source, tmp_path / "out", tokenizer, n_workers=1)
    assert encoded == [units[i].name for i in (3, 5, 6, 7)]
    assert read_outputs(tmp_path / "out") == read_outputs(tmp_path / "whole")


@pytest.mark.parametrize("change", ["inputs", "settings"])
def test_work_of_another_job_is_kept_unless_it_is_overwritten(
    tmp_path: Path, source: Path, tokenizer: str, units: list[Path], change: str
) -> None:
    if change == "inputs":
        source.write_bytes(source.read_bytes() + b'\n{"text": "fish", "url": ""}')
    options = {"append_eod": change == "settings"}
    with pytest.raises(ValueError, match="out: got an interrupted job of other inputs or settings"):
        run(source, tmp_path / "out", tokenizer, **options)
    assert sorted((tmp_path / ".out.shards").iterdir()) == units
    run(source, tmp_path / "out", tokenizer, overwrite=True, **options)
    run(source, tmp_path / "whole", tokenizer, **options)
    assert read_outputs(tmp_path / "out") == read_outputs(tmp_path / "whole")


def test_a_finished_job_is_not_repeated_and_another_is_refused(
    tmp_path: Path, source: Path, tokenizer: str, encoded: list[str]
) -> None:
    first = run(source, tmp_path / "out", tokenizer)
    before = read_outputs(tmp_path / "out")
    encoded.clear()
    again = run(source, tmp_path / "out", tokenizer, n_workers=1)
    assert (again.outputs, again.rejected, encoded) == (first.outputs, first.rejected, [])
    with pytest.raises(ValueError, match="out_text_document.bin: exists already, from other files"):
        run(source, tmp_path / "out", tokenizer, append_eod=True)
    assert read_outputs(tmp_path / "out") == before
    for suffix in ("_text_document.bin", "_text_document.idx", ".rejects.jsonl"):
        Path(f"{tmp_path}/out{suffix}").unlink()
        run(source, tmp_path / "out", tokenizer)
        assert read_outputs(tmp_path / "out") == before
    run(source, tmp_path / "out", tokenizer, append_eod=True, overwrite=True)
    assert read_outputs(tmp_path / "out") != before


def test_an_input_that_is_edited_in_place_is_an_error(
    tmp_path: Path, source: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = workers.encode_piece

    def edit_and_encode(piece: Any, path: Path, *rest: Any) -> Any:
        if path.name == "00000002.unit":
            with source.open("r+b") as file:  # keeps the size
                file.seek(piece.begin + 12)
                file.write(b"x")
        return encode(piece, path, *rest)

    monkeypatch.setattr(workers, "encode_piece", edit_and_encode)
    with pytest.raises(ValueError, match=r"in.jsonl: a file changed while it was read"):
        run(source, tmp_path / "out", tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_second_process_is_refused(tmp_path: Path, source: Path, tokenizer: str) -> None:
    (tmp_path / ".out.shards").mkdir()
    with (
        open_exclusive(tmp_path / ".out.shards/.lock"),
        pytest.raises(ValueError, match=r"out: in use by another process"),
    ):
        run(source, tmp_path / "out", tokenizer)


def test_a_full_disk_leaves_no_output_and_the_same_call_resumes(
    tmp_path: Path, source: Path, tokenizer: str, encoded: list[str]
) -> None:
    source.write_text(source.read_text().replace("bad", "{}").replace("{}", '{"text": ""}'))
    run(source, tmp_path / "whole", tokenizer)
    n_bytes = (tmp_path / "whole_text_document.bin").stat().st_size
    with limit_file_size(n_bytes // 2), pytest.raises(OSError) as full:
        run(source, tmp_path / "out", tokenizer, skip_bad_lines=False)
    assert full.value.errno == errno.EFBIG
    assert not list(tmp_path.glob("out*"))
    encoded.clear()
    run(source, tmp_path / "out", tokenizer, skip_bad_lines=False)
    assert encoded == []  # the units are smaller than the limit, the output is not
    outputs = [(tmp_path / f"{name}_text_document.bin").read_bytes() for name in ("out", "whole")]
    assert outputs[0] == outputs[1]
