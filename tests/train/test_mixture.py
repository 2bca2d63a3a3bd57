"""Mixtures in training: exact samples, interruption, resumption and multiple ranks."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron.data.indexed import IndexedTokens
from megatron.mixture.catalog import Catalog
from megatron.mixture.prepare import prepare_mixture
from megatron.mixture.properties import read_properties
from megatron.mixture.source import MixtureSamples
from tests.train.conftest import COMMON, read_lines, remove_end, save_every, write_corpus
from tests.train.faults import wait_at_random

LOSS = "adaptive: {rule: 'tests.mixture.loss_rule:LossProportional', every_steps: 1, delay_steps: 4}"
ADO = "adaptive: {rule: ado, every_steps: 1, delay_steps: 4}"
SCHEDULE = "schedule: {change: linear, points: [{at: 0, weights: {a: 1, b: 1}}, {at: 10, weights: {c: 1}}]}"


def build_catalog(folder: Path) -> Path:
    """Write a catalog of two datasets of 120 documents each, divided among three domains."""
    rng = np.random.default_rng(0)
    with Catalog(folder / "catalog.duckdb", n_threads=1) as catalog:
        for name in ("one", "two"):
            write_corpus(folder / name, 120, seed=len(name) + ord(name[0]))
            kinds = [("a", "b", "c")[k] for k in rng.integers(0, 3, 120)]
            pyarrow.parquet.write_table(pyarrow.table({"kind": kinds}), folder / f"{name}.parquet")
        paths = [str(folder / "one"), str(folder / "two")]
        catalog.register("all", paths, read_properties(["kind AS kind"]), quiet=True)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a catalog, which tests only read."""
    return build_catalog(tmp_path_factory.mktemp("catalog"))


@pytest.fixture(scope="module")
def words() -> list[str]:
    """Arguments of a run of 14 steps on a mixture."""
    return [
        *COMMON, "dataset.seq_len=16", "dataset.batch_size=12", "model.d_model=16", "model.n_heads=2",
        "model.n_layers=1", "optim.lr=0.01", "lr_scheduler.total_iterations=14",
        save_every(5),
    ]  # fmt: skip


@pytest.fixture
def write(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a mixture's file: lines -> path."""

    def write_mixture(*lines: str) -> Path:
        path = tmp_path / "mixture.yaml"
        path.write_text("\n".join([f"catalog: {folder / 'catalog.duckdb'}", "by: [kind]", *lines]) + "\n")
        return path

    return write_mixture


@pytest.fixture
def open_mixture(write: Callable[..., Path]) -> Callable[..., MixtureSamples]:
    """Return a function that writes, prepares and opens a mixture: lines, options -> samples."""

    def prepare_and_open(*lines: str, batch_size: int = 12, seed: int = 0) -> MixtureSamples:
        path = write(*lines)
        prepare_mixture(path)
        return MixtureSamples(path, seq_len=16, batch_size=batch_size, seed=seed)

    return prepare_and_open


def read_steps(run: Path) -> dict[int, tuple[float, list[float]]]:
    """Return loss and weights by step."""
    lines = read_lines(run)
    return {line["step"]: (line["loss"], list(line["weights"].values())) for line in lines}


def assert_same_steps(run: Path, expected: Path, first: int = 1) -> None:
    """Assert that a run agrees with another from a step on, up to rounding of other summation orders."""
    ours, theirs = read_steps(run), read_steps(expected)
    assert sorted(ours) == [step for step in sorted(theirs) if step >= first]
    for step, (loss, weights) in ours.items():
        assert loss == pytest.approx(theirs[step][0], rel=1e-5)
        assert weights == pytest.approx(theirs[step][1], rel=1e-4)


def test_windows_are_cut_from_the_documents_of_a_domain(folder, open_mixture) -> None:
    samples = open_mixture("weights: {a: 3, c: 1}", "shuffle: false", batch_size=8)
    pairs = {name: IndexedTokens(folder / name) for name in ("one", "two")}
    for k, kind in enumerate("abc"):
        documents = []
        for name, pair in pairs.items():
            kinds = pyarrow.parquet.read_table(folder / f"{name}.parquet")["kind"].to_pylist()
            documents += [pair.get_document(i) for i in range(120) if kinds[i] == kind]
        stream = np.concatenate(documents)
        n = (len(stream) - 1) // 16
        assert samples.streams[k].n_windows == n
        rows = np.empty((n + 1, 17), dtype=np.int64)
        samples.streams[k].copy_windows(np.arange(n + 1), list(rows))
        assert np.array_equal(rows[:n, :16].ravel(), stream[: 16 * n])
        assert np.array_equal(rows[:n, 16], stream[16 : 16 * n + 1 : 16])
        assert np.array_equal(rows[n], rows[0])  # the next epoch
    domains = samples.lookup_domains(np.arange(80))
    assert np.bincount(domains, minlength=3).tolist() == [60, 0, 20]
    first = samples.take(np.arange(80))[np.flatnonzero(domains == 0)[0]]
    begin = np.empty((1, 17), dtype=np.int64)
    samples.streams[0].copy_windows(np.arange(1), list(begin))
    assert np.array_equal(first, begin[0])


def test_epochs_contain_all_documents_in_different_orders(open_mixture) -> None:
    stream, other = (open_mixture("weights: inferred", seed=seed).streams[1] for seed in (0, 1))
    orders = [stream.compute_document_order(epoch, 0, len(stream.lengths)).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(len(stream.lengths))) for order in orders)
    assert orders[0] != orders[1]
    assert orders[0] != other.compute_document_order(0, 0, len(orders[0])).tolist()


@pytest.mark.parametrize("line", [SCHEDULE, LOSS], ids=["scheduled", "adaptive"])
def test_a_run_stopped_and_resumed_ends_as_if_never_stopped(pretrain, write, tmp_path, line) -> None:
    mixture, whole, half = f"dataset.mixture={write(line)}", tmp_path / "whole", tmp_path / "half"
    pretrain(whole, mixture)
    shutil.copytree(whole, half)
    remove_end(half)
    assert "resuming after step 10" in pretrain(half, mixture, "dataset.num_workers=0").error
    steps = read_steps(whole)
    assert read_steps(half) == steps
    assert steps[14][1] != steps[1][1]
    if line == SCHEDULE:
        assert steps[6][1] == pytest.approx([0.25, 0.25, 0.5])


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["pipeline", "context", pytest.param("tensor", marks=pytest.mark.slow)])
def test_ranks_that_share_a_batch_use_the_same_mixture(pretrain, write, tmp_path, kind) -> None:
    changes = [f"dataset.mixture={write(LOSS)}", "model.n_layers=2", "lr_scheduler.total_iterations=8"]
    pretrain(tmp_path / "alone", *changes)
    steps = read_steps(tmp_path / "alone")
    assert len(steps) == 8 and steps[8][1] != steps[1][1]
    pretrain(tmp_path / "shared", *changes, f"dist.{kind}_parallel=2", n_ranks=2)
    assert_same_steps(tmp_path / "shared", tmp_path / "alone")


def read_samples(record: Path) -> dict[int, str]:
    """Return the hash of each sample that some rank has read; of several, all are equal."""
    read: dict[int, str] = {}
    for path in record.iterdir():
        for line in path.read_text().splitlines():
            number, sums = line.split()
            assert read.setdefault(int(number), sums) == sums
    return read


@pytest.mark.ranks
@pytest.mark.slow
def test_any_number_of_late_ranks_trains_on_equal_data(pretrain, write, tmp_path) -> None:
    changes = [f"dataset.mixture={write(LOSS)}", "checkpoint.keep_last=null", "dataset.num_workers=1"]
    pretrain(tmp_path / "quiet", *changes)
    steps = read_steps(tmp_path / "quiet")
    assert steps[14][1] != steps[5][1] != steps[1][1]  # the weights changed after the checkpoints
    samples, resume = {}, []
    # checkpoints are saved after steps 5, 10 and 14; each run resumes from the first of the previous run
    for run, n_ranks, first in (("two", 2, 1), ("moved to one", 1, 6), ("back on two", 2, 11)):
        folder, record = tmp_path / run, tmp_path / f"record of {run}"
        record.mkdir()
        pretrain(folder, *changes, *resume, n_ranks=n_ranks, change=partial(wait_at_random, record))
        assert_same_steps(folder, tmp_path / "quiet", first)
        samples[run] = read_samples(record)
        assert sorted(samples[run]) == [*range((first - 1) * 12, 14 * 12)]  # 12 samples a step, each once
        assert samples[run].items() <= samples["two"].items()
        resume = [f"checkpoint.resume={min((folder / 'checkpoints').glob('step.*'))}"]


def test_invalid_mixtures_are_refused(pretrain, write, tmp_path) -> None:
    mixture = f"dataset.mixture={write(ADO)}"
    failed = pretrain(tmp_path / "x", mixture, "dataset.num_workers=2", status=1)
    assert "num_workers: got 2, which prepare up to 4 steps ahead" in failed.error
    failed = pretrain(tmp_path / "x", mixture, "dataset.path_train=somewhere", status=1)
    assert "dataset.mixture: got" in failed.error
    for line, sentence in (
        ("dry: maybe", "expected one of stop, repeat, redistribute"),
        ("adaptive: {rule: magic}", "expected ado, or your module:Class"),
        ("adaptive: {rule: 'no_rules:Last'}", "adaptive.rule no_rules:Last: got ModuleNotFoundError"),
        ("where: \"knid = 'a'\"", 'Candidate bindings: "kind"'),
        ("schedule: {points: [{at: 0}]}", r"schedule.points\[0\].weights: got None, expected"),
        ("schedule: {points: [{at: soon, weights: {a: 1}}]}", r"\[0\].at: got 'soon', expected an integer"),
    ):
        with pytest.raises(ValueError, match=sentence):
            prepare_mixture(write(line))
    catalog, path = build_catalog(tmp_path) / "catalog.duckdb", tmp_path / "mixture.yaml"
    write_corpus(tmp_path / "one", 130, seed=9)
    path.write_text(f"catalog: {catalog}\nby: [kind]\nweights: inferred\n")
    with pytest.raises(ValueError, match="has changed since it was registered"):
        prepare_mixture(path)


def test_weights_apply_delay_steps_after_the_observation(open_mixture) -> None:
    samples, again = open_mixture(LOSS), open_mixture(LOSS)
    before = samples.take(np.arange(4 * 12))
    with pytest.raises(ValueError, match="weights of chunk 4 are not known yet"):
        samples.take(np.arange(4 * 12, 5 * 12))
    for mixture in (samples, again):
        mixture.observe(0, np.array([90.0, 5.0, 5.0]), np.array([10.0, 10.0, 10.0]))
    assert samples.weights_at(4)[0] > 2 * samples.weights_at(3)[0]
    assert np.array_equal(again.take(np.arange(4 * 12)), before)


def test_a_schedule_in_tokens_changes_at_the_next_step(open_mixture) -> None:
    points = "points: [{at: 0, weights: {a: 1}}, {at: 1000, weights: {c: 1}}]"
    samples = open_mixture(f"schedule: {{unit: tokens, {points}}}")  # 192 tokens a step
    domains = samples.lookup_domains(np.arange(12 * 8)).reshape(8, 12)
    assert [set(step) for step in domains.tolist()] == [{0}] * 6 + [{2}] * 2  # 1000 / 192 = 5.2


def test_epochs_of_a_repeated_domain_are_counted(pretrain, write, tmp_path) -> None:
    path = write("weights: {a: 1}", "dry: repeat")
    n_windows = prepare_mixture(path).count_windows(16)[0]
    pretrain(tmp_path / "run", f"dataset.mixture={path}", "lr_scheduler.total_iterations=60")
    epochs = read_lines(tmp_path / "run")[-1]["epochs"]
    assert epochs["a"] == pytest.approx(60 * 12 / n_windows)
    assert epochs["a"] > 2 and epochs["b"] == 0


def test_a_mixture_that_stops_ends_a_longer_run(open_mixture) -> None:
    samples = open_mixture("dry: stop")
    with pytest.raises(ValueError, match="the mixture ends after"):
        samples.take(np.arange(12) + 12 * samples.samples_per_epoch)
