"""Checkpoints are whole or absent, and a broken one is found out."""

import errno
import resource
import signal
from pathlib import Path
from typing import IO

import pytest
import torch

from megatron.checkpoint import layout, sharded, store
from tests.conftest import load_newest

META = {"identity": "abc", "step": 3}
STATE_OF_4_MIB = {"model": {"w": torch.zeros(1 << 20)}, "optim": {"state": {}}}


def parts(step: int) -> dict:
    return {name: {"step": step, "tensor": torch.arange(1000)} for name in layout.FILES}


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = store.save(tmp_path, "run", parts(3), META)
    loaded, meta = store.load(path)
    assert torch.equal(loaded["model"]["tensor"], torch.arange(1000))
    assert meta["identity"] == "abc"
    assert sorted(file.name for file in path.iterdir()) == sorted([*layout.FILES.values(), "meta.json"])


def test_the_newest_whole_one_is_taken_and_broken_ones_are_passed_over(tmp_path: Path) -> None:
    paths = [store.save(tmp_path, "run", parts(step), META) for step in (1, 2, 3, 4)]
    truncated = paths[3] / "model_state_dict.pt"
    truncated.write_bytes(truncated.read_bytes()[:-100])
    flipped = paths[2] / "optim_state_dict.pt"
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    (paths[1] / "meta.json").write_text("{")
    found = load_newest(tmp_path, "run")
    assert found is not None
    assert found[0] == paths[0]
    assert found[1]["iter"]["step"] == 1


def test_a_bit_that_flips_anywhere_in_meta_json_is_found_out(tmp_path: Path) -> None:
    path = store.save(tmp_path, "run", parts(1), {**META, "config": {"optim": {"lr": 1e-3}, "name": "é"}})
    content = (path / "meta.json").read_bytes()
    own = content.rindex(b'"sha256"')  # the sum's own name guards nothing
    for i in range(len(content)):
        flipped = bytearray(content)
        flipped[i] ^= 1
        (path / "meta.json").write_bytes(flipped)
        if not own <= i < own + len('"sha256"'):
            with pytest.raises(ValueError, match="meta.json"):
                store.verify(path)
    (path / "meta.json").write_bytes(content)
    assert store.verify(path)["config"]["optim"]["lr"] == 1e-3


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(content: object, file: IO[bytes]) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        store.save(tmp_path, "run", parts(1), META)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_save_is_no_checkpoint_and_is_swept_away(tmp_path: Path) -> None:
    kept = store.save(tmp_path, "run", parts(1), META)
    leftover = tmp_path / (layout.new_name("run", preempt=False) + layout.PARTIAL)
    leftover.mkdir()
    assert [found.path for found in layout.find(tmp_path, "run")] == [kept]
    store.remove_old(tmp_path, "run", keep_last=None)
    assert list(tmp_path.iterdir()) == [kept]


def test_what_another_prefix_is_writing_is_left_alone(tmp_path: Path) -> None:
    writing = tmp_path / (layout.new_name("run-0.1", preempt=False) + layout.PARTIAL)
    writing.mkdir()
    store.remove_old(tmp_path, "run-0", keep_last=2)
    assert list(tmp_path.iterdir()) == [writing]


def test_only_the_last_are_kept_and_other_prefixes_left_alone(tmp_path: Path) -> None:
    other = store.save(tmp_path, "other", parts(0), META)
    paths = [store.save(tmp_path, "run", parts(step), META, preempt=step == 2) for step in range(4)]
    store.remove_old(tmp_path, "run", keep_last=2)
    assert sorted(tmp_path.iterdir()) == sorted([other, *paths[2:]])
    assert paths[2].name.endswith(".preempt")


def test_no_pickled_code_is_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "touched",))

    path = store.save(tmp_path, "run", {**parts(1), "iter": {"evil": Evil()}}, META)
    with pytest.raises(ValueError, match="not a checkpoint of this project"):
        store.load(path)
    assert not (tmp_path / "touched").exists()


def test_a_folder_that_is_none_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        store.load(tmp_path / "none")
    assert load_newest(tmp_path / "none", "run") is None


@pytest.mark.parametrize("inside", ["", "checkpoints"])
def test_a_folder_of_checkpoints_is_answered_with_their_names_and_steps(tmp_path: Path, inside: str) -> None:
    folder = tmp_path / inside
    names = [store.save(folder, "run", parts(step), {**META, "step": step}).name for step in (100, 200)]
    with pytest.raises(ValueError) as caught:
        store.load(tmp_path)
    told = f"give one of those in it: {names[0]} (step 100), {names[1]} (step 200)"
    assert str(caught.value) == f"{folder}: a folder of checkpoints; {told}"


def test_every_hundredth_stays_and_preempted_ones_do_not(tmp_path: Path) -> None:
    paths = [
        store.save(tmp_path, "run", parts(step), {**META, "step": step}, preempt=step == 300)
        for step in (100, 150, 200, 250, 300, 350)
    ]
    store.remove_old(tmp_path, "run", keep_last=1, keep_every=100)
    assert sorted(tmp_path.iterdir()) == [paths[0], paths[2], paths[5]]


def test_a_full_disk_is_an_oserror_whoever_of_torch_finds_it(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    kept = store.save(tmp_path, "run", parts(1), META)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limit[1]))  # a file may hold 64 KiB
    try:
        big = {**parts(2), "model": {"tensor": torch.zeros(1 << 20)}}
        with pytest.raises(OSError):
            store.save(tmp_path, "run", big, META)
        with pytest.raises(OSError):
            sharded.write(store.begin(tmp_path / "run.20300101-000000-000000"), STATE_OF_4_MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [found.path for found in layout.find(tmp_path)] == [kept]
    assert store.load(kept)[0]["iter"]["step"] == 1
