"""DeepSpeed gives the losses of torch on one process for every stage and number of ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import free_port

pytest.importorskip("deepspeed", reason="the DeepSpeed engine is optional: pip install deepspeed")

STAGES = (0, 1, 2, 3)
AR, MDM = "autoregressive", "masked_diffusion"
Case = dict[str, Any]


def zero_config(stage: int, **dist: Any) -> dict[str, Any]:
    return {"engine": "deepspeed", "sharding_stage": f"zero{stage}", **dist}


def run_cases(cases: list[Case], n_ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Run several_steps.py on gloo ranks; return rank 0's result of each case."""
    script = Path(__file__).with_name("several_steps.py")
    shared = {**os.environ, "OMP_NUM_THREADS": "1"}
    if n_ranks > 1:
        shared |= {"WORLD_SIZE": str(n_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [sys.executable, str(script), json.dumps(cases), str(folder)],
            env=shared if n_ranks == 1 else {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(n_ranks)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * n_ranks, outputs[0][-3000:]
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def torch_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of the torch engine on one process, and the folder of its state after step 3."""
    folder = tmp_path_factory.mktemp("torch")
    cases = [{"objective": objective, "save": objective} for objective in (AR, MDM)]
    results = run_cases(cases, 1, folder)
    return {
        case["objective"]: {**result, "folder": folder} for case, result in zip(cases, results, strict=True)
    }


def assert_equal(result: dict[str, Any], expected: dict[str, Any], first: int = 0) -> None:
    assert result["loss"] == pytest.approx(expected["loss"][first:], abs=1e-5)
    assert result["grad_norm"] == pytest.approx(expected["grad_norm"][first:], abs=2e-5)
    assert result["score"] == pytest.approx(expected["score"], abs=1e-5)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "n_ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_every_stage_gives_the_losses_of_torch_also_after_resuming(
    n_ranks: int, torch_alone: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    cases: list[Case] = []
    for objective in (AR, MDM):
        # two samples per forward: four, two or one forwards a step on 1, 2 or 4 ranks, with the same gradient
        cases += [
            {
                "objective": objective,
                "dist": zero_config(stage),
                "microbatch_size": 2,
                "save": f"{objective}{stage}",
            }
            for stage in STAGES
        ]
    # each resumes from the state of another stage, and one from that of torch
    resumed: list[Case] = [
        {"objective": objective, "dist": zero_config(stage), "load": f"{objective}{(stage + 1) % 4}"}
        for objective in (AR, MDM)
        for stage in STAGES
    ]
    from_torch = str(torch_alone[MDM]["folder"] / MDM)
    resumed += [
        {"objective": MDM, "dist": zero_config(3), "load": from_torch},
        {"objective": MDM, "load": f"{MDM}3"},
    ]
    results = run_cases(cases + resumed, n_ranks, tmp_path)
    for case, result in zip(cases + resumed, results, strict=True):
        assert_equal(result, torch_alone[case["objective"]], 3 if "load" in case else 0)


# options with weights used outside of their module, separate rates, or a dependence on whole samples
OPTIONS: list[Case] = [
    {
        "objective": AR,
        "model": {"norm": "layernorm", "feed_forward": "gelu", "positions": "learned", "biases": True}
        | {"tied_embedding": False, "parametrization": "mup", "base_d_model": 12},
    },
    {
        "objective": MDM,
        "model": {"n_kv_heads": 1, "qk_norm": True, "document_mask": True, "eod_id": 0}
        | {"parametrization": "completep", "base_d_model": 12, "base_n_layers": 1},
        "options": {"ar_ratio": 0.5, "t_draw": "stratified"},
    },
    {
        "objective": AR,
        "model": {"attention_dropout": 0.2, "tied_embedding": False},
        "options": {"orders": 3, "randmask_ratio": 0.3},
    },
]


@pytest.mark.slow
@pytest.mark.ranks
def test_every_shape_and_objective_gives_the_same_losses_in_shards(tmp_path: Path) -> None:
    alone = run_cases(OPTIONS, 1, tmp_path)
    layouts = (
        {"sharding_stage": "zero3"},
        zero_config(1),
        zero_config(2, activation_checkpointing="selective"),  # before zero3, which changes it in a process
        zero_config(2, activation_checkpointing="full"),
        zero_config(3),
        zero_config(3, activation_checkpointing="full"),
    )
    cases = [{**case, "dist": layout, "microbatch_size": 2} for case in OPTIONS for layout in layouts]
    expected = [reference for reference in alone for _ in layouts]
    for result, reference in zip(run_cases(cases, 2, tmp_path), expected, strict=True):
        assert_equal(result, reference)


@pytest.mark.slow
@pytest.mark.ranks
def test_offloading_changes_no_loss(torch_alone: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    cases: list[Case] = []
    for stage in (2, 3):
        offload = zero_config(stage, offload_optimizer=True, offload_parameters=stage == 3)
        cases += [
            {"objective": AR, "dist": offload, "save": f"off{stage}"},
            {"objective": AR, "dist": offload, "load": f"off{stage}"},
        ]
    for case, result in zip(cases, run_cases(cases, 2, tmp_path), strict=True):
        assert_equal(result, torch_alone[AR], 3 if "load" in case else 0)


@pytest.mark.slow
@pytest.mark.ranks
def test_bfloat16_is_near_float32_at_every_stage_and_resumes_exactly(
    torch_alone: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    cases: list[Case] = []
    for stage in STAGES:
        dist = zero_config(stage, dtype="bfloat16")
        cases += [
            {"objective": AR, "dist": dist, "save": f"half{stage}"},
            {"objective": AR, "dist": dist, "load": f"half{stage}"},
        ]
    results = run_cases(cases, 2, tmp_path)
    for whole, resumed in zip(results[::2], results[1::2], strict=True):
        assert whole["loss"] == pytest.approx(torch_alone[AR]["loss"], abs=0.01)
        assert whole["loss"] != pytest.approx(torch_alone[AR]["loss"], abs=1e-7)
        assert resumed["loss"] == whole["loss"][3:]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("residual", [None, "float32"])
def test_every_stage_has_the_dtypes_and_losses_of_the_torch_engine(
    residual: str | None, tmp_path: Path
) -> None:
    half = {"dtype": "bfloat16", "residual_dtype": residual}
    layouts = [half, half | {"sharding_stage": "zero3"}, *(zero_config(stage, **half) for stage in STAGES)]
    cases = [{"objective": MDM, "dist": dist, "record_dtypes": True} for dist in layouts]
    results = run_cases(cases, 2, tmp_path)
    for result, dist in zip(results, layouts, strict=True):
        assert result["dtypes"] == {"stream": [residual or "bfloat16"], "norm": ["bfloat16"]}, dist
        assert result["loss"] == pytest.approx(results[0]["loss"], abs=2e-3), dist


@pytest.mark.slow
@pytest.mark.ranks
def test_a_nan_gradient_on_a_single_rank_changes_no_weight(tmp_path: Path) -> None:
    poisoned = [{"objective": MDM, "dist": zero_config(stage), "poison": 2} for stage in STAGES]
    results = run_cases([{"objective": MDM, "poison": 2}, *poisoned], 2, tmp_path)
    for result in results:
        finite = [abs(x) < float("inf") for x in result["grad_norm"]]
        assert finite == [True, True, False, True, True]
        assert result["loss"][3:] == pytest.approx(results[0]["loss"][3:], abs=1e-5)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_sharded_state_resumes_with_other_ranks_stages_and_engines(
    torch_alone: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    first: list[Case] = [
        {"objective": MDM, "dist": zero_config(3), "save": "three", "sharded": True},
        {"objective": MDM, "save": "torch", "sharded": True},
    ]
    run_cases(first, 2, tmp_path)
    then: list[Case] = [
        {"objective": MDM, "dist": zero_config(1), "load": "three", "sharded": True},
        {"objective": MDM, "load": "three", "sharded": True},
        {"objective": MDM, "dist": zero_config(2), "load": "torch", "sharded": True},
    ]
    for result in run_cases(then, 1, tmp_path):
        assert_equal(result, torch_alone[MDM], 3)
