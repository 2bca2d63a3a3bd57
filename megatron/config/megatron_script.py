"""Launch scripts of Megatron, run by bash with recorders of arguments in place of the launchers."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

LAUNCHERS = ("torchrun", "deepspeed", "python", "python3", "srun", "mpirun", "mpiexec", "uv")
INSTALLERS = ("pip", "pip3", "conda", "apt", "apt-get", "sudo", "docker")  # recorded too, so that none runs
REMOTE = ("ssh", "scp", "sbatch")
LIMIT_S = 60
MAX_BYTES = 1 << 20  # size of a script, and of a file that it writes
# a path that begins with /, ~ or a variable and ends in a launcher, as a word
LAUNCHER_BY_PATH = re.compile(rf"(?<![\w./-])[/~$][^\s;&|\"']*/(?:{'|'.join(LAUNCHERS)})(?![\w./-])")
# python -c computes a value of the script; every other call is recorded
RECORDER = """#!/bin/bash
case "$(basename "$0")$1" in python-c|python3-c) exec {python} "$@" ;; esac
printf '%s\\0' "$#" "$@" >> {record}
"""
# Read by every bash before its script. Functions precede a PATH that the script changes. `source`
# looks beside the script and above it too, as the working directory is empty. Given variables are assigned
# again before each command, so that the script cannot change them.
STARTUP = """
for _name in {launchers}; do eval "$_name() {{ {folder}/$_name \\"\\$@\\"; }}"; done
source() {{
    for _folder in "" {places}; do
        if [ -f "$_folder$1" ]; then builtin source "$_folder$1" "${{@:2}}"; return; fi
    done
    builtin source "$@"
}}
.() {{ source "$@"; }}
set -o functrace
trap {assignments} DEBUG
"""
# a relative path, which does not follow a variable or another path
RELATIVE_PATH = re.compile(r"(?<![\w./~$}-])(?:\./)?\w[\w-]*(?:[./][\w-]+)+")


def record_launch_script(path: Path, given: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Run a script, and return (words of its last training command, absolute path -> content of its files).

    It runs with a time limit and closed standard input, in a directory in which the folders and .py files
    that it names exist and are empty. Programs other than launchers and installers are run.

    given   variables that the script cannot change; 1, 2, ...: arguments of the script

    Raises ValueError for a script that would start work elsewhere, that does not end, or without a command.
    """
    text = read_script(path)
    with tempfile.TemporaryDirectory(prefix="megatron_") as name:
        folder, record = Path(name, "bin"), Path(name, "record")
        cwd = Path(name, "empty")
        _make_empty_files(cwd, text)
        environment = _write_recorders(folder, record, path, given)
        n_arguments = max((int(key) for key in given if key.isdecimal()), default=0)
        arguments = [given.get(str(i), "") for i in range(1, n_arguments + 1)]
        errors = _run(["bash", str(path.resolve()), *arguments], cwd, environment, path)
        words = _find_command(record.read_text(encoding="utf-8", errors="replace") if record.exists() else "")
        if not words:
            raise ValueError(
                f"{path}: no launcher got a .py file with arguments. Give its command after --, or what the "
                f"script lacks with --set NAME=VALUE (its errors: {errors.strip()[-300:] or 'none'})."
            )
        files = [file for file in cwd.rglob("*") if file.is_file() and 0 < file.stat().st_size <= MAX_BYTES]
        texts = {
            str(Path.cwd() / file.relative_to(cwd)): file.read_text("utf-8", "replace") for file in files
        }
        # what the script derives from its working directory is meant for the caller's
        return [word.replace(str(cwd), str(Path.cwd())) for word in words], texts


def read_script(path: Path) -> str:
    """Return the text of a script. Raises ValueError for one that calls what cannot be replaced."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path}: got more than {MAX_BYTES >> 20} MB, expected a launch script")
    text = path.read_text(encoding="utf-8", errors="replace")
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    remote = re.search(rf"(?<![\w./-])(?:{'|'.join(REMOTE)})(?![\w./-])", code)
    if remote:
        raise ValueError(f"{path}: it calls {remote[0]}, which runs elsewhere. Give its command after --.")
    by_path = LAUNCHER_BY_PATH.search(code)
    if by_path:
        raise ValueError(
            f"{path}: it calls {by_path[0]} by its path, which cannot be replaced. Write its name alone."
        )
    return code


def _make_empty_files(cwd: Path, code: str) -> None:
    """Create what a script expects in its working directory: empty .py files, and folders to write into."""
    cwd.mkdir()
    for name in set(RELATIVE_PATH.findall(code)):
        with suppress(OSError):  # the names of a script need not be paths
            (cwd / name).parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".py"):
                (cwd / name).touch()


def _write_recorders(folder: Path, record: Path, script: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Write the programs in place of the launchers, and return the environment of the script."""
    folder.mkdir()
    for name in (*LAUNCHERS, *INSTALLERS):
        recorder = folder / name
        recorder.write_text(
            RECORDER.format(python=shlex.quote(sys.executable), record=shlex.quote(str(record)))
        )
        recorder.chmod(0o755)
    for name in REMOTE:
        (folder / name).write_text(f"#!/bin/bash\necho {name}: not run >&2\nexit 1\n")
        (folder / name).chmod(0o755)
    places = (Path.cwd(), script.resolve().parent, *script.resolve().parent.parents)
    variables = {key: value for key, value in given.items() if key.isidentifier()}
    assignments = "; ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items())
    startup = folder / "startup.sh"
    startup.write_text(
        STARTUP.format(
            launchers=" ".join((*LAUNCHERS, *INSTALLERS)),
            folder=shlex.quote(str(folder)),
            places=" ".join(shlex.quote(f"{place}/") for place in places),
            assignments=shlex.quote(assignments),
        )
    )
    return {
        **os.environ,
        **variables,
        "PATH": f"{folder}:{os.environ.get('PATH', os.defpath)}",
        "BASH_ENV": str(startup),
    }


def _run(words: list[str], cwd: Path, environment: dict[str, str], path: Path) -> str:
    """Run a script and all processes that it leaves behind, and return its standard error."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            words, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=errors, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise ValueError(
                f"{path}: did not end within {LIMIT_S} s. Give its training command after --."
            ) from None
        finally:
            with suppress(ProcessLookupError):  # nothing is left behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        return errors.read()


def _find_command(record: str) -> list[str]:
    """Return the words of the last call that starts a .py file with arguments; a call follows its count."""
    words, command = record.split("\0")[:-1], []
    while words:
        n_words = int(words[0])
        call, words = words[1 : n_words + 1], words[n_words + 1 :]
        script = next((i for i, word in enumerate(call) if word.endswith(".py")), len(call))
        if any(word.startswith("--") for word in call[script:]):
            command = call
    return command
