"""Launch scripts of Megatron, run by bash with recorders of arguments in place of the launchers."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LAUNCHERS = ("torchrun", "deepspeed", "python", "python3", "srun", "mpirun", "mpiexec", "uv")
# recorded too, so that none runs
INSTALLERS = ("pip", "pip3", "conda", "apt", "apt-get", "sudo", "docker")
REMOTE = ("ssh", "scp", "sbatch")
RECORDED = (*LAUNCHERS, *INSTALLERS, *REMOTE)
LIMIT_S = 60
# a path that begins with /, ~ or a variable and ends in a launcher, or
# a program that runs elsewhere
REFUSED = re.compile(
    rf"(?<![\w./-])(?:[/~$][^\s;&|\"']*/(?:{'|'.join(LAUNCHERS)})|{'|'.join(REMOTE)})(?![\w./-])"
)
# python -c computes a value of the script; every other call becomes a
# line of JSON
RECORDER = """#!/bin/bash
case "${{0##*/}} $1" in "python -c"|"python3 -c") exec {python} "$@" ;; esac
exec {python} -I -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@" >> {record}
"""
# a relative path, which does not follow a variable or another path
RELATIVE_PATH = re.compile(r"(?<![\w./~$}-])(?:\./)?\w[\w-]*(?:[./][\w-]+)+")


def record_launch_script(path: Path, arguments: Sequence[str] = ()) -> tuple[list[str], dict[str, str]]:
    """Run a script, and return (words of its last training command, absolute path -> content of its JSON).

    It runs with a time limit and closed standard input, in a directory
    with the folders, the .py files (empty) and the .sh files that it
    names. Programs other than launchers and installers are run.

    Raises ValueError for a script that would start work elsewhere, that
    does not end, or without a command.
    """
    code = read_script(path)
    with tempfile.TemporaryDirectory(prefix="megatron_") as name:
        folder, record, cwd = Path(name, "bin"), Path(name, "record"), Path(name, "empty")
        record.touch()
        _make_files(cwd, code, path.resolve())
        environment = _write_recorders(folder, record)
        _run(["bash", str(path.resolve()), *arguments], cwd, environment, path)
        words: list[str] = []
        for line in record.read_text(encoding="utf-8").splitlines():
            call = json.loads(line)
            script = next((i for i, word in enumerate(call) if word.endswith(".py")), len(call))
            if any(word.startswith("--") for word in call[script:]):
                words = call
        if not words:
            raise ValueError(
                f"{path}: no launcher got a .py file with arguments. Set the variables that the script "
                "lacks, or translate its command."
            )
        # what the script derives from its working directory is meant
        # for the caller's
        root = Path.cwd()
        files = [file for file in cwd.rglob("*.json") if file.is_file() and file.stat().st_size]
        texts = {str(root / file.relative_to(cwd)): file.read_text("utf-8") for file in files}
        return [word.replace(str(cwd), str(root)) for word in words], texts


def read_script(path: Path) -> str:
    """Return the text of a script. Raises ValueError for one that calls what cannot be replaced."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    code = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    if call := REFUSED.search(code):
        reason = "which runs elsewhere" if call[0] in REMOTE else "a path, which cannot be replaced"
        raise ValueError(f"{path}: it calls {call[0]}, {reason}. Translate its command instead.")
    return code


def _make_files(cwd: Path, code: str, script: Path) -> None:
    """Create what a script expects in its working directory: empty .py files, folders, sourced files."""
    cwd.mkdir()
    for name in set(RELATIVE_PATH.findall(code)):
        places = [place / name for place in (Path.cwd(), *script.parents) if (place / name).is_file()]
        with suppress(OSError):  # the names of a script need not be paths
            (cwd / name).parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".py"):
                (cwd / name).touch()
            elif name.endswith(".sh") and places:
                shutil.copyfile(places[0], cwd / name)


def _write_recorders(folder: Path, record: Path) -> dict[str, str]:
    """Write the programs in place of the launchers, and return the environment of the script."""
    folder.mkdir()
    recorder = folder / "recorder"
    recorder.write_text(RECORDER.format(python=shlex.quote(sys.executable), record=shlex.quote(str(record))))
    recorder.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ.get('PATH', os.defpath)}"}
    for name in RECORDED:
        (folder / name).symlink_to(recorder)
        # bash reads functions from its environment; they precede a PATH
        # that the script changes
        environment[f"BASH_FUNC_{name}%%"] = f'() {{ {shlex.quote(str(folder / name))} "$@"; }}'
    return environment


def _run(words: list[str], cwd: Path, environment: dict[str, str], path: Path) -> None:
    """Run a script, and end all processes that it leaves behind."""
    process = subprocess.Popen(
        words, cwd=cwd, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        process.communicate(timeout=LIMIT_S)  # with an empty standard input
    except subprocess.TimeoutExpired:
        raise ValueError(f"{path}: did not end within {LIMIT_S} s. Translate its command instead.") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
