"""Header of a .idx file."""

import numpy as np

from megatron.data.indexed import DTYPES
from megatron.plan.idx_header import DTYPE_NAMES, HEADER, MAGIC, VERSION, count_token_bytes


def test_the_header_has_the_34_bytes_that_megatron_writes() -> None:
    # Megatron-LM, indexed_dataset.py: header, <Q version, <B dtype, <Q sequences, <Q document indices
    written = b"MMIDIDX\x00\x00" + b"\x01" + bytes(7) + b"\x08" + b"\x05" + bytes(7) + b"\x06" + bytes(7)
    assert len(written) == 34
    assert HEADER.pack(MAGIC, VERSION, 8, 5, 6) == written


def test_a_token_has_the_bytes_of_its_numpy_type() -> None:
    for code, name in DTYPE_NAMES.items():
        assert count_token_bytes(code) == np.dtype(name).itemsize == DTYPES[code].itemsize
