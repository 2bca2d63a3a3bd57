"""The public names of megatron.laws, and the Python session of LAWS.md."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import megatron.laws


def test_every_public_name_is_imported_and_listed_in_the_guide(root: Path) -> None:
    guide = (root / "examples_scaling/training/LAWS.md").read_text().partition("Public and stable")[2]
    assert set(re.findall(r"`(\w+)`", guide)) == set(megatron.laws.__all__)
    for name in megatron.laws.__all__:
        assert getattr(megatron.laws, name).__name__ == name


def test_the_package_imports_no_slow_library_before_use(root: Path) -> None:
    slow = "('torch', 'pandas', 'scipy', 'plotly')"
    code = f"import megatron.laws, sys; print([name for name in {slow} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_sessions_of_the_guide_print_what_it_shows(root: Path) -> None:
    guide = root / "examples_scaling/training/LAWS.md"
    blocks = re.findall(r"```pycon\n(.*?)```", guide.read_text(), re.DOTALL)
    session = doctest.DocTestParser().get_doctest("".join(blocks), {}, guide.name, str(guide), 0)
    assert len(session.examples) > 10
    printed: list[str] = []
    assert doctest.DocTestRunner().run(session, out=printed.append).failed == 0, "".join(printed)
