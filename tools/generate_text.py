"""Continue text with a model.

    python tools/generate_text.py experiments/run --prompt "The weather" --max-new-tokens 64 --stream
    python tools/generate_text.py stories --prompt "One day" --temperature 0

MODEL is any format that tools/convert_checkpoint.py reads, or NAME or NAME@REVISION of the Hugging Face hub.
Masked-diffusion models fill --max-new-tokens masked positions in --steps forward passes, in the order given
by --order and --block-tokens. Equal seeds give equal text.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.cli import create_parser, positive_int, run_main
from megatron.config.cli_choices import DEVICES, ORDERS
from megatron.evaluation.machine_options import open_requested_world
from megatron.io import write_json


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    model = "a run, a checkpoint, a Hugging Face folder, a name of the hub"
    parser.add_argument("model", type=Path, metavar="MODEL", help=model)
    add = parser.add_argument_group("prompts").add_argument
    prompt = "text to continue; may be repeated, several prompts form one batch"
    add("--prompt", action="append", default=[], metavar="TEXT", help=prompt)
    add("--prompt-file", type=Path, metavar="FILE", help="file with one prompt per line")
    add("--n-samples", type=positive_int, default=1, metavar="N", help="continuations of each prompt")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="maximum tokens of a continuation")
    add("--ignore-end", action="store_true", help="continue after an end-of-document token")
    add("--tokenizer", metavar="PATH", help="default: the tokenizer that the model names")
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=float, default=0.8, metavar="T", help="0: always the most likely token")
    add("--top-k", type=positive_int, metavar="K", help="sample from the K most likely tokens")
    add("--top-p", type=float, metavar="P", help="sample from the most likely tokens of probability P")
    add("--seed", type=int, default=0, metavar="N", help="seed of the sampling")
    add = parser.add_argument_group("masked-diffusion models").add_argument
    add("--steps", type=positive_int, metavar="N", help="forward passes; default: one per token")
    add("--order", choices=ORDERS, default=ORDERS[0], help="order in which positions are filled")
    add("--block-tokens", type=positive_int, metavar="N", help="fill blocks of N tokens from the left")
    add = parser.add_argument_group("device and output").add_argument
    add("--stream", action="store_true", help="print a single continuation while it is generated")
    out = "also write the first prompt and its continuation; RUN/sample.json is shown by the report"
    add("--out", type=Path, metavar="FILE.json", help=out)
    add("--device", choices=DEVICES, help="default: cuda if there is a GPU, else cpu")
    add("--threads", type=positive_int, metavar="N", help="CPU threads; default: torch's choice")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Generate the continuations and print them."""
    args = build_parser().parse_args(argv)
    # imported after parsing, so that --help does not load torch
    from megatron.checkpoint.convert.formats import read_any
    from megatron.generation.completions import TextGenerator
    from megatron.generation.sampling import Sampling
    from megatron.text.hub import open_hub_model, parse_hub_name

    prompts = list(args.prompt)
    if args.prompt_file is not None:
        prompts += args.prompt_file.read_text().splitlines()
    # prompts [a, b] with 2 samples: [a, a, b, b]; without a prompt, text from the start of a document
    prompts = [prompt for prompt in prompts or [""] for _ in range(args.n_samples)]
    how = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    is_name = not args.model.exists() and parse_hub_name(str(args.model)) is not None
    path = open_hub_model(str(args.model)) if is_name else args.model
    with open_requested_world(args) as world:
        writer = TextGenerator(read_any(path, tokenizer=args.tokenizer), str(world.device))
        writer.ignore_end = args.ignore_end
        if args.stream:
            for piece in writer.stream_text(prompts, args.max_new_tokens, how):
                print(piece, end="", flush=True)
            print()
            return 0
        diffusion = {"n_steps": args.steps, "order": args.order, "block_tokens": args.block_tokens}
        texts = writer.write(prompts, args.max_new_tokens, how, **diffusion)
    if args.out:
        about = {"temperature": args.temperature, "seed": args.seed}
        write_json(args.out, {"prompt": prompts[0], "text": texts[0]} | about)
    print("\n\n".join(prompt + text for prompt, text in zip(prompts, texts, strict=True)))
    return 0


if __name__ == "__main__":
    run_main(main)
