"""Greedy generation: ours beside transformers' generate, with the same weights, in one process.

    python tools/bench/generate.py --size 7M 44M --batch 1 8

Both continue the same random prompts by as many tokens, on the same threads, in turn, and must write the
same tokens. The ratio is of the medians; above 1 ours is the faster one.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron.checkpoint.huggingface import write_huggingface
from megatron.checkpoint.weights import Weights
from megatron.command import command, count, run
from megatron.config.presets import padded_rows, shape_of_size
from megatron.config.schema import ModelConfig
from megatron.evaluation.generate import generate
from megatron.evaluation.sampling import Sampling
from megatron.model.gpt import Gpt
from megatron.model.initial import initialise

N_TOKENS = 50257  # GPT-2's


def build(size: str) -> Weights:
    """A named size with random weights."""
    config = ModelConfig(
        **{**shape_of_size(size), "n_tokens": N_TOKENS, "vocab_rows": padded_rows(N_TOKENS), "size": size}
    )
    model = Gpt(config)
    initialise(model, seed=0)
    return Weights(config=config, objective="autoregressive", state=model.state_dict(), seq_len=2048)


def seconds(run: Callable[[], list[list[int]]]) -> tuple[float, float, list[list[int]]]:
    """(wall, CPU, what it gave)."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = run()
    return time.perf_counter() - wall, time.process_time() - cpu, found


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    add = parser.add_argument
    add("--size", nargs="+", default=["7M"], metavar="NAME", help="of utils/model_sizes.yaml")
    add("--batch", nargs="+", type=count, default=[1, 8], metavar="N", help="prompts at once")
    add("--prompt-tokens", type=count, default=32, metavar="N", help="of each prompt")
    add("--new-tokens", type=count, default=64, metavar="N", help="to write behind each")
    add("--repeat", type=count, default=5, metavar="N", help="turns of each side; medians count")
    add("--threads", type=count, metavar="N", help="by itself torch's choice")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a line for each size and batch."""
    args = build_parser().parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers  # after the line before it, which it reads at import

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    for size in args.size:
        weights = build(size)
        ours = weights.model()
        with tempfile.TemporaryDirectory() as folder:
            write_huggingface(weights, Path(folder) / "model")
            theirs = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "model").eval()
        for batch in args.batch:
            generator = torch.Generator().manual_seed(1)
            read = torch.randint(N_TOKENS, (batch, args.prompt_tokens), generator=generator)
            prompts, n = read.tolist(), args.new_tokens

            def run_ours(
                prompts: list[list[int]] = prompts, n: int = n, model: Gpt = ours
            ) -> list[list[int]]:
                return generate(model, prompts, max_new_tokens=n, how=Sampling(temperature=0))

            def run_theirs(
                read: torch.Tensor = read, n: int = n, model: torch.nn.Module = theirs
            ) -> list[list[int]]:
                found = model.generate(read, max_new_tokens=n, do_sample=False, pad_token_id=0)
                return found[:, read.shape[1] :].tolist()

            turns = [(seconds(run_ours), seconds(run_theirs)) for _ in range(args.repeat + 1)][1:]
            same = all(a[2] == b[2] for a, b in turns)
            wall = [statistics.median(turn[side][0] for turn in turns) for side in (0, 1)]
            cpu = [statistics.median(turn[side][1] for turn in turns) for side in (0, 1)]
            print(
                f"{size:>6} x {batch}: ours {batch * n / wall[0]:,.0f} tokens/s, transformers "
                f"{batch * n / wall[1]:,.0f}, ratio {wall[1] / wall[0]:.2f} (CPU {cpu[1] / cpu[0]:.2f}), "
                f"{'the same tokens' if same else 'OTHER TOKENS'}, {torch.get_num_threads()} threads"
            )
            if not same:
                return 1
    return 0


if __name__ == "__main__":
    run(main)
