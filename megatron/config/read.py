"""YAML and key=value words, checked, to one frozen RunConfig. After this nothing writes to it."""

import types
from collections.abc import Sequence
from dataclasses import Field, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

from megatron.config.check import check_checkpoint, check_model, check_objective, check_optim
from megatron.config.datapaths import SYNTHETIC, read_corpora, read_sidecar
from megatron.config.engines import check_engine
from megatron.config.hf import shape_from_hf
from megatron.config.layout import check_layout
from megatron.config.length import check_length
from megatron.config.mixture_use import read_resolved
from megatron.config.presets import SIZES_FILE, model_sizes, nearest, padded_rows, shape_of_size, swiglu_width
from megatron.config.schema import DatasetConfig, RunConfig
from megatron.config.yaml_file import (
    MOST_INT,
    is_finite,
    is_one_line,
    load_file,
    merge,
    parse_override,
    read_yaml,
)

MOST_FLOAT = 1e300  # sums and products of settings stay finite
# keys of a shape that others are computed from before all are checked
COMPUTED_WITH = ("d_model", "d_ff", "d_head", "n_heads", "n_layers", "n_tokens", "vocab_rows")
SHAPE = ("d_model", "n_heads", "n_layers")  # what a name of a size stands for at least
OBJECTIVE_ALIASES = {"ar": "autoregressive", "mdm": "masked_diffusion"}


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's YAML file and apply `section.key=value` words over it.

    Raises FileNotFoundError for a missing file and ValueError for what cannot be read: one sentence that
    names the key and offers the nearest.
    """
    raw = read_yaml(path, overrides)
    _refuse_relabelling(path, overrides)
    return build_config(raw, where=str(path))


def _refuse_relabelling(path: str | Path, overrides: Sequence[str]) -> None:
    """ValueError where `model.size=NAME` on the command line would only rename the shape of the file.

    A name that is not one of the ladder labels a shape that is spelt out beside it: both in the file, or both
    on the command line.
    """
    words: dict[str, Any] = {}
    for word in overrides:
        words = merge(words, parse_override(word))
    given = words.get("model")
    size = given.get("size") if isinstance(given, dict) else None
    if size is None or str(size) in model_sizes():
        return
    if given.get("hf_config") is not None or all(given.get(key) for key in SHAPE):
        return
    written = load_file(Path(path))
    model = written.get("model") if isinstance(written, dict) else None
    of_file = model if isinstance(model, dict) else {}
    if str(of_file.get("size", "custom")) != str(size):
        near = nearest(str(size), list(model_sizes()))
        raise ValueError(
            f"{path}: model.size: '{size}' is not in {SIZES_FILE.name}; {near} "
            f"A new name is given with its shape, {' '.join(f'model.{key}=...' for key in SHAPE)}"
        )


def refuse_unknown(raw: Any, known: Sequence[str], where: str) -> None:
    """ValueError for what is no dictionary, or has a key that is not `known`: the nearest is offered."""
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: wanted the keys {', '.join(known)}, found {raw!r}")
    for key in raw:
        if key not in known:
            raise ValueError(f"{where}: unknown key '{key}'; {nearest(str(key), list(known))}")


def build_config(raw: Any, where: str = "configuration") -> RunConfig:
    """A RunConfig from nested dictionaries with the keys of `schema.py`. ValueError as `read_config`."""
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: wanted sections with keys, found {type(raw).__name__}")
    model = raw.get("model") or {}
    data = raw.get("dataset") or {}
    raw = {**raw, "objective": _whole_name(raw.get("objective"))} if "objective" in raw else raw
    try:
        _refuse_misspelt(raw)
        mixture = data.get("mixture")
        prefix = data.get("path_train") if mixture is None else read_resolved(str(mixture)).pairs[0]
        resolved = {**raw, "model": resolve_model(model, prefix)}
        _fill_positions(resolved)
        config = _section(RunConfig, resolved, "")
        _check(config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return config


def _whole_name(objective: Any) -> Any:
    """The section with `ar` or `mdm` spelt out, so that one objective has one name wherever it is told."""
    if isinstance(objective, dict) and str(objective.get("name")) in OBJECTIVE_ALIASES:
        return {**objective, "name": OBJECTIVE_ALIASES[objective["name"]]}
    return objective


def resolve_model(raw: dict[str, Any], data_prefix: str | None) -> dict[str, Any]:
    """The whole shape: from `size`, from `hf_config` or as written; the vocabulary from the sidecar."""
    if not isinstance(raw, dict):
        raise ValueError(f"model: wanted keys such as size or d_model, found {raw!r}")
    shape = {
        key: value for key, value in raw.items() if key not in ("size", "hf_config") and value is not None
    }
    if raw.get("hf_config") is not None:
        shape = shape_from_hf(raw["hf_config"]) | shape
    if raw.get("size") is not None:
        shape = _named_shape(str(raw["size"]), shape)
    for key in COMPUTED_WITH:
        if not is_finite(shape.get(key, 0)) or abs(shape.get(key, 0)) > MOST_INT:
            raise ValueError(f"model.{key}: found {shape[key]!r}, wanted int")
    if not shape.get("d_model"):
        raise ValueError(
            "model: no shape; give model.size (a name of utils/model_sizes.yaml), "
            "model.hf_config, or model.d_model, n_heads and n_layers"
        )
    for key in ("n_heads", "n_layers"):
        if not shape.get(key):
            raise ValueError(f"model.{key}: missing beside model.d_model={shape['d_model']}")
    if not shape.get("d_head"):
        if shape["d_model"] % shape["n_heads"]:
            raise ValueError(
                f"model.n_heads: {shape['n_heads']} does not divide d_model {shape['d_model']}; "
                "choose another or give model.d_head"
            )
        shape["d_head"] = shape["d_model"] // shape["n_heads"]
    if not shape.get("d_ff"):
        gelu = shape.get("feed_forward") == "gelu"  # two matrices: GPT-2's width
        shape["d_ff"] = 4 * shape["d_model"] if gelu else swiglu_width(shape["d_model"])
    if not shape.get("n_tokens"):
        shape["n_tokens"] = _tokens_of_sidecar(data_prefix)
    if not shape.get("vocab_rows"):
        shape["vocab_rows"] = padded_rows(shape["n_tokens"])
    if shape.get("document_mask") and shape.get("eod_id") is None:
        shape["eod_id"] = _eod_of_sidecar(data_prefix)
    size = raw.get("size")
    return {"size": "custom" if size is None else str(size)} | shape


def _named_shape(size: str, shape: dict[str, Any]) -> dict[str, Any]:
    """The shape of a name of the ladder; what is spelt out beside it, as in a resolved run, must be the same.

    Other names label a shape that is spelt out.
    """
    if not shape.get("d_model"):
        shape = shape_of_size(size) | shape
    named = model_sizes().get(size, {})
    for key in SHAPE:
        if key in named and named[key] != shape.get(key):
            raise ValueError(
                f"model.size: '{size}' has {key} {named[key]}, the shape beside it {shape.get(key)}; set "
                "model.size=null, or model.hf_config, d_model, n_heads and n_layers to null"
            )
    return shape


def _fill_positions(resolved: dict[str, Any]) -> None:
    """A table of learned positions has a row for each position of a sample, unless the shape says more."""
    model, data = resolved["model"], resolved.get("dataset")
    if model.get("positions") == "learned" and model.get("n_positions") is None:
        told = data.get("seq_len") if isinstance(data, dict) else None
        model["n_positions"] = DatasetConfig.seq_len if told is None else told


def as_dict(config: Any) -> dict[str, Any]:
    """Nested dictionaries that `build_config` reads back to an equal config."""
    return asdict(config)


def write_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration as YAML."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(as_dict(config))))


def _tokens_of_sidecar(prefix: str | None) -> int:
    if prefix is None:
        raise ValueError(
            "dataset.path_train: missing; give a .bin/.idx prefix, a data-path file or synthetic "
            "(DATA=... of the training scripts), or model.n_tokens where no text is wanted"
        )
    try:
        prefix = read_corpora(prefix)[0].prefix  # all of a blend are of one tokenizer
        return int(read_sidecar(prefix)["tokenizer"]["n_tokens"])
    except FileNotFoundError as error:
        if not Path(f"{prefix}.idx").is_file():
            raise ValueError(f"dataset.path_train: {error}") from error
        raise ValueError(
            f"dataset.path_train: {prefix} has no sidecar (.json) that says how many ids its tokenizer has. "
            "Give that number, as in model.n_tokens=50257."
        ) from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"{prefix}.json: says no tokenizer.n_tokens; give model.n_tokens") from error


def _eod_of_sidecar(prefix: str | None) -> int:
    told = None
    if prefix is not None:
        prefix = read_corpora(prefix)[0].prefix  # all of a blend are of one tokenizer
        told = (read_sidecar(prefix).get("tokenizer") or {}).get("eod_id")
    if not isinstance(told, int):
        raise ValueError(
            "model.document_mask: no end-of-document id; give model.eod_id, "
            "or a dataset.path_train whose sidecar says tokenizer.eod_id"
        )
    return told


def _refuse_unknown_keys(cls: type, raw: Any, path: str) -> None:
    if not isinstance(raw, dict):
        raise ValueError(f"{path.rstrip('.')}: wanted keys, found {raw!r}")
    known = [f.name for f in fields(cls)]
    for key in raw:
        if key not in known:
            raise ValueError(f"unknown key '{path}{key}'; {nearest(str(key), known)}")


def _refuse_misspelt(raw: dict[str, Any]) -> None:
    """Before anything follows from the keys: a misspelt dataset.path_train is no missing vocabulary.

    The model's section is completed first: it may name what no ModelConfig has.
    """
    _refuse_unknown_keys(RunConfig, raw, "")
    for name, hint in get_type_hints(RunConfig).items():
        if is_dataclass(hint) and name != "model" and raw.get(name) is not None:
            _refuse_unknown_keys(hint, raw[name], f"{name}.")


def _section(cls: type, raw: Any, path: str) -> Any:
    """One dataclass from one dictionary, recursively; every key known and every value of its type."""
    _refuse_unknown_keys(cls, raw, path)
    known = {f.name: f for f in fields(cls)}
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in raw.items():
        hint = hints[key]
        if is_dataclass(hint):
            values[key] = _section(hint, {} if value is None else value, f"{path}{key}.")
        else:
            values[key] = _value(value, hint, known[key], f"{path}{key}")
    return cls(**values)


def _value(value: Any, hint: Any, of: Field, name: str) -> Any:
    """`value` as the field's type; an int stands for a float and 1e9 for an int, nothing else."""
    kinds = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    wanted = next(kind for kind in kinds if kind is not type(None))
    if type(value) in (int, float) and not (is_finite(value) and abs(value) <= MOST_FLOAT):
        raise ValueError(
            f"{name}: got {value!r}, expected a finite number. Leave the key out for its default."
        )
    if wanted is float and type(value) is int:
        value = float(value)
    if wanted is str and type(value) in (int, float):
        value = str(value)
    if wanted is int and type(value) is float and value.is_integer():
        value = int(value)  # 1e9 tokens
    if wanted is int and type(value) is int and abs(value) > MOST_INT:
        raise ValueError(f"{name}: got {value}, expected a number below 2^63. Write a smaller one.")
    if wanted is str and type(value) is str and not is_one_line(value):
        raise ValueError(f"{name}: got {value!r}, expected one line. Remove control characters.")
    if get_origin(wanted) is list:
        return _list(value, wanted, name)
    if type(value) is not wanted:
        raise ValueError(f"{name}: found {value!r}, wanted {wanted.__name__}")
    choices = of.metadata.get("choices") or ()
    if choices and value not in choices:
        raise ValueError(f"{name}: found {value!r}, wanted one of {', '.join(map(str, choices))}")
    above = of.metadata.get("above")
    if above is not None and not value > above:
        raise ValueError(f"{name}: found {value}, wanted more than {above}")
    return value


def _list(value: Any, wanted: Any, name: str) -> list[Any]:
    (kind,) = get_args(wanted)
    if not isinstance(value, list) or any(type(one) is not kind for one in value):
        raise ValueError(f"{name}: found {value!r}, wanted a list of {kind.__name__}")
    return value


def _check(config: RunConfig) -> None:
    """What one key says about another. ValueError names both."""
    check_checkpoint(config.checkpoint)
    check_model(config)
    check_objective(config)
    check_optim(config.optim)
    # models from elsewhere have a row for each token and no more; only diffusion needs one for [MASK]
    spare = 0 if config.objective.name == "autoregressive" else 1
    if config.model.vocab_rows < config.model.n_tokens + spare:
        raise ValueError(
            f"model.vocab_rows: {config.model.vocab_rows} rows are too few for {config.model.n_tokens} tokens"
            f"{' and [MASK]' if spare else ''}; leave the key out"
        )
    data = config.dataset
    if data.mixture is not None and (data.path_train is not None or data.order != "epoch"):
        raise ValueError("dataset.mixture: stands in for path_train and order; leave those out")
    check_length(config.lr_scheduler)
    endless = data.path_train == SYNTHETIC and data.unique_tokens is None
    if endless and config.lr_scheduler.total_epochs is not None:
        raise ValueError(
            "lr_scheduler.total_epochs: synthetic tokens have no epochs; give total_iterations, or "
            "dataset.unique_tokens for them to repeat"
        )
    if config.dataset.unique_tokens is not None:
        _check_unique_tokens(config.dataset)
    window = config.logging.profile_steps
    if window is not None and (len(window) != 2 or not 1 <= window[0] <= window[1]):
        raise ValueError(f"logging.profile_steps: found {window}, wanted [first, last], counted from 1")
    if config.misc.seed < 0:
        raise ValueError(f"misc.seed: found {config.misc.seed}, wanted 0 or more")
    check_engine(config.dist, config.optim)
    check_layout(config)


def _check_unique_tokens(data: DatasetConfig) -> None:
    """ValueError where there are no whole samples of a corpus to take the first of."""
    if data.mixture is not None:
        raise ValueError(
            "dataset.unique_tokens: a mixture says itself what it holds; leave out one of the two"
        )
    if data.order == "megatron":
        raise ValueError(
            "dataset.unique_tokens: wants dataset.order=epoch; in Megatron's order samples are cut anew in "
            "every epoch, take tools/subset_corpus.py instead"
        )
