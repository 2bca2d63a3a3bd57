"""Files of tools/ as modules, for tests that inspect them."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_tool(tool: Path) -> ModuleType:
    """Import a file in tools/ as a module. Modules of its folder can be imported, as when it is run."""
    spec = importlib.util.spec_from_file_location(f"tools_{tool.stem}", tool)
    assert spec is not None and spec.loader is not None, "importlib has a loader for .py files"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    if str(tool.parent) not in sys.path:
        sys.path.append(str(tool.parent))
    spec.loader.exec_module(module)
    return module
