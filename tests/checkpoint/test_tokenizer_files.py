"""A tokenizer converted from the hub to a native checkpoint and back is the same in transformers. The prefix
of a text without context is lm-eval's model's."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from megatron.checkpoint.convert.formats import convert_checkpoint, read_any
from megatron.checkpoint.convert.huggingface import write_huggingface
from megatron.checkpoint.convert.tokenizer_files import find_prefix_id, write_tokenizer
from megatron.checkpoint.model_weights import save_weights
from megatron.evaluation.harness import harness_model
from megatron.evaluation.reader import Reader, Scoring
from megatron.generation.generate import generate
from megatron.generation.sampling import Sampling
from megatron.parallel.world import World
from megatron.tokenizer.kinds import load_tokenizer_by_name
from tests.checkpoint.conftest import import_transformers, weights_of
from tests.conftest import build_tiny

transformers = import_transformers()

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>", "<s>")  # ids from 256 on
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}é"
CHAT = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Hi"}]
SETTINGS: dict[str, dict[str, Any]] = {
    "chat": {
        "tokenizer_config.json": {
            "tokenizer_class": "GPT2Tokenizer", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
            "pad_token": "<pad>", "unk_token": "<|endoftext|>", "chat_template": TEMPLATE,
            "model_max_length": 99,
        }
    },
    "template in a file": {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|im_end|>",
            "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False, "special": True},
            "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        },
        "chat_template.jinja": TEMPLATE,
    },
    "map of special tokens": {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"},
        "special_tokens_map.json": {
            "bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": {"content": "<pad>"},
        },
    },
    "class only": {"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>"}},
    "no bos": {"tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}},
    "custom code": {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "auto_map": {"AutoTokenizer": ["own.Own", None]},
            "bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE,
        }
    },
}  # fmt: skip
BEGUN = {"template in a file", "map of special tokens"}  # cases whose tokenizer also puts <s> before a text
PREFIX = {"chat": 257, "template in a file": 260, "map of special tokens": 260, "class only": 256}
PREFIX |= {"no bos": 258, "custom code": 260}


def write_source(folder: Path, settings: dict[str, Any], begins: bool) -> Path:
    """Write a tokenizer.json of the 256 bytes and SPECIAL, and settings files."""
    folder.mkdir()
    ids = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=ids, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    if begins:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 260)])
    inner.save(str(folder / "tokenizer.json"))
    for name, content in settings.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function: case -> Llama folder `hub` with its tokenizer, converted to `native` and `back`."""

    @cache
    def build(case: str) -> Path:
        folder = tmp_path_factory.mktemp("case")
        write_huggingface(weights_of(build_tiny(n_tokens=261, vocab_rows=261)), folder / "hub")
        source = write_source(folder / "source", SETTINGS[case], case in BEGUN)
        shutil.copytree(source, folder / "hub", dirs_exist_ok=True)
        convert_checkpoint(folder / "hub", folder / "native", to="native")
        convert_checkpoint(folder / "native", folder / "back", to="huggingface")
        return folder

    return build


@pytest.mark.parametrize("case", SETTINGS)
def test_a_converted_tokenizer_is_the_same_in_transformers(hub_folder: Any, case: str) -> None:
    folder = hub_folder(case) / "back"
    load = transformers.AutoTokenizer.from_pretrained
    before, after = (load(path, trust_remote_code=False) for path in (hub_folder(case) / "hub", folder))
    for token in ("bos", "eos", "pad", "unk"):
        assert getattr(after, f"{token}_token_id") == getattr(before, f"{token}_token_id"), token
    text = "Hello <|im_start|>you</s> éa"
    assert after(text).input_ids == before(text).input_ids
    assert after.get_vocab() == before.get_vocab()
    assert after.chat_template == before.chat_template
    if before.chat_template:
        assert after.apply_chat_template(CHAT) == before.apply_chat_template(CHAT)
        assert "<|im_start|>user: Hello" in after.apply_chat_template(CHAT, tokenize=False)
    config = transformers.AutoConfig.from_pretrained(folder)
    # Qwen2Tokenizer pads with <|endoftext|> by default, which is not in config.json
    for token in ("bos", "eos") if case == "no bos" else ("bos", "eos", "pad"):
        assert getattr(config, f"{token}_token_id") == getattr(before, f"{token}_token_id"), token


@pytest.mark.parametrize("case", SETTINGS)
def test_the_prefix_is_that_of_lm_evals_model(hub_folder: Any, case: str) -> None:
    pytest.importorskip("accelerate", reason="lm-eval's hf model requires accelerate")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    world = World(0, 1, 0, torch.device("cpu"))
    texts = ["A text, longer than the sixty-four positions of the model: " * 3, "a", "é"]
    pairs = [("", " and"), ("A cat", " sat"), ("", "<|im_start|>a")]
    rolling = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    instances = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    for folder in (hub_folder(case) / "hub", hub_folder(case) / "back"):
        theirs = HFLM(
            pretrained=str(folder), batch_size=4, device="cpu", dtype="float32", softmax_dtype="float64"
        )
        reader = Reader(read_any(folder), Scoring(batch_size=2), world)
        assert reader.prefix_id == theirs.prefix_token_id == PREFIX[case]
        ours = harness_model(reader)
        expected = theirs.loglikelihood_rolling(rolling, disable_tqdm=True)
        assert ours.loglikelihood_rolling(rolling) == pytest.approx(expected, abs=1e-3)
        scores = theirs.loglikelihood(instances, disable_tqdm=True)
        result = ours.loglikelihood(instances)
        assert [log_p for log_p, _ in result] == pytest.approx([log_p for log_p, _ in scores], abs=1e-3)


def test_without_settings_the_files_name_the_tokens_that_the_tokenizer_uses(tmp_path: Path) -> None:
    for begins, bos_id in ((True, 260), (False, None)):
        source = write_source(tmp_path / f"source-{begins}", {}, begins)
        out = tmp_path / f"out-{begins}"
        out.mkdir()
        ids = write_tokenizer(str(source), out)
        assert ids == {"eos_token_id": 256} | ({"bos_token_id": bos_id} if begins else {})
        read = transformers.AutoTokenizer.from_pretrained(out)
        assert (read.bos_token_id, read.eos_token_id) == (bos_id, 256)
        assert find_prefix_id(str(source), load_tokenizer_by_name(str(source))) == (bos_id or 256)


def test_a_tokenizer_file_has_the_settings_next_to_it(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", SETTINGS["chat"], False)
    (tmp_path / "out").mkdir()
    ids = write_tokenizer(str(source / "tokenizer.json"), tmp_path / "out")
    assert (ids["bos_token_id"], ids["pad_token_id"]) == (257, 259)
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written["chat_template"] == TEMPLATE and written["model_max_length"] == 99
    assert written["eos_token"] == SPECIAL[ids["eos_token_id"] - 256]


def test_a_padding_id_past_the_embedding_is_not_exported(tmp_path: Path) -> None:
    """The embedding has 259 rows and <pad> is id 259: transformers would refuse this padding_idx."""
    source = write_source(tmp_path / "source", SETTINGS["chat"], False)
    model = build_tiny(n_tokens=259, vocab_rows=259)
    write_huggingface(weights_of(model, tokenizer=str(source)), tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (None, 257, 258)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("case", ["chat", "map of special tokens", "no bos"])
def test_generated_text_ends_where_that_of_the_exported_model_ends(tmp_path: Path, case: str) -> None:
    """Greedy text stops at the token that ended documents in training, [MASK] and padding never occur."""
    source = write_source(tmp_path / "source", SETTINGS[case], False)
    tokenizer = load_tokenizer_by_name(str(source))
    model = build_tiny(n_tokens=261, sharpness=4.0)
    embedding = model.embedding.weight.clone()
    embedding[tokenizer.eod_id] *= 4  # so that many texts end
    embedding[262] *= 9  # a row of padding, which would win often
    state = model.state_dict() | {"embedding.weight": embedding}
    weights = weights_of(model, tokenizer=str(source), state=state)
    save_weights(weights, tmp_path / "native")
    convert_checkpoint(tmp_path / "native", tmp_path / "out", to="huggingface")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    prompts = [[i, i + 1, 3 * i] for i in range(15)]
    options = {"max_new_tokens": 20, "sampling": Sampling(temperature=0), "stop_ids": [tokenizer.eod_id]}
    ours = generate(weights.build_model(), prompts, **options)
    for prompt, text in zip(prompts, ours, strict=True):
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, 3:].tolist()
        assert text == expected
    assert 0 < sum(text[-1] == tokenizer.eod_id and len(text) < 20 for text in ours) < 15
    assert max(map(max, ours)) < 261
