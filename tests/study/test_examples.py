"""The studies in examples_scaling/training plan the runs that they describe. Nothing is trained."""

from functools import cache
from pathlib import Path

import pytest

from megatron.study.ladder import PlannedRun, expand_study, read_study_plan
from tests.study.conftest import write_sidecar

STUDIES = {
    "ladder_chinchilla": 54,
    "ladder_chinchilla_6nd": 54,
    "ladder_epochs": 42,
    "learning_rate": 53,  # 30 + 12 + 12, of which one is a duplicate
    "ablations": 15,
    "quickstart_100m": 2,
    "study_cpu": 86,
    "law_cpu": 32,
    "study_gpu": 30,
    "study_crossover_gpu": 96,
    "study_crossover_cpu": 489,
    "study_optimizer_cpu": 38,
    "study_mixture_cpu": 48,
}
SMALL = ("law_cpu", "optimizer_cpu", "mixture_cpu")  # studies of small vocabularies
DOMAINS = ("code", "docs", "web", "books", "wiki")


@pytest.fixture(scope="module")
def planned(root: Path, tmp_path_factory: pytest.TempPathFactory):
    """Return a function: name of a study -> its runs, on a corpus of 50 billion tokens without data."""
    corpora = tmp_path_factory.mktemp("text")
    for vocabulary in (50257, 512):
        for name in ("train", "held_out", *DOMAINS):
            (corpora / str(vocabulary)).mkdir(exist_ok=True)
            write_sidecar(corpora / str(vocabulary) / f"{name}.json", 50_000_000_001, vocabulary)
            for suffix in (".bin", ".idx"):  # a data-path file lists only what exists
                (corpora / str(vocabulary) / name).with_suffix(suffix).touch()

    @cache
    def runs(name: str) -> list[PlannedRun]:
        folder = corpora / ("512" if name.endswith(SMALL) else "50257")
        words = [f"run.dataset.path_train={folder / 'train'}", f"run.dataset.path_eval={folder / 'held_out'}"]
        path = root / "examples_scaling" / "training" / f"{name}.yaml"
        if "mixtures:" in path.read_text():
            words += [f"directory={corpora / name}"]
            words += [f"mixtures.domains.{domain}={folder / domain} unique=100000" for domain in DOMAINS]
        if "path_test:" in path.read_text():
            words.append(f"run.dataset.path_test={folder / 'held_out'}")
        return expand_study(read_study_plan(path, words))

    return runs


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if n > 400 else []) for name, n in STUDIES.items()]
)
def test_a_study_plans_as_many_different_runs_as_it_lists(planned, name: str) -> None:
    runs = planned(name)
    assert len(runs) == STUDIES[name]
    assert len({run.config.name for run in runs}) == len(runs)


def test_every_study_in_the_folder_is_tested(root: Path) -> None:
    folder = root / "examples_scaling" / "training"
    names = {path.stem for path in folder.glob("*.yaml") if "\ncells:" in path.read_text()}
    assert names == STUDIES.keys()


def test_the_budgets_of_the_chinchilla_ladder_are_spent_and_the_largest_is_held_out(planned) -> None:
    for run in planned("ladder_chinchilla"):
        nearest = min((6e18, 1e19, 3e19, 1e20), key=lambda budget: abs(run.plan.train_flops / budget - 1))
        assert run.plan.train_flops == pytest.approx(nearest, rel=0.01)
        assert run.held_out == (nearest == 1e20)


def test_the_original_form_of_the_ladder_has_one_rate_and_budgets_of_6nd(planned) -> None:
    ours = {run.plan.size for run in planned("ladder_chinchilla")}
    runs = planned("ladder_chinchilla_6nd")
    assert {run.plan.size for run in runs} == ours
    for run in runs:
        assert run.config.optim.lr == 2e-4
        spent = 6 * run.plan.n_params * run.plan.train_tokens
        assert min(abs(spent / budget - 1) for budget in (6e18, 1e19, 3e19, 1e20)) < 0.001


def test_the_data_value_ladder_has_the_published_subsets_to_a_tenth(planned) -> None:
    # utils/epoch_tokens.yaml: 7B6_4ep and 12B_20ep for AR, 40B_100ep for diffusion
    unique_tokens = {
        (run.plan.objective, run.plan.size, round(run.plan.epochs)): run.plan.unique_tokens
        for run in planned("ladder_epochs")
    }
    assert unique_tokens[("autoregressive", "217M", 4)] == pytest.approx(1_912_366_531, rel=0.1)
    assert unique_tokens[("autoregressive", "425M", 20)] == pytest.approx(599_002_480, rel=0.1)
    assert unique_tokens[("masked_diffusion", "425M", 100)] == pytest.approx(399_354_803, rel=0.1)
