"""Benchmark greedy generation: ours against transformers' generate, with the same weights, in one process.

    python tools/bench/generate.py --size 7M 44M --batch 1 8

Both sides continue the same random prompts by the same number of tokens, alternating, on the same threads.
They must generate the same tokens. A ratio above 1: ours is faster.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import add_options, format_ratio, median_wall, time_in_turns, write_results

from megatron.checkpoint.convert.huggingface import write_huggingface
from megatron.checkpoint.model_weights import Weights
from megatron.cli import create_parser, positive_int, run_main
from megatron.config.presets import load_named_shape, padded_rows
from megatron.config.schema import ModelConfig
from megatron.generation.generate import generate
from megatron.generation.sampling import Sampling
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt

N_TOKENS = 50257  # GPT-2's


def build_weights(size: str) -> Weights:
    """Return a model of a named size with random weights and GPT-2's vocabulary."""
    shape = {**load_named_shape(size), "n_tokens": N_TOKENS, "vocab_rows": padded_rows(N_TOKENS)}
    config = ModelConfig(**shape, size=size)
    model = Gpt(config)
    init_weights(model, seed=0)
    return Weights(
        config=config,
        objective="autoregressive",
        state=model.state_dict(),
        seq_len=2048,
        tokenizer="gpt2",
        source=size,
    )


def compare_batch(ours: Gpt, theirs: Any, args: argparse.Namespace, batch: int) -> tuple[str, bool]:
    """Return a line of text, and whether both sides generate the same tokens."""
    seed = torch.Generator().manual_seed(1)
    # equal lengths, so that neither side needs padding
    prompts = torch.randint(N_TOKENS, (batch, args.prompt_tokens), generator=seed)
    n = args.new_tokens

    def run_ours() -> list[list[int]]:
        return generate(ours, prompts.tolist(), max_new_tokens=n, sampling=Sampling(temperature=0))

    def run_theirs() -> list[list[int]]:
        output = theirs.generate(prompts, max_new_tokens=n, do_sample=False, pad_token_id=0)
        # transformers returns the prompt with the continuation
        return output[:, args.prompt_tokens :].tolist()

    costs = time_in_turns({"ours": run_ours, "theirs": run_theirs}, args.repeat, warmup=1)
    same = all(a.result == b.result for a, b in zip(costs["ours"], costs["theirs"], strict=True))
    speeds = {side: batch * n / median_wall(turns) for side, turns in costs.items()}
    line = (
        f"ours {speeds['ours']:,.0f} tokens/s, transformers {speeds['theirs']:,.0f}, "
        f"{format_ratio(costs['ours'], costs['theirs'])}, {'the same' if same else 'OTHER'} tokens"
    )
    return line, same


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("model and prompts").add_argument
    add("--size", nargs="+", default=["7M"], metavar="NAME", help="sizes of utils/model_sizes.yaml")
    add("--batch", nargs="+", type=positive_int, default=[1, 8], metavar="N", help="prompts per batch")
    add("--prompt-tokens", type=positive_int, default=32, metavar="N", help="tokens of each prompt")
    add("--new-tokens", type=positive_int, default=64, metavar="N", help="tokens to generate")
    add("--threads", type=positive_int, metavar="N", help="default: torch's choice")
    add_options(parser, repeat=5)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Time both sides, and print a line for each size and batch."""
    args = build_parser().parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers  # reads HF_HUB_OFFLINE at import

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    results = {}
    for size in args.size:
        weights = build_weights(size)
        with tempfile.TemporaryDirectory() as folder:
            write_huggingface(weights, Path(folder) / "model")
            theirs = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "model").eval()
        for batch in args.batch:
            line, same = compare_batch(weights.build_model(), theirs, args, batch)
            results[f"{size} x {batch}"] = line
            print(f"{size:>6} x {batch}: {line}, {torch.get_num_threads()} threads")
            if not same:
                return 1
    write_results(args.json, results)
    return 0


if __name__ == "__main__":
    run_main(main)
