"""The arguments of Megatron without a key here: those without effect, those that cannot be met, and families.

A family is a prefix of names. An argument that is listed is not looked up among the families.
"""

from megatron.config.migration.argument import LIST, NO_EFFECT, Argument, unsupported

# why they have no effect here -> names
REASONS_WITHOUT_EFFECT: dict[str, str] = {
    "kernels and fusions are chosen by the machine; results agree to rounding": (
        "use-flash-attn use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton use-flash-attn-builder "
        "attention-backend flash-attention-version transformer-impl no-masked-softmax-fusion "
        "no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion "
        "cross-entropy-loss-fusion cross-entropy-fusion-impl no-persist-layer-norm disable-mem-efficient-ln "
        "no-gradient-accumulation-fusion no-gradient-reduce-div-fusion ds_fused_adam cpu_torch_adam "
        "use-tutel onnx-safe external-cuda-graph enable-cuda-graph cuda-graph-warmup-steps "
        "cuda-graph-scope cuda-graph-modules cuda-graph-impl optimizer-cuda-graph deterministic-mode "
        "disable-bf16-reduced-precision-matmul use-torch-optimizer-for-cpu-offload fused-residual-rmsnorm"
    ),
    "softmax, loss, reductions over ranks and updates are always float32": (
        "attention-softmax-in-fp32 accumulate-allreduce-grads-in-fp32 fp16-lm-cross-entropy "
        "embedding-weights-in-fp32 no-query-key-layer-scaling grad-reduce-in-bf16 "
        "main-grads-dtype main-params-dtype output-logit-dtype ddp-average-in-collective "
        "ddp-reduce-scatter-with-fp32-accumulation"
    ),
    "float16 uses a dynamic loss scale": (
        "loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis "
        "no-log-loss-scale-to-tensorboard"
    ),
    "communication is overlapped and bucketed by torch or DeepSpeed": (
        "overlap-grad-reduce overlap-param-gather overlap-param-gather-with-optimizer-step "
        "overlap-p2p-communication no-overlap-p2p-communication overlap-p2p-communication-warmup-flush "
        "no-align-grad-reduce no-align-param-gather no-delay-grad-reduce ddp-bucket-size ddp-num-buckets "
        "ddp-pad-buckets-for-high-nccl-busbw no-async-tensor-model-parallel-allreduce "
        "no-scatter-gather-tensors-in-pipeline use-ring-exchange-p2p no-contiguous-buffers-in-local-ddp "
        "use-nccl-ub disable-symmetric-registration nccl-communicator-config-path use-tp-pp-dp-mapping "
        "pipeline-model-parallel-comm-backend disable-gloo-process-groups create-all-gather-group "
        "zero-reduce-scatter zero-contigious-gradients zero-reduce-bucket-size zero-allgather-bucket-size "
        "microbatch-group-size-per-virtual-pipeline-stage defer-embedding-wgrad-compute wgrad-deferral-limit "
        "overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params use-pin-memory "
        "torch-fsdp2-no-reshard-after-forward suggested-communication-unit-size fsdp-double-buffer "
        "num-distributed-optimizer-instances no-use-layer-wise-param-layout "
        "DDP-impl lazy-mpu-init "
        "no-clone-scatter-output-in-embedding local_rank local-rank megatron-fsdp-version"
    ),
    "memory is left to Python and torch": (
        "manual-gc manual-gc-interval no-manual-gc-eval train-sync-interval empty-unused-memory-level"
    ),
    "tensor parallelism always splits the positions between blocks too": "sequence-parallel",
    "a stage has no embedding of its own; the ranks share the blocks evenly": (
        "standalone-embedding-stage no-pipeline-parallel"
    ),
    "only memory and time change; dist.activation_checkpointing is set per block": (
        "recompute-method recompute-num-layers recompute-modules distribute-saved-activations "
        "distribute-checkpointed-activations checkpoint-num-layers partition-activations "
        "contigious-checkpointing checkpoint-in-cpu synchronize-each-layer profile-backward "
        "deepspeed-activation-checkpointing memory-centric-tiled-linear tile-factor scattered-embeddings "
        "split-transformers optimizer-offload-fraction"
    ),
    "weights are drawn on the CPU from the seed, equal on all ranks": (
        "use-cpu-initialization data-parallel-random-init no-initialization init-model-with-meta-device"
    ),
    "datasets are memory-mapped, and their order is computed, not stored": (
        "data-impl mmap-warmup data-cache-path no-mmap-bin-files dataloader-fast-cache-load "
        "dataloader-defer-npy-index-mmap num-dataset-builder-threads mid-level-dataset-surplus "
        "no-create-attention-mask-in-dataloader allow-ambiguous-pad-tokens train-doc-idx-path "
        "train-sample-idx-path train-shuffle-idx-path use-dataset-only no-data-sharding "
        "per-dataset-sequences-path"
    ),
    "the ids are in the dataset; training needs no tokenizer": (
        "merge-file trust-remote-code vocab-extra-ids no-use-tokenizer-model-from-checkpoint-args"
    ),
    "there is no test set; score a checkpoint on it with tools/validate.py": (
        "test-data-path test-data-path-file"
    ),
    "checkpoints contain weights, optimizer states, schedule and position; draws depend on seed and step": (
        "no-save-rng no-load-rng no-ckpt-fully-parallel-save universal-checkpoint "
        "auto-detect-ckpt-format dist-ckpt-strictness dist-ckpt-workers use-persistent-ckpt-worker "
        "override-opt_param-scheduler override-opt-param-scheduler replication replication-jump "
        "replication-factor keep-fp8-transpose-cache"
    ),
    "checkpoint.resume=PATH instead of auto fails without a checkpoint": "exit-on-missing-checkpoint",
    "metrics.jsonl, tensorboard and wandb get loss, rate, norm, memory, tokens/s and MFU of each log line": (
        "no-log-learnig-rate-to-tensorboard no-log-learning-rate-to-tensorboard tensorboard-log-interval "
        "tensorboard-queue-size timing-log-level timing-log-option no-barrier-with-level-1-timing "
        "logging-level log-straggler disable-straggler-on-startup config-logger-dir profile-ranks "
        "use-pytorch-profiler record-memory-history memory-snapshot-path calc-ft-timeouts enable-ft-package"
    ),
    "set the environment variable WANDB_RUN_GROUP or WANDB_DIR or WANDB_ENTITY instead": (
        "wandb-group wandb-save-dir wandb-entity"
    ),
    "a stop signal always saves a checkpoint and exits with status 75": (
        "exit-signal-handler exit-signal adlr-autoresume adlr-autoresume-interval"
    ),
    "NaN and Inf are checked at every step": (
        "check-for-spiky-loss check-for-large-grads check-weight-hash-across-dp-replicas-interval "
        "result-rejected-tracker-filename"
    ),
    "it belongs to an option that is not supported, and has no effect without it": (
        "rotary-scaling-factor relative-attention-num-buckets "
        "relative-attention-max-distance mask-prob short-seq-prob sample-rate sgd-momentum block-size "
        "use-one-sent-docs query-in-block-prob decoder-seq-length mask-type mask-factor head-lr-mult topk "
        "expert-interval mlp-type num-classes num-channels patch-dim img-h img-w iter-per-epoch "
        "classes-fraction data-per-class-fraction rope-type qk-head-dim qk-pos-emb-head-dim v-head-dim "
        "q-lora-rank kv-lora-rank mscale mscale-all-dim max-tokens-to-oom sft-tokenizer-prompt-format "
        "cache-mla-latents mla-down-proj-fusion create-moe-param-group disable-mamba-mem-eff-path "
        "disable-moe-token-dropping disable-moe-top2-2nd-expert-sampling expert-tensor-parallel-size "
        "enable-expert-tensor-parallelism mtp-loss-scaling-factor hidden-size-teacher num-layers-teacher "
        "num-attention-heads-teacher num-experts-teacher num-layers-at-start-in-bf16 "
        "num-layers-at-end-in-bf16 mlp-chunks-for-prefill flash-decode"
    ),
    "inference only; see tools/generate_text.py": (
        "decode-only-cuda-graphs enable-chunked-prefill num-speculative-tokens use-legacy-static-engine "
        "use-same-sampling-seed-across-dp-ranks refit-method"
    ),
    "files are read from disks, see tools/download_assets.py": "enable-msc disable-msc",
    "only for reading while debugging": "dump-param-to-param-group-map",
    "FSDP and float8 are torch's": (
        "keep-fp8-transpose-cache-when-using-custom-fsdp reuse-grad-buf-for-mxfp8-param-ag"
    ),
    "the only model here": "use-mcore-models use-legacy-models enable-experimental",
    "it is always chosen so": "calculate-per-token-loss",
}

NO_EFFECTS: tuple[Argument, ...] = tuple(
    Argument(name, NO_EFFECT, LIST, note=reason)
    for reason, names in REASONS_WITHOUT_EFFECT.items()
    for name in names.split()
)

_MOE = "there are no experts; use a dense model"
_CONVERT = "convert it with tools/convert_checkpoint.py and set checkpoint.init_from"
REFUSED: tuple[Argument, ...] = (
    unsupported("rotary-interleaved", LIST, "halves of a head are rotated; omit it"),
    unsupported("no-rope-freq", LIST, "every block has rotary positions; omit it"),
    unsupported("no-position-embedding", LIST, "there is no model without positions; add rotary positions"),
    unsupported("squared-relu", LIST, "use --swiglu or GELU"),
    unsupported("quick-geglu", LIST, "use --swiglu or GELU"),
    unsupported("apply-layernorm-1p", LIST, "gains are stored as they are; omit it"),
    unsupported("apply-residual-connection-post-layernorm", LIST, "the residual is taken before the norm"),
    unsupported("apply-query-key-layer-scaling", LIST, "omit it: it only protects float16"),
    unsupported("window-attn-skip-freq", LIST, "all blocks have the window of --window-size; omit it"),
    unsupported("linear-attention-freq", LIST, "all blocks have softmax attention"),
    unsupported("multi-latent-attention", LIST, "use grouped-query attention"),
    unsupported("spec", LIST, "the model is megatron/model/transformer.py"),
    unsupported("model-spec", LIST, "the model is megatron/model/transformer.py"),
    unsupported("yaml-cfg", LIST, "give the arguments; this YAML has other keys"),
    unsupported("is-hybrid-model", LIST, "there are no state-space blocks"),
    unsupported("use-target-position-embeddings", LIST, "omit it", ""),
    unsupported("target-random-ratio", LIST, "the original sets it to 0 too; omit it", "0", "0.0"),
    unsupported("use-predefined-order", LIST,
                "set objective.order_kind=noise_sorted and objective.order_noise; its noise is the same "
                "for all orders"),
    unsupported("order-list", LIST, "orders are drawn; use --num-order-list"),
    unsupported("init-method-xavier-uniform", LIST, "weights are normal; use --init-method-std"),
    unsupported("freeze-all-layers", LIST, "all weights are trained"),
    unsupported("decoupled-lr", LIST, "embedding and head have the rate of the matrices"),
    unsupported("decoupled-min-lr", LIST, "embedding and head have the rate of the matrices"),
    unsupported("start-weight-decay", LIST, "weight decay is constant; use --weight-decay"),
    unsupported("end-weight-decay", LIST, "weight decay is constant; use --weight-decay"),
    unsupported("weight-decay-incr-style", LIST, "weight decay is constant", "constant"),
    unsupported("apply-wd-to-qk-layernorm", LIST, "gains have no weight decay"),
    unsupported("no-weight-decay-cond-type", LIST, "gains and biases have no weight decay"),
    unsupported("lr-warmup-init", LIST, "the warm-up starts at 0", "0", "0.0"),
    unsupported("warmup", LIST, "removed by Megatron too; use --lr-warmup-fraction"),
    unsupported("batch-size", LIST, "removed by Megatron too; use --micro-batch-size"),
    unsupported("model-parallel-size", LIST, "removed by Megatron too; use --tensor-model-parallel-size"),
    unsupported("step-batch-size-schedule", LIST, "the batch size is constant; train in parts, each from "
                "the last by checkpoint.branch_from"),
    unsupported("decrease-batch-size-if-needed", LIST, "choose a global batch that the ranks divide"),
    unsupported("iterations-to-skip", LIST, "misc.on_nonfinite=skip skips steps with NaN or Inf"),
    unsupported("exit-interval", LIST, "use misc.stop_file, misc.max_hours, or a shorter run"),
    unsupported("train-data-exact-num-epochs", LIST, "set lr_scheduler.total_epochs in the YAML instead"),
    unsupported("random-ltd", LIST, "all tokens pass all blocks"),
    unsupported("data-efficiency-curriculum-learning", LIST, "samples have a fixed length and order"),
    unsupported("return-data-index", LIST, "sample i is a function of seed and i; see LIBRARY.md"),
    unsupported("train-idx-path", LIST, "the order of samples is computed"),
    unsupported("train-desc-path", LIST, "the order of samples is computed"),
    unsupported("repeated-dataloader", LIST, "data always repeats; the held-out set is read once", ""),
    unsupported("dataloader-type", LIST, "samples are read in the run's own order", "single"),
    unsupported("dataloader-inter-document-masking", LIST, "set model.document_mask=true"),
    unsupported("eod-mask-loss", LIST, "the end of a document is predicted like any token; omit it"),
    unsupported("per-split-data-args-path", LIST, "give --train-data-path and --valid-data-path"),
    unsupported("aml-data-download-path", LIST, "give whole paths"),
    unsupported("object-storage-cache-path", LIST, "copy the dataset to a disk first"),
    unsupported("s3-cache-path", LIST, "copy the dataset to a disk first"),
    unsupported("phase-transition-iterations", LIST, "use a mixture with a schedule (MIXTURE.md)"),
    unsupported("skip-train", LIST, "score a checkpoint with tools/validate.py CHECKPOINT DATA"),
    unsupported("use-checkpoint-args", LIST, "give the shape; tools/convert_checkpoint.py prints it"),
    unsupported("use-mp-args-from-checkpoint-args", LIST, "give the parallel sizes; a run may change them"),
    unsupported("pretrained-checkpoint", LIST, _CONVERT),
    unsupported("no-load-optim", LIST, "add --finetune, which loads the weights only"),
    unsupported("no-save-optim", LIST, "a checkpoint always has the optimizer's states; omit it"),
    unsupported("no-load-lr-state", LIST, "the schedule is a function of the step; omit it"),
    unsupported("use-checkpoint-opt_param-scheduler", LIST, "the schedule is that of the command; omit it"),
    unsupported("use-checkpoint-opt-param-scheduler", LIST, "the schedule is that of the command; omit it"),
    unsupported("reset-iteration", LIST, "add --finetune, which starts at step 0"),
    unsupported("override-ckpt-iteration", LIST, "a checkpoint keeps its step; omit it"),
    unsupported("ckpt-step", LIST, "set checkpoint.resume to the path of that checkpoint"),
    unsupported("ckpt-convert-format", LIST, "use tools/convert_checkpoint.py"),
    unsupported("ckpt-convert-save", LIST, "use tools/convert_checkpoint.py"),
    unsupported("hierarchical-context-parallel-sizes", LIST, "use one context parallel size"),
    unsupported("pipeline-model-parallel-split-rank", LIST, "there is no encoder"),
    unsupported("pipeline-model-parallel-layout", LIST, "the ranks share the blocks evenly; omit it"),
    unsupported("decoder-first-pipeline-num-layers", LIST, "the ranks share the blocks evenly; omit it"),
    unsupported("decoder-last-pipeline-num-layers", LIST, "the ranks share the blocks evenly; omit it"),
    unsupported("account-for-embedding-in-pipeline-split", LIST, "the ranks share the blocks evenly"),
    unsupported("account-for-loss-in-pipeline-split", LIST, "the ranks share the blocks evenly"),
    unsupported("encoder-tensor-model-parallel-size", LIST, "there is no encoder", "0"),
    unsupported("encoder-pipeline-model-parallel-size", LIST, "there is no encoder", "0"),
    unsupported("enable-zbh1-pipeline", LIST, "use dist.pipeline_schedule=1f1b or interleaved; omit it"),
    unsupported("enable-zbh1-exact-semantics", LIST, "use dist.pipeline_schedule=1f1b; omit it"),
    unsupported("force-ds-sequence-parallel", LIST, "use --ds-sequence-parallel-size 2 or more"),
    unsupported("outer-dp-sharding-strategy", LIST, "set dist.sharding_stage=zero3_hybrid", "no_shard"),
    unsupported("enable-full-sharding-in-hsdp", LIST, "set dist.sharding_stage=zero3_hybrid"),
    unsupported("use-precision-aware-optimizer", LIST, "optimizer states are float32; omit it"),
    unsupported("exp-avg-dtype", LIST, "optimizer states are float32", "fp32"),
    unsupported("exp-avg-sq-dtype", LIST, "optimizer states are float32", "fp32"),
    unsupported("fp4-param-gather", LIST, "use --fp8-format or bf16"),
    unsupported("first-last-layers-bf16", LIST, "float8 is used in all blocks; omit one of the two"),
    unsupported("ds-inference", LIST, "use tools/generate_text.py"),
    unsupported("inference", LIST, "use tools/generate_text.py"),
    unsupported("num-experts", LIST, _MOE, "1"),
    unsupported("num-experts-switch", LIST, _MOE),
    unsupported("expert-model-parallel-size", LIST, _MOE, "1"),
    unsupported("moe-expert-parallel-size", LIST, _MOE, "1"),
    unsupported("kd", LIST, "there is no distillation; train on the text"),
    unsupported("mos", LIST, "there is no distillation; train on the text"),
    unsupported("load-teacher", LIST, "there is no distillation; train on the text"),
    unsupported("sft", LIST, "this project pretrains; fine-tune the Hugging Face folder that "
                "tools/convert_checkpoint.py writes"),
    unsupported("mtp-num-layers", LIST, "one token is predicted at a time; omit it"),
    unsupported("decoder-num-layers", LIST, "there is no encoder beside a decoder; use --num-layers"),
    unsupported("test-mode", LIST, "omit it"),
    unsupported("mrope-section", LIST, "positions are those of text"),
    unsupported("output-bert-embeddings", LIST, "there is no BERT"),
    unsupported("perform-rl-step", LIST, "there is no reinforcement learning"),
    unsupported("langrl-env-config", LIST, "there is no reinforcement learning"),
    unsupported("block-data-path", LIST, "there is no retrieval"),
    unsupported("embedding-path", LIST, "there is no retrieval"),
    unsupported("evidence-data-path", LIST, "there is no retrieval"),
    unsupported("titles-data-path", LIST, "there is no retrieval"),
    unsupported("fake-process-group", LIST, "use tools/sweep.py --dry-run to price a run"),
)  # fmt: skip

# prefix of names -> (outcome is "no effect": True, sentence). The first that fits counts.
FAMILIES: dict[str, tuple[bool, str]] = {
    "inference-": (True, "inference only; see tools/generate_text.py"),
    "log-": (True, "metrics.jsonl and tensorboard have a fixed set of columns"),
    "tp-comm-": (True, "communication is overlapped by torch"),
    "disable-tp-comm-": (True, "communication is overlapped by torch"),
    "inprocess-": (True, "a failed run is started again by its launcher"),
    "rerun-": (True, "NaN and Inf are checked at every step"),
    "error-injection-": (True, "tests of Megatron"),
    "ft-": (True, "a failed run is started again by its launcher"),
    "straggler-": (True, "a collective that waits too long names its rank"),
    "one-logger-": (True, "NVIDIA's telemetry"),
    "no-one-logger": (True, "NVIDIA's telemetry"),
    "app-tag-": (True, "NVIDIA's telemetry"),
    "otel-": (True, "telemetry"),
    "run-workload-inspector": (True, "telemetry"),
    "ckpt-": (True, "how sharded checkpoints are written is torch's choice"),
    "async-": (True, "how sharded checkpoints are written is torch's choice"),
    "non-persistent-": (True, "all checkpoints are in one folder"),
    "fp8-": (True, "torchao's recipe is used"),
    "no-fp8-": (True, "torchao's recipe is used"),
    "te-": (True, "Transformer Engine is not used"),
    "megatron-fsdp-": (True, "FSDP is torch's"),
    "ddp-": (True, "communication is bucketed by torch"),
    "gtp-": (True, "communication is bucketed by torch"),
    "fsdp-": (True, "FSDP is torch's"),
    "tiktoken-": (True, "the ids are in the dataset"),
    "tokenizer-": (True, "the ids are in the dataset"),
    "moe-": (True, "there are no experts"),
    "yarn-": (True, "there is no YaRN scaling"),
    "no-yarn-": (True, "there is no YaRN scaling"),
    "muon-": (True, "settings of --optimizer muon, which is not supported"),
    "lion-": (True, "settings of --optimizer lion, which is not supported"),
    "fim-": (False, "there is no fill-in-the-middle; masked diffusion reads both sides"),
    "mamba-": (True, "there are no state-space blocks"),
    "hybrid-": (False, "all blocks are attention and MLP"),
    "heterogeneous-": (False, "all blocks have one shape"),
    "kd-": (True, "there is no distillation"),
    "retro-": (False, "there is no retrieval"),
    "retriever-": (False, "there is no retrieval"),
    "bert-": (False, "there is no BERT"),
    "ict-": (False, "there is no retrieval"),
    "biencoder-": (False, "there is no retrieval"),
    "indexer-": (False, "there is no retrieval"),
    "dino-": (False, "there are no images"),
    "vision-": (False, "there are no images"),
    "swin-": (False, "there are no images"),
    "rl-": (False, "there is no reinforcement learning"),
    "grpo-": (False, "there is no reinforcement learning"),
    "logits-": (False, "there is no distillation"),
    "kitchen-": (False, "use --fp8-format or bf16"),
    "ds-sequence-parallel-fpdt": (False, "use --ds-sequence-parallel-size with ring or ulysses"),
}
