"""Rules of the translation: batch, length, schedule, data, checkpoints and logs of Megatron's arguments."""

from fractions import Fraction

from megatron.config.migration.translate import Draft

SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "wsd": "wsd"}
DECAY_SHAPES = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "sqrt"}
DEFAULT_RUN_DIR = "experiments/megatron"


def set_optimizer(draft: Draft) -> None:
    """Set AdamW. Megatron's `adam` has decoupled weight decay."""
    if draft.value("optimizer") != "adam":
        draft.refuse("optimizer", "the optimizer is AdamW; use --optimizer adam")
    else:
        draft.confirm("optimizer", "AdamW, as Megatron's adam")
    lr = draft.require("lr")
    draft.set("optim.lr", lr, "lr")
    if lr > 0:
        # exact: 2e-5 / 2e-4 in floating point is not 0.1
        ratio = Fraction(str(draft.value("min-lr"))) / Fraction(str(lr))
        draft.set("lr_scheduler.lr_min_ratio", float(ratio), "min-lr")
    for name, key in (
        ("weight-decay", "weight_decay"), ("adam-beta1", "beta1"), ("adam-beta2", "beta2"),
        ("adam-eps", "eps"), ("clip-grad", "grad_clip"),
    ):  # fmt: skip
        draft.set(f"optim.{key}", draft.value(name), name)


def set_batch(draft: Draft) -> int:
    """Set the batch sizes and return the samples of a step."""
    micro = draft.value("micro-batch-size")
    if micro is not None and draft.unsplit:
        # it need not divide the smaller share of a rank
        draft.explain("micro-batch-size", "chosen by memory, as the model is not split")
    elif micro is not None:
        draft.set("dataset.microbatch_size", micro, "micro-batch-size")
    size = draft.value("global-batch-size")
    names = ["global-batch-size"]
    if size is None:
        split = draft.value("tensor-model-parallel-size") * draft.value("pipeline-model-parallel-size")
        split *= draft.value("context-parallel-size") * draft.value("ds-sequence-parallel-size")
        if micro is None or draft.n_ranks is None:
            raise ValueError(
                "--global-batch-size: missing. Give it, or --micro-batch-size and the number of ranks "
                "(--ranks, or the launcher's words)."
            )
        size = micro * max(1, draft.n_ranks // split)
    draft.set("dataset.batch_size", size, *names)
    _check_ramp(draft, size)
    draft.set("dataset.seq_len", draft.require("seq-length", "encoder-seq-length"),
              "seq-length", "encoder-seq-length")  # fmt: skip
    return int(size)


def _check_ramp(draft: Draft, size: int) -> None:
    ramp = draft.value("rampup-batch-size") or []
    if not ramp:
        return
    try:
        start, _, n_samples = map(int, ramp)
    except ValueError:
        raise ValueError(
            f"--rampup-batch-size: got {' '.join(ramp)!r}, expected start, increment and samples"
        ) from None
    if start == size or n_samples == 0:
        draft.set("dataset.batch_size", size, "rampup-batch-size")
    else:
        draft.refuse(
            "rampup-batch-size",
            f"a step always has {size} samples; omit it, and let the warm-up of the rate do its work",
        )


def set_length(draft: Draft, batch: int) -> None:
    """Set length, warm-up and decay in steps, from iterations, samples or tokens."""
    tokens = batch * draft.get("dataset.seq_len", 2048)
    n_steps, names = _count_total(draft, batch, tokens)
    draft.set("lr_scheduler.total_iterations", n_steps, *names)
    kind = str(draft.value("lr-decay-style")).lower()
    if kind not in SCHEDULES:
        draft.refuse("lr-decay-style", "use cosine, linear, constant or WSD")
        return
    draft.set("lr_scheduler.kind", SCHEDULES[kind], "lr-decay-style")
    decay = n_steps
    decay_names = [
        name for name in ("lr-decay-iters", "lr-decay-samples", "lr-decay-tokens") if draft.has(name)
    ]
    for name, unit in zip(
        ("lr-decay-iters", "lr-decay-samples", "lr-decay-tokens"), (1, batch, tokens), strict=True
    ):
        if draft.has(name):
            # the whole run in samples is rounded down to steps, so its decay must be too
            decay = draft.value(name) // unit
    warmup = _set_warmup(draft, batch, tokens, decay, n_steps)
    if kind == "wsd":
        _set_wsd(draft, batch, decay, n_steps, decay_names)
    elif kind in ("linear", "cosine") and decay != n_steps:
        draft.set("lr_scheduler.decay_iterations", max(1, decay - warmup), *decay_names)
    if decay == n_steps:
        for name in decay_names:
            draft.confirm(name, "the decay ends with the run")


def _count_total(draft: Draft, batch: int, tokens: int) -> tuple[int, list[str]]:
    """Return (steps, arguments that give them). As in Megatron, samples are rounded down, tokens up."""
    names = [name for name in ("train-iters", "train-samples", "train-tokens") if draft.has(name)]
    if not names:
        raise ValueError("--train-iters: missing. Give it, --train-samples or --train-tokens.")
    counts = {
        "train-iters": lambda n: n,
        "train-samples": lambda n: n // batch,
        "train-tokens": lambda n: -(-n // tokens),
    }
    # of samples and tokens the run ends with the first that is reached
    n_steps = min(counts[name](draft.value(name)) for name in names)
    if n_steps < 1:
        raise ValueError(f"--{names[0]}: got less than one step of {batch:,} samples")
    return n_steps, names


def _set_warmup(draft: Draft, batch: int, tokens: int, decay: int, n_steps: int) -> int:
    """Set the warm-up and return its steps."""
    share = draft.value("lr-warmup-fraction")
    if share is not None:
        # Megatron's fraction is that of the decay's length
        steps = Fraction(str(share)) * decay
        if decay == n_steps:
            draft.set("lr_scheduler.warmup_fraction", share, "lr-warmup-fraction")
        else:
            draft.set("lr_scheduler.warmup_iterations", -(-steps // 1), "lr-warmup-fraction")
        return int(-(-steps // 1))
    for name, unit in (("lr-warmup-tokens", tokens), ("lr-warmup-samples", batch), ("lr-warmup-iters", 1)):
        if draft.has(name) and draft.value(name):
            steps_up = -(-draft.value(name) // unit)
            draft.set("lr_scheduler.warmup_iterations", steps_up, name)
            if draft.value(name) % unit:
                draft.explain(name, f"rounded up from {draft.value(name) / unit:.2f} steps")
            return int(steps_up)
    return 0


def _set_wsd(draft: Draft, batch: int, decay: int, n_steps: int, decay_names: list[str]) -> None:
    """Set the decay at the end of a warm-up-stable-decay run."""
    shape = draft.value("lr-wsd-decay-style")
    if shape in DECAY_SHAPES:
        draft.set("lr_scheduler.decay_shape", DECAY_SHAPES[shape], "lr-wsd-decay-style")
    else:
        draft.refuse("lr-wsd-decay-style", "no exponential decay; use linear, cosine or minus_sqrt")
    if decay != n_steps:
        draft.refuse(decay_names[0], "WSD decays at the end of the run; omit it")
    if draft.has("lr-wsd-decay-iters"):
        draft.set("lr_scheduler.decay_iterations", draft.value("lr-wsd-decay-iters"), "lr-wsd-decay-iters")
    elif draft.has("lr-wsd-decay-samples"):
        steps = -(-draft.value("lr-wsd-decay-samples") // batch)
        draft.set("lr_scheduler.decay_iterations", steps, "lr-wsd-decay-samples")
    else:
        raise ValueError("--lr-wsd-decay-iters: missing. --lr-decay-style WSD requires it or its samples.")


def set_data(draft: Draft, batch: int) -> None:
    """Set training and held-out data, and the number of held-out samples."""
    draft.set("misc.seed", draft.value("seed"), "seed")
    if draft.has("num-workers"):
        draft.set("dataset.num_workers", draft.value("num-workers"), "num-workers")
    if draft.has("mock-data"):
        draft.set("dataset.path_train", "synthetic", "mock-data")
        return
    _set_paths(draft)
    if draft.get("dataset.path_train") is None and draft.command.unknown:
        # a fork may name its data by an argument of its own, which the table lists
        draft.refuse("data-path", "missing; give it, --train-data-path or --train-data-path-file")
        return
    if draft.get("dataset.path_train") is None:
        raise ValueError("--data-path: missing. Give it, --train-data-path or --train-data-path-file.")
    # Megatron shuffles the documents of all epochs together, and then their samples, from the seed
    draft.imply("order of samples", "dataset.order", "megatron")
    if draft.get("dataset.path_eval") is None:
        return
    if draft.has("eval-iters") and draft.value("eval-iters") == 0:
        draft.settings["dataset"].pop("path_eval")
        draft.explain("eval-iters", "no held-out loss")
        return
    draft.set("evaluation.max_samples", draft.value("eval-iters") * batch, "eval-iters")
    draft.set("evaluation.every_iterations", draft.value("eval-interval"), "eval-interval")


def _set_paths(draft: Draft) -> None:
    for kind in ("train", "valid"):
        key = "dataset.path_train" if kind == "train" else "dataset.path_eval"
        if draft.has(f"{kind}-data-path-file"):
            if not str(draft.value(f"{kind}-data-path-file")).endswith(".txt"):
                draft.refuse(f"{kind}-data-path-file", "rename the file so that it ends in .txt")
            draft.set(key, draft.value(f"{kind}-data-path-file"), f"{kind}-data-path-file")
        elif draft.has(f"{kind}-data-path"):
            path = _name_corpora(draft, draft.value(f"{kind}-data-path"), kind)
            draft.set(key, path, f"{kind}-data-path")
    name = next((name for name in ("data-path", "data-args-path") if draft.has(name)), None)
    if name is None or draft.get("dataset.path_train") is not None:
        if draft.has("split"):
            draft.explain("split", "the datasets are given one by one, and not cut")
        return
    words = draft.value(name) if name == "data-path" else draft.read_words(draft.value(name))
    train, valid = parse_split(draft.value("split"))
    split_names = [name, "split"]
    if train == 1:
        draft.set("dataset.path_train", _name_corpora(draft, words, "train"), *split_names)
        return
    tag = "_".join(_list_shares(draft.value("split")))
    draft.set("dataset.path_train", _name_corpora(draft, words, "train", f"_{tag}_train"), *split_names)
    if valid:
        draft.set("dataset.path_eval", _name_corpora(draft, words, "valid", f"_{tag}_valid"), *split_names)
    for prefix in _list_pairs(words)[1]:
        split = ",".join(_list_shares(draft.value("split")))
        draft.commands.append(
            f"python tools/subset_corpus.py --input {prefix} --split {split} --output {prefix}_{tag}"
        )


def parse_split(text: str) -> tuple[Fraction, Fraction]:
    """Return the shares of training and validation documents of `949,50,1`, `90/10/0` or `100`."""
    words = _list_shares(text)
    try:
        parts = [Fraction(word) for word in words] + [Fraction(0)] * (3 - len(words))
    except ValueError:
        parts = []
    if len(parts) != 3 or min(parts, default=-1) < 0 or not parts[0]:
        raise ValueError(f"--split: got {text!r}, expected up to three numbers such as 949,50,1")
    return parts[0] / sum(parts), parts[1] / sum(parts)


def _list_shares(text: str) -> list[str]:
    """Return the numbers of a split; published scripts pass it with quotes inside, as in '99,1,0'."""
    return [word.strip() for word in text.strip("'\" ").replace("/", ",").split(",") if word.strip()]


def _list_pairs(words: list[str]) -> tuple[list[str], list[str]]:
    """Return (weights, prefixes) of `weight prefix ...`, of one prefix, or of prefixes without weights."""
    if len(words) == 1:
        return [], words
    try:
        _ = [Fraction(word) for word in words[::2]]
    except (ValueError, ZeroDivisionError):
        return [], words
    if len(words) % 2:
        raise ValueError(f"--data-path: got {len(words)} words, expected pairs of weight and prefix")
    return words[::2], words[1::2]


def _name_corpora(draft: Draft, words: list[str], kind: str, suffix: str = "") -> str:
    """Return the prefix of one corpus, or the name of a data-path file of several, which is to be written."""
    weights, prefixes = _list_pairs(words)
    if not prefixes:
        raise ValueError("--data-path: got no dataset, expected a prefix")
    if len(prefixes) == 1:
        return prefixes[0] + suffix
    if not weights:
        raise ValueError(
            f"--data-path: got {len(prefixes)} prefixes without weights, expected: weight prefix ..."
        )
    name = f"{kind}_data.txt"
    draft.files[name] = "".join(f"{w} {p}{suffix}\n" for w, p in zip(weights, prefixes, strict=True))
    return name


def set_run(draft: Draft) -> None:
    """Set folders, checkpoints, logs and stopping."""
    save, load = draft.value("save"), draft.value("load")
    # Megatron writes tensorboard files only into a folder that is given
    draft.set("logging.tensorboard", draft.has("tensorboard-dir"), "tensorboard-dir")
    if draft.has("wandb-exp-name") and draft.value("wandb-exp-name"):
        draft.set("name", draft.value("wandb-exp-name"), "wandb-exp-name")
    if draft.has("wandb-project") and draft.value("wandb-project"):
        draft.set("logging.wandb", draft.value("wandb-project"), "wandb-project")
    draft.set("logging.run_dir", save or DEFAULT_RUN_DIR, "save")
    draft.set("logging.every_iterations", draft.value("log-interval"), "log-interval")
    _set_loading(draft, save, load)
    _set_saving(draft)
    _set_profile(draft)
    if draft.has("kill-switch-file"):
        draft.set("misc.stop_file", draft.value("kill-switch-file"), "kill-switch-file")
    if draft.has("exit-duration-in-mins"):
        draft.set("misc.max_hours", draft.value("exit-duration-in-mins") / 60, "exit-duration-in-mins")
    if draft.has("no-check-for-nan-in-loss-and-grad"):
        draft.set("misc.on_nonfinite", "skip", "no-check-for-nan-in-loss-and-grad")


def _set_loading(draft: Draft, save: str | None, load: str | None) -> None:
    if load is not None and draft.has("finetune"):
        draft.set("checkpoint.init_from", load, "load", "finetune")
        draft.explain("finetune", "a Megatron checkpoint is first converted with tools/convert_checkpoint.py")
    elif load is not None and draft.has("load-tag"):
        draft.set("checkpoint.resume", f"{load}/{draft.value('load-tag')}", "load", "load-tag")
    elif load is not None and load != save:
        draft.set("checkpoint.resume", load, "load")
    elif load is not None:
        draft.set("checkpoint.resume", "auto", "load")
    else:
        draft.set("checkpoint.resume", "never", "load")


def _set_saving(draft: Draft) -> None:
    interval = ("save-interval", "persistent-save-interval")
    often = draft.value("non-persistent-save-interval")
    if draft.has(*interval) and draft.value("save") is None:
        for name in interval:
            draft.explain(name, "nothing is saved without --save")
    elif draft.has(*interval) and often:
        draft.set("checkpoint.chkpt_saving_iterations", often, "non-persistent-save-interval")
        draft.set("checkpoint.keep_every", draft.value(*interval), *interval)
    elif draft.has(*interval):
        draft.set("checkpoint.chkpt_saving_iterations", draft.value(*interval), *interval)
        if draft.has("save-retain-interval"):
            draft.set("checkpoint.keep_every", draft.value("save-retain-interval"), "save-retain-interval")
            draft.set("checkpoint.keep_last", 1, "save-retain-interval")
        else:
            draft.set("checkpoint.keep_last", None, *interval)  # Megatron deletes none
    sharded = [name for name in ("use-dist-ckpt", "dist-ckpt-format") if draft.has(name)]
    if draft.has("ckpt-format") and draft.value("ckpt-format") != "torch":
        sharded.append("ckpt-format")
    elif draft.has("ckpt-format"):
        draft.set("checkpoint.state_dict_type", "full", "ckpt-format")
    if draft.has("async-save"):
        draft.set("checkpoint.asynchronous", True, "async-save")
        sharded.append("async-save")
    if sharded:
        draft.set("checkpoint.state_dict_type", "sharded", *sharded)


def _set_profile(draft: Draft) -> None:
    if not draft.has("profile"):
        return
    if draft.has("profile_steps"):
        first, _, last = draft.value("profile_steps").partition(",")
        if not (first.isdigit() and last.isdigit()):
            raise ValueError(f"--profile_steps: got {draft.value('profile_steps')!r}, expected FIRST,LAST")
        steps, names = [int(first), int(last)], ["profile", "profile_steps"]
    else:
        steps = [draft.value("profile-step-start"), draft.value("profile-step-end")]
        names = ["profile", "profile-step-start", "profile-step-end"]
    # steps are counted from 1 here
    draft.set("logging.profile_steps", [max(1, step) for step in steps], *names)
