"""Model folders of the Hugging Face hub, as in transformers: architectures, missing, new and old keys."""

import inspect
import json
import logging
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint.convert.exported.modeling_masked_diffusion import MaskedDiffusionConfig
from megatron.checkpoint.convert.formats import convert_checkpoint, read_any
from megatron.checkpoint.convert.huggingface import read_huggingface
from megatron.config.hf import DIFFUSION_TYPE, FAMILIES, read_hf_config, shape_from_hf
from megatron.generation.generate import generate
from megatron.generation.sampling import Sampling
from megatron.plan.count import n_params
from tests.checkpoint.conftest import import_transformers
from tests.wrong_values import read_refusal

transformers = import_transformers()

TOKENS = torch.randint(0, 50, (3, 40), generator=torch.Generator().manual_seed(2))
KINDS = ("llama", "qwen2", "qwen3", "mistral", "olmo2", "gpt_neox", "gpt2")
CONFIGS, MODELS = transformers.CONFIG_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING
SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
GROUPED = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {**SMALL, "num_attention_heads": 64, "num_key_value_heads": 32},  # head_dim: the default
    "olmo2": {**SMALL, "num_attention_heads": 4},
    "gpt_neox": {**SMALL, "num_attention_heads": 4},
    "gpt2": {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40},
}
# of 4 pairs, one has more than 4 turns in 32 positions, one less than 1, and two are between
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
UNSCALED = {key: value for key, value in LLAMA3.items() if not key.startswith("original")}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
SERIAL = {
    "use_parallel_residual": False, "tie_word_embeddings": True, "hidden_act": "gelu_new",
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0},
}  # fmt: skip
# (class, further keys of its configuration, options of the model that it must give)
ARCHITECTURES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {}),
    ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}, {"n_kv_heads": 1}),
    ("llama", {"num_key_value_heads": 4}, {"n_kv_heads": 4}),
    ("llama", {"attention_bias": True, "mlp_bias": True}, {"biases": True}),
    ("llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 64}, {"rope_scaling": "llama3"}),
    ("llama", {"rope_parameters": LINEAR}, {"rope_factor": 4.0}),
    ("qwen2", {"tie_word_embeddings": True}, {"qkv_biases": True}),
    ("qwen2", WINDOW, {"attention_window": 6}),
    ("qwen3", {**GROUPED, "head_dim": 16}, {"qk_norm": True}),
    ("mistral", {"sliding_window": None}, {"attention_window": None}),
    ("mistral", {"sliding_window": 6, "head_dim": 16}, {"attention_window": 6}),
    ("olmo2", {"num_key_value_heads": 2}, {"norm_placement": "output", "qk_norm_all_heads": True}),
    ("gpt_neox", {}, {"parallel_residual": True, "rotary_dims": 2, "feed_forward": "gelu_exact"}),
    ("gpt_neox", SERIAL, {"parallel_residual": False, "rotary_dims": None, "feed_forward": "gelu"}),
    ("gpt2", {}, {"feed_forward": "gelu"}),
    ("gpt2", {"activation_function": "gelu"}, {"feed_forward": "gelu_exact"}),
]


def load(folder: Path, kind: str) -> Any:
    return MODELS[CONFIGS[kind]].from_pretrained(folder).eval()


def make(folder: Path, kind: str, **more: Any) -> Any:
    """Save a model of transformers in a folder, and reload it."""
    torch.manual_seed(0)
    config = CONFIGS[kind](**SHAPES.get(kind, GROUPED) | {"initializer_range": 0.3} | more)
    model = MODELS[type(config)](config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # gains that are not 1, biases that are not 0
                parameter += 0.3 * torch.randn(parameter.shape)
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:  # so small that the epsilon of a norm matters
                parameter *= 1e-2
    model.save_pretrained(folder)
    return load(folder, kind)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that makes the folder of a kind once: kind -> (folder, model)."""

    @cache
    def make_once(kind: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(kind)
        return folder, make(folder, kind)

    return make_once


def change_config(folder: Path, add: dict[str, Any], remove: tuple[str, ...] = ()) -> None:
    path = folder / "config.json"
    content = {key: value for key, value in json.loads(path.read_text()).items() if key not in remove}
    path.write_text(json.dumps(content | add))


def change_tensors(folder: Path, add: dict[str, torch.Tensor], rename: Any = str) -> None:
    path = folder / "model.safetensors"
    state = {rename(name): tensor for name, tensor in load_file(path).items()} | add
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path, {"format": "pt"})


def assert_same_logits(folder: Path, theirs: Any) -> None:
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        assert expected.std() > 0.01
        ours = read_any(folder).build_model()(TOKENS, causal=True)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-5 * float(expected.std()))


@pytest.mark.parametrize(("kind", "keys", "options"), ARCHITECTURES)
def test_an_architecture_has_equal_logits_text_and_shape_in_and_out(
    tmp_path: Path, kind: str, keys: dict[str, Any], options: dict[str, Any]
) -> None:
    no_ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    theirs = make(tmp_path / "hub", kind, **keys, **no_ids)
    theirs.save_pretrained(tmp_path / "hub", max_shard_size="20KB")
    assert len(list((tmp_path / "hub").glob("*.safetensors"))) > 1
    weights = read_any(tmp_path / "hub")
    content = json.loads((tmp_path / "hub" / "config.json").read_text())
    for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        content.pop(key, None)
    for key, value in (options | shape_from_hf(content)).items():
        assert getattr(weights.config, key) == value, key
    assert n_params(weights.config) == sum(tensor.numel() for tensor in theirs.parameters())
    assert_same_logits(tmp_path / "hub", theirs)
    prompts = TOKENS[:2, :9]  # longer than the windows
    greedy = Sampling(temperature=0)
    ours = generate(weights.build_model(), prompts.tolist(), max_new_tokens=10, sampling=greedy)
    assert ours == theirs.generate(prompts, max_new_tokens=10, do_sample=False)[:, 9:].tolist()
    convert_checkpoint(tmp_path / "hub", tmp_path / "native", to="native")
    convert_checkpoint(tmp_path / "native", tmp_path / "back", to="huggingface")
    back = type(theirs).from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        assert torch.equal(back(TOKENS).logits, theirs(TOKENS).logits)
    state, again = theirs.state_dict(), back.state_dict()
    assert state.keys() == again.keys() and all(torch.equal(state[key], again[key]) for key in state)


@pytest.mark.parametrize("kind", KINDS)
def test_every_default_equals_that_of_transformers(kind: str) -> None:
    expected = CONFIGS[kind]()
    for key, default in FAMILIES[kind].defaults.items():
        if key == "rope_theta":
            assert default == expected.rope_parameters["rope_theta"]
        elif default is not None:
            value = getattr(expected, key)
            assert (default, type(default)) == (value, type(value)), key
    names = set(inspect.signature(type(expected)).parameters)
    assert set(FAMILIES[kind].defaults) - {"rope_theta", "head_dim"} <= names
    shape, n_positions, ignored = read_hf_config({"model_type": kind})
    ours = (shape.get("n_kv_heads", shape["n_heads"]), shape["d_head"], shape["d_ff"])
    if kind == "gpt2":
        assert ours == (12, 64, 3072)  # the shape of its weights
    else:
        head_dim = getattr(expected, "head_dim", expected.hidden_size // expected.num_attention_heads)
        heads = getattr(expected, "num_key_value_heads", expected.num_attention_heads)
        assert ours == (heads, head_dim, expected.intermediate_size)
    assert shape.get("attention_window") == getattr(expected, "sliding_window", None)
    assert n_positions == expected.max_position_embeddings and ignored == []


def test_defaults_of_an_exported_diffusion_model_are_those_of_its_code() -> None:
    parameters = inspect.signature(MaskedDiffusionConfig.__init__).parameters
    for key, default in FAMILIES[DIFFUSION_TYPE].defaults.items():
        if default is not int and key in parameters:
            assert parameters[key].default == default, key
    with pytest.raises(ValueError, match="hidden_size: missing, expected a value"):
        read_hf_config({"model_type": DIFFUSION_TYPE})


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_configuration_of_transformers_is_read(kind: str) -> None:
    config = CONFIGS[kind](**SHAPES.get(kind, GROUPED))
    shape, _, ignored = read_hf_config(json.loads(config.to_json_string(use_diff=False)))
    assert shape == read_hf_config(json.loads(config.to_json_string()))[0]
    expected = {"resid_pdrop", "embd_pdrop"} if kind == "gpt2" else set()
    assert {word.split()[0] for word in ignored} == expected


@pytest.mark.parametrize(
    ("kind", "add", "remove"),
    [
        ("llama", {"rope_theta": 321.0, "rope_scaling": None}, ("rope_parameters",)),
        ("llama", {"rope_theta": 5.0, "rope_scaling": {"type": "default", "rope_theta": 321.0}}, ()),
        ("llama", {"rope_theta": 321.0, "rope_parameters": {"rope_type": "default"}}, ()),
        ("llama", {"rope_theta": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 321.0}}, ()),
        ("qwen3", {"rope_theta": 321, "partial_rotary_factor": 1.0}, ("rope_parameters",)),
        ("qwen3", {"sliding_window": 2, "use_sliding_window": False, "max_window_layers": 0}, ()),
        ("qwen3", {"layer_types": ["full_attention"] * 2}, ()),
        ("gpt2", {"reorder_and_upcast_attn": True, "activation_function": "gelu_pytorch_tanh"}, ()),
        ("llama", {"rope_parameters": UNSCALED, "max_position_embeddings": 64}, ()),
        ("llama", {}, ("rms_norm_eps", "tie_word_embeddings", "rope_parameters", "hidden_act")),
        ("llama", {"rope_theta": 777.0}, ("max_position_embeddings", "model_type", "rope_parameters")),
        ("qwen3", {}, ("tie_word_embeddings", "head_dim")),
        ("qwen3", {}, ("rms_norm_eps", "rope_parameters", "num_key_value_heads", "attention_bias")),
        ("olmo2", {}, ("num_key_value_heads", "head_dim")),
        ("gpt2", {}, ("layer_norm_epsilon", "n_inner", "tie_word_embeddings", "activation_function")),
        ("gpt2", {}, ("attn_pdrop", "resid_pdrop", "embd_pdrop", "architectures")),
    ],
)
def test_missing_keys_and_other_spellings_mean_what_transformers_reads(
    tmp_path: Path, hub: Any, kind: str, add: dict[str, Any], remove: tuple[str, ...]
) -> None:
    shutil.copytree(hub(kind)[0], tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, add, remove)
    assert_same_logits(tmp_path, load(tmp_path, kind))


def test_gpt2_of_the_hub_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Layout of openai-community/gpt2: names of the bare model, causal masks, dropout, generation keys."""
    theirs = make(tmp_path, "gpt2")
    hub_keys = {
        "n_ctx": 40, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "summary_type": "cls_index",
        "summary_first_dropout": 0.1, "task_specific_params": {"text-generation": {"do_sample": True}},
        "bos_token_id": 50256, "eos_token_id": 50256, "architectures": ["GPT2LMHeadModel"],
    }  # fmt: skip
    change_config(tmp_path, hub_keys, ("n_inner", "scale_attn_weights", "tie_word_embeddings"))
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 40, 40).tril() for i in range(2)}
    masks |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    head = {"lm_head.weight": theirs.transformer.wte.weight.detach().clone()}  # repeats the embedding
    change_tensors(tmp_path, masks | head, lambda name: name.removeprefix("transformer."))
    with caplog.at_level(logging.WARNING):
        assert_same_logits(tmp_path, theirs)
    assert "resid_pdrop 0.1" in caplog.text and "embd_pdrop 0.1" in caplog.text
    assert "summary" not in caplog.text and "task_specific" not in caplog.text
    convert_checkpoint(tmp_path, tmp_path / "native", to="native")
    convert_checkpoint(tmp_path / "native", tmp_path / "back", to="huggingface")
    assert_same_logits(tmp_path / "back", theirs)


def test_llama_with_keys_of_other_programs_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = make(tmp_path, "llama")
    added = {
        "is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"},
        "_model_name_or_path": "other/project", "unk_token_id": 0, "hidden_dropout": 0.0, "resid_pdrop": 0.1,
        "my_label": "third try", "quantization_config": None, "num_experts": 0, "logit_scale": 1.0,
    }  # fmt: skip
    change_config(tmp_path, added)
    table = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    change_tensors(tmp_path, {name.format(0): table, name.format(1): table.half()})
    with caplog.at_level(logging.WARNING):
        assert_same_logits(tmp_path, theirs)
    for key in ("is_llama_config", "rope_interleaved", "transformers.js_config", "resid_pdrop", "my_label"):
        assert key in caplog.text
    assert "unk_token_id" not in caplog.text


ROPE = "rope_parameters"
LAYERS = ["full_attention", "sliding_attention"]
MIXED = {"use_sliding_window": True, "sliding_window": 4}
REFUSED_KEYS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_interleaved": True}, "rope_interleaved: got True, expected none: it changes"),
    ("llama", {"logit_scale": 0.5}, "logit_scale: got 0.5"),
    ("llama", {"residual_multiplier": 0.22}, "residual_multiplier: got 0.22"),
    ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping: got 30.0"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config: got"),
    ("llama", {"num_local_experts": 8}, "num_local_experts: got 8"),
    ("llama", {"use_qk_norm": True}, "use_qk_norm: got True"),
    ("llama", {"is_causal": False}, "is_causal: got False"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5, expected 1.0"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "scaling.low_freq_factor: got None"),
    ("llama", {ROPE: {"rope_type": "linear", "factor": 0}}, "factor: got 0, expected a number"),
    ("llama", {ROPE: {"rope_type": "linear", "factor": 2, "a": 1}}, "got a, unknown with rope_type"),
    ("mistral", {"sliding_window": 0}, "sliding_window: got 0, expected a whole number above 0"),
    ("qwen2", {**MIXED, "layer_types": None, "max_window_layers": 1}, "got 4 in some of the layers"),
    ("olmo2", {"attention_bias": True}, "attention_bias: got True, expected False"),
    ("gpt_neox", {"attention_bias": False}, "attention_bias: got False, expected True"),
    ("gpt_neox", {ROPE: {"partial_rotary_factor": 0.4}}, "rotary_pct: got 0.4, expected an even"),
    ("llama", {"sliding_window": 8}, "sliding_window: got 8, expected None"),
    ("llama", {"architectures": ["LlamaBiModel"]}, "architectures: got ['LlamaBiModel'], expected Llama"),
    ("llama", {"model_type": "gemma"}, "model_type: got 'gemma', expected one of llama, qwen2, qwen3, mist"),
    ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps: got '1e-6', expected float"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps: got nan, expected float"),
    ("llama", {"tie_word_embeddings": None}, "tie_word_embeddings: got None, expected bool"),
    ("llama", {"hidden_size": -32}, "hidden_size: got -32, expected a number above 0"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads: got 3, expected a divisor of 4"),
    ("llama", {"n_tokens": 51}, "n_tokens: got 51, expected 1 to vocab_size 50"),
    ("llama", {"objective": "masked_diffusion"}, "objective: got 'masked_diffusion', expected 'autor"),
    ("qwen3", {**MIXED, "layer_types": LAYERS}, "sliding_window: got 4 in some of the layers"),
    ("qwen3", {"model_type": "llama", "architectures": None}, "weights do not match the model configuration"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: got True"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights: got False, expected True"),
    ("gpt2", {"activation_function": "relu"}, "activation_function: got 'relu', expected 'gelu_new' or"),
    ("gpt2", {"tie_word_embeddings": False}, "lm_head.weight: missing, but tie_word_embeddings is false"),
    ("gpt2", {"n_layer": 3}, "weights do not match the model configuration"),
]


@pytest.mark.parametrize(("kind", "add", "sentence"), REFUSED_KEYS)
def test_a_key_that_changes_the_logits_is_refused_by_name(
    tmp_path: Path, hub: Any, kind: str, add: dict[str, Any], sentence: str
) -> None:
    shutil.copytree(hub(kind)[0], tmp_path / "hub")
    change_config(tmp_path / "hub", add)
    message = read_refusal(lambda: convert_checkpoint(tmp_path / "hub", tmp_path / "out", to="native"))
    assert sentence in str(message)
    assert not list(tmp_path.glob("out*"))


def ones(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("kind", "name", "tensor", "sentence"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.bias", ones(32), "do not match the model configuration"),
        ("llama", "score.weight", ones(2, 32), "got an unknown tensor, expected one of Llama's"),
        ("llama", "embed_tokens.weight", ones(50, 32), "got two tensors of this name, with and without"),
        ("llama", "model.norm.weight", ones(32, dtype=torch.int8), "quantised models are not supported"),
        ("gpt2", "lm_head.weight", ones(50, 32), "lm_head.weight: differs from the embedding"),
        ("gpt2", "score.weight", ones(2, 32), "score.weight: got an unknown tensor, expected one of GPT-2's"),
        ("gpt2", "transformer.h.0.crossattention.c_attn.weight", ones(32, 64), "crossattention"),
        ("gpt2", "transformer.h.0.attn.c_attn.bias", ones(95), "got 95 rows, expected 96"),
    ],
)
def test_a_tensor_that_is_neither_used_nor_redundant_is_refused(
    tmp_path: Path, hub: Any, kind: str, name: str, tensor: torch.Tensor, sentence: str
) -> None:
    shutil.copytree(hub(kind)[0], tmp_path, dirs_exist_ok=True)
    change_tensors(tmp_path, {name: tensor})
    assert sentence in str(read_refusal(lambda: read_huggingface(tmp_path)))


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ([], "got 0 files model-K-of-N.safetensors"),
        (["model-00001-of-00002"], "expected model.safetensors or all N of one model"),
        (["model-00001-of-00002", "model-00002-of-00002"], "in two files, expected one"),
        (["model-00001-of-00001"], None),
    ],
)
def test_the_numbered_files_of_a_model_are_complete(
    tmp_path: Path, hub: Any, names: list[str], sentence: str | None
) -> None:
    folder, theirs = hub("llama")
    shutil.copy(folder / "config.json", tmp_path)
    for name in names:
        shutil.copy(folder / "model.safetensors", tmp_path / f"{name}.safetensors")
    if sentence is None:
        assert_same_logits(tmp_path, theirs)
        return
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        read_huggingface(tmp_path)
