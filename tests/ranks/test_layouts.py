"""Every engine and layout matches a single process to 1e-5 in float32, also after loading a state."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank_processes import start_ranks, stop_ranks
from tests.ranks.train_cases import SAVED_AFTER, TIMEOUT_S, run_cases

OBJECTIVES = ("autoregressive", "masked_diffusion")
TOLERANCE = 1e-5
Case = dict[str, Any]
Result = dict[str, Any]

ZERO3, HYBRID = {"sharding_stage": "zero3"}, {"shard_size": 2}
INTERLEAVED = {"pipeline_parallel": 2, "pipeline_schedule": "interleaved"}
STAGES = tuple(f"zero{i}" for i in range(4))
DEEPSPEED = {stage: {"engine": "deepspeed", "sharding_stage": stage} for stage in STAGES}
NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="pip install deepspeed")
ON_2 = {
    "zero0": {},
    "zero3": ZERO3,
    "tensor": {"tensor_parallel": 2},
    "context": {"context_parallel": 2},
    "pipeline": {"pipeline_parallel": 2},
}
# group -> (ranks, name -> settings of `dist`); the layouts of a group run in the same processes
GROUPS: dict[str, tuple[int, dict[str, Case]]] = {
    "two": (2, ON_2),
    "four": (
        4,
        {
            "zero3_hybrid": HYBRID | {"sharding_stage": "zero3_hybrid"},
            "tensor_zero3": ZERO3 | {"tensor_parallel": 2},
            "interleaved": INTERLEAVED,
        },
    ),
    "more": (
        4,
        {
            "zero0": {},
            "zero1": {"sharding_stage": "zero1"},
            "zero2": {"sharding_stage": "zero2"},
            "zero2_hybrid": HYBRID | {"sharding_stage": "zero2_hybrid"},
            "zero3": ZERO3,
            "zero3_recomputed": ZERO3 | {"activation_checkpointing": "full"},
            "zero2_recomputed": {"sharding_stage": "zero2", "activation_checkpointing": "selective"},
            "offload": ZERO3 | {"cpu_offload": True},
            "tensor": {"tensor_parallel": 4},
            "tensor_zero0": {"tensor_parallel": 2},
            "context": {"context_parallel": 4},
            "context_zero2": {"context_parallel": 2, "sharding_stage": "zero2"},
            "tensor_context": {"tensor_parallel": 2, "context_parallel": 2},
            "pipeline": {"pipeline_parallel": 4},
            "pipeline_zero1": {"pipeline_parallel": 2, "sharding_stage": "zero1"},
            "interleaved_zero1": INTERLEAVED | {"sharding_stage": "zero1"},
            "pipeline_tensor": {"pipeline_parallel": 2, "tensor_parallel": 2},
            "pipeline_context": {"pipeline_parallel": 2, "context_parallel": 2},
        },
    ),
    "compiled": (
        2,
        {
            "compiled_zero3": ZERO3 | {"compile": True, "activation_checkpointing": "selective"},
            "compiled_tensor": {"compile": True, "tensor_parallel": 2},
            "compiled_context": {"compile": True, "context_parallel": 2},
        },
    ),
    "deepspeed zero3": (1, {"zero3": DEEPSPEED["zero3"]}),
    "deepspeed": (2, DEEPSPEED),
    "deepspeed on one": (1, DEEPSPEED),
    "deepspeed on four": (4, DEEPSPEED),
}
FAST = {("two", name) for name in OBJECTIVES} | {("deepspeed zero3", "masked_diffusion")}


def mark_group(group: str, objective: str) -> Any:
    marks = [pytest.mark.ranks] if (group, objective) in FAST else [pytest.mark.ranks, pytest.mark.slow]
    marks += [NEEDS_DEEPSPEED] if "deepspeed" in group else []
    return pytest.param(group, objective, marks=marks)


def train(cases: list[Case], n_ranks: int, folder: Path) -> dict[str, Result]:
    """Run the cases in sequence on gloo ranks; return rank 0's result of each."""
    folder.mkdir(exist_ok=True)
    ranks = start_ranks(run_cases, cases, folder, n_ranks=n_ranks, folder=folder)
    try:
        for rank in ranks:
            ended = rank.wait(900)
            assert ended.status == 0, ended.error[-3000:]
    finally:
        stop_ranks(ranks)
    return {case["name"]: torch.load(folder / f"{case['name']}.result") for case in cases}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Result]]:
    """Folder of the states and the results of each objective on one process."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, train([{"name": name, "objective": {"name": name}} for name in OBJECTIVES], 1, folder)


def assert_close(result: Result, expected: Result, first: int = 0, what: str = "") -> None:
    """Compare steps from `first` on; AdamW amplifies errors of small gradients, so norms may have 3 times."""
    for key, tolerance in (("losses", TOLERANCE), ("norms", 3 * TOLERANCE)):
        assert result[key] == pytest.approx(expected[key][first:], abs=tolerance), (what, key)


def assert_matches(result: Result, expected: Result, name: str) -> None:
    """Compare a whole run and its scores with a single process."""
    assert_close(result["whole"], expected["whole"], what=name)
    assert result["whole"]["counts"] == expected["whole"]["counts"]  # the same tokens, in microbatches
    # sums over 16 positions
    assert result["scored"] == pytest.approx(expected["scored"], abs=16 * TOLERANCE), name
    assert set(result["timeouts"]) <= {TIMEOUT_S}, name


@pytest.mark.parametrize(
    ("group", "objective"), [mark_group(group, objective) for group in GROUPS for objective in OBJECTIVES]
)
def test_layouts_match_a_single_process_and_resume_from_every_state(
    alone, tmp_path: Path, group: str, objective: str
) -> None:
    """States do not depend on the objective; DeepSpeed's stages each resume from the state of another."""
    n_ranks, layouts = GROUPS[group]
    load, cases = alone[0] / f"{objective}.pt", []
    for name, dist in layouts.items():
        n_microbatches = 2 if n_ranks < 4 else max(2, dist.get("pipeline_parallel", 1))
        case = {"name": name, "objective": {"name": objective}, "dist": dist, "microbatches": n_microbatches}
        if objective == "autoregressive" or "deepspeed" in group:
            case |= {"load": str(load), "resume": True, "sharded": True}
        cases.append(case)
        if "deepspeed" in group:
            load = tmp_path / f"{name}.pt"
    if "deepspeed" in group:
        cases.append({"name": "torch", "objective": {"name": objective}, "load": str(load), "resume": True})
    expected = alone[1][objective]
    for name, result in train(cases, n_ranks, tmp_path).items():
        assert_matches(result, expected, name)
        for kind in {"resumed", "moved", "sharded"} & result.keys():
            assert_close(result[kind], expected["whole"], SAVED_AFTER, f"{name}, {kind}")


@pytest.mark.ranks
def test_a_single_process_gives_the_same_with_microbatches_recomputation_and_any_stage(
    alone, tmp_path
) -> None:
    settings = {
        "microbatches": {},
        "full": {"activation_checkpointing": "full"},
        "selective": {"activation_checkpointing": "selective", "sharding_stage": "zero3"},
        "offload": {"cpu_offload": True, "sharding_stage": "zero2"},
    }
    objective = {"name": "masked_diffusion"}
    cases = [
        {"name": name, "objective": objective, "dist": dist, "microbatches": 4}
        for name, dist in settings.items()
    ]
    expected = alone[1]["masked_diffusion"]
    assert min(alone[1]["autoregressive"]["whole"]["norms"]) > 0.5, "clipping was active"
    for name, result in train(cases, 1, tmp_path).items():
        assert_matches(result, expected, name)


STREAM, PRODUCTS = "residual stream", ("result of a norm", "input of a product", "result of a product")


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", pytest.param("deepspeed", marks=NEEDS_DEEPSPEED)])
def test_every_layout_has_the_dtypes_and_losses_of_a_single_process(tmp_path, engine) -> None:
    layouts = DEEPSPEED if engine == "deepspeed" else ON_2
    if engine == "torch":
        layouts = layouts | {"pipeline_zero1": {"pipeline_parallel": 2, "sharding_stage": "zero1"}}
    streams = {"bfloat16": None, "float32": "float32"}  # dtype: value of dist.residual_dtype

    def run(n_ranks: int, layouts: dict[str, Case]) -> dict[str, Result]:
        common = {"objective": {"name": "masked_diffusion"}, "record_dtypes": True, "microbatches": 2}
        cases = [
            {"name": f"{stream}.{name}", "dist": {"dtype": "bfloat16", "residual_dtype": setting, **layout}}
            for name, layout in layouts.items()
            for stream, setting in streams.items()
            if stream == "float32" or name not in ("tensor", "context", "pipeline_zero1")
        ]
        return train([case | common for case in cases], n_ranks, tmp_path / str(n_ranks))

    alone = run(1, {"one": {}, "offload": {"cpu_offload": True, "sharding_stage": "zero2"}})
    for name, result in {**alone, **run(2, layouts)}.items():
        stream = name.partition(".")[0]
        expected = {STREAM: [stream]} | {kind: ["bfloat16"] for kind in PRODUCTS}
        if name.partition(".")[2] not in DEEPSPEED or engine == "torch":
            expected |= {"stored weight": ["float32"], "moment": ["float32"]}
        assert result["dtypes"] == expected, name
        # tensor ranks round their partial sums of a product before adding them
        tolerance = 5e-3 if name.endswith("tensor") else 2e-3 if engine == "deepspeed" else 1e-3
        assert result["losses"] == pytest.approx(alone[f"{stream}.one"]["losses"], abs=tolerance), name


@pytest.mark.slow
@pytest.mark.ranks
@NEEDS_DEEPSPEED
def test_half_precision_stays_near_float32_and_resumes_exactly(alone, tmp_path) -> None:
    layouts = [("bfloat16", dist) for dist in ({}, ZERO3, *DEEPSPEED.values())]
    layouts += [("float16", dist) for dist in ({}, ZERO3)]
    cases = [
        {"name": str(i), "dist": {"dtype": dtype} | dist, "resume": True}
        for i, (dtype, dist) in enumerate(layouts)
    ]
    expected = alone[1]["autoregressive"]["whole"]
    for name, result in train(cases, 2, tmp_path).items():
        whole = result["whole"]
        assert whole["losses"] != pytest.approx(expected["losses"], abs=1e-7), name
        assert whole["losses"] == pytest.approx(expected["losses"], abs=0.02), name
        # later norms belong to weights that have diverged by rounding
        assert whole["norms"][0] == pytest.approx(expected["norms"][0], rel=0.05), name
        assert result["resumed"]["losses"] == pytest.approx(whole["losses"][SAVED_AFTER:], abs=1e-6), name


@pytest.mark.slow
@pytest.mark.ranks
@NEEDS_DEEPSPEED
def test_offloading_of_deepspeed_changes_no_loss(alone, tmp_path) -> None:
    layouts = {
        "2": DEEPSPEED["zero2"] | {"offload_optimizer": True},
        "3": DEEPSPEED["zero3"] | {"offload_optimizer": True, "offload_parameters": True},
    }
    cases = [{"name": name, "dist": dist, "resume": True} for name, dist in layouts.items()]
    for name, result in train(cases, 2, tmp_path).items():
        assert_matches(result, alone[1]["autoregressive"], name)
        assert_close(result["resumed"], alone[1]["autoregressive"]["whole"], SAVED_AFTER, name)


@pytest.mark.slow
@pytest.mark.ranks
@NEEDS_DEEPSPEED
def test_a_nan_gradient_on_a_single_rank_changes_no_weight(tmp_path) -> None:
    layouts = {"torch": {}, "torch zero3": ZERO3, **DEEPSPEED}
    cases = [
        {"name": name, "dist": dist, "objective": {"name": "masked_diffusion"}, "poison": 2}
        for name, dist in layouts.items()
    ]
    results = train(cases, 2, tmp_path)
    for name, result in results.items():
        finite = [abs(norm) < float("inf") for norm in result["whole"]["norms"]]
        assert finite == [True, True, False, True], name
        expected = results["torch"]["whole"]["losses"][3:]
        assert result["whole"]["losses"][3:] == pytest.approx(expected, abs=1e-5), name


# options with weights used outside of their module, separate rates, or a dependence on whole samples
OPTIONS: dict[str, Case] = {
    "gpt2": {
        "model": {"norm": "layernorm", "feed_forward": "gelu", "positions": "learned", "biases": True}
        | {"tied_embedding": False, "parametrization": "mup", "base_d_model": 9}
    },
    "completep": {
        "objective": {"name": "masked_diffusion", "ar_ratio": 0.5, "t_draw": "stratified"},
        "model": {"n_kv_heads": 1, "qk_norm": True, "document_mask": True, "eod_id": 0}
        | {"parametrization": "completep", "base_d_model": 9, "base_n_layers": 1},
    },
    "orders": {
        "objective": {"orders": 3, "randmask_ratio": 0.3},
        "model": {"attention_dropout": 0.2, "tied_embedding": False},
    },
    # biases of queries, keys and values (Qwen2), parallel branches, scaled and partly rotated positions
    "qwen2": {
        "model": {"qkv_biases": True, "parallel_residual": True, "rotary_dims": 2}
        | {"rope_scaling": "linear", "rope_factor": 4.0}
    },
}


@pytest.mark.slow
@pytest.mark.ranks
@NEEDS_DEEPSPEED
@pytest.mark.parametrize("option", OPTIONS)
def test_every_shape_and_objective_gives_the_same_losses_in_all_layouts(tmp_path: Path, option: str) -> None:
    layouts = {
        "zero3": ZERO3,
        "ds1": DEEPSPEED["zero1"],
        # before zero3, which changes it in a process
        "ds2 selective": DEEPSPEED["zero2"] | {"activation_checkpointing": "selective"},
        "ds2 full": DEEPSPEED["zero2"] | {"activation_checkpointing": "full"},
        "ds3": DEEPSPEED["zero3"],
        "ds3 full": DEEPSPEED["zero3"] | {"activation_checkpointing": "full"},
    }
    if option == "qwen2":
        layouts = {name: ON_2[name] for name in ("tensor", "pipeline", "context")}
    (tmp_path / "one").mkdir()
    alone = train([{"name": "one", **OPTIONS[option]}], 1, tmp_path / "one")["one"]
    cases = [
        {"name": name, "dist": dist, "microbatches": 2, **OPTIONS[option]} for name, dist in layouts.items()
    ]
    for name, result in train(cases, 2, tmp_path).items():
        assert_matches(result, alone, name)
