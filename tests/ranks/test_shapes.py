"""Published shapes have the losses of one rank, relative to 2e-7, in layouts that split the model."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.test_layouts import Case, Result, train
from tests.ranks.train_cases import SAVED_AFTER

TOLERANCE = 2e-7
GPT3 = {
    "norm": "layernorm",
    "feed_forward": "gelu",
    "positions": "learned",
    "biases": True,
    "n_kv_heads": None,
}
OLMO2 = {"tied_embedding": False, "qk_norm": True, "qk_norm_all_heads": True, "norm_placement": "output"}
SHAPES: dict[str, Case] = {
    "llama2": {"model": {"tied_embedding": False}},
    "gpt3": {"model": GPT3},
    "olmo2": {"model": OLMO2},
    # further options, each with weights or places of its own
    "dropout": {"model": GPT3 | {"attention_dropout": 0.2, "hidden_dropout": 0.1}},
    "qwen3": {"model": {"qk_norm": True, "qkv_biases": True, "parallel_residual": True, "rotary_dims": 2}},
    "mup": {"model": GPT3 | {"tied_embedding": False, "parametrization": "mup", "base_d_model": 9}},
    "completep": {
        "objective": {"name": "masked_diffusion", "ar_ratio": 0.5, "t_draw": "stratified"},
        "model": {"document_mask": True, "eod_id": 0, "parametrization": "completep", "base_d_model": 9}
        | {"base_n_layers": 1},
    },
    "orders": {
        "objective": {"orders": 3, "randmask_ratio": 0.3},
        "model": {"positions": "learned", "n_positions": 17, "tied_embedding": False, "head_bias": True},
    },
    "window": {"model": {"attention_window": 5}},
}
TENSOR, PIPELINE = "tensor_parallel=2", "pipeline_parallel=2"
# the fast cases: biases, positions and heads of tensor ranks, and a head on another stage than the embedding
FAST = [("gpt3", TENSOR), ("olmo2", TENSOR), ("llama2", PIPELINE)]
PUBLISHED = ("llama2", "gpt3", "olmo2")
TWO = [(shape, layout) for shape in SHAPES for layout in (TENSOR, PIPELINE) if (shape, layout) not in FAST]
TWO += [(shape, "context_parallel=2") for shape in (*PUBLISHED, "qwen3", "mup")]
BOTH = f"{TENSOR} {PIPELINE}"
SPLIT = [BOTH, f"{BOTH} zero1", f"{TENSOR} zero3", f"{PIPELINE} pipeline_schedule=interleaved"]
FOUR = [(shape, layout) for shape in PUBLISHED for layout in SPLIT] + [("dropout", BOTH), ("orders", BOTH)]


def train_alone(names: Iterable[str], folder: Path) -> dict[str, Result]:
    """Return the results of shapes on one process, whose states are in the folder."""
    return train([{"name": name, **SHAPES[name]} for name in dict.fromkeys(names)], 1, folder)


def assert_equal(result: Result, expected: Result, what: str) -> None:
    """Compare losses and scores; norms too, whose errors AdamW amplifies where gradients are small."""
    for key in ("losses", "counts"):
        assert result["whole"][key] == pytest.approx(expected["whole"][key], rel=TOLERANCE), (what, key)
    assert result["whole"]["norms"] == pytest.approx(expected["whole"]["norms"], rel=25 * TOLERANCE), what
    assert sum(result["scored"]) == pytest.approx(sum(expected["scored"]), rel=TOLERANCE), what


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("n_ranks", "cases"),
    [(2, FAST), pytest.param(2, TWO, marks=pytest.mark.slow), pytest.param(4, FOUR, marks=pytest.mark.slow)],
)
def test_a_split_shape_has_the_losses_of_one_rank(tmp_path, n_ranks: int, cases: list[Any]) -> None:
    runs = [
        {"name": f"{shape} {layout}", "layout": layout, "microbatches": 2, **SHAPES[shape]}
        for shape, layout in cases
    ]
    alone = train_alone((shape for shape, _ in cases), tmp_path / "alone")
    for name, result in train(runs, n_ranks, tmp_path).items():
        expected = alone[name.partition(" ")[0]]
        assert max(expected["whole"]["norms"]) > 0.5, "clipping was active"
        assert_equal(result, expected, name)


@pytest.mark.ranks
@pytest.mark.slow
def test_untied_heads_and_positions_move_between_layouts(tmp_path: Path) -> None:
    """A full state of one rank resumes in four parts, and full and sharded states of those on one rank."""
    expected = train_alone(["mup"], tmp_path)["mup"]["whole"]
    common = SHAPES["mup"] | {"resume": True}
    split = common | {"layout": BOTH, "microbatches": 2, "load": str(tmp_path / "mup.pt"), "sharded": True}
    results = train([{"name": "four", **split}], 4, tmp_path / "four")
    whole = common | {"load": str(tmp_path / "four" / "four.pt")}
    results |= train([{"name": "one", "load_shards": str(tmp_path / "four" / "four"), **whole}], 1, tmp_path)
    for name, kinds in (("four", ("resumed", "moved", "sharded")), ("one", ("moved", "sharded"))):
        for kind in kinds:
            losses = expected["losses"][SAVED_AFTER:]
            assert results[name][kind]["losses"] == pytest.approx(losses, rel=TOLERANCE), (name, kind)
