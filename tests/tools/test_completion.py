"""Tests of the completion script in real bash and zsh processes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ASK = """
source "$1"
COMP_LINE=$2 COMP_POINT=${#2}
COMP_WORDS=($2) COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_megatron_complete 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


# a zsh in a pseudo-terminal, to which a line and a tab are sent
TYPE = """
zmodload zsh/zpty
zpty shell zsh -f -i
heard() { local part all=; for i in {1..600}; do sleep 0.1
    while zpty -r -t shell part; do all+=$part; done; [[ $all == *$1* ]] && break; done; print -r -- $all }
zpty -w shell "autoload -U compinit bashcompinit; compinit -u -D; bashcompinit; source $1; echo rea''dy"
heard ready >/dev/null
zpty -w -n shell "$2"$'\\t'
heard "$3"
"""


@pytest.fixture(scope="module")
def offered(root: Path, tmp_path_factory: pytest.TempPathFactory):
    """A function that maps a typed line to the completions of its last word."""
    script = tmp_path_factory.mktemp("completion") / "completion.bash"
    command = [sys.executable, str(root / "tools" / "completion.py"), "--out", str(script)]
    subprocess.run(command, check=True, timeout=240, capture_output=True)

    def complete_line(line: str) -> set[str]:
        words = ["bash", "--norc", "-c", ASK, "bash", str(script), line]
        done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=True)
        return set(done.stdout.split())

    complete_line.script = script
    return complete_line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("python tools/fit_law.py t.csv --prof", {"--profile"}),
        (
            "python tools/fit_law.py t.csv --profile ",
            {"E", "alpha", "beta", "eta", "alpha_N", "alpha_D", "R_D", "R_N"},
        ),
        ("python3 /home/me/study/tools/convert_checkpoint.py a b --to hu", {"huggingface"}),
        ("python tools/pretrain.py run.yaml optim.l", {"optim.lr="}),
        ("python tools/pretrain.py run.yaml dist.eng", {"dist.engine="}),
        ("python tools/pretrain.py run.yaml dist.engine=", {"torch", "deepspeed"}),
        ("python tools/pretrain.py run.yaml dist.engine=de", {"deepspeed"}),
        ("torchrun --standalone --nproc-per-node 2 tools/pretrain.py run.yaml misc.se", {"misc.seed="}),
        ("python tools/sweep.py s.yaml run.misc.s", {"run.misc.seed=", "run.misc.stop_file="}),
        ("python tools/download_assets.py ", {"c4", "slimpajama", "subset", "tasks", "tokenizer", "weights"}),
        ("python tools/download_assets.py c4 --sp", {"--split"}),
        ("python tools/download_assets.py c4 --split v", {"validation"}),
        ("python tools/register_corpus.py x add name f --pres", {"--preset"}),
        ("scaling tra", {"train"}),
        ("/venv/bin/scaling fit t.csv --prof", {"--profile"}),
        ("scaling train run.yaml dist.engine=", {"torch", "deepspeed"}),
        ("scaling sweep s.yaml run.misc.s", {"run.misc.seed=", "run.misc.stop_file="}),
        ("scaling register x add name f --pres", {"--preset"}),
        ("scaling --he", {"--help"}),
        ("torchrun --nproc-per-node 2 -m megatron.cli train run.yaml misc.se", {"misc.seed="}),
        # the shell completes file names
        ("scaling train ", set()),
        ("scaling zzz --o", set()),
        ("python tools/pretrain.py ", set()),
        ("python tools/fit_law.py t.csv --out ", set()),
        ("python my_script.py --o", set()),
    ],
)
def test_what_is_offered_follows_from_what_is_typed(offered, line: str, words: set[str]) -> None:
    assert offered(line) == words


def test_every_tool_is_in_the_script_and_bash_reads_it(offered, root: Path) -> None:
    text = offered.script.read_text()
    for tool in root.glob("tools/*.py"):
        assert f"'{tool.stem} .')" in text
    subprocess.run(["bash", "-n", str(offered.script)], check=True, timeout=240)


def test_a_real_tab_completes_a_word_in_an_interactive_bash(offered, tmp_path: Path) -> None:
    typed = f"source {offered.script}\nbind 'set enable-bracketed-paste off'\n"
    typed += (
        "python tools/fit_law.py --hel\t | echo got: \x01echo \x05\n"  # Ctrl-A, then echo before the line
    )
    words = ["bash", "--norc", "--noprofile", "-i"]
    done = subprocess.run(
        ["script", "-qec", " ".join(words), "/dev/null"], input=typed + "exit\n",
        capture_output=True, text=True, timeout=240, cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "TERM": "dumb"},
    )  # fmt: skip
    assert "tools/fit_law.py --help" in done.stdout


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh: apt-get install zsh")
@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("python tools/fit_law.py t.csv --prof", "--profile"),
        ("python tools/fit_law.py t.csv --profile R", "--profile R_"),
        ("python tools/pretrain.py run.yaml dist.engine=de", "dist.engine=deepspeed"),
        ("torchrun --nproc-per-node 2 tools/pretrain.py run.yaml misc.se", "misc.seed="),
        ("scaling colle", "scaling collect"),
        ("scaling train run.yaml misc.se", "misc.seed="),
    ],
)
def test_zsh_completes_the_same(offered, line: str, completed: str) -> None:
    words = ["zsh", "-f", "-c", TYPE, "zsh", str(offered.script), line, completed]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=True)
    assert completed in re.sub(r"\x1b\[[\d;]*[A-Za-z]|\x08", "", done.stdout)
