"""Models by their name on the hub: scored by this project or by transformers, with lm-eval's files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpoint.convert.tokenizer_files import write_tokenizer
from megatron.data.indexed_writer import IndexedWriter
from megatron.evaluation.downstream_tasks import DownstreamRequest, evaluate_downstream
from megatron.evaluation.foreign_model import ForeignModel, TransformersNet, read_scored_model
from megatron.evaluation.held_out import HeldOutScoring, score_held_out
from megatron.evaluation.reader import Reader, Scoring
from megatron.evaluation.scored_models import ScoredModel, find_models
from megatron.io import read_json
from megatron.parallel.world import World

ALONE = World(0, 1, 0, torch.device("cpu"))
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


def score(name: str, data: Path, backend: str = "auto", **how: Any) -> tuple[dict[str, Any], Path]:
    request = DownstreamRequest(tasks=("copa", "piqa"), data=data, limit=4, samples=True)
    results, _, folder = evaluate_downstream(
        open_model(name), request, Scoring(batch_size=4, **how), ALONE, backend=backend
    )
    return results, folder


def read_log_p(folder: Path, task: str) -> np.ndarray:
    """Return the log-likelihoods of a task's requests from the file of lm-eval's form."""
    (path,) = folder.glob(f"*/samples_{task}_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    return np.array([float(answer[0][0]) for sample in samples for answer in sample["resps"]])


def test_only_what_the_converter_refuses_goes_to_transformers(cache: Path) -> None:
    llama = read_scored_model(open_model("acme/llama").path, None)
    assert not isinstance(llama, ForeignModel) and llama.seq_len == 128
    falcon = read_scored_model(open_model("acme/falcon").path, None)
    assert isinstance(falcon, ForeignModel) and "model_type: got 'falcon'" in falcon.reason
    with pytest.raises(ValueError, match="model_type: got 'falcon'"):
        read_scored_model(falcon.path, None, "native")


def test_a_model_of_another_kind_is_refused_instead_of_scored_as_autoregressive(tmp_path: Path) -> None:
    for config in ({"architectures": ["LladaModelLm"]}, {}, {"objective": "masked_diffusion"}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of", **config}))
        with pytest.raises(ValueError, match="model_type"):
            read_scored_model(tmp_path, None)


def test_both_backends_agree_and_their_results_are_kept_apart(cache: Path, scaling_data: Path) -> None:
    data = scaling_data / "downstream"
    ours, folder = score("acme/llama", data)
    by_us = {task: read_log_p(folder, task) for task in ("copa", "piqa")}
    for path in folder.glob("*/*"):
        path.unlink()
    theirs, _ = score("acme/llama", data, "transformers")
    for task, log_p in by_us.items():
        assert len(log_p) == 8
        assert log_p == pytest.approx(read_log_p(folder, task), abs=2e-4, rel=2e-6)
        # accuracies of equal log-likelihoods are equal
        assert ours["results"][task] == theirs["results"][task]
    assert "backend" not in ours["config"] and theirs["config"]["backend"] == "transformers"
    n = 2 * VOCABULARY * 16 + 4 * 16 * 16 + 3 * 16 * 32 + 3 * 16  # embedding, head, attention, MLP, norms
    assert ours["config"]["model_num_parameters"] == theirs["config"]["model_num_parameters"] == n


def test_results_are_files_that_lm_evals_readers_accept(cache: Path, scaling_data: Path) -> None:
    from lm_eval.loggers import WandbLogger
    from lm_eval.utils import (
        get_file_datetime,
        get_file_task_name,
        get_latest_filename,
        get_results_filenames,
        get_sample_results_filenames,
        make_table,
    )

    results, folder = score("acme/falcon", scaling_data / "downstream")
    # the sanitized name of the model, as in the visualisation scripts of lm-eval
    files = [path.as_posix() for path in (folder / "acme__falcon").iterdir()]
    (path,) = get_results_filenames(files)
    samples = {get_file_task_name(Path(name).name): name for name in get_sample_results_filenames(files)}
    assert set(samples) == {"copa", "piqa"} and get_latest_filename(list(samples.values()))
    dates = {get_file_datetime(Path(name).name).removesuffix(".json") for name in files}
    assert len(dates) == 1
    content = read_json(Path(path))
    assert content is not None
    assert make_table(content) == make_table(results) and "|copa" in make_table(content)
    assert (content["model_source"], content["model_name"]) == ("hf", "acme/falcon")
    assert content["config"]["model_args"] == "pretrained=acme/falcon,dtype=float32"
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


def test_bfloat16_scores_are_near_those_of_float32(cache: Path, scaling_data: Path) -> None:
    """bfloat16 has 8 bits: a relative error of 2^-9 = 0.2 % per rounding."""
    weights = read_scored_model(open_model("acme/llama").path, None)
    assert not isinstance(weights, ForeignModel)
    whole, rounded = (Reader(weights, Scoring(dtype=dtype), ALONE) for dtype in ("float32", "bfloat16"))
    requests = whole.make_requests([("Once upon a time", " there was a dog"), ("One day", " Tom")])
    expected = whole.compute_likelihoods(requests).log_p
    actual = rounded.compute_likelihoods(requests).log_p
    assert rounded.model.embedding.weight.dtype == torch.bfloat16
    assert (actual != expected).all() and actual == pytest.approx(expected, rel=0.02)
    with pytest.raises(ValueError, match="--dtype: got 'float16'"):
        Scoring(dtype="float16").resolve("autoregressive")


def test_a_network_of_transformers_computes_the_states_of_ours(cache: Path) -> None:
    """Logits from hidden states and head, against this project's model of the same weights."""
    path = open_model("acme/llama").path
    ours = read_scored_model(path, None)
    assert not isinstance(ours, ForeignModel)
    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    logits = []
    with torch.inference_mode():
        for net in (ours.build_model(), TransformersNet(path)):
            logits.append(net.hidden_states(tokens, causal=True) @ net.head_weight[:VOCABULARY].T)
    assert torch.allclose(*logits, atol=1e-4)


def test_held_out_losses_of_both_backends_agree(cache: Path, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 60)
    with IndexedWriter(tmp_path / "corpus", np.dtype(np.uint16), {}) as writer:
        writer.add_document(ids)
    scoring = HeldOutScoring(data=str(tmp_path / "corpus"), seq_len=16, batch_size=2)
    model, results = open_model("acme/llama"), []
    for backend in ("auto", "transformers"):
        result, _, before = score_held_out(model, scoring, ALONE, out=tmp_path / "out", backend=backend)
        assert not before
        results.append(result)
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-5)
    assert "backend" not in results[0] and results[1]["backend"] == "transformers"
    # the reference: the mean of transformers' log-softmax over the same four windows of 16 tokens
    net = TransformersNet(model.path).model
    with torch.inference_mode():
        nats = [
            torch.nn.functional.cross_entropy(
                net(torch.tensor(ids[None, a:b])).logits[0],
                torch.tensor(ids[a + 1 : b + 1]),
                reduction="none",
            )[skip:]
            # the last window is whole, and scores only what the others did not
            for a, b, skip in ((0, 16, 0), (16, 32, 0), (32, 48, 0), (43, 59, 5))
        ]
    assert results[0]["loss"] == pytest.approx(float(torch.cat(nats).mean()), rel=1e-5)
    assert results[0]["n_tokens"] == 59


def test_a_head_that_is_more_than_a_matrix_is_refused(tmp_path: Path) -> None:
    """Gemma 2 caps its logits: c tanh(h W / c) is not h W."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="more than its last hidden states times a matrix"):
        TransformersNet(tmp_path)
