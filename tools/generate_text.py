"""Continue text with a model.

    python tools/generate_text.py experiments/run --prompt "The weather" --max-new-tokens 64 --stream
    python tools/generate_text.py stories260K.bin --tokenizer tok512.bin --prompt "One day" --temperature 0

MODEL is whatever tools/convert_checkpoint.py reads. Masked-diffusion models fill in --max-new-tokens hidden
positions in --steps forwards, in the order that --order and --block-tokens say. Equal seeds give equal text.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.command import command, count, failed, run
from megatron.config.choices import ORDERS


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="a run, a checkpoint, a Hugging Face folder, a llama2.c file",
    )
    add = parser.add_argument_group("what to continue").add_argument
    add("--prompt", action="append", metavar="TEXT", help="text to continue; several are one batch")
    add("--prompt-file", type=Path, metavar="FILE", help="a prompt a line")
    add("--n-samples", type=count, default=1, metavar="N", help="continuations of each prompt")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="tokens of a continuation, at most")
    add("--ignore-end", action="store_true", help="go on after the end of a document")
    add("--tokenizer", metavar="PATH", help="by itself the one that the model says")
    add = parser.add_argument_group("how tokens are drawn").add_argument
    add("--temperature", type=float, default=0.8, metavar="T", help="0: always the likeliest token")
    add("--top-k", type=count, metavar="K", help="only the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="only the likeliest that together reach P, of 1")
    add("--seed", type=int, default=0, metavar="N", help="of the drawing")
    diffusion = parser.add_argument_group("masked-diffusion models")
    diffusion.add_argument("--steps", type=count, metavar="N", help="forwards; by itself one a token")
    diffusion.add_argument(
        "--order", choices=ORDERS, default=ORDERS[0], help="in which hidden positions are settled"
    )
    diffusion.add_argument(
        "--block-tokens", type=count, metavar="N", help="settle blocks of N tokens from left to right"
    )
    add = parser.add_argument_group("machine and screen").add_argument
    add("--stream", action="store_true", help="print a single text as it is written")
    add("--device", metavar="NAME", help="of torch; by itself cuda where there is a GPU, else cpu")
    add("--threads", type=count, metavar="N", help="CPU threads; by itself torch's choice")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write the continuations to standard output."""
    args = build_parser().parse_args(argv)
    import torch  # after the words: --help should not wait for it

    from megatron.checkpoint.convert import read_any
    from megatron.evaluation.sampling import Sampling
    from megatron.evaluation.text import Writer

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        prompts = list(args.prompt or [])
        if args.prompt_file is not None:
            prompts += args.prompt_file.read_text().splitlines()
        prompts = [prompt for prompt in prompts or [""] for _ in range(args.n_samples)]
        how = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
        device = _device(args.device)
        writer = Writer(read_any(args.model, tokenizer=args.tokenizer), device)
        writer.ignore_end = args.ignore_end
        if args.stream:
            for piece in writer.stream(prompts, args.max_new_tokens, how):
                print(piece, end="", flush=True)
            print()
            return 0
        texts = writer.write(
            prompts,
            args.max_new_tokens,
            how,
            n_steps=args.steps,
            order=args.order,
            block_tokens=args.block_tokens,
        )
    except (OSError, ValueError) as error:
        return failed(error)
    print("\n\n".join(prompt + text for prompt, text in zip(prompts, texts, strict=True)))
    return 0


def _device(name: str | None) -> str:
    """The device asked for, else cuda where there is a GPU. ValueError for one that torch cannot use here."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch built without CUDA
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from error
    return name


if __name__ == "__main__":
    run(main)
