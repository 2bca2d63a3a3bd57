"""The git commit of the code that runs."""

import subprocess
from pathlib import Path


def git_revision(folder: Path) -> str | None:
    """Commit of the code that runs, with `+` where the tree was changed; None outside a checkout."""
    try:
        commit = _git(folder, "describe", "--always", "--abbrev=12")
        # not `describe --dirty`: that writes the index, and a run ended meanwhile leaves the checkout locked
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changed else "")


def _git(folder: Path, *words: str) -> str:
    """What git says of a checkout, without writing to it."""
    command = ["git", "--no-optional-locks", *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=10, check=True
    ).stdout.strip()


def git_of_code() -> str | None:
    """Revision of the checkout this package lies in."""
    return git_revision(Path(__file__).resolve().parent)
