"""Checkpoints are complete or absent, and damaged ones are detected."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import layout, sharded, store
from megatron.checkpoint.model_weights import find_newest_checkpoint
from megatron.io import PARTIAL, create_partial_folder
from tests.conftest import flip_middle_bit, limit_file_size, load_newest, save_checkpoint
from tests.wrong_values import read_refusal

META = {"identity": "abc", "step": 3}
STATE_OF_4_MIB = {"model": {"w": torch.zeros(1 << 20)}, "optim": {"state": {}}}


def make_parts(step: int) -> dict:
    return {name: {"step": step, "tensor": torch.arange(1000)} for name in layout.FILES}


def list_paths(folder: Path) -> list[Path]:
    return [info.path for info in layout.find_checkpoints(folder, "run")]


def test_the_newest_valid_checkpoint_is_loaded_and_damaged_ones_are_skipped(tmp_path: Path) -> None:
    paths = [save_checkpoint(tmp_path, "run", make_parts(step), META) for step in (1, 2, 3, 4)]
    truncated = paths[3] / "model_state_dict.pt"
    size = truncated.stat().st_size
    os.truncate(truncated, size - 1)
    flipped = paths[2] / "optim_state_dict.pt"
    flip_middle_bit(flipped)
    (paths[1] / "meta.json").write_text("{")
    result = load_newest(tmp_path, "run")
    assert result is not None
    assert (result[0], result[1]["iter"]["step"]) == (paths[0], 1)
    with pytest.raises(ValueError, match=rf"got {size - 1:,} bytes, expected {size:,}"):
        store.verify_checkpoint(paths[3])
    sentence = f"{flipped}: got content with another sha256 than was saved; {layout.RESTORE}"
    assert read_refusal(lambda: store.verify_checkpoint(paths[2])) == sentence


def test_a_flipped_bit_anywhere_in_meta_json_is_detected(tmp_path: Path) -> None:
    path = save_checkpoint(
        tmp_path, "run", make_parts(1), {**META, "config": {"optim": {"lr": 1e-3}, "name": "é"}}
    )
    content = (path / "meta.json").read_bytes()
    digest_key = content.rindex(b'"sha256"')  # the key of the checksum is not covered by it
    for i in range(len(content)):
        flipped = bytearray(content)
        flipped[i] ^= 1
        (path / "meta.json").write_bytes(flipped)
        if not digest_key <= i < digest_key + len('"sha256"'):
            with pytest.raises(ValueError, match="meta.json"):
                store.verify_checkpoint(path)
    (path / "meta.json").write_bytes(content)
    assert store.verify_checkpoint(path)["config"]["optim"]["lr"] == 1e-3


def test_an_interrupted_save_is_not_a_checkpoint_and_is_removed(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, "run", make_parts(1), META)
    leftover, other = (
        tmp_path / (layout.new_checkpoint_name(prefix, preempt=False) + PARTIAL)
        for prefix in ("run", "run.1")
    )
    leftover.mkdir()
    other.mkdir()  # a save of another prefix in progress
    assert list_paths(tmp_path) == [saved]
    store.remove_old_checkpoints(tmp_path, "run", keep_last=None)
    assert sorted(tmp_path.iterdir()) == sorted([saved, other])


def test_a_missing_folder_is_named_as_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        store.load_checkpoint(tmp_path / "none")
    assert load_newest(tmp_path / "none", "run") is None


@pytest.mark.parametrize("inside", ["", "checkpoints"])
def test_the_error_for_a_folder_of_checkpoints_lists_their_names_and_steps(
    tmp_path: Path, inside: str
) -> None:
    folder = tmp_path / inside
    names = [
        save_checkpoint(folder, "run", make_parts(step), {**META, "step": step}).name for step in (100, 200)
    ]
    listed = f"Give {names[0]} (step 100), {names[1]} (step 200)."
    sentence = f"{folder}: got a folder of checkpoints, expected one of them. {listed}"
    assert read_refusal(lambda: store.load_checkpoint(tmp_path)) == sentence


def test_a_full_disk_is_an_oserror_in_both_layouts_and_leaves_no_files(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, "run", make_parts(1), META)
    with limit_file_size(1 << 16):
        big = {**make_parts(2), "model": {"tensor": torch.zeros(1 << 20)}}
        with pytest.raises(OSError) as whole:
            save_checkpoint(tmp_path, "run", big, META)
        assert list(tmp_path.iterdir()) == [saved]
        partial = create_partial_folder(tmp_path / "run.20300101-000000-000000")
        with pytest.raises(OSError) as shards:
            sharded.write_sharded(partial, STATE_OF_4_MIB)
    assert [info.path for info in layout.find_checkpoints(tmp_path)] == [saved]
    assert store.load_checkpoint(saved)[0]["iter"]["step"] == 1
    # the system's error and file, not the error of torch's writer
    assert whole.value.errno == shards.value.errno == errno.EFBIG
    assert str(whole.value.filename).endswith(f"{PARTIAL}/{layout.FILES['model']}")
    assert shards.value.filename == str(partial / "shard-00001-model-00001-of-00001.safetensors")


def save_at(directory: Path, step: int, time: str, **meta: object) -> Path:
    """Save a checkpoint of a step under the name that it gets when the clock shows `time`."""
    path = directory / f"run.{time}"
    store.save_checkpoint(path, make_parts(step), {**META, "step": step, **meta})
    return path


def test_the_newest_is_that_of_the_last_step_for_any_clock(tmp_path: Path) -> None:
    before = [save_at(tmp_path, step, f"20300101-0000{step}-000000") for step in (10, 20)]
    # the clock is corrected: all later checkpoints have an earlier time in their name
    after = []
    for step in (30, 40, 50):
        after.append(save_at(tmp_path, step, f"20200101-0000{step}-000000"))
        store.remove_old_checkpoints(tmp_path, "run", keep_last=2, saved=after[-1])
    assert list_paths(tmp_path) == after[1:]
    assert not any(path.exists() for path in before)
    newest = store.find_newest_valid(tmp_path, "run")
    assert newest is not None and newest[0] == after[-1]
    assert find_newest_checkpoint(tmp_path) == after[-1]


@pytest.mark.parametrize(
    ("steps", "options", "retained"),
    [
        ((0, 1, 2, 3), {"keep_last": 2}, (2, 3)),
        # the one of step 300 is saved on a preemption
        ((100, 150, 200, 250, 300, 350), {"keep_last": 1, "keep_every": 100}, (100, 200, 350)),
        ((11, 20, 30, 31), {"keep_last": 1, "saved": 11}, (11,)),
    ],
)
def test_the_last_multiples_and_the_one_just_saved_are_retained_and_no_other_prefix_is_touched(
    tmp_path: Path, steps: tuple[int, ...], options: dict[str, Any], retained: tuple[int, ...]
) -> None:
    other = save_checkpoint(tmp_path, "other", make_parts(0), META)
    paths = {}
    for step in steps:
        meta = {**META, "step": step - step % 10}  # equal in the first case, so that the time decides
        paths[step] = save_checkpoint(tmp_path, "run", make_parts(step), meta, preempt=step in (2, 300))
    saved = {"saved": paths[options["saved"]]} if "saved" in options else {}
    store.remove_old_checkpoints(tmp_path, "run", **options | saved)
    assert sorted(tmp_path.iterdir()) == sorted([other, *(paths[step] for step in retained)])


def test_after_a_rewind_to_an_earlier_step_new_checkpoints_are_the_newest(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_at(tmp_path, step, f"20200101-0000{step}-000000")
    saved = []
    for step in (15, 20, 25):  # rewound to step 10
        generation = store.next_generation(tmp_path, "run", step)
        assert generation == 1
        saved.append(save_at(tmp_path, step, f"20190101-0000{step}-000000", generation=generation))
    infos = layout.find_checkpoints(tmp_path, "run")
    assert [info.step for info in infos] == [10, 20, 30, 15, 20, 25]
    store.remove_old_checkpoints(tmp_path, "run", keep_last=4, saved=saved[-1])
    assert list_paths(tmp_path) == [infos[2].path, *saved]
    newest = store.find_newest_valid(tmp_path, "run")
    assert newest is not None and newest[0] == saved[-1]
    assert store.next_generation(tmp_path, "run", 25) == 2  # the same step again starts a new generation
    assert store.next_generation(tmp_path, "run", 26) == 1
    assert store.next_generation(tmp_path, "other", 1) == 0


@pytest.mark.parametrize(
    "content", [None, '{"step": 99', '{"step": true}', '{"step": -1}', "[]", "[" * 100_000]
)
def test_a_checkpoint_without_a_readable_step_is_never_newest_counted_or_deleted(
    tmp_path: Path, content: str | None
) -> None:
    """None: the number in meta.json is changed, so that only its checksum shows the damage."""
    first = save_at(tmp_path, 10, "20200101-000010-000000")
    odd = save_at(tmp_path, 20, "20300101-000020-000000")
    meta = (odd / "meta.json").read_text()
    (odd / "meta.json").write_text(content or meta.replace('"step": 20', '"step": 90'))
    last = save_at(tmp_path, 30, "20200101-000030-000000")
    store.remove_old_checkpoints(tmp_path, "run", keep_last=2, saved=last)
    assert list_paths(tmp_path) == [odd, first, last]
    assert find_newest_checkpoint(tmp_path) == last
    store.remove_old_checkpoints(tmp_path, "run", keep_last=1, saved=last)
    assert list_paths(tmp_path) == [odd, last]


def test_the_newest_of_two_runs_in_one_folder_is_not_guessed(tmp_path: Path) -> None:
    for prefix, step in (("a", 10), ("b", 20)):
        save_checkpoint(tmp_path, prefix, make_parts(step), {**META, "step": step})
    with pytest.raises(ValueError, match=r"checkpoints of 2 runs \(a, b\). Give the path"):
        find_newest_checkpoint(tmp_path)
