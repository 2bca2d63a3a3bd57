"""Git commit of the running code."""

import subprocess
from pathlib import Path


def git_revision(folder: Path) -> str | None:
    """Return the commit of a checkout, with `+` if tracked files are modified; None outside a checkout."""
    try:
        commit = _run_git(folder, "describe", "--always", "--abbrev=12")
        # not `describe --dirty`: it writes the index, and a run killed meanwhile would leave index.lock
        changed = _run_git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changed else "")


def _run_git(folder: Path, *words: str) -> str:
    """Run git on a checkout without writing to it, and return its output."""
    # `status` refreshes the index as a side effect; the option suppresses this, so a killed run leaves no
    # index.lock
    command = ["git", "--no-optional-locks", *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=10, check=True
    ).stdout.strip()


def code_revision() -> str | None:
    """Return the revision of the checkout that contains this package."""
    return git_revision(Path(__file__).resolve().parent)
