"""MIGRATE.md is generated from the data of the translator, and its names here exist."""

import re
from pathlib import Path

import pytest

from megatron.config.migration import names
from megatron.config.migration.megatron_table import SECTIONS
from megatron.config.migration.megatron_unused import FAMILIES, NO_EFFECTS, REFUSED
from megatron.config.migration.page import PAGE, render_migration_page
from megatron.config.reference import list_sections

TABLES = {
    name: rows
    for name, rows in vars(names).items()
    if name.isupper() and isinstance(rows, tuple) and name != "LAUNCHERS"
}
ROWS = [(table, row) for table, rows in TABLES.items() for row in rows]
SECTION_NAMES = {name for name, _, _ in list_sections() if name}
KEYS = {f"{name}.{key.name}" for name, _, keys in list_sections() for key in keys} | {
    "name",
    "model.hf_config",
}


def test_the_page_in_the_tree_is_current(root: Path) -> None:
    assert (root / PAGE).read_text() == render_migration_page(root), "run make docs"


@pytest.mark.parametrize(("table", "row"), ROWS, ids=lambda value: str(value)[:60])
def test_each_key_that_a_row_names_here_exists(table: str, row: tuple[str, str, str]) -> None:
    old, new, note = row
    assert old and (new or note), f"{table}: {old} has no successor and no reason"
    for word in re.findall(r"\b([a-z_]+\.[a-z_0-9]+)\b", f"{new} {note}"):
        if word.partition(".")[0] in SECTION_NAMES:
            assert word in KEYS, f"{table}: {word} is no key"


def test_every_argument_of_the_tables_is_on_the_page(root: Path) -> None:
    text = (root / PAGE).read_text()
    arguments = [argument for group in (*SECTIONS.values(), NO_EFFECTS, REFUSED) for argument in group]
    assert [argument.name for argument in arguments if f"`{argument.option}`" not in text] == []
    assert [prefix for prefix in FAMILIES if f"`--{prefix}*`" not in text] == []


def test_the_columns_of_the_log_are_those_of_a_run(root: Path) -> None:
    written = (root / "megatron" / "train" / "metrics_logger.py").read_text()
    for _, new, _ in names.MEGATRON_LOG:
        if new and "." not in new:
            assert f'"{new}"' in written or f"{new}:" in written or f"{new}=" in written, new
