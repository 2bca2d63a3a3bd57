"""Run offline and with one thread: generation makes thousands of tiny forward passes."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megatron.checkpoint.model_weights import Weights
from megatron.config.schema import ModelConfig
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from megatron.parallel.world import World

ALONE = World(0, 1, 0, torch.device("cpu"))


def build_diffusion(stories: Weights) -> Weights:
    """Return a small untrained diffusion model with the tokenizer of the stories model."""
    config = ModelConfig(d_model=32, d_ff=64, d_head=8, n_heads=4, n_layers=2, n_tokens=512, vocab_rows=640)
    model = Gpt(config)
    init_weights(model, 0)
    return replace(stories, config=config, objective="masked_diffusion", state=model.state_dict())


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
