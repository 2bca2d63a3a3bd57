"""Write a script that completes the options of this project's tools in bash and zsh.

python tools/completion.py --out completion.bash
python tools/completion.py > completion.bash

Load it with `source completion.bash`; in zsh, run `autoload -U bashcompinit && bashcompinit` first. It
completes options of `scaling x`, `python tools/x.py` and `torchrun ... tools/x.py`, their choices, keys such
as optim.lr= where a tool takes them, and file names elsewhere. Completion does not start Python.
"""

# The script is ours, not a library's, because of these measurements of 21 typed lines on a busy core. A TAB
# costs the same with shtab within the noise; the lines of code, the size and zsh decide.
#   ours           149 lines, no dependency; 6 to 10 ms for a TAB; 34 KB, 3 ms of CPU to source
#   shtab 1.13.0   170 lines, since `python tools/x.py`, keys and words split at = need code of ours, in bash
#                  and again in zsh; 8 to 12 ms for a TAB; 92 KB, 5 ms of CPU to source. In zsh it adds help
#                  texts and loses actions after a positional word (register_corpus.py CATALOG add).
#   argcomplete 3.7.2   starts Python at each TAB: 0.1 to 0.7 s of CPU

import argparse
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.cli import PROGRAM, SUBCOMMANDS, TOOLS, create_parser, report_error, run_main
from megatron.config.reference import list_sections
from megatron.io import write_atomic
from tests.tool_modules import load_tool

FILE = "FILE"  # placeholder for the value of an option without choices
# tools that take section.key=value words, and the prefix of each word
WITH_KEYS = {"pretrain": "", "sweep": "run."}
SCRIPT = r"""# Written by tools/completion.py. In zsh, first: autoload -U bashcompinit && bashcompinit
_megatron_words() {
    case "$1" in
CASES
    esac
}

_megatron_complete() {
    local tool='' action='' previous='' candidates='' word
    local current=${COMP_LINE:0:$COMP_POINT}
    # split by hand up to the cursor: COMP_WORDS is also split at = and :
    while [[ $current == *[[:space:]]* ]]; do
        word=${current%%[[:space:]]*}
        current=${current#*[[:space:]]}
        if [[ -z $word ]]; then continue; fi
        previous=$word
        if [[ $word == *tools/*.py ]]; then tool=${word##*/}; tool=${tool%.py}
        elif [[ -z $tool && ( $word == scaling || $word == */scaling || $word == megatron.cli ) ]]; then
            tool=scaling
        elif [[ $tool == scaling ]]; then tool=$(_megatron_words "scaling $word")
        elif [[ -n $tool && -z $action && -n $(_megatron_words "$tool $word .") ]]; then action=" $word"
        fi
    done
    COMPREPLY=()
    if [[ -z $tool ]]; then return; fi
    if [[ $previous == -* ]]; then candidates=$(_megatron_words "$tool$action $previous"); fi
    if [[ $candidates == FILE ]]; then return
    elif [[ -n $candidates ]]; then :
    elif [[ $current == -* ]]; then candidates=$(_megatron_words "$tool$action .")
    elif [[ $current == *=* ]]; then candidates=$(_megatron_words "$tool ${current%%=*}=")
    elif [[ -n $current ]]; then
        candidates="$(_megatron_words "$tool keys") $(_megatron_words "$tool actions")"
    elif [[ -z $action ]]; then candidates=$(_megatron_words "$tool actions")
    fi
    if [[ -z ${candidates// } ]]; then return; fi
    local cut=''
    # COMP_WORDBREAKS splits at =, so bash inserts only the part after the last =
    if [[ $current == *=* && ${COMP_WORDBREAKS-} == *=* ]]; then cut=${current%=*}=; fi
    for word in $(compgen -W "$candidates" -- "$current"); do COMPREPLY+=("${word#"$cut"}"); done
    if [[ "${COMPREPLY[*]}" == *= ]]; then compopt -o nospace 2>/dev/null; fi
}

complete -o default -F _megatron_complete scaling python python3 torchrun
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="output file; default: print the script")
    return parser


def parser_completions(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield (typed words, possible next words) for a parser and its subcommands."""
    # "." is the place of an option: no option or action has this name
    yield f"{name} .", [word for action in parser._actions for word in action.option_strings]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield f"{name} actions", list(action.choices)
            for inner, its_parser in action.choices.items():
                yield from parser_completions(f"{name} {inner}", its_parser)
        # nargs 0: a flag, whose next word is not its value
        elif action.nargs != 0:
            for option in action.option_strings:
                yield f"{name} {option}", [str(choice) for choice in action.choices or (FILE,)]


def key_completions(name: str, before: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield (typed words, possible next words) for section.key=value words."""
    keys = []
    for section, _, options in list_sections():
        for option in options:
            key = f"{before}{section}.{option.name}=" if section else f"{before}{option.name}="
            # a key ends with "=", so the shell completes "optim.lr=" without a blank and then its value
            keys.append(key)
            choices = [str(choice) for choice in option.metadata["choices"]]
            if option.type is bool:
                choices = ["true", "false"]
            if choices:
                yield f"{name} {key}", [key + choice for choice in choices]
    yield f"{name} keys", keys


def format_case(typed: str, words: Sequence[str]) -> str:
    """Return a line of a shell `case`: typed words, and the words that may follow."""
    return f"        {shlex.quote(typed)}) echo {shlex.quote(' '.join(words))} ;;"


def build_script() -> str:
    """Return the completion script, generated from the parsers of all tools."""
    # one line of a shell `case` for each place: the completion itself starts no Python
    cases = [format_case(f"{PROGRAM} {name}", [tool]) for name, tool in SUBCOMMANDS.items()]
    cases += [format_case(f"{PROGRAM} actions", list(SUBCOMMANDS)), format_case(f"{PROGRAM} .", ["--help"])]
    for tool in sorted(TOOLS.glob("*.py")):
        completions = list(parser_completions(tool.stem, load_tool(tool).build_parser()))
        if tool.stem in WITH_KEYS:
            completions += key_completions(tool.stem, WITH_KEYS[tool.stem])
        cases += [format_case(typed, words) for typed, words in completions]
    return SCRIPT.replace("CASES", "\n".join(cases))


def main(argv: Sequence[str] | None = None) -> int:
    """Write or print the script."""
    args = build_parser().parse_args(argv)
    if args.out is None:
        print(build_script(), end="")
        return 0
    try:
        write_atomic(args.out, build_script())
    except OSError as error:
        return report_error(error)
    print(f"{args.out}: source it")
    return 0


if __name__ == "__main__":
    run_main(main)
