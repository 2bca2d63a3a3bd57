"""Fuzz targets of configurations: YAML files, key=value words, amounts, hosts, launchers."""

import random
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path

from fuzzing.cases import FileCase, WordCase
from fuzzing.corpora import write_dataset
from fuzzing.harness import FuzzTarget, WrongAnswerError
from fuzzing.mutate import EXTREMES, VALUES, mutate_text, mutate_yaml

# {{ and }} are braces after str.format; {folder} is the folder of the target
RUN = """name: small
dist: {{dtype: float32}}
dataset: {{path_train: {folder}/train, path_eval: {folder}/held, seq_len: 8, batch_size: 2, num_workers: 0}}
model: {{d_model: 32, n_heads: 2, n_layers: 1}}
objective: {{name: autoregressive}}
optim: {{lr: 4.0e-3, weight_decay: 0.1, grad_clip: 1.0}}
lr_scheduler: {{total_tokens: 500, warmup_tokens: 50, kind: cosine, lr_min_ratio: 0.1}}
checkpoint: {{chkpt_saving_iterations: 100, keep_last: 2}}
evaluation: {{every_iterations: 10}}
logging: {{run_dir: "{folder}/runs/${{name}}", every_iterations: 5}}
misc: {{seed: 1}}
"""

STUDY = """name: quick
directory: {folder}/study
run:
  dist: {{dtype: float32}}
  dataset: {{path_train: {folder}/train, path_eval: {folder}/held, seq_len: 8, batch_size: 4}}
  optim: {{lr: 4.0e-3}}
  lr_scheduler: {{kind: cosine, warmup_tokens: 50, lr_min_ratio: 0.1}}
sizes:
  0.1M: {{d_model: 32, n_heads: 2, n_layers: 2}}
  0.2M: {{d_model: 48, n_heads: 3, n_layers: 2}}
grids:
  - objectives: [autoregressive]
    sizes: [0.1M, 0.2M]
    train_tokens: [250, 500]
    seeds: [0, 1]
  - objectives: [masked_diffusion]
    sizes: [0.1M]
    train_tokens: [1_000]
    run: {{optim: {{lr: 8.0e-3}}}}
seed: 3
blind:
  sizes: [0.1M, 0.2M]
  compute: 4
  lr: [{{coefficient: 1.79, n: -0.713, d: 0.307}}]
  run: {{optim: {{weight_decay: 0.2}}}}
"""
MIXTURE = """catalog: catalog
corpora: [slim]
where: ["language = 'en'", "stars > 3"]
by: [source, language]
weights: {Github: 0.7, C4: {en: 0.3, de: 0.1}}
count: tokens
dry: repeat
shuffle: true
tokenizer: gpt2
"""
SCHEDULED = """catalog: catalog
by: [source]
schedule:
  unit: steps
  change: linear
  points:
    - {at: 0, weights: {Github: 1, C4: 1}}
    - {at: 1000, weights: infer}
dry: stop
"""
ADAPTIVE = """catalog: catalog
by: source
adaptive: {rule: ado, every_steps: 10, delay_steps: 8}
weights: {"*": 1}
"""
# existing keys, keys that do not exist, sections without a key, and no key
KEYS = (
    "name", "dist.dtype", "dist.tensor", "dist.pipeline", "dist.timeout_s", "dataset.seq_len",
    "dataset.batch_size",
    "dataset.path_train", "dataset.path_eval", "dataset.unique_tokens", "dataset.epochs", "dataset.mixture",
    "model.size", "model.d_model", "model.n_heads", "model.n_layers", "model.d_ff", "model.n_tokens",
    "model.rope_theta",
    "model.hf_config", "model.parametrization", "objective.name", "objective",
    "objective.mask_rate_min", "optim.lr",
    "optim.beta2", "optim.name", "lr_scheduler.kind", "lr_scheduler.total_tokens", "lr_scheduler.total_steps",
    "lr_scheduler.warmup_tokens", "checkpoint.keep_last", "checkpoint.keep_at", "checkpoint.directory",
    "checkpoint.prefix", "evaluation.num_mc", "evaluation.every_iterations", "logging.run_dir",
    "logging.wandb",
    "misc.seed", "misc.n_threads", "misc.stop_file", "engine", "dist.deepspeed_config", "", "a",
    "model", "dataset",
)  # fmt: skip
PIECES = (
    "=",
    "==",
    ".",
    "..",
    "[",
    "{",
    "a: b",
    "${name}",
    "${",
    "&a [*a]",
    "!!python/name:os.system",
    "1e9",
    "1_000",
    "",
)


def open_runs(folder: Path) -> FileCase:
    """Open a run's YAML, which is checked and planned."""
    from megatron.config.read import config_to_dict
    from megatron.plan.resolve import load_config, resolve_config
    from megatron.plan.run_plan import plan_run

    path = folder / "run.yaml"
    path.write_text(RUN.format(folder=folder))
    for name in ("train", "held"):
        write_dataset(folder / name)

    def read() -> None:
        config = load_config(path)
        # a resolved configuration that is read again must give the same run
        if resolve_config(config_to_dict(config)) != config:
            raise WrongAnswerError("the resolved configuration resolves to a different one")
        plan = plan_run(config)
        if not plan.n_steps > 0 or not plan.train_tokens > 0:
            raise WrongAnswerError(f"got a plan of {plan.n_steps} steps, {plan.train_tokens} tokens")

    return FileCase(folder, {"run.yaml": mutate_yaml}, read)


def open_words(folder: Path) -> WordCase:
    """Open key=value words that override a run's YAML."""
    from megatron.plan.resolve import load_config

    path = folder / "run.yaml"
    path.write_text(RUN.format(folder=folder))
    for name in ("train", "held"):
        write_dataset(folder / name)
    values = [str(value) for value in (*VALUES, *EXTREMES)] + list(PIECES)

    def mutate(rng: random.Random, word: bytes) -> bytes:
        if rng.random() < 0.3:
            return mutate_text(rng, word)
        return f"{rng.choice(KEYS)}={rng.choice(values)}".encode("utf-8", "surrogatepass")

    words = tuple(f"{key}={value}" for key, value in zip(KEYS, values, strict=False)) + (
        "optim.lr=1e-3",
        "misc.seed=5",
    )
    # `and None`: a configuration is not empty, and `read` would return it as counts of outcomes
    return WordCase(words, mutate, lambda word: load_config(path, [word]) and None)


def open_studies(folder: Path) -> FileCase:
    """Open a study's YAML, which is expanded into its runs."""
    from megatron.study.ladder import expand_study, read_study_plan

    path = folder / "study.yaml"
    path.write_text(STUDY.format(folder=folder))
    for name in ("train", "held"):
        write_dataset(folder / name)

    def read() -> None:
        # two runs in one folder would overwrite each other's checkpoints
        folders = [run.folder for run in expand_study(read_study_plan(path))]
        if len(set(folders)) != len(folders):
            raise WrongAnswerError(f"two runs have the same folder: {folders}")

    return FileCase(folder, {"study.yaml": mutate_yaml}, read)


def open_specs(folder: Path) -> FileCase:
    """Open the YAML of three mixtures, without their catalog."""
    from megatron.mixture.spec import read_spec

    names = {"plain.yaml": MIXTURE, "scheduled.yaml": SCHEDULED, "adaptive.yaml": ADAPTIVE}
    for name, text in names.items():
        (folder / name).write_text(text)

    def read() -> None:
        for name in names:
            spec = read_spec(folder / name)
            # values that are computed when they are read, and so may raise only here
            spec.make_query(), spec.compute_sha256(), spec.by, spec.adaptive, spec.counts_tokens, spec.catalog

    return FileCase(folder, dict.fromkeys(names, mutate_yaml), read)


def _parse_amount(word: str) -> Fraction | None:
    """Parse an amount with `decimal`; None for an invalid one."""
    # exact: a Fraction of "0.1" is 1/10 and not the nearest float
    factor = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}.get(word[-1:].upper())
    try:
        value = Decimal((word[:-1] if factor else word).strip())
        # 1e999999999 is a valid Decimal, but its Fraction would have a billion digits
        return Fraction(value) * (factor or 1) if value.is_finite() and abs(value.adjusted()) < 1000 else None
    except InvalidOperation:
        return None


def open_amounts(folder: Path) -> WordCase:
    """Open amounts, compared with Python's decimal."""
    from megatron.text.arguments import parse_count, parse_count_or_fraction

    def read(word: str) -> None:
        share = parse_count_or_fraction(word)
        expected = _parse_amount(word)
        if expected is None or share != expected:
            raise WrongAnswerError(f"{word!r}: got {share}, expected {expected}")
        if parse_count(word) != expected:
            raise WrongAnswerError(f"{word!r}: got {parse_count(word)}, expected {expected}")

    return WordCase(
        ("100M", "1.5B", "20_000", "20000", "0.1", "1e9", "5T", "7k", "1e-3", "0.25"), mutate_text, read
    )


def open_addresses(folder: Path) -> WordCase:
    """Open hosts, ports, locations, lists of hosts, and the variables of launchers."""
    from megatron.mixture.server import ListenOptions, is_loopback
    from megatron.parallel.rank_env import (
        LAUNCHERS,
        TORCHRUN_VARIABLES,
        parse_first_host,
        ranks_from_environment,
    )

    def read(word: str) -> None:
        # the kind may be mutated too; then the word is read as variables of a launcher
        kind, _, rest = word.partition("|")
        if kind == "hosts":
            parse_first_host(rest)
        elif kind == "listen":
            host, _, port = rest.rpartition(":")
            is_loopback(host)
            ListenOptions(
                host=host, port=int(port) if port.isdecimal() else 0, token="t" * 32, allow_plain=True
            ).check()
        else:
            pairs: list[str] = rest.split(" ")
            ranks_from_environment(dict(pair.partition("=")[::2] for pair in pairs))

    slurm = "SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_LOCALID=3 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[03-05] "
    words = (
        "hosts|n[03-05,9],gpu1", "hosts|a,b", "listen|0.0.0.0:80",
        "listen|[::1]:65535",
        "env|" + " ".join(f"{name}=1" for name in TORCHRUN_VARIABLES) + " WORLD_SIZE=2",
        "env|" + slurm + "SLURM_STEP_TASKS_PER_NODE=4(x2) SLURM_JOB_NODELIST=n[1-2] SLURM_JOB_ID=5",
        *(f"env|{launcher.marker}=0 {launcher.rank}=0 {launcher.n_ranks}=2 {launcher.local_rank}=0 "
          f"{launcher.n_local}=2 MASTER_PORT=5"
          for launcher in LAUNCHERS),
    )  # fmt: skip
    return WordCase(words, mutate_text, read)


TARGETS: tuple[FuzzTarget, ...] = (
    FuzzTarget("run YAML", 3, open_runs),
    FuzzTarget("key=value words", 3, open_words),
    FuzzTarget("study YAML", 1.5, open_studies),
    FuzzTarget("mixture YAML", 3, open_specs),
    FuzzTarget("amounts", 3, open_amounts),
    FuzzTarget("hosts, ranks", 3, open_addresses),
)
