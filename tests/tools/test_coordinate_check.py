"""tools/bench/coordinate_check.py: activation changes at every size, and the page."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from megatron.config.schema import ModelConfig


@pytest.fixture(scope="module")
def bench(root: Path) -> dict[str, Any]:
    return runpy.run_path(str(root / "tools" / "bench" / "coordinate_check.py"))


def test_activations_change_equally_where_expected(cli, bench: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    words = "--threads 1 --widths 32 192 --depths 2 8 --d-head 16 --steps 4 --seeds 1 --n-tokens 63"
    words += " --lr 1e-3"
    output = cli("bench/coordinate_check.py", *words.split(), "--out", tmp_path / "page.html").output
    slopes = {}
    for line in output.splitlines()[1:7]:
        axis, parametrization, *numbers = line.split()
        slopes[axis, parametrization] = dict(zip(bench["QUANTITIES"], map(float, numbers), strict=True))
    is_constant = {("width", "mup"), ("width", "completep"), ("depth", "completep")}
    for case, powers in slopes.items():
        assert abs(powers["embedding"]) < 0.15  # its learning rate is the same at every size
        if case in is_constant:
            assert all(abs(power) < 0.25 for power in powers.values()), case
        else:
            # theory: 1 for a matrix of N inputs that move together; between 1/2 and 1 for depth
            assert powers["residual"] > (0.9 if case[0] == "width" else 0.5), case
    assert len(slopes) == 6 and is_constant < slopes.keys()
    text = (tmp_path / "page.html").read_text()
    assert "Coordinate check" in text
    assert 'id="plot-width"' in text and 'id="plot-depth"' in text


@pytest.mark.parametrize(
    ("parametrization", "base"),
    [("mup", {"base_d_model": 32}), ("completep", {"base_d_model": 32, "base_n_layers": 2})],
)
def test_every_parametrization_equals_the_standard_at_its_base_shape(
    bench: dict[str, Any], parametrization: str, base: dict[str, int]
) -> None:
    shape = {"d_model": 32, "d_ff": 85, "d_head": 16, "n_heads": 2, "n_layers": 2, "n_tokens": 64}
    shape["vocab_rows"] = 128
    configs = (
        ModelConfig(**shape),
        ModelConfig(**shape, parametrization=parametrization, base_d_head=16, **base),
    )
    results = [bench["measure_coordinates"](config, lr=2e-3, n_steps=3) for config in configs]
    assert results[0] == results[1]
