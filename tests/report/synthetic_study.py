"""A study directory made from a known law, with the files of real runs. Nothing is trained."""

import hashlib
import json
import math
from pathlib import Path

import numpy as np

TRUTH = {"E": 1.9, "A": 120.0, "B": 900.0, "alpha": 0.33, "beta": 0.42}
SIZES = {"0.2M": 214_336, "0.5M": 541_824, "1M": 1_103_616, "2M": 2_312_192, "5M": 5_046_528}
BUDGETS = (524_288, 1_572_864, 4_718_592)
DIFFUSION_SIZES = ("0.5M", "2M")
UNIQUE_TOKENS, TOKENS_PER_STEP, SEQ_LEN = 983_040, 8_192, 256
ABOVE = {"autoregressive": 0.0, "masked_diffusion": 0.55}


def true_loss(N: float, D: float) -> float:
    """Return the loss by the true law, in nats per token."""
    return TRUTH["E"] + TRUTH["A"] / N ** TRUTH["alpha"] + TRUTH["B"] / D ** TRUTH["beta"]


def make_plan(size: str, train_tokens: int, objective: str) -> dict:
    """Return the contents of plan.json."""
    N = SIZES[size]
    short = {"autoregressive": "ar", "masked_diffusion": "md"}[objective]
    name = f"{short}-{size}-{train_tokens / 1e6:.1f}MT"
    flops_per_token = 6.0 * N + 12 * 4 * 64 * SEQ_LEN
    plan = {"identity": hashlib.sha256(name.encode()).hexdigest()[:12], "name": name, "objective": objective}
    plan |= {"size": size, "n_params": N, "n_non_embedding": N // 2, "seed": 0, "seq_len": SEQ_LEN}
    plan |= {"train_tokens": train_tokens, "n_steps": train_tokens // TOKENS_PER_STEP}
    plan |= {"unique_tokens": UNIQUE_TOKENS, "epochs": train_tokens / UNIQUE_TOKENS}
    plan |= {"tokens_per_step": TOKENS_PER_STEP, "flops_per_token": flops_per_token}
    plan |= {"train_flops": flops_per_token * train_tokens, "flops_6nd": 6.0 * N * train_tokens}
    return plan | {"flops_convention": "exact matmuls, forward and backward"}


def make_metrics(plan: dict, final: float, rng: np.random.Generator) -> list[dict]:
    """Return lines of metrics.jsonl: a loss that falls from a uniform guess's to `final`."""
    lines = []
    for step in range(2, plan["n_steps"] + 1, 2):
        done, tokens, start = step / plan["n_steps"], step * TOKENS_PER_STEP, math.log(4096)
        loss = final + (start - final) * (1 / (1 + tokens / 150_000)) * (1 - done**2)
        line = {"kind": "train", "step": step, "tokens": tokens, "loss": loss + rng.normal(0, 0.05)}
        line |= {"lr": 1e-3, "grad_norm": 1.0, "tps": 17_000.0, "tflops": 0.1, "mfu": None}
        lines.append(line | {"epoch": tokens / UNIQUE_TOKENS, "elapsed_s": tokens / 17_000})
        if step % 16 == 0 or step == plan["n_steps"]:
            line = {"kind": "validation", "step": step, "tokens": tokens, "loss": loss + 0.02}
            line |= {"loss_se": 0.012, "n_tokens": 65_536, "num_mc": None, "checkpoint": None}
            lines.append(line)
    return lines


def write_run(
    study_dir: Path, size: str, train_tokens: int, objective: str, rng: np.random.Generator
) -> Path:
    """Write the directory of one finished run."""
    plan = make_plan(size, train_tokens, objective)
    folder = study_dir / "runs" / plan["name"]
    folder.mkdir(parents=True)
    final = true_loss(plan["n_params"], train_tokens) + ABOVE[objective] + rng.normal(0, 0.015)
    (folder / "plan.json").write_text(json.dumps(plan))
    lines = [json.dumps(line) + "\n" for line in make_metrics(plan, final, rng)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    result = {name: plan[name] for name in ("identity", "train_tokens", "train_flops")}
    result |= {"loss": final, "loss_se": 0.012, "n_tokens_scored": 65_536, "step": plan["n_steps"]}
    result |= {"wall_s": train_tokens / 17_000, "tps_mean": 17_000.0, "hardware": "2 CPU cores"}
    (folder / "result.json").write_text(json.dumps(result | {"torch": "2.13.0", "git": "0123abc"}))
    return folder


def make_law(rng: np.random.Generator, n_bootstrap: int = 200) -> dict:
    """Return the contents of law.json: the true constants, and replicates scattered around them."""
    replicates = {
        name: list(value * np.exp(rng.normal(0, 0.03, n_bootstrap))) for name, value in TRUTH.items()
    }
    ends = {name: list(np.percentile(values, (2.5, 97.5))) for name, values in replicates.items()}
    ranges = {
        "N": [min(SIZES.values()), max(SIZES.values())],
        "D": [BUDGETS[0], BUDGETS[-1]],
        "L": [4.0, 7.6],
    }
    interval = {"level": 0.95, "method": "bootstrap over runs, percentiles", "n_bootstrap": n_bootstrap}
    law = {"form": "chinchilla", "params": TRUTH, "objective": 1e-4, "huber_delta": 1e-3, "n_runs": 15}
    law |= {"filter": {"objective": "autoregressive"}, "ranges": ranges, "replicates": replicates}
    law |= {"interval": interval | {"seed": 0, "params": ends}, "table": {"path": "table.csv", "sha256": ""}}
    return law | {"warnings": ["15 runs are few: the intervals of A and B are wide."]}


def write_study(study_dir: Path) -> Path:
    """Write 5 sizes x 3 budgets autoregressive, 2 sizes x 3 masked diffusion, corpus.json and law.json."""
    rng = np.random.default_rng(0)
    for train_tokens in BUDGETS:
        for size in SIZES:
            write_run(study_dir, size, train_tokens, "autoregressive", rng)
        for size in DIFFUSION_SIZES:
            write_run(study_dir, size, train_tokens, "masked_diffusion", rng)
    corpus = {"corpus": "2,000 documents of C4 (English web pages)", "documents": 2000}
    corpus |= {"train_tokens": UNIQUE_TOKENS, "held_out_tokens": 65_536, "bytes_per_token": 3.6}
    (study_dir / "corpus.json").write_text(json.dumps(corpus))
    (study_dir / "law.json").write_text(json.dumps(make_law(rng)))
    return study_dir


def edit_json(path: Path, **change: object) -> None:
    """Replace keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
