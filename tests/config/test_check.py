"""Contradictions are refused in one sentence that names the keys, before the run starts."""

import pytest

from megatron.config.yaml_file import merge_sections, parse_overrides
from megatron.plan.resolve import resolve_config

RUN = {
    "model": {"d_model": 48, "d_ff": 96, "n_heads": 6, "n_layers": 4, "n_tokens": 60, "vocab_rows": 64},
    "dataset": {"seq_len": 24},
    "lr_scheduler": {"total_iterations": 10},
}
DEEPSPEED, MDM, LLAMA3 = "dist.engine=deepspeed", "objective.name=mdm", "model.rope_scaling=llama3"
ZERO3 = "dist.sharding_stage=zero3"


def read(words: str):
    return resolve_config(merge_sections(RUN, parse_overrides(words.split())))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("optm.lr=1", "unknown key 'optm'; did you mean 'optim'?"),
        ("optim.wieght_decay=1", "unknown key 'optim.wieght_decay'; did you mean 'weight_decay'?"),
        ("optim.lr=fast", "optim.lr: got 'fast', expected float"),
        ("optim.beta1=1.0", "optim.beta1: got 1.0, expected 0 or more and less than 1"),
        ("optim.grad_clip=.nan", "optim.grad_clip: got nan, expected a finite number"),
        ("misc.seed=-1", "misc.seed: got -1, expected 0 or more"),
        ("dataset.seq_len=2.5", "dataset.seq_len: got 2.5, expected int"),
        ("dataset.seq_len=0", "dataset.seq_len: got 0, expected more than 0"),
        ("dist.dtype=fp16", "dist.dtype: got 'fp16', expected one of float32, bfloat16, float16"),
        ("objective.name=mdn", "got 'mdn', expected one of autoregressive, masked_diffusion"),
        ("objective.randmask_ratio=1.5", "objective.randmask_ratio: got 1.5, expected 0 to 1"),
        ("dist.compile=1", "dist.compile: got 1, expected auto, true or false"),
        *((f"{section}=3", f"{section}: got 3, expected keys") for section in ("optim", "dataset", "model")),
        # checkpoints and logs
        ("checkpoint.prefix=", "checkpoint.prefix: got None, expected str"),
        ("checkpoint.prefix=a/b", "Set folders with checkpoint.directory"),
        ("checkpoint.chkpt_at=[5,0]", "checkpoint.chkpt_at: got 0, expected 1 or more"),
        ("checkpoint.asynchronous=true", "got checkpoint.state_dict_type=full, expected sharded. Remove"),
        ("logging.profile_steps=[3,2]", "logging.profile_steps: got [3, 2], expected [first, last]"),
        # data and length
        ("dataset.mixture=m dataset.order=megatron", "got dataset.order=megatron, expected epoch"),
        ("dataset.mixture=m dataset.path_train=p", "got dataset.path_train=p, expected null"),
        ("dataset.mixture=m dataset.unique_tokens=9", "dataset.unique_tokens: got dataset.mixture=m"),
        ("lr_scheduler.total_tokens=9", "give the length as either total_iterations, total_tokens"),
        ("lr_scheduler.total_iterations=", "give the length as either"),
        ("lr_scheduler.warmup_tokens=1 lr_scheduler.warmup_fraction=0.5", "give the warm-up as either"),
        ("lr_scheduler.decay_shape=linear", "got lr_scheduler.kind=cosine, expected wsd. Remove"),
        ("lr_scheduler.kind=constant lr_scheduler.decay_tokens=3", "expected cosine or linear or wsd"),
        (
            "dataset.path_train=synthetic lr_scheduler.total_iterations= lr_scheduler.total_epochs=1",
            "have no epochs",
        ),
        # shape
        ("model.n_heads=5", "got 5, expected a divisor of d_model 48"),
        ("model.n_kv_heads=4", "model.n_kv_heads: got 4, expected a divisor of model.n_heads 6"),
        ("model.d_head=7", "model.d_head: got 7, expected an even width"),
        ("model.vocab_multiple=64", "model.vocab_multiple: got model.vocab_rows too"),
        ("model.vocab_rows=59", "model.vocab_rows: got 59, expected 60 tokens. Remove it."),
        (f"model.vocab_rows=60 {MDM}", "got 60, expected 60 tokens and [MASK]. Remove it."),
        ("model.positions=learned model.n_positions=9", "got 9 learned positions, expected 24 or more"),
        ("model.positions=learned objective.orders=2", "got 24 learned positions, expected 25"),
        ("model.document_mask=true", "model.document_mask: no end-of-document id"),
        ("model.document_mask=true model.eod_id=60", "model.eod_id: got 60, expected 0 to 59"),
        ("model.document_mask=true model.eod_id=1 objective.orders=2", "objective.orders: got an order over"),
        ("model.parametrization=mup", "model.base_d_model: missing, expected for parametrization 'mup'"),
        ("model.base_d_model=32", "got model.parametrization=standard, expected mup or completep"),
        ("model.base_n_layers=2", "parametrization=standard, expected completep"),
        ("model.qkv_biases=true model.biases=true", "got model.biases=true, expected false"),
        ("model.qk_norm_all_heads=true", "model.qk_norm_all_heads: got model.qk_norm=false, expected true"),
        ("model.parallel_residual=true model.norm_placement=output", "got model.norm_placement=output"),
        ("model.head_bias=true", "model.head_bias: got model.tied_embedding=true, expected false"),
        ("model.mask_id=3", "model.mask_id: got objective.name=autoregressive, expected masked_diffusion"),
        (f"model.mask_id=60 {MDM}", "model.mask_id: got 60, expected an id below model.n_tokens 60"),
        (f"model.attention_window=4 {MDM}", "attention_window: got objective.name=masked_diffusion"),
        ("model.attention_window=4 objective.orders=2", "attention_window: got objective.orders=2"),
        ("model.rotary_dims=10", "model.rotary_dims: got 10, expected an even number up to 8"),
        ("model.rotary_dims=3", "model.rotary_dims: got 3, expected an even number"),
        ("model.rotary_dims=4 model.positions=learned", "got model.positions=learned, expected rotary"),
        ("model.rope_factor=8.0", "got model.rope_scaling=none, expected linear or llama3"),
        ("model.rope_scaling=linear model.rope_low_factor=2.0", "rope_low_factor: got model.rope_scaling"),
        (LLAMA3, "model.rope_original_positions: missing"),
        (f"{LLAMA3} model.rope_original_positions=8 model.rope_low_factor=4.0", "expected less than"),
        # objective
        ("objective.ar_ratio=0.5", "got objective.name=autoregressive, expected masked"),
        (f"objective.orders=2 {MDM}", "objective.orders: got objective.name=masked_diffusion"),
        ("objective.masked_input_rate=0.2", "got objective.masked_input_ratio=0.0, expected more than 0"),
        (f"objective.low_noise_start=0.5 {MDM}", "expected both or neither"),
        # devices
        ("dist.offload_optimizer=true", "got dist.engine=torch, expected deepspeed"),
        (f"{DEEPSPEED} dist.offload_optimizer=true", "zero0, expected zero1 or zero2"),
        (f"{DEEPSPEED} dist.offload_parameters=true", "got dist.sharding_stage=zero0, expected zero3"),
        (f"{DEEPSPEED} dist.sharding_stage=zero3_hybrid", "got zero3_hybrid, expected zero0"),
        *(
            (f"{DEEPSPEED} {word}", f"{word.partition('=')[0]}: got dist.engine=deepspeed, expected torch")
            for word in (
                "dist.tensor_parallel=2",
                "dist.compile=true",
                "dist.float8=true",
                "optim.kernel=apex",
            )
        ),
        ("dist.tensor_parallel=4", "got 6, expected a multiple of 4 for dist.tensor_parallel 4"),
        ("dist.context_parallel=4", "model.n_heads: got 6, expected a multiple of 4"),
        ("dist.context_parallel=5 dist.context_method=ring", "got 24, expected a multiple of 5"),
        ("dist.tensor_parallel=3", "model.vocab_rows: got 64, expected a multiple of 3"),
        ("dist.tensor_parallel=2 model.norm=layernorm", "got model.norm=layernorm, expected rmsnorm"),
        (f"dist.pipeline_parallel=2 {ZERO3}", "zero3 would gather the weights"),
        ("dist.pipeline_parallel=5", "5 stages for model.n_layers 4 blocks"),
        ("dist.pipeline_parallel=4 dist.pipeline_schedule=interleaved", "8 stages for model.n_layers 4"),
        ("dist.pipeline_schedule=interleaved", "got dist.pipeline_parallel=1, expected more than 1"),
        ("dist.pipeline_parallel=2 dist.pipeline_chunks=3", "=1f1b, expected interleaved"),
        ("dist.context_method=ring", "got dist.context_parallel=1, expected more than 1"),
        ("dist.context_parallel=2 dist.context_method=ring dist.dtype=float32", "got ring with"),
        ("dist.shard_size=2", "got dist.sharding_stage=zero0, expected zero2_hybrid or zero3_hybrid"),
        ("dist.cpu_offload=true", "dist.cpu_offload: got dist.sharding_stage=zero0, expected zero1"),
        (f"{ZERO3} dist.cpu_offload=true dist.pipeline_parallel=2", "got dist.pipeline_parallel=2"),
        ("dist.float8=true dist.dtype=float16", "dist.float8: got dist.dtype=float16, expected bfloat16"),
    ],
    ids=str,
)
def test_a_contradiction_is_one_sentence_that_names_the_keys(words: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(words)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        "dist.tensor_parallel=2 dist.context_parallel=3",
        "dist.context_parallel=4 dist.context_method=ring",
        "dist.pipeline_parallel=2 dist.sharding_stage=zero1",
        f"{DEEPSPEED} {ZERO3} dist.offload_optimizer=true dist.offload_parameters=true",
        "dist.sharding_stage=zero3_hybrid dist.shard_size=2 dist.cpu_offload=true",
        f"{MDM} objective.low_noise_start=0.5 objective.low_noise_iterations=2 model.predicts_next=true",
    ],
)
def test_a_supported_combination_is_read(words: str) -> None:
    config = read(words)
    for word in words.split():
        (section, key), value = word.partition("=")[0].split("."), word.partition("=")[2]
        written = str(getattr(getattr(config, section), key)).lower()
        assert written == {"mdm": "masked_diffusion"}.get(value, value)
