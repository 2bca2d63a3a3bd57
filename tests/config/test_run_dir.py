"""What is written to a run's folder, where the disk does not take it."""

from pathlib import Path

import pytest

from megatron.run_dir import room_in

FULL = Path("/dev/full")  # takes nothing, as a full disk does


@pytest.mark.skipif(not FULL.exists(), reason="wants /dev/full")
def test_a_full_disk_is_told_with_its_folder_and_the_way_out() -> None:
    with (
        pytest.raises(OSError, match="^tokens: No space left on device; make room and run"),
        room_in(Path("tokens")),
        FULL.open("wb", buffering=0) as file,
    ):
        file.write(b"x")


def test_what_else_the_system_refuses_is_told_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"), room_in(tmp_path):
        (tmp_path / "absent").read_bytes()
