"""Where the tests find real data, how they say that it is absent, and tiny models."""

import atexit
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import store
from megatron.config.schema import ModelConfig
from megatron.model.gpt import Gpt
from megatron.model.initial import initialise
from megatron.train.local_ranks import held_port

ROOT = Path(__file__).resolve().parents[1]
HELD_PORTS = ExitStack()
atexit.register(HELD_PORTS.close)


def pytest_configure() -> None:
    """Let Ctrl-C and SIGHUP reach what the tests start: `pytest &` ignores the one, nohup the other."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def scaling_data() -> Path:
    """The folder of real data; the test is skipped where there is none."""
    folder = Path(os.environ.get("SCALING_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(
            f"no data at {folder}: set SCALING_DATA to a folder that has c4/, megatron_openwebtext/, ..."
        )
    return folder


@pytest.fixture(scope="session")
def laws(scaling_data: Path) -> Path:
    """The folder of published runs and fits, beside the data."""
    folder = scaling_data.parent / "laws"
    if not folder.is_dir():
        pytest.skip(f"no published runs at {folder}")
    return folder


def free_port() -> int:
    """A port for ranks to meet at, which nobody else is given until the tests end."""
    return HELD_PORTS.enter_context(held_port())


def load_newest(directory: Path, prefix: str) -> tuple[Path, dict[str, Any], dict[str, Any]] | None:
    """(path, parts, meta) of the newest whole checkpoint."""
    found = store.newest_whole(directory, prefix)
    return None if found is None else (found[0], store.read_parts(*found), found[1])


def build_tiny(n_tokens: int, seed: int = 0, sharpness: float = 20.0, **more: Any) -> Gpt:
    """Two blocks, 4 query heads over 2 of keys; weights large enough that context matters."""
    shape = {"d_model": 32, "d_ff": 64, "d_head": 8, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2}
    model = Gpt(ModelConfig(**{"n_tokens": n_tokens, "vocab_rows": n_tokens + 8, **shape, **more}))
    initialise(model, seed)
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            if parameter.ndim == 2:  # what the blocks add outweighs the token itself: no mere repetition
                parameter *= 15
        model.embedding.weight *= sharpness
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def tiny() -> Gpt:
    return build_tiny(40)


@pytest.fixture(scope="session")
def tiny_of() -> Callable[..., Gpt]:
    """`build_tiny`, for a model of another kind."""
    return build_tiny
