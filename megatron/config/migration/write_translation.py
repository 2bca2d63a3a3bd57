"""Output of a translation: the table of its rows, and the YAML with the files that it names."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from megatron.config.migration.argument import OUTCOMES
from megatron.config.migration.translate import Row, Translation
from megatron.io import PARTIAL, atomic_path

ARGUMENT_WIDTH = 46


def format_rows(rows: list[Row]) -> str:
    """Return the rows as a table, grouped by outcome, with a count of each."""
    lines = []
    for outcome in OUTCOMES:
        chosen = [row for row in rows if row.outcome == outcome]
        if not chosen:
            continue
        lines.append(f"{outcome}: {len(chosen)}")
        width = min(ARGUMENT_WIDTH, max(len(row.argument) for row in chosen))
        lines += [f"  {row.argument:<{width}}  {row.text}" for row in chosen]
    return "\n".join(lines)


def write_translation(translation: Translation, path: Path | None, writer: int = 0) -> str:
    """Write the configuration, with its files beside it, and return its YAML.

    path    the YAML file; None: write nothing, and files are named as they would be beside run.yaml
    writer  number of this process among those that write the same content at the same time
    """
    settings = translation.settings
    target = path or Path("run.yaml")
    for name, content in translation.files.items():
        file = target.with_name(f"{target.stem}.{name}")
        settings = _replace_value(settings, name, str(file))
        if path is not None:
            _write(file, content, writer)
    text = OmegaConf.to_yaml(OmegaConf.create(settings))
    if path is not None:
        _write(path, text, writer)
    return text


def _write(path: Path, text: str, writer: int) -> None:
    # a temporary name for each writer: the ranks of a run write one file, and one would rename another's away
    with atomic_path(path, partial_name=f"{path.name}.{writer}{PARTIAL}") as partial:
        partial.write_text(text, encoding="utf-8")


def _replace_value(settings: dict[str, Any], value: str, new: str) -> dict[str, Any]:
    """Return the settings with one file's name replaced by its path."""
    return {
        key: _replace_value(entry, value, new)
        if isinstance(entry, dict)
        else new
        if entry == value
        else entry
        for key, entry in settings.items()
    }
