"""Where the tests find real data, and how they say that it is absent."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def scaling_data() -> Path:
    """The folder of real data; the test is skipped where there is none."""
    folder = Path(os.environ.get("SCALING_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(
            f"no data at {folder}: set SCALING_DATA to a folder that has c4/, megatron_openwebtext/, ..."
        )
    return folder


@pytest.fixture(scope="session")
def laws(scaling_data: Path) -> Path:
    """The folder of published runs and fits, beside the data."""
    folder = scaling_data.parent / "laws"
    if not folder.is_dir():
        pytest.skip(f"no published runs at {folder}")
    return folder
