"""Header of a .idx file: Megatron's format MMIDIDX, version 1. Its only definition; needs no numpy."""

import struct

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
# "<": little endian without padding, 34 bytes: magic, version, dtype code, sequences, documents + 1
HEADER = struct.Struct("<9sQBQQ")
# codes of Megatron's indexed_dataset; 6 and 7 are float types, which are not tokens
DTYPE_NAMES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


def count_token_bytes(code: int) -> int:
    """Return the bytes of a token by its dtype code: "uint16" has 16 bits, 2 bytes."""
    return int(DTYPE_NAMES[code].removeprefix("u").removeprefix("int")) // 8
