"""Studies of the report's tests."""

from pathlib import Path

import pytest

from megatron.report.study_data import Study, read_study
from tests.report.synthetic_study import write_study


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a study that a test may change."""
    return write_study(tmp_path / "a_study")


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Return the same study, read; tests do not change it."""
    return read_study(write_study(tmp_path_factory.mktemp("study")))


@pytest.fixture(scope="session")
def crossing(root: Path) -> Study:
    """Return the measured crossover of the guide."""
    return read_study(root / "examples_scaling" / "training" / "crossover_cpu")
