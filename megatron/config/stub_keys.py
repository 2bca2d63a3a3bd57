"""Keys of exp-maxie's training stub by their names here: the table utils/stub_keys.yaml."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

from megatron.config.yaml_file import read_yaml
from megatron.log import get_logger

log = get_logger(__name__)
# a link to utils/stub_keys.yaml; a copy of it in a wheel
TABLE_FILE = Path(__file__).with_name("stub_keys.yaml")
HF = "model.hf_config"
Raw = dict[str, Any]


@cache
def load_stub_keys() -> dict[str, dict[str, str | None]]:
    """Return section -> key -> name here, or None for a key without effect."""
    return read_yaml(TABLE_FILE)


def adopt_stub_keys(raw: Raw) -> Raw:
    """Return settings with the stub's keys renamed; those without effect are dropped and logged.

    Raises ValueError for a key beside another value of its successor,
    and for a .csv file as a dataset.
    """
    settings = copy.deepcopy(raw)
    renamed: Raw = {}
    dropped = []
    sections = {name: keys for name, keys in settings.items() if isinstance(keys, dict)}
    hf_config = sections.get("model", {}).get("hf_config")
    # Llama's hf_config has hidden_act and initializer_range too; its
    # gelu would be a gated one
    marks = load_stub_keys()[HF].keys() - {"hidden_act", "initializer_range"}
    if isinstance(hf_config, dict) and "model_type" not in hf_config and marks & hf_config.keys():
        sections[HF] = hf_config
    for section, table in load_stub_keys().items():
        keys = sections.get(section, {})
        for key in [key for key in table if key in keys]:
            value, successor = keys.pop(key), table[key]
            if successor is None:
                dropped.append(f"{section}.{key}")
            else:
                renamed[successor] = _convert(key, value, sections, renamed)
    if settings.pop("loss", {}) not in ({"grad_accum_steps": 1}, {}):
        raise ValueError("loss: expected grad_accum_steps 1. Set dataset.batch_size and microbatch_size.")
    if dropped:
        log.warning("keys of the training stub without effect here: %s", ", ".join(dropped))
    for name, value in renamed.items():
        section, _, key = name.partition(".")
        keys = settings.setdefault(section, {})
        if isinstance(keys, dict) and value is not None:  # the reader of the section reports another type
            if keys.get(key) not in (None, value):
                raise ValueError(f"{name}: got {keys[key]!r}, but {value!r} from the stub. Set one of them.")
            keys[key] = value
    _replace_placeholders(sections.get("dataset", {}))
    return settings


def _convert(key: str, value: Any, sections: Raw, renamed: Raw) -> Any:
    """Return a value in the unit of its successor; one of a wrong type as it is, for the reader to refuse."""
    peak = sections.get("optim", {}).get("lr", 3e-4)
    batch = sections.get("dataset", {}).get("batch_size", 256)
    if key == "min_lr" and {type(value), type(peak)} <= {int, float} and peak > 0:
        return value / peak
    if key == "max_eval_iter" and type(value) is int and type(batch) in (int, float):
        return value * batch
    if key == "directory":
        return value or "experiments"
    if key == "prefix":  # which follows `directory` in the table
        directory = renamed.get("logging.run_dir", "experiments")
        return f"{directory}/{value}" if value else directory
    return value


def _replace_placeholders(data: Raw) -> None:
    """Raise ValueError for a .csv file of the stub as a dataset; held-out tokens follow synthetic ones."""
    for key in ("path_train", "path_eval"):
        if not str(data.get(key)).endswith(".csv"):
            continue
        if data.get("path_train") != "synthetic":
            raise ValueError(
                f"dataset.{key}: got {data[key]}, expected the prefix of a .bin/.idx dataset. For random "
                "tokens instead of data, set dataset.path_train=synthetic."
            )
        log.warning("dataset.%s: %s is replaced by synthetic tokens", key, data[key])
        data[key] = "synthetic"
