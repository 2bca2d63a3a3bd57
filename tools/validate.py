"""Held-out loss of checkpoints.

    python tools/validate.py experiments/run --data data/held_out
    python tools/validate.py experiments/study --data utils/datapaths/c4_and_slimpajama.txt
    python tools/validate.py A B --data data/held_out --compare
    torchrun --standalone --nproc-per-node 2 tools/validate.py experiments/run --data data/held_out

CHECKPOINT is a checkpoint, a run, a folder of either (a study), or a model that tools/convert_checkpoint.py
reads. What is found goes to validation/<checkpoint>/ in the run's folder and to its TensorBoard; a checkpoint
that was scored in the same way before is not scored again. One whose loss is NaN or Inf has no result; the
others are scored, and the exit status is 1.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.command import command, count, failed, near, run
from megatron.config.choices import METHODS, WINDOWS
from megatron.evaluation.options import add_machine_options, open_asked_world
from megatron.run_dir import write_json

if TYPE_CHECKING:  # --help should not wait for torch
    from megatron.evaluation.held_out import Held
    from megatron.evaluation.scores import Scored
    from megatron.parallel.world import World


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__, takes_ranks=True)
    parser.add_argument(
        "models", nargs="+", type=Path, metavar="CHECKPOINT", help="checkpoints, runs, a study"
    )
    add = parser.add_argument_group("what is scored").add_argument
    add("--data", required=True, metavar="PREFIX|DATAPATH", help="a .bin/.idx pair, or a .txt of several")
    add("--max-samples", type=count, metavar="N", help="first windows of each corpus; by itself all")
    add("--seq-len", type=count, metavar="N", help="tokens of a window; by itself as trained")
    add(
        "--stride",
        type=count,
        metavar="N",
        help="autoregressive: a window every N tokens; by itself its length",
    )
    add(
        "--windows",
        choices=WINDOWS,
        default=WINDOWS[0],
        help="corpus: across the ends of documents; document: each document alone, without its end token",
    )
    add(
        "--allow-other-tokenizer",
        action="store_true",
        help="score a corpus that another tokenizer than the model's made, with a warning",
    )
    add = parser.add_argument_group("how it is scored").add_argument
    add(
        "--method", choices=METHODS, help="masked diffusion: mc, the bound (by itself), or ar, exact and slow"
    )
    add("--num-mc", type=count, default=8, metavar="N", help="mc: masks for each window")
    add("--seed", type=int, default=0, metavar="N", help="of masks")
    add("--tokenizer", metavar="PATH", help="for bits per byte; by itself the one that data or model say")
    add = parser.add_argument_group("results").add_argument
    add("--save-per-document", action="store_true", help="write the nats of every document, parquet")
    add("--compare", action="store_true", help="paired bootstrap of each model against the first")
    add("--n-bootstrap", type=int, default=10_000, metavar="N", help="resamples of --compare")
    add("--out", type=Path, metavar="DIR", help="where results go, for a single model")
    add_machine_options(parser, batch_size=16, unit="windows")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Score, print a line for each model and domain, and say where the results are."""
    args = build_parser().parse_args(argv)
    # after the words: --help should not wait for torch
    from megatron.evaluation.held_out import Held
    from megatron.evaluation.scores import models_of

    try:
        held = Held(
            data=args.data,
            method=args.method,
            num_mc=args.num_mc,
            stride=args.stride,
            seq_len=args.seq_len,
            seed=args.seed,
            batch_size=args.batch_size,
            max_samples=args.max_samples,
            per_document=args.save_per_document or args.compare,
            windows=args.windows,
            allow_other_tokenizer=args.allow_other_tokenizer,
        )
        models = models_of(args.models, args.out)
        if args.compare and len(models) < 2:
            raise ValueError("--compare: wants two models or more")
        with open_asked_world(args) as world:
            paths = _score(models, held, args, world)
            failures = paths.count(None)
            if args.compare and failures:
                raise ValueError(f"--compare: got {failures} models without a loss, expected none.")
            if args.compare and world.is_first:
                _compare(paths, [model.path for model in models], args.n_bootstrap, args.seed)
    except (OSError, ValueError) as error:
        return failed(error)
    return 1 if failures else 0


def _score(
    models: Sequence["Scored"], held: "Held", args: argparse.Namespace, world: "World"
) -> list[Path | None]:
    """The result of each model; None, reported, for one whose loss is NaN or Inf."""
    from megatron.evaluation.held_out import score_held_out
    from megatron.evaluation.nonfinite import NonFiniteError

    paths: list[Path | None] = []
    for model in models:
        try:
            found, path, before = score_held_out(model, held, world, tokenizer=args.tokenizer, out=args.out)
        except NonFiniteError as error:
            paths.append(None)
            if world.is_first:
                failed(error)
            continue
        paths.append(path)
        if world.is_first:
            _tell(model.path, found, path, before)
    return paths


def _tell(model: Path, found: dict[str, Any], path: Path, before: bool) -> None:
    print(f"{model}: {_line(found)}")
    for name, told in found.get("domains", {}).items():
        print(f"  {name}: {_line(told)}")
    of = "document by document" if found["windows"] == "document" else "windows across documents"
    if found["bits_per_byte"] is not None:
        print(f"  {of}; bits a byte: {found['bits_per_byte_of']}")
    print(f"{near(path)}{' (scored before)' if before else ''}")


def _line(told: dict[str, Any]) -> str:
    error = "".join(
        f" +- {told[key]:.5f} ({of})"
        for key, of in (("mc_se", "masks"), ("loss_se", "documents"))
        if told[key] is not None
    )
    if told["mc_interval"] is not None:
        error += " (95 % over masks: {:.5f} to {:.5f})".format(*told["mc_interval"])
    perplexity = "beyond a float" if told["perplexity"] is None else f"{told['perplexity']:.3f}"
    per_byte = "" if told["bits_per_byte"] is None else f", {told['bits_per_byte']:.5f} bits a byte"
    return (
        f"{told['loss']:.5f} nats a token{error}, {told['bits_per_token']:.5f} bits{per_byte}, "
        f"perplexity {perplexity}, {told['n_tokens']:,} tokens"
    )


def _compare(paths: Sequence[Path | None], models: Sequence[Path], n_bootstrap: int, seed: int) -> None:
    """Each against the first, beside the scores of the other."""
    from megatron.evaluation.compare import compare_documents
    from megatron.evaluation.scores import identity

    documents = [path.with_suffix(".documents.parquet") for path in paths if path]
    for model, path in zip(models[1:], documents[1:], strict=True):
        found = compare_documents(documents[0], path, n_bootstrap=n_bootstrap, seed=seed)
        about = {"a": str(models[0]), "b": str(model), "seed": seed}
        key = identity([str(models[0].resolve()), seed, n_bootstrap])[:8]
        write_json(path.with_suffix(f".compared-{key}.json"), {**about, **found.as_dict()})
        print(f"{models[0]} against {model}: {found}")


if __name__ == "__main__":
    run(main)
