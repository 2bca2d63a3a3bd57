"""Rules of the translation: shape of the model, objective and precision of Megatron's arguments."""

from megatron.config.migration.translate import Draft

# ids of the tokenizers that Megatron's users name without a vocabulary file
NAMED_TOKENIZERS = {"gpt2": 50257, "openai-community/gpt2": 50257}
STUDY_DIFFUSION_OPTIONS = ("low-noise-start", "ar-ratio")


def set_shape(draft: Draft) -> None:
    """Set the shape. Raises ValueError if layers, width or heads are missing."""
    draft.set("model.n_layers", draft.require("num-layers", "encoder-num-layers"),
              "num-layers", "encoder-num-layers")  # fmt: skip
    draft.set("model.d_model", draft.require("hidden-size"), "hidden-size")
    draft.set("model.n_heads", draft.require("num-attention-heads"), "num-attention-heads")
    for name, key in (("kv-channels", "d_head"), ("ffn-hidden-size", "d_ff")):
        if draft.has(name):
            draft.set(f"model.{key}", draft.value(name), name)
    if draft.has("num-key-value-heads"):
        draft.set("model.n_kv_heads", draft.value("num-key-value-heads"), "num-key-value-heads")
    elif draft.has("group-query-attention"):
        # Megatron-LM's default of one group is multi-query attention
        draft.set(
            "model.n_kv_heads", draft.value("num-query-groups"), "group-query-attention", "num-query-groups"
        )
    draft.set("model.init_std", draft.value("init-method-std"), "init-method-std")
    draft.set("model.attention_dropout", draft.value("attention-dropout"), "attention-dropout")
    draft.set("model.hidden_dropout", draft.value("hidden-dropout"), "hidden-dropout")
    untie = [
        name
        for name in ("untie-embeddings-and-output-weights", "untie-with-additional-mask")
        if draft.has(name)
    ]
    if untie:
        draft.set("model.tied_embedding", False, *untie)
    _set_layers(draft)
    _set_positions(draft)
    _set_window(draft)
    _set_document_mask(draft)
    _set_vocabulary(draft)


def _set_layers(draft: Draft) -> None:
    """Set norms, biases and the feed-forward layer, whose defaults are GPT-2's in Megatron."""
    has_biases = not draft.has("disable-bias-linear")
    norm = str(draft.value("normalization")).lower()
    if norm not in ("rmsnorm", "layernorm"):
        draft.refuse("normalization", "use RMSNorm or LayerNorm")
    else:
        draft.set("model.norm", norm, "normalization")
    draft.set("model.norm_eps", float(draft.value("layernorm-epsilon", "norm-epsilon")),
              "layernorm-epsilon", "norm-epsilon")  # fmt: skip
    draft.set("model.biases", has_biases, "disable-bias-linear")
    if draft.has("add-qkv-bias") and not has_biases:
        draft.set("model.qkv_biases", True, "add-qkv-bias")
    if norm == "layernorm" and not has_biases:
        # Megatron keeps the biases of LayerNorm, here they go with those of the matrices
        draft.refuse("disable-bias-linear", "LayerNorm here has biases if the matrices have; use RMSNorm")
    if draft.has("qk-layernorm"):
        if norm == "rmsnorm":
            draft.set("model.qk_norm", True, "qk-layernorm")
        else:
            draft.refuse("qk-layernorm", "queries and keys have RMSNorm; use --normalization RMSNorm")
    if draft.has("swiglu"):
        draft.set("model.feed_forward", "swiglu", "swiglu")
        return
    draft.set("model.feed_forward", "gelu", *(["openai-gelu"] if draft.has("openai-gelu") else ["swiglu"]))
    if draft.has("openai-gelu"):
        return
    # Without biases or fusion, Megatron computes GELU exactly. Its fused kernel and this model use the tanh
    # form.
    for name in ("disable-bias-linear", "no-bias-gelu-fusion"):
        if draft.has(name) and name not in draft.refusals:
            draft.refuse(name, "its GELU is then exact, here it is the tanh form; add --openai-gelu")


def _set_positions(draft: Draft) -> None:
    kind = "rope" if draft.has("use-rotary-position-embeddings") else draft.value("position-embedding-type")
    names = ("position-embedding-type", "use-rotary-position-embeddings")
    if kind == "rope":
        draft.set("model.positions", "rotary", *names)
        draft.explain("max-position-embeddings", "rotary positions have no table")
        if draft.has("no-position-embedding"):
            draft.confirm("no-position-embedding", "rotary positions replace the table")
        theta = ("rotary-base", "rotary-position-embeddings-theta")
        draft.set("model.rope_theta", float(draft.value(*theta)), *theta)
        _set_rotary(draft)
    elif kind == "learned_absolute":
        draft.set("model.positions", "learned", *names)
        draft.set("model.n_positions", draft.require("max-position-embeddings"), "max-position-embeddings")
    else:
        draft.refuse("position-embedding-type", f"no {kind} positions; use rope or learned_absolute")


def _set_rotary(draft: Draft) -> None:
    """Set the rotated channels and the scaling of their frequencies."""
    width = draft.get("model.d_head") or draft.get("model.d_model") // max(1, draft.get("model.n_heads"))
    rotated = int(width * min(1.0, draft.value("rotary-percent")))
    if rotated < width:
        draft.set("model.rotary_dims", rotated, "rotary-percent")
    name, factor = "rotary-seq-len-interpolation-factor", draft.value("rotary-seq-len-interpolation-factor")
    if draft.has("use-rope-scaling"):
        names = ("use-rope-scaling", "rope-scaling-factor")
        draft.set("model.rope_scaling", "llama3", *names)
        draft.set("model.rope_factor", draft.value("rope-scaling-factor"), *names)
        # its other constants, which cannot be set there, are the defaults here
        draft.set("model.rope_original_positions", 8192, "use-rope-scaling")
        if factor not in (None, 1):
            draft.refuse(name, "positions have one scaling; omit it or --use-rope-scaling")
    elif factor not in (None, 1):
        draft.set("model.rope_scaling", "linear", name)
        draft.set("model.rope_factor", float(factor), name)


def _set_window(draft: Draft) -> None:
    """Set the window of attention, given as positions before and after the own one; -1: all."""
    text = draft.value("window-size")
    if text is None:
        return
    try:
        before, after = (int(word) for word in text.strip("()").split(","))
    except ValueError:
        raise ValueError(f"--window-size: got {text!r}, expected two whole numbers such as 1023,0") from None
    if draft.objective != "autoregressive" or after != 0 or before < -1:
        draft.refuse("window-size", "a window is N,0, of autoregressive training; omit it")
    elif before >= 0:
        draft.set("model.attention_window", before + 1, "window-size")


def _set_document_mask(draft: Draft) -> None:
    names = ("reset-position-ids", "reset-attention-mask")
    given = [name for name in names if draft.has(name)]
    if len(given) == 2:
        draft.set("model.document_mask", True, *names)
    elif given:
        draft.refuse(given[0], "model.document_mask resets both; give --reset-position-ids and "
                     "--reset-attention-mask")  # fmt: skip


def _set_vocabulary(draft: Draft) -> None:
    """Set the number of ids if the arguments give it, and the rows or their multiple."""
    n_tokens, names = _count_ids(draft)
    if n_tokens is not None:
        draft.set("model.n_tokens", n_tokens, *names)
    if draft.has("padded-vocab-size"):
        draft.set("model.vocab_rows", draft.value("padded-vocab-size"), "padded-vocab-size")
    else:
        parts = ("make-vocab-size-divisible-by", "tensor-model-parallel-size")
        multiple = draft.value(parts[0]) * draft.value(parts[1])
        draft.set("model.vocab_multiple", multiple, *parts)
    reason = "another argument gives the number of ids"
    if n_tokens is None:
        reason = "the corpus's sidecar gives the number of ids"
    for other in ("vocab-file", "tokenizer-type", "tokenizer-model"):
        if other not in names:
            draft.explain(other, reason)


def _count_ids(draft: Draft) -> tuple[int | None, tuple[str, ...]]:
    """Return (number of ids, the arguments that give it), or (None, ())."""
    if draft.has("vocab-size"):
        if draft.value("tokenizer-type") == "NullTokenizer":
            # it has an end-of-document id after the others
            return draft.value("vocab-size") + 1, ("vocab-size", "tokenizer-type")
        return draft.value("vocab-size"), ("vocab-size",)
    if draft.has("vocab-file"):
        n_ids = draft.count_ids(draft.value("vocab-file"))
        if n_ids is not None:
            return n_ids, ("vocab-file",)
    model = draft.value("tokenizer-model")
    if model in NAMED_TOKENIZERS:
        return NAMED_TOKENIZERS[model], ("tokenizer-model",)
    return None, ()


def set_objective(draft: Draft) -> None:
    """Set the objective and its options; options of the other objective are refused."""
    is_diffusion = draft.objective == "masked_diffusion"
    if is_diffusion:
        draft.settings.setdefault("objective", {})["name"] = draft.objective
    if draft.has("low-noise-start"):
        draft.set(
            "objective.low_noise_start", draft.value("low-noise-ratio"), "low-noise-start", "low-noise-ratio"
        )
        draft.set(
            "objective.low_noise_iterations",
            draft.value("low-noise-iter"),
            "low-noise-start",
            "low-noise-iter",
        )
    draft.set("objective.ar_ratio", draft.value("ar-ratio"), "ar-ratio")
    draft.set("objective.randmask_ratio", draft.value("randmask-ratio"), "randmask-ratio")
    if draft.has("use-order-list", "num-order-list"):
        # the original counts left to right as the first order, and at least 1
        n_orders = max(1, draft.value("num-order-list"))
        draft.set("objective.orders", n_orders, "num-order-list", "use-order-list")
    if draft.has("num-mc"):
        draft.set("evaluation.num_mc", draft.value("num-mc"), "num-mc")
    other = (
        ("randmask-ratio", "num-order-list", "use-order-list") if is_diffusion else STUDY_DIFFUSION_OPTIONS
    )
    for name in other:
        if draft.has(name) and draft.value(name) not in (0, 0.0, False):
            trained = "autoregressive" if is_diffusion else "masked diffusion"
            draft.refuse(name, f"an option of {trained}; omit it")


def set_precision(draft: Draft) -> None:
    """Set the dtype of matrix products; without --bf16 or --fp16 Megatron computes in float32."""
    names = [name for name in ("bf16", "fp16") if draft.has(name)]
    if len(names) == 2:
        raise ValueError("--fp16: got --bf16 too, expected one of the two")
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[names[0]] if names else "float32"
    draft.set("dist.dtype", dtype, *(names or ["bf16"]))
    if draft.has("fp32-residual-connection"):
        draft.set("dist.residual_dtype", "float32", "fp32-residual-connection")
    for name in ("fp8-format", "fp8-e4m3", "fp8-hybrid"):
        if draft.has(name):
            draft.set("dist.float8", True, name)
