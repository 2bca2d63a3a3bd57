"""tools/bench/coordinate_check.py: activation changes at every size, and the command line."""

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.schema import ModelConfig
from megatron.report.plot_coordinates import CoordinateSweep

WIDTHS, DEPTHS = [32, 64, 128, 256], [2, 4, 8, 16]


def build_shape(parametrization: str, width: int = 32, depth: int = 2, **more: Any) -> ModelConfig:
    base = {
        "standard": {},
        "mup": {"base_d_model": 32},
        "completep": {"base_d_model": 32, "base_n_layers": 2},
    }
    return ModelConfig(
        d_model=width, d_ff=8 * width // 3, d_head=16, n_heads=width // 16, n_layers=depth, n_tokens=64,
        vocab_rows=128, parametrization=parametrization, **base[parametrization], **more,
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: models this small are slower with several."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="module")
def bench(root: Path) -> dict[str, Any]:
    return runpy.run_path(str(root / "tools" / "bench" / "coordinate_check.py"))


@pytest.fixture(scope="module")
def sweep(bench: dict[str, Any]) -> Callable[[str, str], CoordinateSweep]:
    """Slopes after four steps at a learning rate suitable for the smallest model."""

    def run_sweep(parametrization: str, axis: str) -> CoordinateSweep:
        sizes = WIDTHS if axis == "width" else DEPTHS
        runs = [
            bench["measure_coordinates"](
                build_shape(parametrization, **{axis: size}), lr=1e-3, n_steps=4, n_samples=4, seq_len=32
            )
            for size in sizes
        ]
        return CoordinateSweep(
            parametrization, axis, sizes, {q: [run[q][-1] for run in runs] for q in bench["QUANTITIES"]}
        )

    return run_sweep


@pytest.mark.parametrize(
    ("parametrization", "axis", "constant"),
    [
        ("standard", "width", False),
        ("mup", "width", True),
        ("standard", "depth", False),
        ("mup", "depth", False),
        ("completep", "depth", True),
    ],
)
def test_changes_of_activations_are_equal_at_every_size_where_expected(
    bench: dict[str, Any],
    sweep: Callable[[str, str], CoordinateSweep],
    parametrization: str,
    axis: str,
    constant: bool,
) -> None:
    done = sweep(parametrization, axis)
    assert done.is_constant() is constant
    assert abs(done.fit_slope("embedding")) < 0.1  # its learning rate is the same at every size
    if constant:
        assert all(abs(done.fit_slope(quantity)) < 0.2 for quantity in bench["QUANTITIES"])
    else:
        # the theoretical slope is 1 for a matrix of N inputs that move together; for depth between 1/2 and 1
        assert done.fit_slope("residual") > (1 if axis == "width" else 0.5)


@pytest.mark.parametrize("parametrization", ["mup", "completep"])
def test_every_parametrization_equals_the_standard_at_its_base_shape(
    bench: dict[str, Any], parametrization: str
) -> None:
    shapes = build_shape("standard"), build_shape(parametrization, base_d_head=16)
    results = [bench["measure_coordinates"](config, lr=2e-3, n_steps=3) for config in shapes]
    assert results[0] == results[1]


@pytest.mark.slow
def test_it_prints_a_slope_for_each_sweep_and_writes_a_page(cli, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "page.html"
    output = cli(
        "bench/coordinate_check.py", "--threads", 1, "--widths", 16, 64, "--depths", 2, 8, "--d-head", 16,
        "--steps", 2, "--seeds", 1, "--n-tokens", 50, "--out", page,
    ).output  # fmt: skip
    lines = [line.split() for line in output.splitlines()[1:7]]
    assert [line[:2] for line in lines] == [
        [axis, kind] for axis in ("width", "depth") for kind in ("standard", "mup", "completep")
    ]
    residual = {(line[0], line[1]): float(line[5]) for line in lines}
    assert residual["width", "standard"] > 0.6 > 0.3 > abs(residual["width", "mup"])
    assert residual["depth", "mup"] > 0.5 > 0.2 > abs(residual["depth", "completep"])
    text = page.read_text()
    assert "Coordinate check" in text
    assert 'id="plot-width"' in text and 'id="plot-depth"' in text


def test_a_single_size_is_refused(cli) -> None:
    error = cli("bench/coordinate_check.py", "--widths", "64", status=1).error
    assert "expected two or more" in error
