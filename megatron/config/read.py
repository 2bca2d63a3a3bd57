"""Reader of a run's YAML file and key=value overrides into one checked, frozen RunConfig.

No data file is opened. A corpus records the size
of its vocabulary and its end-of-document id,
and plan/resolve.py passes the function that reads them.

Sections are read by section.py, not by pydantic, which takes 245 ms to
import and suggests no nearest key.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from megatron.config.check import check_config
from megatron.config.hf import shape_from_hf
from megatron.config.presets import (
    SIZES_FILE,
    VOCAB_MULTIPLE,
    load_model_sizes,
    load_named_shape,
    padded_rows,
    suggest_nearest,
    swiglu_width,
)
from megatron.config.schema import DatasetConfig, ModelConfig, ObjectiveConfig, RunConfig
from megatron.config.section import check_known_keys, convert_keys, read_section
from megatron.config.stub_keys import adopt_stub_keys
from megatron.config.yaml_file import parse_overrides, read_yaml
from megatron.io import write_atomic

REQUIRED_SHAPE_KEYS = ("d_model", "n_heads", "n_layers")  # keys that every named size defines
# (n_tokens or eod_id, section `dataset`) -> the
# number that the corpus records
VocabularyReader = Callable[[str, Mapping[str, Any]], int]
# Keys of `dist` in the configurations of earlier
# runs: values without effect, and the fix of others.
REMOVED_KEYS: dict[str, tuple[tuple[Any, ...], str]] = {
    "cuda_graphs": (("auto", False), "Omit it: dist.compile compiles the blocks on a GPU."),
    "attention_backend": (("auto",), "Omit it: torch chooses the kernel."),
    "context_method": (("ulysses",), "Omit it, and use at most as many context ranks as heads."),
}
OBJECTIVE_ALIASES = {"ar": "autoregressive", "mdm": "masked_diffusion"}


def read_config(
    path: str | Path, overrides: Sequence[str] = (), vocabulary: VocabularyReader | None = None
) -> RunConfig:
    """Read a run's YAML file and apply `section.key=value` overrides.

    vocabulary   as in `build_config`

    Raises FileNotFoundError for a missing file, and ValueError for
    invalid content: one sentence with the key and, for an unknown key,
    the nearest one.
    """
    _check_size_label(path, overrides)
    return build_config(read_yaml(path, overrides), str(path), vocabulary)


def _check_size_label(path: str | Path, overrides: Sequence[str]) -> None:
    """Raise ValueError if `model.size=NAME` on the command line would only rename the shape of the file.

    A name that is not in the table of sizes is a label for an explicit
    shape, which must be on the command line too: a misspelt size must
    not train the file's shape.
    """
    words = parse_overrides(overrides).get("model")
    size = words.get("size") if isinstance(words, dict) else None
    if not isinstance(words, dict) or size is None or str(size) in load_model_sizes():
        return
    if words.get("hf_config") is None and not all(words.get(key) for key in REQUIRED_SHAPE_KEYS):
        hint = suggest_nearest(str(size), list(load_model_sizes()))
        raise ValueError(
            f"{path}: model.size: '{size}' is not in {SIZES_FILE.name}; {hint} "
            f"A new name needs its shape, {' '.join(f'model.{key}=...' for key in REQUIRED_SHAPE_KEYS)}"
        )


def build_config(
    raw: Any, where: str = "configuration", vocabulary: VocabularyReader | None = None
) -> RunConfig:
    """Build a RunConfig from nested dictionaries with the keys of `schema.py`.

    vocabulary   called for model.n_tokens and model.eod_id if they
                 are needed and not set; without it they must be set

    Raises ValueError as `read_config` does.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: got {type(raw).__name__}, expected sections with keys")
    try:
        raw = _drop_removed_keys(_expand_objective_alias(adopt_stub_keys(raw)))
        sections = {key.name: key.type for key in fields(RunConfig) if is_dataclass(key.type)}
        check_known_keys(raw, ["name", *sections], "")
        values = convert_keys(RunConfig, {key: raw[key] for key in raw.keys() - sections.keys()}, "", "")
        for key, cls in sections.items():
            if key != "model":
                values[key] = read_section(cls, raw.get(key) or {}, key)  # type: ignore[arg-type]  # a class
        values["model"] = _build_model(
            raw.get("model") or {}, values["dataset"], values["objective"], vocabulary or _refuse_vocabulary
        )
        config = RunConfig(**values)
        check_config(config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return config


def _expand_objective_alias(raw: dict[str, Any]) -> dict[str, Any]:
    """Replace the alias `ar` or `mdm` by the objective's name, so that configs store only one spelling."""
    objective = raw.get("objective")
    if isinstance(objective, dict) and str(objective.get("name")) in OBJECTIVE_ALIASES:
        return {**raw, "objective": {**objective, "name": OBJECTIVE_ALIASES[objective["name"]]}}
    return raw


def _drop_removed_keys(raw: dict[str, Any]) -> dict[str, Any]:
    """Return settings without keys of earlier versions. Raises ValueError for one that has an effect."""
    if not isinstance(raw.get("dist"), dict):
        return raw
    for key, (neutral, fix) in REMOVED_KEYS.items():
        if raw["dist"].get(key) not in (None, *neutral):
            raise ValueError(f"dist.{key}: got {raw['dist'][key]}, but this key was removed. {fix}")
    return {**raw, "dist": {key: raw["dist"][key] for key in raw["dist"].keys() - REMOVED_KEYS}}


def _refuse_vocabulary(key: str, data: Mapping[str, Any]) -> int:
    """Raise ValueError: the default VocabularyReader, for a configuration without its corpus."""
    corpus = data["path_train"] or data["mixture"]
    raise ValueError(f"model.{key}: missing, expected beside a corpus ({corpus}) that is not read. Set it.")


def _build_model(
    raw: Any, data: DatasetConfig, objective: ObjectiveConfig, vocabulary: VocabularyReader
) -> ModelConfig:
    """Return the complete shape from `size`, `hf_config` or explicit keys, and `vocabulary`."""
    if not isinstance(raw, dict):
        raise ValueError(f"model: got {raw!r}, expected keys such as size or d_model")
    shape = {key: value for key, value in raw.items() if key != "hf_config" and value is not None}
    # explicit keys override hf_config,
    # and are compared with a named size
    if raw.get("hf_config") is not None:
        shape = shape_from_hf(raw["hf_config"]) | shape
    if "size" in shape:
        shape = _resolve_named_shape(str(shape["size"]), shape)
    shape = convert_keys(ModelConfig, shape, "model")
    if "d_model" not in shape:
        raise ValueError(
            "model: no shape; set model.size (a name in utils/model_sizes.yaml), "
            "model.hf_config, or model.d_model, n_heads and n_layers"
        )
    for key in ("n_heads", "n_layers"):
        if key not in shape:
            raise ValueError(f"model.{key}: missing, expected with model.d_model={shape['d_model']}")
    if "d_head" not in shape:
        if shape["d_model"] % shape["n_heads"]:
            raise ValueError(
                f"model.n_heads: got {shape['n_heads']}, expected a divisor of d_model {shape['d_model']}. "
                "Choose another, or set model.d_head."
            )
        shape["d_head"] = shape["d_model"] // shape["n_heads"]
    if "d_ff" not in shape:
        # a GELU layer has two matrices, of GPT-2's width 4 d
        gelu = shape.get("feed_forward", "swiglu") != "swiglu"
        shape["d_ff"] = 4 * shape["d_model"] if gelu else swiglu_width(shape["d_model"])
    if "n_tokens" not in shape:
        shape["n_tokens"] = vocabulary("n_tokens", vars(data))
    if shape.get("document_mask") and "eod_id" not in shape:
        shape["eod_id"] = vocabulary("eod_id", vars(data))
    if shape.get("positions") == "learned":  # one row per position of a sample
        shape.setdefault("n_positions", data.seq_len)
    multiple = shape.pop("vocab_multiple", None)
    if multiple is not None and "vocab_rows" in shape:
        raise ValueError("model.vocab_multiple: got model.vocab_rows too. Remove one of the two settings.")
    masks = multiple is None or objective.name != "autoregressive" or objective.masked_input_ratio > 0
    shape.setdefault("vocab_rows", padded_rows(shape["n_tokens"], int(masks), multiple or VOCAB_MULTIPLE))
    return ModelConfig(**shape)


def _resolve_named_shape(size: str, shape: dict[str, Any]) -> dict[str, Any]:
    """Return the shape of a named size. Explicit keys beside it, as in a resolved run, must be equal to it.

    A name that is not in the table of sizes
    is a label for an explicit shape.
    """
    if not shape.get("d_model"):
        # explicit keys win here; keys in
        # REQUIRED_SHAPE_KEYS are compared below
        shape = load_named_shape(size) | shape
    named = load_model_sizes().get(size, {})
    for key in REQUIRED_SHAPE_KEYS:
        if key in named and named[key] != shape.get(key):
            raise ValueError(
                f"model.size: '{size}' has {key} {named[key]}, but the explicit shape has {shape.get(key)}. "
                "Set model.size=null, or model.hf_config, d_model, n_heads and n_layers to null."
            )
    return shape


def config_to_dict(config: Any) -> dict[str, Any]:
    """Return nested dictionaries from which `build_config` builds an equal config."""
    return asdict(config)


def write_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration as YAML, atomically."""
    write_atomic(path, OmegaConf.to_yaml(OmegaConf.create(config_to_dict(config))))
