"""Run offline and with one thread: generation makes thousands of tiny forward passes."""

from collections.abc import Iterator

import pytest
import torch

from megatron.parallel.world import World

ALONE = World(0, 1, 0, torch.device("cpu"))


@pytest.fixture(autouse=True, scope="package")
def offline() -> Iterator[None]:
    """Set HF_HUB_OFFLINE, which lm_eval reads at import; without it, loading local data takes a minute."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
