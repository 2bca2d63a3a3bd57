"""tools/bench/coordinate_check.py: activation changes at every size, and the page."""

from pathlib import Path

import pytest


def test_activations_change_equally_where_expected(cli, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    words = "--threads 1 --widths 32 192 --depths 2 8 --d-head 16 --steps 4 --seeds 1 --n-tokens 63"
    words += " --lr 1e-3"
    output = cli("bench/coordinate_check.py", *words.split(), "--out", tmp_path / "page.html").output
    head, *rows = output.splitlines()[:7]
    slopes = {}
    for line in rows:
        axis, parametrization, *numbers = line.split()
        slopes[axis, parametrization] = dict(zip(head.split()[2:], map(float, numbers), strict=True))
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
