"""Hook of mkdocs: the pages of the site are the guides of this checkout, at their own paths.

Besides the pages, the site has the files that they link to, such as figures and example programs.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def find_pages() -> list[Path]:
    """Return the guides, relative to the root: those at the root and those in examples_scaling."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "examples_scaling").rglob("*.md")]
    return sorted(page.relative_to(ROOT) for page in pages)


def find_linked_files(page: Path) -> set[Path]:
    """Return the files of this checkout, other than guides, that a guide links to or shows."""
    targets = re.findall(r"\]\(([^)#:]+)[^)]*\)", (ROOT / page).read_text())
    paths = {(ROOT / page.parent / target).resolve() for target in targets}
    return {path.relative_to(ROOT) for path in paths if path.is_file() and path.suffix != ".md"}


def on_files(files: Any, config: Any) -> Any:
    """Replace the files of docs_dir with the checkout's; keep the theme's."""
    from mkdocs.structure.files import File, Files

    pages = find_pages()
    names = sorted({*pages, *(path for page in pages for path in find_linked_files(page))})
    theme = [file for file in files if file.src_dir != config["docs_dir"]]
    guides = [File(str(name), str(ROOT), config["site_dir"], use_directory_urls=False) for name in names]
    return Files([*theme, *guides])
