"""Commands: sub-commands of `scaling`, help, exit statuses, stop signals, and children that end with them."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from megatron import cli
from megatron.cli import ACTIONS, GROUPS, SUBCOMMANDS, report_error
from tests.conftest import run_process, wait_until
from tests.screen import TerminalStream, read_screen
from tests.tool_modules import load_tool

SLOW_LIBRARIES = {"numpy", "scipy", "torch", "rich", "omegaconf", "pyarrow"}
SLOW_IMPORT = "import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(240)\n"
WITHOUT_MODULE = """
import sys
sys.modules[sys.argv.pop(1)] = None
sys.argv[0] = "scaling"
from megatron.cli import run_console
run_console()
"""


def run_python(root: Path, *words: str, path: Path | None = None, cwd: Path | None = None, **variables: str):
    """Run Python on the checkout, and on the modules in `path` before it."""
    variables |= {"PYTHONPATH": f"{path}:{root}" if path else str(root), "TERM": "dumb", "COLUMNS": "100"}
    return run_process([sys.executable, *words], cwd or root, **variables)


def run_scaling(root: Path, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run_python(root, "-m", "megatron.cli", *words, cwd=cwd)


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A function that runs `scaling` in this process and returns (status, output, errors)."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["scaling", *words])
        status = cli.main()
        return status, *capsys.readouterr()

    return run


def test_every_tool_is_exactly_one_sub_command_and_is_listed_with_its_sentence(root: Path, scaling) -> None:
    assert set(SUBCOMMANDS.values()) == {path.stem for path in root.glob("tools/*.py")}
    n_commands = Counter(SUBCOMMANDS.values())
    assert {tool for tool in n_commands if n_commands[tool] > 1} == set(ACTIONS)
    assert len(SUBCOMMANDS) == sum(map(len, GROUPS.values()))
    assert all(re.fullmatch("[a-z]+(-[a-z]+)?", name) for name in SUBCOMMANDS)
    status, text, errors = scaling()
    assert (status, errors) == (0, "")
    assert scaling("--help") == scaling("help") == scaling("-h") == (0, text, "")
    lines = text.splitlines()
    assert [line for line in lines if re.fullmatch("[a-z]+( [a-z]+)?", line)] == list(GROUPS)
    listed = [line for line in lines if line.startswith("  ")]
    assert [line.split()[0] for line in listed] == list(SUBCOMMANDS)
    assert all(line.endswith(".") for line in listed)


@pytest.mark.parametrize(
    ("word", "hint"),
    [("trian", "; did you mean train?"), ("pretrain.py", "; did you mean train?"),
     ("fit_law", "; did you mean fit?"), ("zzzzzz", ""), ("--verbose", ""),
     ("\x1b[31m", "")],
)  # fmt: skip
def test_an_unknown_sub_command_gets_the_nearest_and_status_2(scaling, word: str, hint: str) -> None:
    shown = word.replace("\x1b", r"\x1b")
    sentence = f"scaling: error: got '{shown}', expected a sub-command{hint} (see scaling --help)\n"
    assert scaling(word) == (2, "", sentence)


@pytest.mark.parametrize(
    ("name", "words", "status"),
    [("sizes", ["117M"], 0), ("train", ["absent.yaml"], 1), ("serve", ["--no-such"], 2)],
)  # fmt: skip
def test_output_and_status_are_those_of_the_file(root: Path, name: str, words: list[str], status) -> None:
    tool = SUBCOMMANDS[name]
    action = [name] if tool in ACTIONS else []
    expected, done = run_python(root, f"tools/{tool}.py", *action, *words), run_scaling(root, name, *words)
    assert (expected.returncode, done.returncode) == (status, status)
    assert done.stdout == expected.stdout
    program = "scaling" if action else f"scaling {name}"
    assert done.stderr == expected.stderr.replace(f"{tool}.py", program)


def test_the_help_shows_the_sub_command_and_mixtera_server_is_serve(root: Path) -> None:
    text = run_scaling(root, "help", "merge").stdout
    assert text.startswith("usage: scaling merge [-h] ")
    assert "\n    scaling merge " in text and "python tools/" not in text
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["scaling"] == "megatron.cli:run_console"
    module, function = scripts["mixtera-server"].split(":")
    done = run_python(root, "-c", f"from {module} import {function}; {function}()", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: scaling serve ")


def test_ranks_run_a_sub_command_or_a_file_and_return_its_status(root: Path, tmp_path: Path) -> None:
    (tmp_path / "stopped.py").write_text("raise SystemExit(75)\n")
    assert run_scaling(root, "ranks", "2", "stopped.py", cwd=tmp_path).returncode == 75
    done = run_scaling(root, "ranks", "1", "sizes", "117M", cwd=tmp_path)
    assert done.returncode == 0 and "123,587,328" in done.stdout


def test_the_list_loads_no_slow_library(root: Path) -> None:
    done = run_python(root, "-X", "importtime", "-m", "megatron.cli")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported and not imported & SLOW_LIBRARIES


@pytest.fixture
def site(root: Path, tmp_path: Path) -> Path:
    """A search path on which the distribution has the version 9.8 and the extras of pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines = ["Metadata-Version: 2.4", f"Name: {project['name']}", "Version: 9.8"]
    for extra, packages in project["optional-dependencies"].items():
        lines += [f'Requires-Dist: {package}; extra == "{extra}"' for package in packages]
    folder = tmp_path / "site" / "megatron_scaling-9.8.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    return folder.parent


NEEDS = "error: {}: not installed. This needs pip install 'megatron-scaling[{}]'.\n"


@pytest.mark.parametrize(
    ("module", "words", "errors"),
    [("none", ["--version"], ""), ("yaml", ["fit", "table.csv"], NEEDS.format("yaml", "laws")),
     ("tokenizers", ["tokenizer", "x.jsonl", "--out", "t"], NEEDS.format("tokenizers", "train")),
     ("megatron._csrc", ["inspect", "absent"], "error: megatron._csrc: not compiled when this package was "),
     # a module of no extra: a fault of the program, not of the installation
     ("megatron.plan", ["fit", "table.csv"], "Traceback")],
)  # fmt: skip
def test_a_missing_package_is_one_sentence_with_the_extra_that_installs_it(
    root: Path, site: Path, module: str, words: list[str], errors: str
) -> None:
    done = run_python(root, "-c", WITHOUT_MODULE, module, *words, path=site, cwd=site)
    if words == ["--version"]:
        assert (done.returncode, done.stdout, done.stderr) == (0, "megatron-scaling 9.8\n", "")
        return
    assert done.returncode == 1 and done.stderr.startswith(errors)
    assert done.stderr.count("\n") == 1 or errors == "Traceback"


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (["-m", "megatron.cli", "train"], signal.SIGTERM),
        (["-m", "megatron.cli", "train"], signal.SIGUSR1),
        (["tools/preprocess_data_many_cores.py"], signal.SIGINT),
        (["tools/preprocess_data_many_cores.py"], signal.SIGHUP),
    ],
)
def test_a_stop_during_the_imports_of_a_command_exits_with_75(
    root: Path, tmp_path: Path, words: list[str], number: signal.Signals
) -> None:
    # stands in for a library that is slow to import: omegaconf for training, numpy for tokenising
    for name in ("omegaconf", "numpy"):
        (tmp_path / f"{name}.py").write_text(SLOW_IMPORT)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{root}"}
    command = [sys.executable, *words[:-1], words[-1].replace("tools/", f"{root}/tools/"), "x.yaml"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_until((tmp_path / "importing").exists)
        process.send_signal(number)
        assert process.communicate(timeout=120)[1] == "stopped; run the same command again\n"
    assert process.returncode == 75


def test_errors_are_one_inert_sentence_with_path_and_fix(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").touch()
    for error, sentence in (
        (FileNotFoundError(2, "", "runs/\x1b[31m[red]"), r"runs/\x1b[31m[red]: no such file or folder"),
        (NotADirectoryError(20, "", "file/x"), "file/x: got a file, expected a folder; choose another place"),
        (IsADirectoryError(21, "", "x.partial"), "x: got a folder, expected a file; choose another name"),
        (OSError(5, "Input/output error"), "Input/output error"),
        (OSError("a sentence of ours"), "a sentence of ours"),
        (ValueError("a\n\tb\x07"), "a\n\tb\\x07"),
    ):
        assert report_error(error) == 1
        assert capsys.readouterr().err == f"error: {sentence}\n"


def test_help_on_a_terminal_has_colours_and_the_same_text(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich_argparse")
    parser = load_tool(root / "tools" / "mixtures.py").build_parser()
    out = TerminalStream(monkeypatch)
    plain = parser.format_help()
    monkeypatch.setattr(sys, "stdout", out)
    coloured = parser.format_help()
    assert "\x1b[" in coloured and "\x1b" not in plain
    assert read_screen(coloured) == [line.rstrip() for line in plain.splitlines() if line.strip()]
    monkeypatch.setenv("TERM", "dumb")
    assert parser.format_help() == plain


@pytest.mark.parametrize(
    ("tool", "words"), [("pretrain", "run.yaml optim.lr=1"), ("validate", "a b --data c")]
)
def test_a_tool_that_takes_ranks_accepts_the_local_rank_of_launchers(root: Path, tool, words) -> None:
    parser = load_tool(root / "tools" / f"{tool}.py").build_parser()
    expected = parser.parse_args(words.split())
    for word in ("--local_rank=1", "--local-rank=1", "--local_rank=-1"):
        for place in (0, 2):
            inserted = [*words.split()[:place], word, *words.split()[place:]]
            assert parser.parse_args(inserted) == expected
