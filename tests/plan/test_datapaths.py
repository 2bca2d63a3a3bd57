"""Data-path files: accepted syntax, and one sentence for each error."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from megatron.config.schema import RunConfig
from megatron.plan.datapaths import WeightedCorpus, count_corpus_tokens, read_corpora, read_data_paths
from megatron.plan.identity import run_identity
from megatron.plan.resolve import resolve_config
from megatron.plan.run_plan import plan_run
from tests.datasets import write_dataset

META = {"tokenizer": {"n_tokens": 50, "sha256": "aa"}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with the datasets a, b (int32) and deep/c: 101, 201 and 301 tokens."""
    for name, n_tokens, dtype in (("a", 101, "uint16"), ("b", 201, "int32"), ("deep/c", 301, "uint16")):
        write_dataset(tmp_path / name, [[7] * n_tokens], META, dtype)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_data_paths(folder: Path, text: str) -> Path:
    path = folder / "deep" / "blend.txt"
    path.write_text(text)
    return path


def test_comments_quotes_tabs_and_variables_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", str(folder))
    text = """# a blend

    "0.5 a"    # quotes, as in Megatron-DeepSpeed's shell scripts
    3e-1\t$WHERE/b
    0.2 'c'
    """
    assert read_data_paths(write_data_paths(folder, text)) == (
        WeightedCorpus("a", Fraction(1, 2)),
        WeightedCorpus(f"{folder}/b", Fraction(3, 10)),  # exactly, not the nearest double
        WeightedCorpus(str(folder / "deep" / "c"), Fraction(1, 5)),  # found beside the file
    )


def test_a_line_may_have_several_pairs_names_of_files_and_windows_line_ends(folder: Path) -> None:
    expected = (WeightedCorpus("a", Fraction(1, 2)), WeightedCorpus("b", Fraction(1, 4)))
    for text in (
        '"0.5 a" "0.25 b"', "0.5 a 0.25 b", '"0.5 a 0.25 b"', "'1/2 a' '.25 b'", '"0.5 a"\n0.25 b\n',
        "\ufeff0.5 a.bin\r\n0.25 b.idx\r\n",
    ):  # fmt: skip
        assert read_data_paths(write_data_paths(folder, text)) == expected


def test_one_corpus_needs_no_weight_and_a_prefix_needs_no_file(folder: Path) -> None:
    expected = (WeightedCorpus("a", Fraction(1)),)
    assert read_corpora(write_data_paths(folder, "a")) == read_corpora("a") == expected


def test_an_unusable_line_is_reported_with_file_and_line(folder: Path) -> None:
    for text, sentence in (
        ("", "blend.txt: got no corpus"),
        ("0.5 a\n# x\n0.5 nowhere", "blend.txt:3: no dataset nowhere.bin/.idx, neither in"),
        ("0.5 a x b", "blend.txt:1: no dataset a x b.bin/.idx, expected `weight path-prefix` pairs"),
        ('"0.5 a" "0.5 none"', "blend.txt:1: no dataset none.bin/.idx"),
        ("0.5 a 0.5 a", "blend.txt:1: a is on line 1 already"),
        ("0.5 a\nb", "blend.txt:2: got the single word 'b'"),
        ("half a\n1 b", "blend.txt:1: got weight 'half', expected"),
        ("nan a", "got weight 'nan', expected"),
        ("1/0 a", "got weight '1/0', expected"),
        ("1 a unique=0", "blend.txt:1: got unique=0, expected a number of tokens"),
        ("1 a unique=1e6", "blend.txt:1: got unique=1e6, expected a number of tokens"),
        ("1 a\n0 b", "blend.txt:2: got weight 0, expected"),
        ("-1 a", "got weight -1, expected"),
        ("1 a\n1 b\n2 ./a", "blend.txt:3: ./a is on line 1 already"),
        ("1 $NOT_SET_HERE/a", "contains an environment variable that is not set"),
    ):
        with pytest.raises((ValueError, FileNotFoundError)) as caught:
            read_data_paths(write_data_paths(folder, text))
        assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_unique_tokens_limit_one_corpus_of_a_blend(folder: Path) -> None:
    text = "1 a unique=25\n3 b"
    blend = write_data_paths(folder, text)
    assert [corpus.unique_tokens for corpus in read_data_paths(blend)] == [25, None]
    plan = plan_run(build_run(blend))
    # 25 tokens are three whole samples of 10; of 60 samples a quarter is of a
    limited, whole = plan.corpora
    assert (limited.tokens, limited.samples, limited.epochs, limited.repeated_tokens) == (30, 15, 5.0, 120)
    assert whole.samples == 45
    other = write_data_paths(folder, "1 a unique=31\n3 b")
    assert plan_run(build_run(other)).identity != plan.identity
    with pytest.raises(ValueError, match="unique=TOKENS, which is for training"):
        plan_run(build_run("a", path_eval=str(blend)))
    with pytest.raises(ValueError, match="unique=100000 of a, expected dataset.order=epoch and at most its"):
        plan_run(build_run(write_data_paths(folder, "1 a unique=100000\n3 b")))
    with pytest.raises(ValueError, match="expected dataset.order=epoch"):
        plan_run(build_run(write_data_paths(folder, text), order="megatron"))


def test_the_value_of_a_variable_is_in_no_message(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_TEST", "hunter2")
    for text in ("1 $SECRET_OF_TEST/a", "1 ${SECRET_OF_TEST}.bin", "1 $SECRET_OF_TEST a"):
        with pytest.raises(FileNotFoundError) as caught:
            read_data_paths(write_data_paths(folder, text))
        assert "hunter2" not in str(caught.value) and "SECRET_OF_TEST" in str(caught.value)


def test_corpora_of_two_tokenizers_are_refused_also_beside_datasets_without_a_sidecar(folder: Path) -> None:
    write_dataset(folder / "other", [[7] * 100], {"tokenizer": META["tokenizer"] | {"sha256": "bb"}})
    with pytest.raises(ValueError, match="blend.txt:2: other has another tokenizer than a"):
        read_data_paths(write_data_paths(folder, "1 a\n1 other"))
    with pytest.raises(ValueError, match="dataset.path_eval: other has another tokenizer than a"):
        plan_run(build_run("a", path_eval="other"))
    (folder / "a.json").unlink()
    assert len(read_data_paths(write_data_paths(folder, "1 a\n1 other"))) == 2
    for order in ("a b other", "b a other", "b other a", "other a b"):
        with pytest.raises(ValueError, match="has another tokenizer than"):
            read_data_paths(write_data_paths(folder, "\n".join(f"1 {name}" for name in order.split())))


def build_run(path: Path | str, **dataset: object) -> RunConfig:
    data = {"path_train": str(path), "seq_len": 10, "batch_size": 5, **dataset}
    model = {"d_model": 16, "n_heads": 2, "n_layers": 1}
    return resolve_config({"dataset": data, "model": model, "lr_scheduler": {"total_iterations": 12}})


def test_the_plan_counts_epochs_unique_and_repeated_tokens_of_each_corpus(folder: Path) -> None:
    # 60 samples: 45 of a (10 an epoch), 15 of b (20 an epoch)
    plan = plan_run(build_run(write_data_paths(folder, "3 a\n1 b")))
    assert [(c.name, c.samples, c.epochs, c.unique_tokens, c.repeated_tokens) for c in plan.corpora] == [
        ("a", 45, 4.5, 100, 350),
        ("b", 15, 0.75, 150, 0),
    ]
    assert (plan.unique_tokens, plan.repeated_tokens, plan.epochs) == (250, 350, 600 / 300)
    assert plan.flops_6nd == 6 * plan.n_params * 600
    assert json.loads(json.dumps(plan.as_dict()))["corpora"][1]["share"] == 0.25


def test_the_identity_depends_on_contents_and_proportions_and_not_on_names(folder: Path) -> None:
    def identity(text: str) -> str:
        return run_identity(build_run(write_data_paths(folder, text)))

    before = identity("3 a\n1 b")
    assert identity("# the same\n0.75 ./a\n\n0.25 b") == before
    assert identity("2 a\n1 b") != before
    assert identity("3 a\n1 deep/c") != before
    assert identity("1 a") == run_identity(build_run("a"))
    write_dataset(folder / "b", [[8] * 201], META)  # other tokens with the same name
    assert identity("3 a\n1 b") != before


def test_the_example_files_are_read_when_their_datasets_exist(
    root: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    n_corpora = {"c4_100m": 1, "c4": 1, "slimpajama": 1, "c4_and_slimpajama": 2}
    for dataset in ("c4_100m", "c4", "slimpajama"):
        write_dataset(tmp_path / "data" / f"{dataset}_text_document", [[7] * 100], META)
    corpora = {name: read_corpora(root / "utils" / "datapaths" / f"{name}.txt") for name in n_corpora}
    assert {name: len(corpora[name]) for name in corpora} == n_corpora


def test_a_dataset_written_by_megatron_needs_no_sidecar(tmp_path: Path, scaling_data: Path) -> None:
    folder = scaling_data / "megatron_openwebtext"
    assert count_corpus_tokens(folder / "meg-gpt2-openwebtext_text_document") == 1_361_845  # uint16
    ag_news = folder / "ag_news_prompt_inputs_document"
    assert count_corpus_tokens(ag_news) * 4 == ag_news.with_suffix(".bin").stat().st_size  # int32
    (tmp_path / "x.idx").write_bytes(b"something else")
    with pytest.raises(ValueError, match="x.idx: got b.something., version"):
        count_corpus_tokens(tmp_path / "x")
