"""Settings of what is trained and how: model, objective, optimizer and learning-rate schedule."""

from dataclasses import dataclass

from megatron.config.option import ALWAYS, IF_CHANGED, option

OBJECTIVES = ("autoregressive", "masked_diffusion")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Resolved shape of a transformer, for autoregressive models and masked diffusion."""

    size: str = option("custom", "name of a size in utils/model_sizes.yaml, or a label")
    d_model: int = option(0, "width of the residual stream", above=0, unit="features", identity=ALWAYS)
    d_ff: int = option(0, "width of the feed-forward layer", above=0, unit="features", identity=ALWAYS)
    d_head: int = option(0, "width of an attention head", above=0, unit="features", identity=ALWAYS)
    n_heads: int = option(0, "number of attention heads", above=0, unit="heads", identity=ALWAYS)
    n_layers: int = option(0, "number of blocks", above=0, unit="blocks", identity=ALWAYS)
    n_tokens: int = option(
        0, "ids of the tokenizer; [MASK] is the next row", above=0, unit="tokens", identity=ALWAYS
    )
    vocab_rows: int = option(
        0, "embedding rows: tokens, then [MASK], then padding", above=0, unit="rows", identity=ALWAYS
    )
    rope_theta: float = option(10000.0, "base of the rotary frequencies", above=0, unit="-", identity=ALWAYS)
    norm_eps: float = option(
        1e-5, "epsilon added to the mean square (variance) in a norm", above=0, unit="-", identity=ALWAYS
    )
    n_kv_heads: int | None = option(
        None,
        "key and value heads, each shared by a group of heads; default: n_heads",
        above=0,
        unit="heads",
        identity=IF_CHANGED,
    )
    norm: str = option("rmsnorm", "norm of the residual stream", "rmsnorm", "layernorm", identity=IF_CHANGED)
    feed_forward: str = option(
        "swiglu",
        "swiglu: three matrices; gelu: two matrices, GPT-2's tanh approximation; gelu_exact: exact GELU",
        "swiglu",
        "gelu",
        "gelu_exact",
        identity=IF_CHANGED,
    )
    positions: str = option(
        "rotary",
        "position encoding; learned: a table added to the embedding",
        "rotary",
        "learned",
        identity=IF_CHANGED,
    )
    n_positions: int | None = option(
        None,
        "rows of the table of learned positions; default: dataset.seq_len",
        above=0,
        unit="positions",
        identity=IF_CHANGED,
    )
    biases: bool = option(False, "biases in every matrix of a block and in LayerNorm", identity=IF_CHANGED)
    tied_embedding: bool = option(
        True, "the output head is the embedding; false: a separate matrix", identity=IF_CHANGED
    )
    qk_norm: bool = option(False, "RMSNorm on each head's query and key", identity=IF_CHANGED)
    document_mask: bool = option(
        False, "attend only within a document, with positions counted from its start", identity=IF_CHANGED
    )
    eod_id: int | None = option(
        None,
        "end-of-document id, for document_mask; default: that of the corpus",
        unit="id",
        identity=IF_CHANGED,
    )
    attention_dropout: float = option(
        0.0,
        "probability of dropping an attention weight in training; 0 in evaluation",
        at_least=0,
        below=1,
        unit="share",
        identity=IF_CHANGED,
    )
    hidden_dropout: float = option(
        0.0,
        "probability of dropping a feature of the embedding and of each branch in training; 0 in evaluation",
        at_least=0,
        below=1,
        unit="share",
        identity=IF_CHANGED,
    )
    init_std: float = option(
        0.02,
        "std of the initial matrices; much narrower models than GPT-2 learn faster with 0.6 / sqrt(d_model)",
        above=0,
        unit="-",
        identity=IF_CHANGED,
    )
    parametrization: str = option(
        "standard",
        "scaling of initialisation, learning rates and multipliers with the shape",
        "standard",
        "mup",
        "completep",
        identity=IF_CHANGED,
    )
    base_d_model: int | None = option(
        None,
        "mup, completep: width at which the model equals the standard one",
        above=0,
        unit="features",
        identity=IF_CHANGED,
    )
    base_n_layers: int | None = option(
        None,
        "completep: depth at which the model equals the standard one",
        above=0,
        unit="blocks",
        identity=IF_CHANGED,
    )
    base_d_head: int | None = option(
        None,
        "mup, completep: head width at which the model equals the standard one; default: d_head",
        above=0,
        unit="features",
        identity=IF_CHANGED,
    )

    qkv_biases: bool = option(
        False, "biases in the matrices of query, key and value alone, as in Qwen2", identity=IF_CHANGED
    )
    qk_norm_all_heads: bool = option(
        False, "qk_norm: one norm over all heads, as in OLMo 2, not one per head", identity=IF_CHANGED
    )
    norm_placement: str = option(
        "input",
        "norm of the input of attention and feed-forward layer, or of their output as in OLMo 2",
        "input",
        "output",
        identity=IF_CHANGED,
    )
    parallel_residual: bool = option(
        False, "attention and feed-forward layer read the same input, as in GPT-NeoX", identity=IF_CHANGED
    )
    attention_window: int | None = option(
        None,
        "autoregressive: last positions, itself included, that a position attends to; default: all",
        above=0,
        unit="positions",
        identity=IF_CHANGED,
    )
    rotary_dims: int | None = option(
        None,
        "channels of a head that are rotated, the first ones; default: d_head",
        above=0,
        unit="channels",
        identity=IF_CHANGED,
    )
    rope_scaling: str = option(
        "none",
        "stretching of the rotary frequencies: linear, or that of Llama 3.1",
        "none",
        "linear",
        "llama3",
        identity=IF_CHANGED,
    )
    rope_factor: float = option(
        1.0, "rope_scaling: factor of the length", above=0, unit="-", identity=IF_CHANGED
    )
    rope_low_factor: float = option(
        1.0,
        "llama3: frequencies of fewer turns in rope_original_positions are divided by rope_factor",
        above=0,
        unit="turns",
        identity=IF_CHANGED,
    )
    rope_high_factor: float = option(
        4.0,
        "llama3: frequencies of more turns in rope_original_positions are unchanged",
        above=0,
        unit="turns",
        identity=IF_CHANGED,
    )
    rope_original_positions: int | None = option(
        None, "llama3: length before the stretching", above=0, unit="positions", identity=IF_CHANGED
    )
    vocab_multiple: int | None = option(
        None,
        "rows of the embedding: the next multiple of this, with a row for [MASK] only if the run masks "
        "tokens, as in Megatron; default: of 128, always with that row",
        above=0,
        unit="rows",
    )
    mask_id: int | None = option(
        None,
        "masked diffusion: row of [MASK] if it is one of the ids of the tokenizer; default: n_tokens",
        at_least=0,
        unit="id",
        objective="masked_diffusion",
        identity=IF_CHANGED,
    )
    predicts_next: bool = option(
        False,
        "masked diffusion: the output of a position predicts the token after it, as in Dream",
        objective="masked_diffusion",
        identity=IF_CHANGED,
    )
    head_bias: bool = option(
        False, "a bias of the separate head, as in the models of MDLM", identity=IF_CHANGED
    )

    @property
    def rotary_channels(self) -> int:
        """Number of channels of a head that are rotated."""
        return self.rotary_dims or self.d_head

    @property
    def mask_row(self) -> int:
        """Row of [MASK] in the embedding."""
        return self.n_tokens if self.mask_id is None else self.mask_id

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.n_kv_heads or self.n_heads


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Training objective."""

    name: str = option(
        "autoregressive",
        "autoregressive (ar): next token; masked_diffusion (mdm): masked tokens from both sides",
        *OBJECTIVES,
        identity=ALWAYS,
    )
    rate_min: float = option(
        1e-3,
        "masked diffusion: masking rate = (1 - rate_min) t + rate_min, t ~ U(0, 1)",
        above=0,
        below=1,
        unit="share",
        identity=ALWAYS,
    )
    t_draw: str = option(
        "independent",
        "masked diffusion: joint distribution of the t of a batch; each t is uniform",
        "independent",
        "antithetic",
        "stratified",
        objective="masked_diffusion",
        identity=IF_CHANGED,
    )
    low_noise_start: float | None = option(
        None,
        "masked diffusion: t ~ U(0, low_noise_start) for the first low_noise_iterations",
        above=0,
        at_most=1,
        unit="share",
        objective="masked_diffusion",
        identity=IF_CHANGED,
    )
    low_noise_iterations: int | None = option(
        None,
        "masked diffusion: number of steps with low_noise_start",
        above=0,
        unit="steps",
        objective="masked_diffusion",
        identity=IF_CHANGED,
    )
    ar_ratio: float = option(
        0.0,
        "masked diffusion: share of training samples whose last tokens are masked, not random ones",
        at_least=0,
        at_most=1,
        unit="share",
        objective="masked_diffusion",
        identity=IF_CHANGED,
    )
    orders: int = option(
        1,
        "autoregressive: number of orders in which training samples are read, including left to right",
        above=0,
        unit="orders",
        objective="autoregressive",
        identity=IF_CHANGED,
    )
    order_kind: str = option(
        "random",
        "autoregressive: kind of the orders other than left to right",
        "random",
        "noise_sorted",
        objective="autoregressive",
        identity=IF_CHANGED,
    )
    order_noise: float = option(
        0.1,
        "noise_sorted: sort positions plus normal noise of this std, in units of seq_len",
        above=0,
        unit="sample lengths",
        objective="autoregressive",
        identity=IF_CHANGED,
    )
    randmask_ratio: float = option(
        0.0,
        "autoregressive: share of training positions that attend to a random subset of the past",
        at_least=0,
        at_most=1,
        unit="share",
        objective="autoregressive",
        identity=IF_CHANGED,
    )
    masked_input_ratio: float = option(
        0.0,
        "autoregressive: share of training samples with masked inputs, a regularization for repeated text",
        at_least=0,
        at_most=1,
        unit="share",
        objective="autoregressive",
        identity=IF_CHANGED,
    )
    masked_input_rate: float = option(
        0.5,
        "masked_input_ratio: largest rate of masked inputs of a sample; its rate is uniform up to this",
        above=0,
        at_most=1,
        unit="share",
        objective="autoregressive",
        identity=IF_CHANGED,
    )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    lr: float = option(3e-4, "peak learning rate", above=0, unit="-", identity=ALWAYS)
    weight_decay: float = option(
        0.1, "weight decay of matrices; gains of norms have none", at_least=0, unit="-", identity=ALWAYS
    )
    beta1: float = option(
        0.9, "decay rate of the mean gradient", at_least=0, below=1, unit="-", identity=ALWAYS
    )
    beta2: float = option(
        0.95, "decay rate of the mean squared gradient", at_least=0, below=1, unit="-", identity=ALWAYS
    )
    eps: float = option(
        1e-8, "epsilon added to the root of the mean square", above=0, unit="-", identity=ALWAYS
    )
    grad_clip: float = option(
        1.0, "maximum gradient norm; 0: no clipping", at_least=0, unit="L2 norm", identity=ALWAYS
    )
    kernel: str = option(
        "torch",
        "fused AdamW of torch or of NVIDIA's apex, which must be built from source",
        "torch",
        "apex",
        engine="torch",
    )


@dataclass(frozen=True, kw_only=True)
class LrSchedulerConfig:
    """Length of the run and learning-rate schedule. Set each length in one unit only."""

    kind: str = option(
        "cosine", "schedule after the warm-up", "cosine", "linear", "wsd", "constant", identity=ALWAYS
    )
    total_iterations: int | None = option(None, "length of the run", above=0, unit="steps", identity=ALWAYS)
    total_tokens: int | None = option(
        None, "length of the run, rounded to whole steps", above=0, unit="tokens", identity=ALWAYS
    )
    total_epochs: float | None = option(
        None, "length of the run, rounded down to whole steps", above=0, unit="epochs", identity=ALWAYS
    )
    warmup_iterations: int | None = option(
        None, "length of the linear warm-up", at_least=0, unit="steps", identity=ALWAYS
    )
    warmup_tokens: int | None = option(
        None,
        "length of the linear warm-up, rounded up to whole steps",
        at_least=0,
        unit="tokens",
        identity=ALWAYS,
    )
    warmup_fraction: float | None = option(
        None,
        "length of the linear warm-up, as a fraction of the run",
        at_least=0,
        at_most=1,
        unit="share",
        identity=ALWAYS,
    )
    decay_iterations: int | None = option(
        None,
        "length of the decay; wsd: at the end; cosine, linear: after the warm-up, then the minimum rate; "
        "default: the rest of the run",
        above=0,
        unit="steps",
        identity=ALWAYS,
    )
    decay_tokens: int | None = option(
        None, "the same in tokens, rounded up to whole steps", above=0, unit="tokens", identity=ALWAYS
    )
    decay_fraction: float | None = option(
        None,
        "the same as a fraction of the run; default of wsd: the last fifth",
        above=0,
        at_most=1,
        unit="share",
        identity=ALWAYS,
    )
    decay_shape: str = option(
        "sqrt",
        "wsd: shape of the decay; sqrt: 1 - sqrt(fraction of the decay)",
        "linear",
        "sqrt",
        "cosine",
        identity=ALWAYS,
    )
    lr_min_ratio: float = option(
        0.1, "final learning rate divided by the peak", at_least=0, at_most=1, unit="share", identity=ALWAYS
    )
