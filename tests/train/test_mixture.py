"""Mixtures in training: exact samples, interruption, resumption and multiple ranks."""

from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from megatron.checkpoint.preempt import StopMonitor
from megatron.data.indexed import IndexedTokens
from megatron.mixture.catalog import Catalog
from megatron.mixture.prepare import prepare_mixture
from megatron.mixture.properties import read_properties
from megatron.mixture.source import MixtureSamples
from megatron.parallel.world import World
from megatron.plan.resolve import load_config
from megatron.plan.run_dir import read_metrics
from megatron.plan.run_plan import plan_run
from megatron.train.build import Run, build_run
from megatron.train.loop import train
from tests.train.conftest import write_corpus

pytestmark = pytest.mark.usefixtures("one_thread")
ALONE = World(0, 1, 0, torch.device("cpu"))
LOSS = "adaptive: {rule: 'tests.mixture.loss_rule:LossProportional', every_steps: 1, delay_steps: 4}"
ADO = "adaptive: {rule: ado, every_steps: 1, delay_steps: 4}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A catalog of two datasets of 120 documents each, divided among three domains."""
    rng = np.random.default_rng(0)
    with Catalog(tmp_path / "catalog.duckdb", n_threads=1) as catalog:
        for name in ("one", "two"):
            write_corpus(tmp_path / name, 120, seed=len(name) + ord(name[0]))
            kinds = [("a", "b", "c")[k] for k in rng.integers(0, 3, 120)]
            pyarrow.parquet.write_table(pyarrow.table({"kind": kinds}), tmp_path / f"{name}.parquet")
        catalog.register(
            "all",
            [str(tmp_path / "one"), str(tmp_path / "two")],
            read_properties(["kind AS kind"]),
            quiet=True,
        )
    return tmp_path


def write_mixture(folder: Path, *lines: str) -> Path:
    path = folder / "mixture.yaml"
    path.write_text("\n".join(["catalog: catalog.duckdb", "by: [kind]", *lines]) + "\n")
    return path


def build_words(path: Path, run: str) -> list[str]:
    return [
        f"dataset.mixture={path}", "dataset.seq_len=16", "dataset.batch_size=12", "model.d_model=16",
        "model.n_heads=2", "model.n_layers=1", "optim.lr=0.01", "lr_scheduler.total_iterations=14",
        "dist.dtype=float32", "dist.cpu_only=true", "logging.every_iterations=1", "logging.tensorboard=false",
        "misc.n_threads=1", "checkpoint.chkpt_saving_iterations=5", f"logging.run_dir={path.parent / run}",
    ]  # fmt: skip


def build_small_run(path: Path, run: str, *more: str) -> Run:
    prepare_mixture(path)
    (path.parent / "empty.yaml").write_text("name: test\n")
    config = load_config(path.parent / "empty.yaml", [*build_words(path, run), *more])
    return build_run(config, plan_run(config), ALONE)


def read_losses_and_weights(run: Path) -> list[tuple[float, list[float]]]:
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    return [(line["loss"], list(line["weights"].values())) for line in lines]


def test_windows_are_cut_from_the_concatenated_documents_of_a_domain(folder) -> None:
    path = write_mixture(folder, "weights: {a: 3, c: 1}", "shuffle: false")
    resolved = prepare_mixture(path)
    samples = MixtureSamples(path, seq_len=16, batch_size=8, seed=0)
    pairs = {name: IndexedTokens(folder / name) for name in ("one", "two")}
    for k, kind in enumerate("abc"):
        documents = []
        for name, pair in pairs.items():
            kinds = pyarrow.parquet.read_table(folder / f"{name}.parquet")["kind"].to_pylist()
            documents += [pair.get_document(i) for i in range(120) if kinds[i] == kind]
        stream = np.concatenate(documents)
        assert resolved.tokens[k] == len(stream)
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


def test_shuffled_epochs_contain_all_documents_in_different_orders(folder) -> None:
    path = write_mixture(folder, "weights: inferred")
    prepare_mixture(path)
    stream = MixtureSamples(path, seq_len=16, batch_size=8, seed=0).streams[1]
    orders = [stream.compute_document_order(epoch, 0, len(stream.lengths)).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(len(stream.lengths))) for order in orders)
    assert orders[0] != orders[1]
    again = MixtureSamples(path, seq_len=16, batch_size=8, seed=1).streams[1]
    assert orders[0] != again.compute_document_order(0, 0, len(orders[0])).tolist()


@pytest.mark.parametrize(
    "lines",
    [
        "weights: {a: 5, b: 3, c: 2}",
        "schedule: {change: linear, points: [{at: 0, weights: {a: 1, b: 1}}, {at: 10, weights: {c: 1}}]}",
        LOSS,
    ],
    ids=["fixed", "scheduled", "adaptive"],
)
def test_a_run_stopped_and_resumed_ends_as_if_never_stopped(folder, lines) -> None:
    path = write_mixture(folder, lines)
    assert train(build_small_run(path, "whole"), StopMonitor(None))
    half = build_small_run(path, "half")
    stop = StopMonitor(None)
    step = half.engine.step

    def stopping(*words: object) -> object:
        stopping.n += 1
        if stopping.n == 7:
            stop.reason = "test"
        return step(*words)

    stopping.n = 0
    half.engine.step = stopping
    assert not train(half, stop)
    assert train(build_small_run(path, "half", "dataset.num_workers=0"), StopMonitor(None))
    assert read_losses_and_weights(folder / "half") == read_losses_and_weights(folder / "whole")
    if lines == LOSS:
        assert (
            read_losses_and_weights(folder / "whole")[-1][1]
            != read_losses_and_weights(folder / "whole")[0][1]
        )
    if "points" in lines:
        assert read_losses_and_weights(folder / "whole")[5][1] == pytest.approx([0.25, 0.25, 0.5])


@pytest.mark.ranks
def test_two_ranks_get_the_weights_and_losses_of_a_single_rank(folder, pretrain) -> None:
    path = write_mixture(folder, LOSS.replace("every_steps: 1", "every_steps: 2"))
    for n_ranks in (1, 2):
        done = pretrain(build_words(path, f"on{n_ranks}"), n_ranks)
        assert done.returncode == 0, done.stderr
    single, two = read_losses_and_weights(folder / "on1"), read_losses_and_weights(folder / "on2")
    assert np.allclose([loss for loss, _ in single], [loss for loss, _ in two], rtol=1e-5)
    assert np.allclose([weights for _, weights in single], [weights for _, weights in two], rtol=1e-4)
    assert single[-1][1] != single[0][1]


def read_by_step(run: Path) -> dict[int, tuple[float, list[float]]]:
    """Return loss and weights by step."""
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    return {line["step"]: (line["loss"], list(line["weights"].values())) for line in lines}


def is_same(whole: dict[int, tuple[float, list[float]]], part: dict[int, tuple[float, list[float]]]) -> bool:
    """Return whether `part` agrees with `whole` at its steps, up to rounding of other summation orders."""
    pairs = [(whole[step], entry) for step, entry in part.items()]
    losses = np.allclose([a for (a, _), _ in pairs], [b for _, (b, _) in pairs], rtol=1e-5)
    return losses and np.allclose([a for (_, a), _ in pairs], [b for _, (_, b) in pairs], rtol=1e-4)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("before", "between", "after"), [(2, 1, 2), pytest.param(1, 2, 1, marks=pytest.mark.slow)]
)
def test_a_run_resumed_on_other_numbers_of_ranks_gives_the_same_losses(
    folder, pretrain, before, between, after
) -> None:
    path = write_mixture(folder, LOSS)
    keep_all = ["checkpoint.keep_last=null", "checkpoint.chkpt_saving_iterations=5"]
    whole = pretrain([*build_words(path, "whole"), *keep_all], before)
    assert whole.returncode == 0, whole.stderr
    saved = sorted((folder / "whole" / "checkpoints").glob("step.*"))
    assert len(saved) == 3  # after steps 5, 10 and 14
    moved = pretrain([*build_words(path, "moved"), *keep_all, f"checkpoint.resume={saved[0]}"], between)
    assert moved.returncode == 0, moved.stderr
    assert "resuming after step 5" in moved.stderr
    again = sorted((folder / "moved" / "checkpoints").glob("step.*"))
    back = pretrain([*build_words(path, "back"), *keep_all, f"checkpoint.resume={again[0]}"], after)
    assert back.returncode == 0, back.stderr
    assert "resuming after step 10" in back.stderr
    expected = read_by_step(folder / "whole")
    assert expected[14][1] != expected[5][1]  # the weights changed after the checkpoints
    assert sorted(read_by_step(folder / "moved")) == [*range(6, 15)]
    assert is_same(expected, read_by_step(folder / "moved"))
    assert sorted(read_by_step(folder / "back")) == [*range(11, 15)]
    assert is_same(expected, read_by_step(folder / "back"))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("tensor_parallel=2", marks=pytest.mark.slow),
        "pipeline_parallel=2",
        pytest.param("context_parallel=2", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_a_batch_use_the_same_mixture(folder, pretrain, layout) -> None:
    path = write_mixture(folder, LOSS)
    more = ["model.n_layers=2", "lr_scheduler.total_iterations=8"]
    for run, n_ranks, how in (("alone", 1, []), ("shared", 2, [f"dist.{layout}"])):
        done = pretrain([*build_words(path, run), *more, *how], n_ranks)
        assert done.returncode == 0, done.stderr
    single, shared = read_by_step(folder / "alone"), read_by_step(folder / "shared")
    assert len(single) == len(shared) == 8
    assert is_same(single, shared)
    assert single[8][1] != single[1][1]


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_and_loaders_out_of_step_train_on_the_same_bytes(folder, pretrain, root) -> None:
    path = write_mixture(folder, LOSS)
    slow = root / "tests" / "train" / "pretrain_with_random_waits.py"
    for run, n_ranks, script in (("quiet", 1, None), ("slow1", 1, slow), ("slow2", 2, slow)):
        done = pretrain([*build_words(path, run), "dataset.num_workers=1"], n_ranks, script=script)
        assert done.returncode == 0, done.stderr
    quiet = read_by_step(folder / "quiet")
    assert quiet == read_by_step(folder / "slow1")
    assert is_same(quiet, read_by_step(folder / "slow2"))


def read_samples(record: Path) -> dict[int, str]:
    """Return the hash of each sample that some rank has read; of several, all are equal."""
    read: dict[int, str] = {}
    for path in record.iterdir():
        for line in path.read_text().splitlines():
            number, sums = line.split()
            assert read.setdefault(int(number), sums) == sums
    return read


@pytest.mark.slow
@pytest.mark.ranks
def test_two_and_four_ranks_and_a_change_between_them_train_on_equal_data(
    folder, pretrain, root, monkeypatch
) -> None:
    path = write_mixture(folder, LOSS)
    script = root / "tests" / "train" / "pretrain_with_random_waits.py"
    keep_all = ["checkpoint.keep_last=null"]
    saved = folder / "on2" / "checkpoints"
    samples, losses = {}, {}
    for run, n_ranks in (("on1", 1), ("on2", 2), ("on4", 4), ("2to4", 4)):
        (folder / f"record-{run}").mkdir()
        monkeypatch.setenv("RECORD", str(folder / f"record-{run}"))
        resume = [f"checkpoint.resume={min(saved.glob('step.*'))}"] if run == "2to4" else []
        done = pretrain([*build_words(path, run), *keep_all, *resume], n_ranks, script=script)
        assert done.returncode == 0, done.stderr
        samples[run], losses[run] = read_samples(folder / f"record-{run}"), read_by_step(folder / run)
    assert sorted(samples["on1"]) == [*range(14 * 12)]  # 14 steps of 12 samples, each once
    assert samples["on1"] == samples["on2"] == samples["on4"]
    assert sorted(losses["2to4"]) == [*range(6, 15)]
    assert samples["2to4"] == {i: samples["on1"][i] for i in range(5 * 12, 14 * 12)}
    for run in ("on2", "on4", "2to4"):
        assert is_same(losses["on1"], losses[run])


def test_invalid_mixtures_are_refused_with_a_one_line_error(folder) -> None:
    path = write_mixture(folder, ADO)
    with pytest.raises(ValueError, match="num_workers: got 2, which prepare up to 4 steps ahead"):
        build_small_run(path, "x", "dataset.num_workers=2")
    with pytest.raises(ValueError, match="dataset.mixture: got"):
        build_small_run(path, "x", "dataset.path_train=somewhere")
    for lines, sentence in (
        ("weights: {d: 1}", "no document has kind=d"),
        ("wieghts: {a: 1}", "did you mean 'weights'"),
        ("dry: maybe", "expected one of stop, repeat, redistribute"),
        ("adaptive: {rule: magic}", "expected ado, or your module:Class"),
        ("where: \"knid = 'a'\"", 'Candidate bindings: "kind"'),
        ("schedule: {points: [{at: 0}]}", r"schedule.points\[0\].weights: got None, expected"),
        (
            "schedule: {points: [{at: soon, weights: {a: 1}}]}",
            r"schedule.points\[0\].at: got 'soon', expected an integer",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            prepare_mixture(write_mixture(folder, lines))
    write_corpus(folder / "one", 130, seed=9)
    with pytest.raises(ValueError, match="has changed since it was registered"):
        prepare_mixture(write_mixture(folder, "weights: inferred"))


def test_weights_apply_delay_steps_after_the_observation_and_later_steps_wait_for_it(folder) -> None:
    path = write_mixture(folder, LOSS)
    prepare_mixture(path)
    samples = MixtureSamples(path, seq_len=16, batch_size=12, seed=0)
    before = samples.take(np.arange(4 * 12))
    with pytest.raises(ValueError, match="weights of chunk 4 are not known yet"):
        samples.take(np.arange(4 * 12, 5 * 12))
    samples.observe(0, np.array([90.0, 5.0, 5.0]), np.array([10.0, 10.0, 10.0]))
    assert samples.weights_at(4)[0] > 2 * samples.weights_at(3)[0]
    again = MixtureSamples(path, seq_len=16, batch_size=12, seed=0)
    again.observe(0, np.array([90.0, 5.0, 5.0]), np.array([10.0, 10.0, 10.0]))
    assert np.array_equal(again.take(np.arange(4 * 12)), before)


def test_a_schedule_applies_before_the_weights_of_a_rule(folder) -> None:
    points = "points: [{at: 0, weights: {a: 1}}, {at: 6, weights: {a: 1, b: 1, c: 1}}]"
    path = write_mixture(folder, f"schedule: {{{points}}}", LOSS)
    assert train(build_small_run(path, "both"), StopMonitor(None))
    weights = [weights for _, weights in read_losses_and_weights(folder / "both")]
    assert weights[:6] == [[1, 0, 0]] * 6
    # the rule has observed `a` alone: the mean loss counts for the other domains
    assert len({tuple(w) for w in weights[6:]}) > 1 and min(weights[-1]) > 0.2


def test_a_custom_rule_is_loaded_by_its_name_in_the_file(folder, monkeypatch) -> None:
    (folder / "my_rules.py").write_text(
        "import numpy as np\n"
        "class Last:\n"
        "    def __init__(self, first):\n"
        "        self.n = len(first)\n"
        "    def observe(self, n, nats, counts):\n"
        "        return np.eye(self.n)[-1] * 0.9 + 0.1 / self.n\n"
        "    def as_dict(self):\n"
        "        return {}\n"
        "    def restore(self, state):\n"
        "        pass\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    path = write_mixture(folder, "adaptive: {rule: 'my_rules:Last', every_steps: 1, delay_steps: 4}")
    assert train(build_small_run(path, "own"), StopMonitor(None))
    weights = [weights for _, weights in read_losses_and_weights(folder / "own")]
    assert weights[3] == weights[0]
    assert weights[4] == pytest.approx([0.1 / 3, 0.1 / 3, 0.9 + 0.1 / 3])
    with pytest.raises(ValueError, match="adaptive.rule no_rules:Last: got ModuleNotFoundError"):
        MixtureSamples(
            write_mixture(folder, "adaptive: {rule: 'no_rules:Last'}"), seq_len=16, batch_size=12, seed=0
        )


def test_a_schedule_in_tokens_changes_at_the_first_step_after_them(folder) -> None:
    path = write_mixture(
        folder, "schedule: {unit: tokens, points: [{at: 0, weights: {a: 1}}, {at: 1000, weights: {c: 1}}]}"
    )
    prepare_mixture(path)
    samples = MixtureSamples(path, seq_len=16, batch_size=12, seed=0)  # 192 tokens a step
    domains = samples.lookup_domains(np.arange(12 * 8)).reshape(8, 12)
    assert [set(step) for step in domains.tolist()] == [{0}] * 6 + [{2}] * 2  # 1000 / 192 = 5.2


def test_epochs_of_a_repeated_domain_are_counted(folder) -> None:
    path = write_mixture(folder, "weights: {a: 1}", "dry: repeat")
    resolved = prepare_mixture(path)
    assert train(build_small_run(path, "again", "lr_scheduler.total_iterations=60"), StopMonitor(None))
    last = [line for line in read_metrics(folder / "again") if line["kind"] == "train"][-1]
    assert last["epochs"]["a"] == pytest.approx(60 * 12 / resolved.count_windows(16)[0])
    assert last["epochs"]["a"] > 2
    assert last["epochs"]["b"] == 0


def test_a_mixture_that_stops_ends_a_longer_run(folder) -> None:
    path = write_mixture(folder, "dry: stop")
    prepare_mixture(path)
    samples = MixtureSamples(path, seq_len=16, batch_size=12, seed=0)
    with pytest.raises(ValueError, match="the mixture ends after"):
        samples.take(np.arange(12) + 12 * samples.samples_per_epoch)
