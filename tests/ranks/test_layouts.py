"""Every parallel layout matches a single process to 1e-5 in float32, also after loading a state."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import free_port

OBJECTIVES = ("autoregressive", "masked_diffusion")
TOLERANCE = 1e-5
TRAIN = Path(__file__).parent / "train_layouts.py"

Job = dict[str, Any]
Result = dict[str, Any]

ZERO3, HYBRID = {"sharding_stage": "zero3"}, {"shard_size": 2}
INTERLEAVED = {"pipeline_parallel": 2, "pipeline_schedule": "interleaved"}

# (name, ranks): settings of `dist`
LAYOUTS: dict[tuple[str, int], Job] = {
    ("zero0", 2): {},
    ("zero3", 2): ZERO3,
    ("tensor", 2): {"tensor_parallel": 2},
    ("context", 2): {"context_parallel": 2},
    ("pipeline", 2): {"pipeline_parallel": 2},
    ("zero3_hybrid", 4): HYBRID | {"sharding_stage": "zero3_hybrid"},
    ("tensor_zero3", 4): ZERO3 | {"tensor_parallel": 2},
    ("interleaved", 4): INTERLEAVED,
}
SLOW: dict[tuple[str, int], Job] = {
    ("zero0", 4): {},
    ("zero1", 4): {"sharding_stage": "zero1"},
    ("zero2", 4): {"sharding_stage": "zero2"},
    ("zero2_hybrid", 4): HYBRID | {"sharding_stage": "zero2_hybrid"},
    ("zero3", 4): ZERO3,
    ("zero3_recomputed", 4): ZERO3 | {"activation_checkpointing": "full"},
    ("zero2_recomputed", 4): {"sharding_stage": "zero2", "activation_checkpointing": "selective"},
    ("offload", 4): ZERO3 | {"cpu_offload": True},
    ("tensor", 4): {"tensor_parallel": 4},
    ("tensor_zero0", 4): {"tensor_parallel": 2},
    ("context", 4): {"context_parallel": 4},
    ("context_zero2", 4): {"context_parallel": 2, "sharding_stage": "zero2"},
    ("tensor_context", 4): {"tensor_parallel": 2, "context_parallel": 2},
    ("pipeline", 4): {"pipeline_parallel": 4},
    ("pipeline_zero1", 4): {"pipeline_parallel": 2, "sharding_stage": "zero1"},
    ("interleaved_zero1", 4): INTERLEAVED | {"sharding_stage": "zero1"},
    ("pipeline_tensor", 4): {"pipeline_parallel": 2, "tensor_parallel": 2},
    ("pipeline_context", 4): {"pipeline_parallel": 2, "context_parallel": 2},
}
# compiled layouts are compared with two ranks only
COMPILED: dict[tuple[str, int], Job] = {
    ("compiled_zero3", 2): ZERO3 | {"compile": True, "activation_checkpointing": "selective"},
    ("compiled_tensor", 2): {"compile": True, "tensor_parallel": 2},
    ("compiled_context", 2): {"compile": True, "context_parallel": 2},
}
GROUPS = {"fast": LAYOUTS, "slow": SLOW, "compiled": COMPILED}
CASES = [
    pytest.param(
        group,
        name,
        n_ranks,
        objective,
        id=f"{name}-{n_ranks}-{objective}",
        marks=[pytest.mark.ranks, *([] if group == "fast" else [pytest.mark.slow])],
    )
    for group, layouts in GROUPS.items()
    for name, n_ranks in layouts
    for objective in OBJECTIVES
    if group != "compiled" or objective == "autoregressive"
]


def run_jobs(jobs: list[Job], n_ranks: int, folder: Path, root: Path) -> dict[str, Result]:
    """Run the jobs in sequence on gloo ranks; return rank 0's result of each."""
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps({"out": str(folder), "layouts": jobs}))
    shared = os.environ | {
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(n_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(TRAIN), str(folder / "job.json")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**shared, "RANK": str(rank)},
        )
        for rank in range(n_ranks)
    ]
    try:
        errors = [process.communicate(timeout=900)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0] * n_ranks, "\n".join(e[-3000:] for e in errors)
    return {job["name"]: json.loads((folder / f"{job['name']}.json").read_text()) for job in jobs}


@pytest.fixture(scope="module")
def alone(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Result]]:
    """Folder of the states after step 3 and the results of each objective on one process."""
    folder = tmp_path_factory.mktemp("layouts") / "alone"
    jobs = [{"name": o, "objective": o, "dist": {}} for o in OBJECTIVES]
    return folder, run_jobs(jobs, 1, folder, root)


def tolerance_of(what: str) -> float:
    """Return the tolerance; three times larger for norms: AdamW amplifies rounding of small gradients."""
    return TOLERANCE * (3 if what == "norms" else 1)


class Results:
    """Results of layouts by name and objective; the ranks of a group are started at first use."""

    def __init__(self, root: Path, folder: Path, states: Path) -> None:
        self.root, self.folder, self.states = root, folder, states
        self.results: dict[tuple[str, int], dict[str, Result]] = {}

    def __call__(self, group: str, name: str, n_ranks: int, objective: str) -> Result:
        if (group, n_ranks) not in self.results:
            cases = [case.values for case in CASES]
            jobs = [
                self.build_job(group, *case[1:]) for case in cases if (case[0], case[2]) == (group, n_ranks)
            ]
            folder = self.folder / f"{group}-{n_ranks}"
            self.results[group, n_ranks] = run_jobs(jobs, n_ranks, folder, self.root)
        return self.results[group, n_ranks][f"{name}.{objective}"]

    def build_job(self, group: str, name: str, n_ranks: int, objective: str) -> Job:
        """Build the job of a case; states are moved with one objective only, as they do not depend on it."""
        settings = GROUPS[group][name, n_ranks]
        exact = objective == "autoregressive" and group != "compiled"
        return {
            "name": f"{name}.{objective}",
            "objective": objective,
            "dist": settings,
            "microbatches": max(2, settings.get("pipeline_parallel", 1)),
            "from": str(self.states / f"{objective}.pt") if exact else None,
            "dcp": exact,
        }


@pytest.fixture(scope="module")
def results(
    root: Path, alone: tuple[Path, dict[str, Result]], tmp_path_factory: pytest.TempPathFactory
) -> Results:
    return Results(root, tmp_path_factory.mktemp("results"), alone[0])


@pytest.mark.parametrize(("group", "name", "n_ranks", "objective"), CASES)
def test_a_layout_gives_the_losses_and_norms_of_a_single_process(
    alone, results, group, name, n_ranks, objective
) -> None:
    ours, theirs = results(group, name, n_ranks, objective), alone[1][objective]
    for what in ("losses", "norms"):
        assert ours["whole"][what] == pytest.approx(theirs["whole"][what], abs=tolerance_of(what))
    assert ours["whole"]["counts"] == theirs["whole"]["counts"]  # the same tokens, in microbatches
    # sums over 16 positions
    assert ours["scored"] == pytest.approx(theirs["scored"], abs=16 * TOLERANCE)


@pytest.mark.parametrize(("group", "name", "n_ranks", "objective"), CASES)
def test_a_layout_resumes_from_its_state_and_from_that_of_a_single_process(
    alone, results, group, name, n_ranks, objective
) -> None:
    theirs = alone[1][objective]["whole"]
    ours = results(group, name, n_ranks, objective)
    for kind in ("resumed", "moved", "sharded"):
        for what in ("losses", "norms"):
            if kind in ours:
                expected = pytest.approx(theirs[what][3:], abs=tolerance_of(what))
                assert ours[kind][what] == expected, kind


@pytest.mark.ranks
def test_a_single_process_gives_the_same_with_microbatches_recomputation_and_any_stage(
    alone, root, tmp_path
) -> None:
    settings = {
        "microbatches": {},
        "full": {"activation_checkpointing": "full"},
        "selective": {"activation_checkpointing": "selective", "sharding_stage": "zero3"},
        "offload": {"cpu_offload": True, "sharding_stage": "zero2"},
    }
    jobs = [
        {"name": name, "objective": "masked_diffusion", "dist": job, "microbatches": 4}
        for name, job in settings.items()
    ]
    theirs = alone[1]["masked_diffusion"]
    for result in run_jobs(jobs, 1, tmp_path / "one", root).values():
        for what in ("losses", "norms"):
            assert result["whole"][what] == pytest.approx(theirs["whole"][what], abs=tolerance_of(what))


STREAM, PRODUCTS = "residual stream", ("result of a norm", "input of a product", "result of a product")
PRECISION_LAYOUTS = ("zero0", "zero3", "tensor", "context", "pipeline")


@pytest.mark.ranks
def test_every_layout_has_the_dtypes_and_losses_of_a_single_process(root, tmp_path) -> None:
    layouts = {name: LAYOUTS[name, 2] for name in PRECISION_LAYOUTS}
    layouts["pipeline_zero1"] = {"pipeline_parallel": 2, "sharding_stage": "zero1"}
    streams = {"bfloat16": None, "float32": "float32"}  # dtype: value of dist.residual_dtype

    def run(n_ranks: int, layouts: dict[str, Job]) -> dict[str, Result]:
        common = {"objective": "masked_diffusion", "record_dtypes": True, "microbatches": 2}
        jobs = [
            {
                "name": f"{stream}.{name}",
                "dist": {"dtype": "bfloat16", "residual_dtype": setting, **layout},
                **common,
            }
            for name, layout in layouts.items()
            for stream, setting in streams.items()
        ]
        return run_jobs(jobs, n_ranks, tmp_path / str(n_ranks), root)

    alone = run(1, {"one": {}, "offload": {"cpu_offload": True}})
    for name, result in {**alone, **run(2, layouts)}.items():
        stream = name.partition(".")[0]
        expected = {STREAM: [stream], "stored weight": ["float32"], "moment": ["float32"]}
        expected |= {"sum of the loss": ["float64"]} | {kind: ["bfloat16"] for kind in PRODUCTS}
        assert result["dtypes"] == expected, name
        # tensor ranks round their partial sums of a product before adding them
        tolerance = 5e-3 if name.endswith("tensor") else 1e-3
        assert result["losses"] == pytest.approx(alone[f"{stream}.one"]["losses"], abs=tolerance), name


@pytest.mark.slow
@pytest.mark.ranks
def test_half_precision_stays_near_float32(alone, root, tmp_path) -> None:
    jobs = [
        {"name": f"{dtype}_{stage}", "objective": "autoregressive", "dist": {"dtype": dtype, **layout}}
        for dtype in ("bfloat16", "float16")
        for stage, layout in (("zero0", {}), ("zero3", ZERO3))
    ]
    theirs = alone[1]["autoregressive"]["whole"]
    for name, result in run_jobs(jobs, 2, tmp_path / "half", root).items():
        assert result["whole"]["losses"] != theirs["losses"], name
        assert result["whole"]["losses"] == pytest.approx(theirs["losses"], abs=0.02), name
        # later norms belong to weights that have diverged by rounding
        assert result["whole"]["norms"][0] == pytest.approx(theirs["norms"][0], rel=0.05), name
        assert result["resumed"]["losses"] == pytest.approx(result["whole"]["losses"][3:], abs=1e-6), name


@pytest.mark.ranks
def test_the_norm_is_above_the_limit_so_clipping_was_active(alone) -> None:
    _, results = alone
    assert min(results["autoregressive"]["whole"]["norms"]) > 0.5


@pytest.mark.slow
@pytest.mark.ranks
def test_options_of_other_architectures_match_a_single_process(root: Path, tmp_path: Path) -> None:
    """Biases of queries, keys and values (Qwen2), parallel branches, scaled and partly rotated positions."""
    shape = {"qkv_biases": True, "parallel_residual": True, "rotary_dims": 2}
    shape |= {"rope_scaling": "linear", "rope_factor": 4.0}
    job: Job = {"objective": "autoregressive", "model": shape, "microbatches": 2}
    alone = run_jobs([{"name": "one", "dist": {}, **job}], 1, tmp_path / "one", root)["one"]
    names = ("tensor", "pipeline", "context")
    jobs: list[Job] = [{"name": name, "dist": {f"{name}_parallel": 2}, **job} for name in names]
    for name, result in run_jobs(jobs, 2, tmp_path / "two", root).items():
        for what in ("losses", "norms"):
            assert result["whole"][what] == pytest.approx(alone["whole"][what], abs=tolerance_of(what)), name
        assert result["scored"] == pytest.approx(alone["scored"], abs=16 * TOLERANCE), name
