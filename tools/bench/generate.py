"""Benchmark greedy generation: ours against transformers' generate, with the same weights, in one process.

    python tools/bench/generate.py --size 7M 44M --batch 1 8

Both sides continue the same random prompts by the same number of tokens, alternating, on the same threads.
They must generate the same tokens. The ratio is that of the medians; above 1 ours is faster.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from history import add_history_options, record_result

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
    """Return a model of a named size with random weights."""
    config = ModelConfig(
        **{**load_named_shape(size), "n_tokens": N_TOKENS, "vocab_rows": padded_rows(N_TOKENS), "size": size}
    )
    model = Gpt(config)
    init_weights(model, seed=0)
    return Weights(config=config, objective="autoregressive", state=model.state_dict(), seq_len=2048)


def time_call(run: Callable[[], list[list[int]]]) -> tuple[float, float, list[list[int]]]:
    """Call a function; return (wall seconds, CPU seconds, result)."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("model and prompts").add_argument
    add("--size", nargs="+", default=["7M"], metavar="NAME", help="sizes of utils/model_sizes.yaml")
    add("--batch", nargs="+", type=positive_int, default=[1, 8], metavar="N", help="prompts per batch")
    add("--prompt-tokens", type=positive_int, default=32, metavar="N", help="tokens of each prompt")
    add(
        "--new-tokens",
        type=positive_int,
        default=64,
        metavar="N",
        help="tokens to generate after each prompt",
    )
    add = parser.add_argument_group("measurement").add_argument
    add(
        "--repeat",
        type=positive_int,
        default=5,
        metavar="N",
        help="timed runs of each side; the ratio is that of the medians",
    )
    add("--threads", type=positive_int, metavar="N", help="default: torch's choice")
    add_history_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Time both sides, and print a line for each size and batch."""
    args = build_parser().parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers  # transformers reads HF_HUB_OFFLINE at import

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    for size in args.size:
        weights = build_weights(size)
        ours = weights.build_model()
        with tempfile.TemporaryDirectory() as folder:
            write_huggingface(weights, Path(folder) / "model")
            theirs = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "model").eval()
        for batch in args.batch:
            generator = torch.Generator().manual_seed(1)
            # [B, prompt]: equal lengths, so that neither side needs padding
            read = torch.randint(N_TOKENS, (batch, args.prompt_tokens), generator=generator)
            prompts, n = read.tolist(), args.new_tokens

            def run_ours(
                prompts: list[list[int]] = prompts, n: int = n, model: Gpt = ours
            ) -> list[list[int]]:
                return generate(model, prompts, max_new_tokens=n, sampling=Sampling(temperature=0))

            def run_theirs(
                read: torch.Tensor = read, n: int = n, model: torch.nn.Module = theirs
            ) -> list[list[int]]:
                output = model.generate(read, max_new_tokens=n, do_sample=False, pad_token_id=0)
                # transformers returns the prompt with the continuation
                return output[:, read.shape[1] :].tolist()

            # turns[repeat][side] = (wall, CPU, tokens); the first turn warms up and is dropped
            turns = [(time_call(run_ours), time_call(run_theirs)) for _ in range(args.repeat + 1)][1:]
            same = all(a[2] == b[2] for a, b in turns)
            wall = [statistics.median(turn[side][0] for turn in turns) for side in (0, 1)]
            cpu = [statistics.median(turn[side][1] for turn in turns) for side in (0, 1)]
            print(
                f"{size:>6} x {batch}: ours {batch * n / wall[0]:,.0f} tokens/s, transformers "
                f"{batch * n / wall[1]:,.0f}, ratio {wall[1] / wall[0]:.2f} (CPU {cpu[1] / cpu[0]:.2f}), "
                f"{'the same tokens' if same else 'OTHER TOKENS'}, {torch.get_num_threads()} threads"
            )
            cell = f"{size} x {batch}, {args.prompt_tokens} + {n} tokens, {torch.get_num_threads()} threads"
            for name, unit, rates in (
                ("ours", "tokens/s", [batch * n / a[0] for a, _ in turns]),
                ("ours, CPU", "tokens/CPU-s", [batch * n / a[1] for a, _ in turns]),
                ("times transformers", "", [b[0] / a[0] for a, b in turns]),
            ):
                value = statistics.median(rates)
                record_result(
                    args.history, "generate", f"{cell}: {name}", value, unit, better="higher", repeats=rates
                )
            if not same:
                return 1
    return 0


if __name__ == "__main__":
    run_main(main)
