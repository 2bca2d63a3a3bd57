"""Models by their name on the hub: scored with lm-eval's files, or refused with lm-eval's command."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.convert.tokenizer_files import write_tokenizer
from megatron.evaluation.downstream_tasks import DownstreamRequest, evaluate_downstream
from megatron.evaluation.likelihood import Request
from megatron.evaluation.reader import Reader, Scoring
from megatron.evaluation.scored_models import ScoredModel, find_models, read_weights
from megatron.io import read_json
from tests.evaluation.conftest import ALONE

VOCABULARY = 50257  # GPT-2's


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A hub cache with a random Llama, which this project reads, and a Falcon, which it does not."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="lm-eval's hf model requires accelerate")
    folder = tmp_path_factory.mktemp("hub")
    shape = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    llama = transformers.LlamaConfig(
        **shape, intermediate_size=32, max_position_embeddings=128, initializer_range=0.5
    )
    models = {
        "acme/llama": transformers.LlamaForCausalLM(llama),
        "acme/falcon": transformers.FalconForCausalLM(
            transformers.FalconConfig(**shape, initializer_range=0.5)
        ),
    }
    for name, model in models.items():
        repository = folder / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("c1")
        model.save_pretrained(repository / "snapshots" / "c1")
        write_tokenizer("gpt2", repository / "snapshots" / "c1")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_HUB_CACHE", str(folder))
        patched.chdir(tmp_path_factory.mktemp("work"))
        yield folder


def open_model(name: str) -> ScoredModel:
    (model,) = find_models([Path(name)])
    assert model.hub_name == model.name == name
    assert model.folder("downstream") == Path(f"{name.replace('/', '__')}.scores/downstream")
    return model


def score(name: str, data: Path) -> tuple[dict[str, Any], Path]:
    request = DownstreamRequest(tasks=("copa", "piqa"), include_path=data, limit=4, samples=True)
    results, _, folder = evaluate_downstream(open_model(name), request, Scoring(batch_size=4), ALONE)
    return results, folder


def test_what_the_converter_refuses_is_an_error_with_lm_evals_command(cache: Path) -> None:
    weights = read_weights(open_model("acme/llama"), None)
    assert weights.seq_len == 128
    command = (
        r"model_type: got 'falcon'.* lm_eval --model hf --model_args pretrained=acme/falcon --tasks NAMES"
    )
    with pytest.raises(ValueError, match=command):
        read_weights(open_model("acme/falcon"), None)


def test_a_model_of_another_kind_has_no_command_of_lm_eval(tmp_path: Path) -> None:
    """lm-eval would score it as autoregressive."""
    for config in ({"architectures": ["LladaModelLm"]}, {}, {"objective": "masked_diffusion"}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of", **config}))
        with pytest.raises(ValueError, match="model_type") as caught:
            read_weights(ScoredModel(tmp_path, None, None), None)
        assert "lm_eval" not in str(caught.value)


def test_results_are_files_that_lm_evals_readers_accept(cache: Path, task_folder: Path) -> None:
    from lm_eval.loggers import WandbLogger
    from lm_eval.utils import (
        get_file_datetime,
        get_file_task_name,
        get_latest_filename,
        get_results_filenames,
        get_sample_results_filenames,
        make_table,
    )

    results, folder = score("acme/llama", task_folder)
    # the sanitized name of the model, as in the visualisation scripts of lm-eval
    files = [path.as_posix() for path in (folder / "acme__llama").iterdir()]
    (path,) = get_results_filenames(files)
    samples = {get_file_task_name(Path(name).name): name for name in get_sample_results_filenames(files)}
    assert set(samples) == {"copa", "piqa"} and get_latest_filename(list(samples.values()))
    dates = {get_file_datetime(Path(name).name).removesuffix(".json") for name in files}
    assert len(dates) == 1
    content = read_json(Path(path))
    assert content is not None
    assert make_table(content) == make_table(results) and "|copa" in make_table(content)
    assert (content["model_source"], content["model_name"]) == ("megatron", "acme/llama")
    assert content["config"]["model_args"] == "pretrained=acme/llama,dtype=float32"
    assert content["n-samples"]["copa"] == {"original": 100, "effective": 4}
    assert set(content["task_hashes"]) == {"copa", "piqa"} and content["lm_eval_version"]
    logger = object.__new__(WandbLogger)  # without wandb.init
    logger.post_init(content)
    _, metrics = logger._sanitize_results_dict()
    assert metrics["copa/acc"] == results["results"]["copa"]["acc,none"]
    rows = [json.loads(line) for line in Path(samples["piqa"]).read_text().splitlines()]
    assert [row["doc_id"] for row in rows] == [0, 1, 2, 3]
    # what lm-eval's scripts read from a row
    assert all(row["arguments"]["gen_args_0"]["arg_0"].startswith("Question: ") for row in rows)
    assert all(row["acc"] in (0.0, 1.0) and isinstance(row["target"], str) for row in rows)
    n_right = sum(row["acc"] for row in rows)
    assert n_right / 4 == results["results"]["piqa"]["acc,none"]


def test_bfloat16_scores_are_near_those_of_float32(cache: Path, task_folder: Path) -> None:
    """bfloat16 has 8 bits: a relative error of 2^-9 = 0.2 % per rounding."""
    weights = read_weights(open_model("acme/llama"), None)
    whole, rounded = (Reader(weights, Scoring(dtype=dtype), ALONE) for dtype in ("float32", "bfloat16"))
    pairs = (("Once upon a time", " there was a dog"), ("One day", " Tom"))
    requests = [Request(whole.encode_text(a), whole.encode_text(b, begin=False)) for a, b in pairs]
    expected = whole.compute_likelihoods(requests).log_p
    actual = rounded.compute_likelihoods(requests).log_p
    assert rounded.model.embedding.weight.dtype == torch.bfloat16
    assert (actual != expected).all() and actual == pytest.approx(expected, rel=0.02)
