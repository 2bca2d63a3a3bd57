"""Shared fixtures: real data, published laws and tiny models."""

import atexit
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

# two workers share the cores, so more threads only wait; torch and child processes read it once
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from megatron.checkpoint import layout, store
from megatron.config.schema import ModelConfig
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from megatron.train.local_ranks import reserve_port
from tests.tool_modules import Cli, run_cli

ROOT = Path(__file__).resolve().parents[1]
RESERVED_PORTS = ExitStack()
atexit.register(RESERVED_PORTS.close)
if not torch.cuda.is_available():
    # Triton reads it at its first import, which another library may do before any kernel's test
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure() -> None:
    """Restore SIGINT and SIGHUP for child processes: `pytest &` ignores the former, nohup the latter."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def root() -> Path:
    """Root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def cli() -> Cli:
    """Return `run_cli`: it runs a program of tools/ or a sub-command in process."""
    return run_cli


@pytest.fixture(scope="session")
def scaling_data() -> Path:
    """Folder of real data; tests that need it are skipped if it is missing."""
    folder = Path(os.environ.get("SCALING_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}: set SCALING_DATA to a folder with c4/, megatron_openwebtext/, ...")
    return folder


@pytest.fixture(scope="session")
def stories_folder(scaling_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Hugging Face folder of a trained model of 260,032 parameters, with its tokenizer."""
    from tests.checkpoint.llama2c import export_stories

    return export_stories(scaling_data / "stories260K", tmp_path_factory.mktemp("stories260K"))


@pytest.fixture(scope="session")
def task_folder(scaling_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of lm-eval task files with local data."""
    from tests.task_folder import write_task_folder

    return write_task_folder(scaling_data / "downstream", tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="session")
def laws(scaling_data: Path) -> Path:
    """Folder of published runs and fits, beside the data."""
    folder = scaling_data.parent / "laws"
    if not folder.is_dir():
        pytest.skip(f"no published runs at {folder}")
    return folder


def free_port() -> int:
    """Return a port for rank 0, reserved until the tests end."""
    return RESERVED_PORTS.enter_context(reserve_port())


def wait_until(
    condition: Callable[[], object], explain: Callable[[], object] = str, limit_s: float = 240
) -> None:
    """Wait until a condition is true. `explain` returns the message of the failure after `limit_s`."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, explain()
        time.sleep(0.02)


def run_process(
    words: Sequence[object], cwd: Path | None = None, base: Mapping[str, str] = os.environ, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command with `base` and more variables, and with this Python first on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**base, "PATH": path, **variables}
    return subprocess.run(
        list(map(str, words)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )


def load_newest(directory: Path, prefix: str) -> tuple[Path, dict[str, Any], dict[str, Any]] | None:
    """Return (path, parts, meta) of the newest complete checkpoint, or None."""
    newest = store.find_newest_valid(directory, prefix)
    return None if newest is None else (newest[0], store.read_parts(*newest), newest[1])


def save_checkpoint(
    folder: Path, prefix: str, parts: dict[str, Any], meta: dict[str, Any], preempt: bool = False
) -> Path:
    """Save a checkpoint under a new name in `folder`, and return its path."""
    path = folder / layout.new_checkpoint_name(prefix, preempt)
    store.save_checkpoint(path, parts, meta)
    return path


def flip_middle_bit(path: Path) -> None:
    """Change one bit of a file: damage that its size does not show."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@contextmanager
def limit_file_size(n_bytes: int) -> Iterator[None]:
    """Make every larger file fail with EFBIG, as on a disk with `n_bytes` left."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


def build_tiny(n_tokens: int, seed: int = 0, sharpness: float = 20.0, **more: Any) -> Gpt:
    """Build a model with two blocks, 4 query and 2 key heads, and weights so large that context matters."""
    shape = {"d_model": 32, "d_ff": 64, "d_head": 8, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2}
    model = Gpt(ModelConfig(**{"n_tokens": n_tokens, "vocab_rows": n_tokens + 8, **shape, **more}))
    init_weights(model, seed)
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            # the output of the blocks outweighs the embedding, so the model does not only repeat tokens
            if parameter.ndim == 2:
                parameter *= 15
        model.embedding.weight *= sharpness
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def tiny() -> Gpt:
    return build_tiny(40)


@pytest.fixture(scope="session")
def tiny_of() -> Callable[..., Gpt]:
    """Return `build_tiny`, for models with other options."""
    return build_tiny
