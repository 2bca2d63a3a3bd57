"""Megatron's folders are scored without a conversion, as the model that they contain."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.convert.formats import convert_checkpoint
from megatron.checkpoint.convert.megatron_layouts import read_megatron
from megatron.evaluation.held_out import HeldOutScoring, score_held_out
from megatron.evaluation.likelihood import Request
from megatron.evaluation.likelihood_diffusion import score_bound
from megatron.evaluation.scored_models import find_models
from megatron.model.transformer import Gpt
from tests.checkpoint.test_megatron_layouts import LLAMA, write_deepspeed, write_megatron_lm
from tests.checkpoint.test_megatron_objective import EVERYTHING, FORK, change_args
from tests.evaluation.conftest import ALONE
from tests.evaluation.test_held_out_files import write_corpus


@pytest.fixture
def diffusion(tiny_of: Callable[..., Gpt], tmp_path: Path) -> Path:
    """A checkpoint of the fork's diffusion model: 41 ids, [MASK] in row 41."""
    write_deepspeed(tiny_of(**LLAMA), tmp_path / "mdm", 2, True)
    change_args(tmp_path / "mdm", **FORK, attn_mask=EVERYTHING)
    return tmp_path / "mdm"


def score(path: Path, data: str) -> dict[str, Any]:
    return score_held_out(find_models([path])[0], HeldOutScoring(data=data, seq_len=8, num_mc=3), ALONE)[0]


def test_a_diffusion_checkpoint_of_the_fork_scores_as_its_conversion(diffusion: Path, tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "text", 0)
    convert_checkpoint(diffusion, tmp_path / "native", to="native")
    result, expected = score(diffusion, data), score(tmp_path / "native", data)
    assert result["loss"] == expected["loss"]
    assert result["objective"] == expected["objective"] == "masked_diffusion"
    as_text = read_megatron(diffusion).build_model()
    request = Request((3, 4), (5,))
    # one masked token: the bound is its loss with [MASK] in its place, seen from both sides
    options = {"num_mc": 1, "seed": 0, "batch_size": 1, "max_length": 16, "world": ALONE}
    (log_p,) = score_bound(as_text, [request], **options).log_p
    logits = as_text(torch.tensor([[3, 4, 41]]), causal=False)[0, 2].double()
    assert log_p == pytest.approx(float(logits.log_softmax(-1)[5]), abs=1e-5)


def test_an_unknown_objective_is_refused_when_scoring(diffusion: Path, tmp_path: Path) -> None:
    change_args(diffusion, attn_mask=None)
    with pytest.raises(ValueError, match="--objective masked_diffusion"):
        score(diffusion, write_corpus(tmp_path / "text", 0))
    assert not (tmp_path / "mdm.scores").exists()


def test_folders_of_both_projects_are_listed(tiny_of: Callable[..., Gpt], tmp_path: Path) -> None:
    write_megatron_lm(tiny_of(**LLAMA), tmp_path / "lm" / "a", 2, 1, "core")
    write_deepspeed(tiny_of(**LLAMA), tmp_path / "ds" / "a", 2, False)
    for run, name in ((tmp_path / "lm" / "a", "iter_0000007"), (tmp_path / "ds" / "a", "global_step7")):
        assert [model.path for model in find_models([run.parent])] == [run]
        (model,) = find_models([run / name])
        assert (model.path, model.step, model.run) == (run / name, 7, None)
