"""Reader of a run's YAML file and key=value overrides into one checked, frozen RunConfig.

No data file is opened. A corpus records the size of its vocabulary and its end-of-document id, and
plan/resolve.py passes the function that reads them.

Sections are read by section.py, not by pydantic. Measured with pydantic 2.14.3 and the same sections as its
dataclasses (328 lines instead of 555): importing the schema takes 245 ms instead of 23 ms, and
`tools/pretrain.py --help` 0.38 s of CPU time instead of 0.22 s. Its strict mode refuses dictionaries for
nested dataclasses, and its lax mode reads "yes" as true and "1e-3" as a number. Its errors suggest no nearest
key, so that conversions and messages would need code beside it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import OmegaConf

from megatron.config.check import check_config
from megatron.config.deepspeed_json import adopt_deepspeed_json, format_adopted
from megatron.config.hf import shape_from_hf
from megatron.config.migration.stub_keys import adopt_stub_keys
from megatron.config.presets import (
    SIZES_FILE,
    load_model_sizes,
    load_named_shape,
    padded_rows,
    suggest_nearest,
    swiglu_width,
)
from megatron.config.schema import DatasetConfig, RunConfig
from megatron.config.section import convert_value
from megatron.config.yaml_file import (
    MAX_INT,
    is_finite,
    load_yaml_file,
    merge_sections,
    parse_override,
    read_yaml,
)
from megatron.io import write_atomic
from megatron.log import get_logger

log = get_logger(__name__)

# keys from which others are computed before the types of all keys are checked
INTEGER_SHAPE_KEYS = (
    "d_model", "d_ff", "d_head", "n_heads", "n_layers", "n_tokens", "vocab_rows", "vocab_multiple",
)  # fmt: skip
REQUIRED_SHAPE_KEYS = ("d_model", "n_heads", "n_layers")  # keys that every named size defines
# (n_tokens or eod_id, section `dataset`) -> the number that the corpus records
VocabularyReader = Callable[[str, Mapping[str, Any]], int]
OBJECTIVE_ALIASES = {"ar": "autoregressive", "mdm": "masked_diffusion"}


def read_config(
    path: str | Path, overrides: Sequence[str] = (), vocabulary: VocabularyReader | None = None
) -> RunConfig:
    """Read a run's YAML file and apply `section.key=value` overrides.

    vocabulary   as in `build_config`

    Raises FileNotFoundError for a missing file, and ValueError for invalid content: one sentence with the key
    and, for an unknown key, the nearest one.
    """
    raw, adopted = adopt_deepspeed_json(read_yaml(path, overrides))
    if adopted:
        name = raw["dist"]["deepspeed_config"]
        log.info("dist.deepspeed_config: %s sets keys that are open:\n%s", name, format_adopted(adopted))
    _check_size_label(path, overrides)
    return build_config(raw, str(path), vocabulary)


def _check_size_label(path: str | Path, overrides: Sequence[str]) -> None:
    """Raise ValueError if `model.size=NAME` on the command line would only rename the shape of the file.

    A name that is not in the table of sizes is a label for an explicit shape. Label and shape must both be in
    the file or both on the command line.
    """
    words: dict[str, Any] = {}
    for word in overrides:
        words = merge_sections(words, parse_override(word))
    model_words = words.get("model")
    if not isinstance(model_words, dict):
        return
    size = model_words.get("size")
    # Without this check, a misspelt size on the command line would become the label of the file's shape, and
    # that shape would be trained.
    if size is None or str(size) in load_model_sizes():
        return
    if model_words.get("hf_config") is not None or all(model_words.get(key) for key in REQUIRED_SHAPE_KEYS):
        return
    # the file before overrides: its own label may be repeated on the command line
    content = load_yaml_file(Path(path))
    model = content.get("model") if isinstance(content, dict) else None
    file_model = model if isinstance(model, dict) else {}
    if str(file_model.get("size", "custom")) != str(size):
        hint = suggest_nearest(str(size), list(load_model_sizes()))
        raise ValueError(
            f"{path}: model.size: '{size}' is not in {SIZES_FILE.name}; {hint} "
            f"A new name needs its shape, {' '.join(f'model.{key}=...' for key in REQUIRED_SHAPE_KEYS)}"
        )


def build_config(
    raw: Any, where: str = "configuration", vocabulary: VocabularyReader | None = None
) -> RunConfig:
    """Build a RunConfig from nested dictionaries with the keys of `schema.py`.

    vocabulary   called for model.n_tokens and model.eod_id if they are needed and not set; without it they
                 must be set

    Raises ValueError as `read_config` does.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: got {type(raw).__name__}, expected sections with keys")
    try:
        raw = adopt_stub_keys(raw)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    model = raw.get("model") or {}
    data = raw.get("dataset") or {}
    raw = {**raw, "objective": _expand_objective_alias(raw.get("objective"))} if "objective" in raw else raw
    try:
        # the order matters: key names first, then values that follow from others, then types and combinations
        _check_section_keys(raw)
        resolved = {**raw, "model": _resolve_model(model, data, vocabulary or _refuse_vocabulary)}
        _fill_rows(resolved)
        _fill_positions(resolved)
        config = _build_section(RunConfig, resolved, "")
        check_config(config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return config


def _expand_objective_alias(objective: Any) -> Any:
    """Replace the alias `ar` or `mdm` by the objective's name, so that configs store only one spelling."""
    if isinstance(objective, dict) and str(objective.get("name")) in OBJECTIVE_ALIASES:
        return {**objective, "name": OBJECTIVE_ALIASES[objective["name"]]}
    return objective


def _refuse_vocabulary(key: str, data: Mapping[str, Any]) -> int:
    """Raise ValueError: the default VocabularyReader, for a configuration without its corpus."""
    corpus = data.get("path_train") or data.get("mixture")
    raise ValueError(f"model.{key}: missing, expected beside a corpus ({corpus}) that is not read. Set it.")


def _resolve_model(raw: Any, data: Mapping[str, Any], vocabulary: VocabularyReader) -> dict[str, Any]:
    """Return the complete shape from `size`, `hf_config` or explicit keys, and `vocabulary`."""
    if not isinstance(raw, dict):
        raise ValueError(f"model: got {raw!r}, expected keys such as size or d_model")
    shape = {
        key: value for key, value in raw.items() if key not in ("size", "hf_config") and value is not None
    }
    # explicit keys override hf_config, and are compared with a named size
    if raw.get("hf_config") is not None:
        shape = shape_from_hf(raw["hf_config"]) | shape
    if raw.get("size") is not None:
        shape = _resolve_named_shape(str(raw["size"]), shape)
    for key in INTEGER_SHAPE_KEYS:
        if not is_finite(shape.get(key, 0)) or abs(shape.get(key, 0)) > MAX_INT:
            raise ValueError(f"model.{key}: got {shape[key]!r}, expected int")
    if not shape.get("d_model"):
        raise ValueError(
            "model: no shape; set model.size (a name in utils/model_sizes.yaml), "
            "model.hf_config, or model.d_model, n_heads and n_layers"
        )
    for key in ("n_heads", "n_layers"):
        if not shape.get(key):
            raise ValueError(f"model.{key}: missing, expected with model.d_model={shape['d_model']}")
    if not shape.get("d_head"):
        if shape["d_model"] % shape["n_heads"]:
            raise ValueError(
                f"model.n_heads: got {shape['n_heads']}, expected a divisor of d_model {shape['d_model']}. "
                "Choose another, or set model.d_head."
            )
        shape["d_head"] = shape["d_model"] // shape["n_heads"]
    if not shape.get("d_ff"):
        gelu = shape.get("feed_forward") in (
            "gelu",
            "gelu_exact",
        )  # which has two matrices, of GPT-2's width 4 d
        shape["d_ff"] = 4 * shape["d_model"] if gelu else swiglu_width(shape["d_model"])
    if not shape.get("n_tokens"):
        shape["n_tokens"] = vocabulary("n_tokens", data)
    if shape.get("document_mask") and shape.get("eod_id") is None:
        shape["eod_id"] = vocabulary("eod_id", data)
    size = raw.get("size")
    return {"size": "custom" if size is None else str(size)} | shape


def _resolve_named_shape(size: str, shape: dict[str, Any]) -> dict[str, Any]:
    """Return the shape of a named size. Explicit keys beside it, as in a resolved run, must be equal to it.

    A name that is not in the table of sizes is a label for an explicit shape.
    """
    if not shape.get("d_model"):
        # explicit keys win here; those of REQUIRED_SHAPE_KEYS are compared below
        shape = load_named_shape(size) | shape
    named = load_model_sizes().get(size, {})
    for key in REQUIRED_SHAPE_KEYS:
        if key in named and named[key] != shape.get(key):
            raise ValueError(
                f"model.size: '{size}' has {key} {named[key]}, but the explicit shape has {shape.get(key)}. "
                "Set model.size=null, or model.hf_config, d_model, n_heads and n_layers to null."
            )
    return shape


def _fill_rows(resolved: dict[str, Any]) -> None:
    """Set the default rows of the embedding; vocab_rows replaces vocab_multiple."""
    model, objective = resolved["model"], resolved.get("objective")
    multiple = model.get("vocab_multiple")
    if multiple is not None and model.get("vocab_rows"):
        raise ValueError("model.vocab_multiple: got model.vocab_rows too. Remove one of the two settings.")
    if isinstance(multiple, int) and multiple > 0:
        options = objective if isinstance(objective, dict) else {}
        masks = options.get("name", "autoregressive") != "autoregressive" or options.get("masked_input_ratio")
        model["vocab_rows"] = padded_rows(model["n_tokens"], 1 if masks else 0, multiple)
        del model["vocab_multiple"]
    elif not model.get("vocab_rows"):
        model["vocab_rows"] = padded_rows(model["n_tokens"])


def _fill_positions(resolved: dict[str, Any]) -> None:
    """Set the default size of the table of learned positions: one row per position of a sample."""
    model, data = resolved["model"], resolved.get("dataset")
    if model.get("positions") == "learned" and model.get("n_positions") is None:
        seq_len = data.get("seq_len") if isinstance(data, dict) else None
        model["n_positions"] = DatasetConfig.seq_len if seq_len is None else seq_len


def config_to_dict(config: Any) -> dict[str, Any]:
    """Return nested dictionaries from which `build_config` builds an equal config."""
    return asdict(config)


def write_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration as YAML, atomically."""
    write_atomic(path, OmegaConf.to_yaml(OmegaConf.create(config_to_dict(config))))


def _check_keys(cls: type, raw: Any, path: str) -> None:
    if not isinstance(raw, dict):
        raise ValueError(f"{path.rstrip('.')}: got {raw!r}, expected keys")
    known_keys = [f.name for f in fields(cls)]
    for key in raw:
        if key not in known_keys:
            raise ValueError(f"unknown key '{path}{key}'; {suggest_nearest(str(key), known_keys)}")


def _check_section_keys(raw: dict[str, Any]) -> None:
    """Check the keys of all sections except the model's, before any value is computed from them.

    A misspelt dataset.path_train must not be reported as a missing vocabulary. The model's section is checked
    after it was completed, because it may have keys that ModelConfig does not have (hf_config).
    """
    _check_keys(RunConfig, raw, "")
    for name, hint in get_type_hints(RunConfig).items():
        if isinstance(hint, type) and is_dataclass(hint) and name != "model" and raw.get(name) is not None:
            _check_keys(hint, raw[name], f"{name}.")


def _build_section(cls: type, raw: Any, path: str) -> Any:
    """Build a dataclass from a dictionary, recursively, and check its keys and types."""
    _check_keys(cls, raw, path)
    fields_by_name = {f.name: f for f in fields(cls)}
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in raw.items():
        hint = hints[key]
        if isinstance(hint, type) and is_dataclass(hint):
            values[key] = _build_section(hint, {} if value is None else value, f"{path}{key}.")
        else:
            values[key] = convert_value(value, hint, fields_by_name[key], f"{path}{key}")
    return cls(**values)
