"""Pickles that run code, fill memory or overflow a stack, assembled from opcodes."""

import pickle
import subprocess
from pathlib import Path


def text(word: str) -> bytes:
    """Return the opcode that pushes a string."""
    raw = word.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def call(module: str, name: str, *words: str) -> bytes:
    """Return the opcodes of the call module.name(*words)."""
    return f"c{module}\n{name}\n".encode() + b"(" + b"".join(map(text, words)) + b"tR"


def run_by(name: str, target: Path) -> bytes:
    """Return a pickle that executes `touch target` when it is read, in the given way."""
    command = f"touch {target}"
    dcp = "torch.distributed.checkpoint"
    ways = {
        "posix.system": call("posix", "system", command),
        "a name by a stack": text("os") + text("system") + b"\x93" + text(command) + b"\x85R",
        "a module in DCP's module": f"c{dcp}.filesystem\nos.system\n".encode() + text(command) + b"\x85R",
        "getattr of an allowed class": b"cbuiltins\ngetattr\n" + f"c{dcp}.metadata\nMetadata\n".encode()
        + text("__init__") + b"\x86R",
        "an instance of old": b"(" + text(command) + b"iposix\nsystem\n",
        "an extension's number": b"\x82\x01",
        "a persistent name": b"Pposix.system\n",
        "a class's own state": f"c{dcp}.metadata\nMetadata\n".encode() + b"N}" + text("__init__")
        + b"cposix\nsystem\n" + b"s\x86b",
    }  # fmt: skip
    return b"\x80\x02" + ways[name] + b"."


RUN_BY = (
    "posix.system", "a name by a stack", "a module in DCP's module", "getattr of an allowed class",
    "an instance of old", "an extension's number", "a persistent name", "a class's own state",
)  # fmt: skip

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
