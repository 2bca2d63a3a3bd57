"""Compute the held-out loss of checkpoints.

    python tools/validate.py experiments/run --data data/held_out
    python tools/validate.py experiments/study --data utils/datapaths/c4_and_slimpajama.txt
    python tools/validate.py A B --data data/held_out --compare
    python tools/validate.py EleutherAI/pythia-70m --data data/held_out_neox --batch-size 64
    torchrun --standalone --nproc-per-node 2 tools/validate.py experiments/run --data data/held_out

CHECKPOINT is a checkpoint, a run, a folder of either (a study), a model that tools/convert_checkpoint.py
reads, or NAME or NAME@REVISION of the Hugging Face hub, from its cache or downloaded. Results are written to
validation/<checkpoint>/ in the run's folder and to its TensorBoard log, for a name of the hub to
NAME.scores/; a checkpoint that was already scored with the same settings is skipped. A checkpoint whose loss
is NaN or Inf gets no result; the others are scored, and the exit status is 1.
"""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.cli import create_parser, positive_int, report_error, run_main, shorten_path
from megatron.config.cli_choices import METHODS, WINDOWS
from megatron.evaluation.machine_options import add_machine_options, open_requested_world


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__, takes_ranks=True, removed={"--backend": "Use `lm_eval --model hf`"})
    models = "checkpoints, runs, a study, names of the hub"
    parser.add_argument("models", nargs="+", type=Path, metavar="CHECKPOINT", help=models)
    add = parser.add_argument_group("data").add_argument
    data = "a .bin/.idx dataset, or a .txt file that lists several"
    add("--data", required=True, metavar="PREFIX|DATAPATH", help=data)
    add("--max-samples", type=positive_int, metavar="N", help="first windows of each corpus; default: all")
    add("--seq-len", type=positive_int, metavar="N", help="tokens per window; default: as in training")
    stride = "autoregressive: a window every N tokens; default: the window's length"
    add("--stride", type=positive_int, metavar="N", help=stride)
    windows = "corpus: windows across documents; document: each separately, without its end token"
    add("--windows", choices=WINDOWS, default=WINDOWS[0], help=windows)
    other = "also score a corpus of another tokenizer than the model's, with a warning"
    add("--allow-other-tokenizer", action="store_true", help=other)
    add = parser.add_argument_group("scoring").add_argument
    method = "masked diffusion: mc, the likelihood bound (default), or ar, exact and slow"
    add("--method", choices=METHODS, help=method)
    add("--num-mc", type=positive_int, default=8, metavar="N", help="mc: masks for each window")
    add("--seed", type=int, default=0, metavar="N", help="seed of masks")
    add("--tokenizer", metavar="PATH", help="for bits per byte; default: from the data or the model")
    add = parser.add_argument_group("results").add_argument
    add("--save-per-document", action="store_true", help="write the nats of every document as parquet")
    add("--compare", action="store_true", help="paired bootstrap of each model against the first")
    add("--n-bootstrap", type=int, default=10_000, metavar="N", help="bootstrap resamples of --compare")
    add("--out", type=Path, metavar="DIR", help="output folder, for a single model")
    add_machine_options(parser, batch_size=16, unit="windows")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Score, and print a line for each model and domain and the path of the results."""
    args = build_parser().parse_args(argv)
    # imported after parsing, so that --help does not load torch
    from megatron.evaluation.compare import compare_documents
    from megatron.evaluation.held_out import HeldOutScoring, score_held_out
    from megatron.evaluation.scored_models import find_models
    from megatron.generation.nonfinite_scores import NonFiniteError

    names = {field.name for field in fields(HeldOutScoring)} & set(vars(args))
    settings = HeldOutScoring(
        # the comparison is paired by documents, so it requires their losses
        per_document=args.save_per_document or args.compare,
        **{name: getattr(args, name) for name in names},
    )
    models = find_models(args.models, args.out)
    if args.compare and len(models) < 2:
        raise ValueError(f"--compare: got {len(models)} model, expected two or more.")
    with open_requested_world(args) as world:
        paths: list[Path | None] = []
        for model in models:
            path = None
            try:
                result, path, before = score_held_out(
                    model, settings, world, tokenizer=args.tokenizer, out=args.out
                )
                if world.is_first:
                    _print_result(model.hub_name or str(model.path), result, path, before)
            except NonFiniteError as error:
                if world.is_first:
                    report_error(error)
            paths.append(path)
        failures = paths.count(None)
        if args.compare and failures:
            raise ValueError(f"--compare: got {failures} models without a loss, expected none.")
        if args.compare and world.is_first:
            documents = [path.with_suffix(".documents.parquet") for path in paths if path]
            for model, path in zip(models[1:], documents[1:], strict=True):
                options = {"n_bootstrap": args.n_bootstrap, "seed": args.seed}
                comparison = compare_documents(documents[0], path, **options)
                print(f"{models[0].path} against {model.path}: {comparison}")
    return 1 if failures else 0


def _print_result(model: str, result: dict[str, Any], path: Path, before: bool) -> None:
    print(f"{model}: {_format_line(result)}")
    for name, domain_result in result.get("domains", {}).items():
        print(f"  {name}: {_format_line(domain_result)}")
    scope = "document by document" if result["windows"] == "document" else "windows across documents"
    if result["bits_per_byte"] is not None:
        print(f"  {scope}; bits per byte: {result['bits_per_byte_of']}")
    print(f"{shorten_path(path)}{' (scored before)' if before else ''}")


def _format_line(result: dict[str, Any]) -> str:
    error = "".join(
        f" +- {result[key]:.5f} ({source})"
        for key, source in (("mc_se", "masks"), ("loss_se", "documents"))
        if result[key] is not None
    )
    if result["mc_interval"] is not None:
        error += " (95 % over masks: {:.5f} to {:.5f})".format(*result["mc_interval"])
    perplexity = "overflow" if result["perplexity"] is None else f"{result['perplexity']:.3f}"
    per_byte = "" if result["bits_per_byte"] is None else f", {result['bits_per_byte']:.5f} bits per byte"
    return (
        f"{result['loss']:.5f} nats per token{error}, {result['bits_per_token']:.5f} bits{per_byte}, "
        f"perplexity {perplexity}, {result['n_tokens']:,} tokens"
    )


if __name__ == "__main__":
    run_main(main)
