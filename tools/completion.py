"""Write a script that completes the words of this project's tools in bash and zsh.

python tools/completion.py --out completion.bash
python tools/completion.py > completion.bash

Then `source completion.bash`; in zsh after `autoload -U bashcompinit && bashcompinit`. It completes the
options of `python tools/x.py` and `torchrun ... tools/x.py`, their choices, keys such as optim.lr= where a
tool takes them, and file names elsewhere. No Python is started while one types.
"""

import argparse
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.command import command, failed, load_tool, run
from megatron.config.reference import sections
from megatron.run_dir import write_whole

ROOT = Path(__file__).resolve().parents[1]
FILE = "FILE"  # stands for the value of an option that has no choices
# tools that take section.key=value words, and what precedes one
WITH_KEYS = {"pretrain": "", "sweep": "run."}
SCRIPT = r"""# Written by tools/completion.py. In zsh, first: autoload -U bashcompinit && bashcompinit
_megatron_words() {
    case "$1" in
CASES
    esac
}

_megatron_complete() {
    local tool='' action='' previous='' found='' word
    local current=${COMP_LINE:0:$COMP_POINT}
    while [[ $current == *[[:space:]]* ]]; do
        word=${current%%[[:space:]]*}
        current=${current#*[[:space:]]}
        if [[ -z $word ]]; then continue; fi
        previous=$word
        if [[ $word == *tools/*.py ]]; then tool=${word##*/}; tool=${tool%.py}
        elif [[ -n $tool && -z $action && -n $(_megatron_words "$tool $word .") ]]; then action=" $word"
        fi
    done
    COMPREPLY=()
    if [[ -z $tool ]]; then return; fi
    if [[ $previous == -* ]]; then found=$(_megatron_words "$tool$action $previous"); fi
    if [[ $found == FILE ]]; then return
    elif [[ -n $found ]]; then :
    elif [[ $current == -* ]]; then found=$(_megatron_words "$tool$action .")
    elif [[ $current == *=* ]]; then found=$(_megatron_words "$tool ${current%%=*}=")
    elif [[ -n $current ]]; then found="$(_megatron_words "$tool keys") $(_megatron_words "$tool actions")"
    elif [[ -z $action ]]; then found=$(_megatron_words "$tool actions")
    fi
    if [[ -z ${found// } ]]; then return; fi
    local cut=''
    # bash takes what follows the last = for the word
    if [[ $current == *=* && ${COMP_WORDBREAKS-} == *=* ]]; then cut=${current%=*}=; fi
    for word in $(compgen -W "$found" -- "$current"); do COMPREPLY+=("${word#"$cut"}"); done
    if [[ "${COMPREPLY[*]}" == *= ]]; then compopt -o nospace 2>/dev/null; fi
}

complete -o default -F _megatron_complete python python3 torchrun
"""


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where the script goes; by itself it is printed"
    )
    return parser


def words_of(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, Sequence[str]]]:
    """(what has been typed, what may come next) of one parser and of its actions."""
    yield f"{name} .", [word for action in parser._actions for word in action.option_strings]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield f"{name} actions", list(action.choices)
            for inner, its_parser in action.choices.items():
                yield from words_of(f"{name} {inner}", its_parser)
        elif action.nargs != 0:
            for option in action.option_strings:
                yield f"{name} {option}", [str(one) for one in action.choices or (FILE,)]


def keys_of(name: str, before: str) -> Iterator[tuple[str, Sequence[str]]]:
    """The same of section.key=value words."""
    keys = []
    for section, _, options in sections():
        for option in options:
            key = f"{before}{section}.{option.name}=" if section else f"{before}{option.name}="
            keys.append(key)
            choices = [str(one) for one in option.metadata["choices"]]
            if option.type is bool:
                choices = ["true", "false"]
            if choices:
                yield f"{name} {key}", [key + choice for choice in choices]
    yield f"{name} keys", keys


def script() -> str:
    """The whole script, from the parsers of the tools as they are."""
    cases = []
    for tool in sorted(ROOT.glob("tools/*.py")):
        told = list(words_of(tool.stem, load_tool(tool).build_parser()))
        if tool.stem in WITH_KEYS:
            told += keys_of(tool.stem, WITH_KEYS[tool.stem])
        cases += [
            f"        {shlex.quote(typed)}) echo {shlex.quote(' '.join(next_))} ;;" for typed, next_ in told
        ]
    return SCRIPT.replace("CASES", "\n".join(cases))


def main(argv: Sequence[str] | None = None) -> int:
    """Write or print it."""
    args = build_parser().parse_args(argv)
    if args.out is None:
        print(script(), end="")
        return 0
    try:
        write_whole(args.out, script())
    except OSError as error:
        return failed(error)
    print(f"{args.out}: source it")
    return 0


if __name__ == "__main__":
    run(main)
