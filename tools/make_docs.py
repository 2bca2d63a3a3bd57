"""Write the files that are derived from the code and its tables: `make docs`.

    python tools/make_docs.py

CONFIG.md lists the keys of a configuration, MIGRATE.md Megatron's arguments, scripts and files, and
utils/model_params.sh has the sizes and subsets as bash variables.
"""

import argparse
import inspect
import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import Field, fields, is_dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from megatron.cli import create_parser, run_main
from megatron.config.megatron_args import PAGE, load_rows
from megatron.config.option import list_choices, read_switch, split_type
from megatron.config.presets import load_model_sizes
from megatron.config.schema import RunConfig
from megatron.io import write_atomic

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "examples_scaling/training/CONFIG.md"


def format_type(key: Field[Any]) -> str:
    """Return the type as written in YAML: whole number, number, true or false, text, a list, or choices."""
    if key.metadata["read"] is read_switch:
        return "`auto` or true or false"
    if choices := list_choices(key):
        return " or ".join(f"`{choice}`" for choice in choices)
    names = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    kind, _ = split_type(key.type)
    return f"list of {names[typing.get_args(kind)[0]]}s" if typing.get_args(kind) else names[kind]


def format_default(key: Field[Any]) -> str:
    """Return the default as written in YAML. Keys of the shape get theirs from the size or the corpus."""
    # a default of 0 that violates its own bound marks a required key,
    # which the size or the corpus sets
    if key.metadata["above"] == 0 and key.default == 0:
        return "from the corpus" if key.name in ("n_tokens", "vocab_rows") else "from `model.size`"
    if key.metadata["read"] is read_switch:
        return "`auto`"
    if key.default is None:
        return "`null`"
    if isinstance(key.default, bool):
        return f"`{str(key.default).lower()}`"
    return f"`{key.default}`"


def read_help(cls: Any) -> dict[str, str]:
    """Return the help texts of a section: the entries `key: text` of its docstring."""
    entries = re.split(r"\n(?=\w)", inspect.cleandoc(cls.__doc__ or ""))[1:]
    pairs = (entry.partition(":") for entry in entries)
    return {key: " ".join(text.split()) for key, _, text in pairs}


def format_help(key: Field[Any], text: str) -> str:
    """Return the help text, and the lower bound of a number that has no upper one."""
    above = key.metadata["above"]
    if above is None or key.metadata["below"] is not None:
        return text
    # above=-1 bounds whole numbers from 0: "0 or more" reads better
    # than "more than -1"
    return f"{text}; " + (f"{above + 1} or more" if above < 0 else f"more than {above}")


def list_sections() -> Iterator[tuple[str, Any, list[Field[Any]]]]:
    """Yield (name, class, keys) of each section, first the keys that are in no section."""
    yield "", RunConfig, [key for key in fields(RunConfig) if not is_dataclass(key.type)]
    for section in fields(RunConfig):
        if is_dataclass(section.type):
            yield section.name, section.type, list(fields(section.type))


def render_reference() -> str:
    """Return the sections of CONFIG.md. Raises KeyError for a key without a help text."""
    lines = []
    for name, cls, keys in list_sections():
        texts = read_help(cls)
        lines.append(f"## {name or 'Run'}\n")
        if name:
            lines.append(f"{cls.__doc__.partition(chr(10))[0]}\n")
        lines += ["| key | type | default | unit | meaning |", "|---|---|---|---|---|"]
        for key in keys:
            path = f"`{name}.{key.name}`" if name else f"`{key.name}`"
            meaning = format_help(key, texts[key.name]).replace("|", "\\|")
            cells = (path, format_type(key), format_default(key), key.metadata["unit"], meaning)
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def render_migration(root: Path) -> str:
    """Return the sections of MIGRATE.md. `root` is the checkout, whose tables are read."""
    parts = []
    for title, rows in groupby(load_rows(), key=lambda row: row.section):
        reasons: dict[str, list[str]] = {}
        for row in rows:
            keys = ", ".join(key.partition("=")[0] for key in row.keys)
            alias = "".join(row.list_conditions("as"))
            reason = keys or (f"--{alias}" if alias else row.note)
            if "preprocessing" in row.conversion:
                reason = "`preprocess_data_many_cores.py` warns with the reason"
            reasons.setdefault(reason, []).append(f"`--{row.name}`")
        is_supported = not title.startswith(("No effect", "Not supported", "Options of preprocessing"))
        cells = [(", ".join(names), reason) for reason, names in reasons.items()]
        parts.append(_render_table(title, ("argument", "here" if is_supported else "why"), cells))
    for title, name in (("Scripts of the data-constrained study", "scripts"), ("Files", "files")):
        rows = yaml.safe_load((root / f"utils/migration/{name}.yaml").read_text())
        parts.append(_render_table(title, ("there", "here", "note"), map(_list_cells, rows)))
    return "\n".join(parts)


def _list_cells(row: dict[str, str | list[str]]) -> tuple[str, str, str]:
    new = [row["new"]] if isinstance(row["new"], str) else row["new"]
    paths = ", ".join("the same" if path in (row["old"], "the same") else f"`{path}`" for path in new)
    return str(row["old"]), paths or "-", str(row["note"])


def _render_table(title: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"## {title}\n", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def format_shell_tables() -> str:
    """Return both tables as bash variables with the names and tuples of the original study's scripts.

    PARAM_425M=(1280 5120 128 10 18)   d_model, 4 d_model, d_head, n_heads, n_layers
    DATA_100M=99952399                 tokens per epoch
    """
    lines = [
        "# shellcheck shell=bash disable=SC2034",
        "# Generated by make docs from model_sizes.yaml and epoch_tokens.yaml. Sourced by scripts.",
        "# PARAM_SIZE=(d_model ffw_size kv_size n_heads n_layers). ffw_size is 4 d_model, for two matrices;",
        "# each of SwiGLU's three matrices has the width floor(8 d_model / 3 / 64) * 64.",
    ]
    for name, shape in load_model_sizes().items():
        d_model = shape["d_model"]
        values = (d_model, 4 * d_model, shape["d_head"], shape["n_heads"], shape["n_layers"])
        lines.append(f"PARAM_{name}=({' '.join(map(str, values))})")
    lines.append("# DATA_SUBSET: tokens of one epoch of a published subset")
    epoch_tokens = yaml.safe_load((ROOT / "utils/epoch_tokens.yaml").read_text())
    lines += [f"DATA_{name}={tokens}" for name, tokens in epoch_tokens.items()]
    return "\n".join(lines) + "\n"


def render_files(root: Path) -> dict[str, str]:
    """Return path in the checkout -> content of all files."""
    pages = {CONFIG: render_reference(), PAGE: render_migration(root)}
    # the introduction of a page, until its first section, is written by hand
    heads = {name: (root / name).read_text().partition("\n## ")[0] for name in pages}
    return {name: f"{heads[name]}\n{text}" for name, text in pages.items()} | {
        "utils/model_params.sh": format_shell_tables()
    }


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser, which takes no options."""
    return create_parser(__doc__)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files."""
    build_parser().parse_args(argv)
    for name, text in render_files(ROOT).items():
        write_atomic(ROOT / name, text)
        print(ROOT / name)
    return 0


if __name__ == "__main__":
    run_main(main)
