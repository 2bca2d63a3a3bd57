"""Tests of scaling sizes from the command line."""

import pytest


def test_options_change_the_count_and_20_tokens_a_parameter_the_flops(cli) -> None:
    small = ("sizes", "7M", "--n-tokens", 255)
    plain, untied = (
        int(cli(*small, *more).output.splitlines()[1].split()[1].replace(",", ""))
        for more in ((), ("model.tied_embedding=false",))
    )
    assert untied - plain == 256 * 128
    cells = cli(*small, "--tokens", 1e9, "--seq-len", 1).output.splitlines()[1].split()
    # by hand at one position: 6 (N without norms, 3 blocks of 2 gains and one more) + 12 L H K
    assert float(cells[-1]) == pytest.approx(1e9 * (6 * (plain - 7 * 128) + 12 * 3 * 4 * 32), rel=5e-3)
