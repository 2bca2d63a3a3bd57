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
    "misc.max_epochs": "lr_scheduler.total_epochs",  # unless another length is set
    "misc.max_eval_iter": "evaluation.max_samples",  # times dataset.batch_size
    "misc.sharding_stage": "dist.sharding_stage",
    f"{HF}.attention_probs_dropout_prob": "model.attention_dropout",
    f"{HF}.hidden_act": "model.feed_forward",  # gelu, by its tanh approximation
    f"{HF}.hidden_dropout_prob": "model.hidden_dropout",
    f"{HF}.initializer_range": "model.init_std",
    f"{HF}.layer_norm_eps": "model.norm_eps",
}
# of its loader, of images, or always so here; whole sections too
WITHOUT_EFFECT = (
    "checkpoint.offload_to_cpu", "checkpoint.preempt_chkpt_saving_iterations",
    "checkpoint.preempt_metadata_path", "checkpoint.rank0_only", "dataset.cache_size", "dataset.debug",
    "dataset.drop_last_in_loader", "dataset.drop_last_in_sampler", "dataset.input", "dataset.num_channels",
    "dataset.pin_memory", "dataset.prefetch_factor", "dataset.seg_size", "dataset.transforms",
    "dist.uses_unique_world_seed", "logging.level", "loss.grad_accum_steps",
    "lr_scheduler.scheduler_update_iterations", "misc.data_dump_on", "misc.max_eval_retry",
    "misc.monitors_dynamics", "misc.peak_flops_per_sec", "model.from_scratch", "optim.fused",
    *(f"{HF}.{key}" for key in (
        "decoder_hidden_size", "decoder_intermediate_size", "decoder_num_attention_heads",
        "decoder_num_hidden_layers", "image_size", "mask_ratio", "norm_pix_loss", "num_channels",
        "patch_size", "qkv_bias",
    )),
)  # fmt: skip
# Llama's hf_config has these two as well; its gelu would be a gated one
SHARED_HF_KEYS = {"hidden_act", "initializer_range"}
Raw = dict[str, Any]


def adopt_stub_keys(raw: Raw) -> Raw:
    """Return settings with the stub's keys renamed; those without effect are dropped and logged.

    Raises ValueError for a key beside another value of its successor, and for the placeholder of a data file.
    """
    settings, found = copy.deepcopy(raw), {}
    hf_config = _find_section(settings, HF)
    stub_keys = {key for key in hf_config if f"{HF}.{key}" in (*RENAMES, *WITHOUT_EFFECT)}
    is_stub = "model_type" not in hf_config and not stub_keys <= SHARED_HF_KEYS
    for name in (*RENAMES, *WITHOUT_EFFECT):
        section, _, key = name.rpartition(".")
        if key in (keys := _find_section(settings, section)) and (is_stub or section != HF):
            found[name] = keys.pop(key)
    n_batches = found.get("loss.grad_accum_steps")
    if n_batches not in (None, 1):
        raise ValueError(
            f"loss.grad_accum_steps: got {n_batches!r}, expected 1. Set dataset.batch_size to batch_size x "
            "ranks x grad_accum_steps, and dataset.microbatch_size to batch_size."
        )
    if settings.get("loss") == {}:
        del settings["loss"]
    if dropped := [name for name in found if name in WITHOUT_EFFECT]:
        log.warning("keys of the training stub without effect here: %s", ", ".join(dropped))
    for name, value in _convert(found, settings).items():
        section, _, key = name.partition(".")
        keys = settings.setdefault(section, {})
        if isinstance(keys, dict) and value is not None:  # the reader of the section reports another type
            if keys.setdefault(key, value) not in (None, value):
                raise ValueError(f"{name}: got {keys[key]!r}, but {value!r} from the stub. Set one of them.")
            keys[key] = value
    _refuse_placeholders(_find_section(settings, "dataset"))
    return settings


def _find_section(settings: Raw, place: str) -> Raw:
    """Return a section by its dotted name, or {} if there is none."""
    section: Any = settings
    for word in place.split("."):
        section = section.get(word) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else {}


def _convert(found: Raw, settings: Raw) -> Raw:
    """Return the renamed settings by their names here, in the units of these."""

    def read_number(section: str, key: str, default: float) -> float:
        value = _find_section(settings, section).get(key)
        return value if isinstance(value, int | float) and value > 0 else default

    converted = {RENAMES[name]: value for name, value in found.items() if name in RENAMES}
    if isinstance(rate := found.get("lr_scheduler.min_lr"), int | float):
        converted["lr_scheduler.lr_min_ratio"] = rate / read_number("optim", "lr", 3e-4)
    if isinstance(batches := found.get("misc.max_eval_iter"), int):
        converted["evaluation.max_samples"] = batches * int(read_number("dataset", "batch_size", 256))
    if "logging.run_dir" in converted:
        parts = found.get("logging.directory") or "experiments", found.get("logging.prefix")
        converted["logging.run_dir"] = "/".join(str(part) for part in parts if part)
    if converted.get("model.feed_forward") in ("silu", "swish"):
        converted["model.feed_forward"] = "swiglu"
    if any(read_number("lr_scheduler", f"total_{unit}", 0) for unit in ("iterations", "tokens", "epochs")):
        converted.pop("lr_scheduler.total_epochs", None)
    return converted


def _refuse_placeholders(data: Raw) -> None:
    """Raise ValueError for a .csv file of the stub as a dataset; held-out tokens follow synthetic ones."""
    for key in ("path_train", "path_eval"):
        if str(data.get(key)).endswith(".csv"):
            if data.get("path_train") != "synthetic":
                raise ValueError(
                    f"dataset.{key}: got {data[key]}, expected the prefix of a .bin/.idx dataset. For random "
                    "tokens instead of data, set dataset.path_train=synthetic."
                )
            log.warning(
                "dataset.%s: %s is replaced by synthetic tokens, as the training data", key, data[key]
            )
            data[key] = "synthetic"
