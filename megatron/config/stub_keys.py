"""Keys of exp-maxie's FSDP training stub by their names here. Names that both have are not listed."""

import copy
from typing import Any

from megatron.log import get_logger

log = get_logger(__name__)
HF = "model.hf_config"
RENAMES = {
    "checkpoint.path_chkpt_prev": "checkpoint.resume",
    "checkpoint.pretrain": "checkpoint.init_from",
    "dataset.path_val": "dataset.path_eval",
    "logging.directory": "logging.run_dir",  # directory/prefix
    "logging.prefix": "logging.run_dir",
    "lr_scheduler.min_lr": "lr_scheduler.lr_min_ratio",  # divided by optim.lr
    "misc.compiles_model": "dist.compile",
    "misc.max_eval_iter": "evaluation.max_samples",  # times dataset.batch_size
    "misc.sharding_stage": "dist.sharding_stage",
    f"{HF}.attention_probs_dropout_prob": "model.attention_dropout",
    f"{HF}.hidden_act": "model.feed_forward",  # gelu, by its tanh approximation
    f"{HF}.hidden_dropout_prob": "model.hidden_dropout",
    f"{HF}.initializer_range": "model.init_std",
    f"{HF}.layer_norm_eps": "model.norm_eps",
}
# of its loader, of images, or always so here; some are whole sections
WITHOUT_EFFECT = (
    "checkpoint.offload_to_cpu", "checkpoint.preempt_chkpt_saving_iterations",
    "checkpoint.preempt_metadata_path", "checkpoint.rank0_only", "dataset.cache_size", "dataset.debug",
    "dataset.drop_last_in_loader", "dataset.drop_last_in_sampler", "dataset.input", "dataset.num_channels",
    "dataset.pin_memory", "dataset.prefetch_factor", "dataset.seg_size", "dataset.transforms",
    "dist.uses_unique_world_seed", "logging.level", "lr_scheduler.scheduler_update_iterations",
    "misc.data_dump_on", "misc.max_epochs", "misc.max_eval_retry", "misc.monitors_dynamics",
    "misc.peak_flops_per_sec", "model.from_scratch", "optim.fused", f"{HF}.image_size", f"{HF}.mask_ratio",
    f"{HF}.norm_pix_loss", f"{HF}.num_channels", f"{HF}.patch_size", f"{HF}.qkv_bias",
    f"{HF}.decoder_hidden_size", f"{HF}.decoder_intermediate_size", f"{HF}.decoder_num_attention_heads",
    f"{HF}.decoder_num_hidden_layers",
)  # fmt: skip
Raw = dict[str, Any]


def adopt_stub_keys(raw: Raw) -> Raw:
    """Return settings with the stub's keys renamed; those without effect are dropped and logged.

    Raises ValueError for a key beside another value of its successor, and for the placeholder of a data file.
    """
    settings, stub_settings = copy.deepcopy(raw), {}
    # Llama's hf_config has hidden_act and initializer_range too; its gelu would be a gated one
    marks = {name.removeprefix(f"{HF}.") for name in (*RENAMES, *WITHOUT_EFFECT)}
    hf_config = _find_section(settings, HF)
    is_stub = "model_type" not in hf_config and hf_config.keys() & marks - {"hidden_act", "initializer_range"}
    for name in (*RENAMES, *WITHOUT_EFFECT):
        section, _, key = name.rpartition(".")
        if key in (keys := _find_section(settings, section)) and (is_stub or section != HF):
            stub_settings[name] = keys.pop(key)
    if "loss" in settings and settings.pop("loss") not in ({"grad_accum_steps": 1}, {}):
        raise ValueError("loss: expected grad_accum_steps 1. Set dataset.batch_size and microbatch_size.")
    if dropped := [name for name in stub_settings if name in WITHOUT_EFFECT]:
        log.warning("keys of the training stub without effect here: %s", ", ".join(dropped))
    for name, value in _convert(stub_settings, settings).items():
        section, _, key = name.partition(".")
        keys = settings.setdefault(section, {})
        if isinstance(keys, dict) and value is not None:  # the reader of the section reports another type
            if keys.setdefault(key, value) not in (None, value):
                raise ValueError(f"{name}: got {keys[key]!r}, but {value!r} from the stub. Set one of them.")
            keys[key] = value
    _replace_placeholders(_find_section(settings, "dataset"))
    return settings


def _find_section(settings: Raw, place: str) -> Raw:
    """Return a section by its dotted name, or {} if there is none."""
    section: Any = settings
    for word in place.split("."):
        section = section.get(word) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else {}


def _convert(stub_settings: Raw, settings: Raw) -> Raw:
    """Return the renamed settings by their names here, in the units of these."""
    converted = {RENAMES[name]: value for name, value in stub_settings.items() if name in RENAMES}
    peak = _find_section(settings, "optim").get("lr", 3e-4)
    batch = _find_section(settings, "dataset").get("batch_size", 256)
    rate, n_batches = stub_settings.get("lr_scheduler.min_lr"), stub_settings.get("misc.max_eval_iter")
    # values of wrong types stay as they are, and the reader of their section reports them
    if isinstance(rate, int | float) and isinstance(peak, int | float) and peak > 0:
        converted["lr_scheduler.lr_min_ratio"] = rate / peak
    if isinstance(n_batches, int) and isinstance(batch, int | float):
        converted["evaluation.max_samples"] = n_batches * batch
    if "logging.run_dir" in converted:
        parts = stub_settings.get("logging.directory") or "experiments", stub_settings.get("logging.prefix")
        converted["logging.run_dir"] = "/".join(str(part) for part in parts if part)
    return converted


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
        log.warning("dataset.%s: %s is replaced by synthetic tokens, as the training data", key, data[key])
        data[key] = "synthetic"
