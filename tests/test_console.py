"""Tests of the console script `scaling`: equal arguments and exit statuses as `python tools/x.py`."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from megatron.cli import GROUPS, SUBCOMMANDS, list_lines
from tests.guide_commands import Command, check_program
from tests.screen import TerminalStream, render_screen

SLOW_LIBRARIES = {"numpy", "scipy", "torch", "rich", "omegaconf", "pyarrow"}
SLOW_IMPORT = "import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(240)\n"


def run_scaling(root: Path, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run `scaling` with some words."""
    environment = {**os.environ, "PYTHONPATH": str(root), "TERM": "dumb", "COLUMNS": "100"}
    command = [sys.executable, "-m", "megatron.cli", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environment, cwd=options.get("cwd", root)
    )


def run_tool_file(root: Path, tool: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `python tools/TOOL.py` with some words."""
    environment = {**os.environ, "PYTHONPATH": str(root), "TERM": "dumb", "COLUMNS": "100"}
    command = [sys.executable, f"tools/{tool}.py", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=root)


def test_every_tool_is_exactly_one_sub_command(root: Path) -> None:
    assert sorted(SUBCOMMANDS.values()) == sorted(path.stem for path in root.glob("tools/*.py"))
    assert len(SUBCOMMANDS) == sum(map(len, GROUPS.values()))
    for name in SUBCOMMANDS:
        assert re.fullmatch("[a-z]+(-[a-z]+)?", name), name


def test_without_arguments_it_lists_every_sub_command_with_its_sentence(root: Path) -> None:
    done = run_scaling(root)
    assert (done.returncode, done.stderr) == (0, "")
    assert run_scaling(root, "--help").stdout == done.stdout
    assert (
        "\n  merge        Merge tokenized datasets into one, or make them one dataset without a copy.\n"
        in done.stdout
    )
    headings = [line for line in done.stdout.splitlines() if re.fullmatch("[a-z]+( [a-z]+)?", line)]
    assert headings == ["setup", "prepare text", "plan", "train", "score", "fit", "report"]
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert listed == list(SUBCOMMANDS)
    for line in done.stdout.splitlines():
        assert not line.startswith("  ") or line.endswith(".")


def test_a_narrow_terminal_gets_one_line_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(len(line) <= 60 for line in list_lines(60))
    assert sum(line.startswith("  ") for line in list_lines(60)) == len(SUBCOMMANDS)
    from megatron.cli import print_list

    monkeypatch.setattr(sys, "stdout", out := TerminalStream(monkeypatch))
    print_list()
    line = "  merge        Merge tokenized datasets into one, or make them one dataset without a copy."
    assert line in render_screen(out.getvalue())


@pytest.mark.parametrize(
    ("word", "hint"),
    [("trian", "; did you mean train?"), ("pretrain.py", "; did you mean train?"),
     ("fit_law", "; did you mean fit?"), ("zzzzzz", ""), ("--verbose", "")],
)  # fmt: skip
def test_an_unknown_sub_command_gets_the_nearest_and_status_2(root: Path, word: str, hint: str) -> None:
    done = run_scaling(root, word)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"scaling: error: got '{word}', expected a sub-command{hint} (see scaling --help)\n"
    )


def test_help_is_a_word_too_and_shows_the_help_of_a_sub_command(root: Path) -> None:
    for words in (("help",), ("help", "sizes")):
        done, expected = run_scaling(root, *words), run_scaling(root, *words[1:], "--help")
        assert (done.returncode, done.stdout) == (0, expected.stdout) and done.stdout.startswith("usage: ")
    assert run_scaling(root, "help", "zzzzzz").returncode == 2


@pytest.fixture
def metadata(root: Path, tmp_path: Path) -> Path:
    """A search path on which the distribution has the version 9.8 and the extras of pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines = ["Metadata-Version: 2.4", f"Name: {project['name']}", "Version: 9.8"]
    for extra, packages in project["optional-dependencies"].items():
        lines += [f'Requires-Dist: {package}; extra == "{extra}"' for package in packages]
    folder = tmp_path / "site" / "megatron_scaling-9.8.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    return folder.parent


def run_without(root: Path, site: Path, module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `scaling` where a module is not installed."""
    code = f"""
import sys
sys.modules[{module!r}] = None
sys.argv[0] = "scaling"
from megatron.cli import run_console
run_console()
"""
    environment = {**os.environ, "PYTHONPATH": f"{site}:{root}"}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=site)


def test_the_version_is_that_of_the_distribution(root: Path, metadata: Path) -> None:
    done = run_without(root, metadata, "none", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, "megatron-scaling 9.8\n", "")


@pytest.mark.parametrize(
    ("module", "words", "extra"),
    [("yaml", ["fit", "table.csv"], "laws"), ("yaml", ["sweep", "study.yaml"], "laws"),
     ("tokenizers", ["code-points"], "train")],
)  # fmt: skip
def test_a_missing_package_is_one_sentence_with_the_extra_that_installs_it(
    root: Path, metadata: Path, module: str, words: list[str], extra: str
) -> None:
    done = run_without(root, metadata, module, *words)
    sentence = f"error: {module}: not installed. This needs pip install 'megatron-scaling[{extra}]'.\n"
    assert (done.returncode, done.stderr) == (1, sentence)


def test_a_missing_module_of_no_extra_is_a_traceback_since_it_is_a_fault_of_the_program(
    root: Path, metadata: Path
) -> None:
    done = run_without(root, metadata, "megatron.config.yaml_file", "fit", "table.csv")
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_a_helper_that_was_not_compiled_is_reported_with_a_fix(root: Path, metadata: Path) -> None:
    done = run_without(root, metadata, "megatron._csrc", "inspect", "absent")
    assert done.returncode == 1 and done.stderr.startswith("error: megatron._csrc: not compiled when this ")
    assert "Install g++ 10 or newer" in done.stderr and done.stderr.count("\n") == 1


def test_mixtera_server_is_the_sub_command_serve(root: Path) -> None:
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["mixtera-server"].split(":")
    code = f"from {module} import {function}; {function}()"
    environment = {**os.environ, "PYTHONPATH": str(root), "TERM": "dumb", "COLUMNS": "100"}
    command = [sys.executable, "-c", code, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0 and done.stdout == run_scaling(root, "serve", "--help").stdout


def test_a_hostile_sub_command_is_printed_inert(root: Path) -> None:
    assert r"got '\x1b[31m'" in run_scaling(root, "\x1b[31m").stderr


def test_the_list_loads_no_slow_library(root: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "megatron.cli"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True, cwd=root)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported and not imported & SLOW_LIBRARIES


@pytest.mark.parametrize(
    ("name", "words", "status"),
    [("sizes", ["117M"], 0), ("sizes", ["117MM"], 1), ("merge", ["--no-such"], 2), ("inspect", ["absent"], 1),
     ("train", ["absent.yaml"], 1), ("predict", ["--list"], 0)],
)  # fmt: skip
def test_output_and_status_are_those_of_the_file(
    root: Path, name: str, words: list[str], status: int
) -> None:
    tool = SUBCOMMANDS[name]
    expected, done = run_tool_file(root, tool, *words), run_scaling(root, name, *words)
    assert (expected.returncode, done.returncode) == (status, status)
    assert done.stdout == expected.stdout
    assert done.stderr == expected.stderr.replace(f"{tool}.py", f"scaling {name}")


def test_a_guide_may_show_sub_commands_and_wrong_ones_are_refused() -> None:
    check_program(Command("a.md:1", ["scaling"]))
    check_program(Command("a.md:1", ["scaling", "merge", "a", "b", "--output", "c"]))
    for words in (["merge", "a", "--no-such"], ["mrege", "a"]):
        with pytest.raises(AssertionError):
            check_program(Command("a.md:1", ["scaling", *words]))


def test_the_help_shows_the_sub_command_in_its_usage_and_examples(root: Path) -> None:
    text = run_scaling(root, "merge", "--help").stdout
    assert text.startswith("usage: scaling merge [-h] ")
    assert "\n    scaling merge " in text and "python tools/" not in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("name", ["train", "prepare"])
def test_a_stop_during_the_imports_of_a_sub_command_exits_with_75(
    root: Path, tmp_path: Path, name: str, number: signal.Signals
) -> None:
    # stands in for a library that is slow to import: omegaconf for training, numpy for tokenising
    module = {"train": "omegaconf", "prepare": "numpy"}[name]
    (tmp_path / f"{module}.py").write_text(SLOW_IMPORT)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{root}"}
    command = [sys.executable, "-m", "megatron.cli", name, "x.yaml"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        end = time.monotonic() + 120
        while not (tmp_path / "importing").exists():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(number)
        assert process.communicate(timeout=120)[1] == "stopped; run the same command again\n"
    assert process.returncode == 75


def test_ranks_run_a_sub_command_or_a_file_and_return_its_status(root: Path, tmp_path: Path) -> None:
    (tmp_path / "stopped.py").write_text("raise SystemExit(75)\n")
    assert run_scaling(root, "ranks", "2", "stopped.py", cwd=tmp_path).returncode == 75
    done = run_scaling(root, "ranks", "1", "sizes", "117M", cwd=tmp_path)
    assert done.returncode == 0 and "123,587,328" in done.stdout


def test_a_wheel_has_the_tools_in_its_own_package_and_runs_them(root: Path, tmp_path: Path) -> None:
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(build, cwd=root, check=True, timeout=240, capture_output=True)
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]
    installed = {path.stem for path in tmp_path.glob("megatron/commands/*.py")}
    assert installed == set(SUBCOMMANDS.values())
    for helper in (root / "megatron").glob("_csrc*.so"):  # built by another command
        shutil.copy(helper, tmp_path / "megatron")
    done = run_scaling(tmp_path, "merge", "--help", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("usage: scaling merge")
    # without requirements.txt the libraries are those of the wheel's metadata
    done = run_scaling(tmp_path, "check", "--quick", cwd=tmp_path)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr and "Python" in done.stdout
    code = "from megatron.study.launchers import local; print(local.PRETRAIN.is_file())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path,
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert done.stdout == "True\n"
