"""What the tests of foreign formats share: transformers without the network, and weights of a model."""

from typing import Any

import pytest

from megatron.checkpoint.model_weights import Weights
from megatron.model.transformer import Gpt


def import_transformers() -> Any:
    """Import transformers, or skip the module. It reads HF_HUB_OFFLINE at import; unset for later tests."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_HUB_OFFLINE", "1")
        return pytest.importorskip("transformers")


def weights_of(model: Gpt, objective: str = "autoregressive", **more: Any) -> Weights:
    """Return the weights of a model, with other fields of Weights in `more`."""
    fields = {"state": model.state_dict(), "seq_len": 64} | more
    return Weights(config=model.config, objective=objective, **fields)
