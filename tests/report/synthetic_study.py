"""A study directory made from a known law, with the files of real runs. Nothing is trained.

python tests/report/synthetic_study.py FOLDER         (then: python tools/make_report.py FOLDER)
"""

import hashlib
import json
import math
import sys
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
    return {
        "identity": hashlib.sha256(name.encode()).hexdigest()[:12],
        "name": name,
        "size": size,
        "objective": objective,
        "seed": 0,
        "n_params": N,
        "n_non_embedding": N // 2,
        "train_tokens": train_tokens,
        "n_steps": train_tokens // TOKENS_PER_STEP,
        "tokens_per_step": TOKENS_PER_STEP,
        "seq_len": SEQ_LEN,
        "unique_tokens": UNIQUE_TOKENS,
        "epochs": train_tokens / UNIQUE_TOKENS,
        "flops_per_token": flops_per_token,
        "train_flops": flops_per_token * train_tokens,
        "flops_6nd": 6.0 * N * train_tokens,
        "flops_convention": "exact matmuls, forward and backward",
    }


def make_metrics(plan: dict, final: float, rng: np.random.Generator) -> list[dict]:
    """Return lines of metrics.jsonl: a loss that falls from that of a uniform guess to `final`."""
    lines = []
    for step in range(2, plan["n_steps"] + 1, 2):
        done = step / plan["n_steps"]
        tokens = step * TOKENS_PER_STEP
        start = math.log(4096)
        loss = final + (start - final) * (1 / (1 + tokens / 150_000)) * (1 - done**2)
        lines.append(
            {
                "kind": "train",
                "step": step,
                "tokens": tokens,
                "loss": loss + rng.normal(0, 0.05),
                "lr": 1e-3,
                "grad_norm": 1.0,
                "tps": 17_000.0,
                "tflops": 0.1,
                "mfu": None,
                "epoch": tokens / UNIQUE_TOKENS,
                "elapsed_s": tokens / 17_000,
            }
        )
        if step % 16 == 0 or step == plan["n_steps"]:
            lines.append(
                {
                    "kind": "validation",
                    "step": step,
                    "tokens": tokens,
                    "loss": loss + 0.02,
                    "loss_se": 0.012,
                    "n_tokens": 65_536,
                    "num_mc": None,
                    "checkpoint": None,
                }
            )
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
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in make_metrics(plan, final, rng))
    )
    (folder / "result.json").write_text(
        json.dumps(
            {
                "identity": plan["identity"],
                "loss": final,
                "loss_se": 0.012,
                "n_tokens_scored": 65_536,
                "step": plan["n_steps"],
                "train_tokens": train_tokens,
                "wall_s": train_tokens / 17_000,
                "train_flops": plan["train_flops"],
                "tps_mean": 17_000.0,
                "hardware": "2 CPU cores",
                "torch": "2.13.0",
                "git": "0123abc",
            }
        )
    )
    return folder


def make_law(rng: np.random.Generator, n_bootstrap: int = 200) -> dict:
    """Return the contents of law.json: the true constants, and replicates scattered around them."""
    replicates = {
        name: list(value * np.exp(rng.normal(0, 0.03, n_bootstrap))) for name, value in TRUTH.items()
    }
    exponent = np.array(replicates["beta"]) / (np.array(replicates["alpha"]) + np.array(replicates["beta"]))
    ends = {name: list(np.percentile(values, (2.5, 97.5))) for name, values in replicates.items()}
    return {
        "form": "chinchilla",
        "formula": "L = 1.9 + 120/N^0.33 + 900/D^0.42",
        "params": TRUTH,
        "objective": 1e-4,
        "huber_delta": 1e-3,
        "n_runs": 15,
        "columns": {"N": "n_params", "D": "train_tokens", "L": "loss"},
        "filter": {"objective": "autoregressive"},
        "ranges": {
            "N": [min(SIZES.values()), max(SIZES.values())],
            "D": [BUDGETS[0], BUDGETS[-1]],
            "L": [4.0, 7.6],
        },
        "interval": {
            "level": 0.95,
            "method": "bootstrap over runs, percentiles",
            "n_bootstrap": n_bootstrap,
            "seed": 0,
            "params": ends,
            "derived": {"a_exponent": list(np.percentile(exponent, (2.5, 97.5)))},
        },
        "standard_error": {name: float(np.std(values)) for name, values in replicates.items()},
        "derived": {"a_exponent": TRUTH["beta"] / (TRUTH["alpha"] + TRUTH["beta"])},
        "replicates": replicates,
        "warnings": ["15 runs are few: the intervals of A and B are wide."],
        "table": {"path": "table.csv", "sha256": ""},
    }


def write_study(study_dir: Path, with_law: bool = True) -> Path:
    """5 sizes x 3 budgets autoregressive, 2 sizes x 3 masked diffusion, corpus.json and, if asked,
    law.json.
    """
    rng = np.random.default_rng(0)
    for train_tokens in BUDGETS:
        for size in SIZES:
            write_run(study_dir, size, train_tokens, "autoregressive", rng)
        for size in DIFFUSION_SIZES:
            write_run(study_dir, size, train_tokens, "masked_diffusion", rng)
    (study_dir / "corpus.json").write_text(
        json.dumps(
            {
                "corpus": "2,000 documents of C4 (English web pages)",
                "documents": 2000,
                "train_tokens": UNIQUE_TOKENS,
                "held_out_tokens": 65_536,
                "bytes_per_token": 3.6,
            }
        )
    )
    if with_law:
        (study_dir / "law.json").write_text(json.dumps(make_law(rng)))
    return study_dir


if __name__ == "__main__":
    print(write_study(Path(sys.argv[1]), with_law="--no-law" not in sys.argv))
