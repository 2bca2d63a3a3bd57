"""Rules of the translation: parallel sizes, sharding, engine and recomputation of Megatron's arguments."""

from typing import Any

from megatron.config.migration.translate import Draft

FSDP_STAGES = {"no_shard": "zero0", "optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "zero3"}
CONTEXT_METHODS = {"p2p": "ring", "a2a": "ulysses"}
RECOMPUTED = ("checkpoint-activations", "recompute-activations", "recompute-granularity")
SPLIT_OPTIONS = (
    "tensor-model-parallel-size", "pipeline-model-parallel-size", "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank", "context-parallel-size", "cp-comm-type",
    "ds-sequence-parallel-size",
)  # fmt: skip


def set_devices(draft: Draft) -> None:
    """Set the parallel sizes, then the engine that supports them with their sharding."""
    if not draft.unsplit:
        for axis in ("tensor", "pipeline"):
            name = f"{axis}-model-parallel-size"
            draft.set(f"dist.{axis}_parallel", draft.value(name), name)
        _set_pipeline_chunks(draft)
        _set_context(draft)
    _set_recomputation(draft)
    backend = draft.value("distributed-backend")
    if backend not in ("nccl", "gloo"):
        draft.refuse("distributed-backend", "use nccl or gloo")
    elif draft.has("distributed-backend"):
        draft.set("dist.backend", backend, "distributed-backend")
    minutes = draft.value("distributed-timeout-minutes")
    if draft.has("distributed-timeout-minutes"):
        draft.set("dist.timeout_s", 60 * minutes, "distributed-timeout-minutes")
    if draft.has("deepspeed"):
        _set_deepspeed(draft)
    else:
        _set_sharding(draft)
    if draft.unsplit:
        names = [name for name in SPLIT_OPTIONS if draft.has(name) and draft.value(name) != 1]
        draft.set("dist.sharding_stage", "zero3", *names)
        ranks = f"on ranks that divide {draft.get('dataset.batch_size')} samples"
        for name in names:
            draft.explain(name, f"unsplit, {ranks}: {draft.unsplit}")


def _set_pipeline_chunks(draft: Draft) -> None:
    ranks = draft.value("pipeline-model-parallel-size")
    chunks = draft.value("num-virtual-stages-per-pipeline-rank")
    names = ["num-virtual-stages-per-pipeline-rank"]
    if draft.has("num-layers-per-virtual-pipeline-stage"):
        names = ["num-layers-per-virtual-pipeline-stage"]
        blocks = draft.value(*names)
        layers = draft.value("num-layers", "encoder-num-layers")
        if layers % (ranks * blocks):
            raise ValueError(
                f"--{names[0]}: got {blocks}, expected a divisor of {layers} layers / {ranks} pipeline ranks"
            )
        chunks = layers // ranks // blocks
    if chunks is not None and chunks > 1 and ranks > 1:
        draft.set("dist.pipeline_schedule", "interleaved", *names)
        draft.set("dist.pipeline_chunks", chunks, *names)


def _set_context(draft: Draft) -> None:
    if draft.value("ds-sequence-parallel-size") > 1:
        # Megatron-DeepSpeed's sequence parallelism is Ulysses
        draft.set(
            "dist.context_parallel", draft.value("ds-sequence-parallel-size"), "ds-sequence-parallel-size"
        )
        return
    size = draft.value("context-parallel-size")
    draft.set("dist.context_parallel", size, "context-parallel-size")
    method = draft.value("cp-comm-type")[0]
    if size == 1:
        return
    if method in CONTEXT_METHODS:
        draft.set("dist.context_method", CONTEXT_METHODS[method], "cp-comm-type")
    else:
        draft.refuse("cp-comm-type", "use p2p or a2a")


def _set_recomputation(draft: Draft) -> None:
    granularity = draft.value("recompute-granularity")
    if draft.has("checkpoint-activations"):
        granularity = "full"
    elif draft.has("recompute-activations"):
        granularity = "selective"
    if granularity in ("full", "selective"):
        names = [name for name in RECOMPUTED if draft.has(name)]
        draft.set("dist.activation_checkpointing", granularity, *names)
    elif granularity is not None:
        draft.refuse("recompute-granularity", "use full or selective")


def _set_sharding(draft: Draft) -> None:
    """Set the stage of Megatron's own optimizer and of its FSDP."""
    stage, names = "zero0", ["use-distributed-optimizer"]
    if draft.has("use-distributed-optimizer"):
        stage = "zero1"
    fsdp = [name for name in ("use-megatron-fsdp", "use-custom-fsdp") if draft.has(name)]
    if draft.has("use-torch-fsdp2"):
        stage, names = "zero3", ["use-torch-fsdp2"]
    elif fsdp:
        strategy = draft.value("data-parallel-sharding-strategy")
        if strategy not in FSDP_STAGES:
            raise ValueError(
                f"--data-parallel-sharding-strategy: got {strategy!r}, expected {' or '.join(FSDP_STAGES)}"
            )
        stage, names = FSDP_STAGES[strategy], [*fsdp, "data-parallel-sharding-strategy"]
    draft.set("dist.sharding_stage", stage, *names)
    if draft.has("optimizer-cpu-offload", "cpu-optimizer"):
        name = "optimizer-cpu-offload" if draft.has("optimizer-cpu-offload") else "cpu-optimizer"
        if stage == "zero0":
            draft.refuse(name, "offload requires sharded states; add --use-distributed-optimizer")
        else:
            draft.set("dist.cpu_offload", True, name)


def _set_deepspeed(draft: Draft) -> None:
    """Set engine, stage and offload of --deepspeed; its JSON decides, as in Megatron-DeepSpeed."""
    path = draft.value("deepspeed_config")
    config = draft.read_deepspeed(path) if path is not None else None
    zero = (config or {}).get("zero_optimization") or {}
    stage = zero.get("stage") if isinstance(zero, dict) else None
    stage_names = ["deepspeed_config"] if isinstance(stage, int) else ["zero-stage"]
    stage = stage if isinstance(stage, int) else draft.value("zero-stage") if draft.has("zero-stage") else 0
    if draft.has("zero-stage") and draft.value("zero-stage") != stage:
        draft.refuse("zero-stage", f"the DeepSpeed JSON has stage {stage}; make them equal")
    elif draft.has("zero-stage"):
        stage_names.append("zero-stage")
    torch_only = [
        key
        for key in ("tensor_parallel", "pipeline_parallel", "context_parallel")
        if draft.get(f"dist.{key}") not in (None, 1, "none")
    ]
    torch_only += ["zero3 instead of the JSON's stage"] if draft.unsplit else []
    draft.set("dist.sharding_stage", f"zero{stage}", *stage_names)
    offload_optimizer, offload_parameters = _find_offload(draft, zero, stage)
    if torch_only or draft.get("dist.float8"):
        draft.set("dist.engine", "torch", "deepspeed")
        draft.explain("deepspeed", f"only this engine supports {', '.join(torch_only or ['float8'])}")
        draft.explain("deepspeed_config", "read for its stage; the torch engine has no JSON")
        if (offload_optimizer or offload_parameters) and stage > 0:
            draft.set("dist.cpu_offload", True, "cpu-optimizer", "remote-device")
        return
    draft.set("dist.engine", "deepspeed", "deepspeed")
    if offload_optimizer:
        draft.set("dist.offload_optimizer", True, "cpu-optimizer", "deepspeed_config")
    if offload_parameters:
        draft.set("dist.offload_parameters", True, "remote-device", "deepspeed_config")
    if config is not None:
        draft.set("dist.deepspeed_config", path, "deepspeed_config")
    elif path is not None:
        draft.explain("deepspeed_config", f"{path} is not there; the settings of the command are used")


def _find_offload(draft: Draft, zero: Any, stage: int) -> tuple[bool, bool]:
    """Return whether optimizer and weights are offloaded; DeepSpeed does so from stages 1 and 3 on."""
    devices = [
        (zero.get(key) or {}).get("device", "none") if isinstance(zero, dict) else "none"
        for key in ("offload_optimizer", "offload_param")
    ]
    optimizer = devices[0] == "cpu" or draft.has("cpu-optimizer")
    parameters = devices[1] == "cpu" or draft.value("remote-device") == "cpu"
    if draft.has("cpu-optimizer") and stage == 0:
        draft.explain("cpu-optimizer", "stage 0 offloads nothing")
    return optimizer and stage > 0, parameters and stage == 3
