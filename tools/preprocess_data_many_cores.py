"""Tokenize text into a .bin/.idx dataset.

    python tools/preprocess_data_many_cores.py --input 'c4/train-*.json.gz' --output-prefix c4_100M \\
        --tokenizer-model gpt2 --append-eod --max-tokens 100M --workers 2 --root tokens

writes tokens/c4_100M_text_document.bin, .idx (Megatron's MMIDIDX version 1) and .json (a record of the inputs
and settings). With a custom tokenizer:

    python tools/prepare_corpus.py --out text
    python tools/train_tokenizer.py text/train.jsonl --out tokenizer
    python tools/preprocess_data_many_cores.py --input text/train.jsonl --output-prefix train \\
        --dataset-impl mmap --tokenizer-type HFTokenizer --tokenizer-model tokenizer --append-eod \\
        --workers 2 --root tokens

After an interruption, the same command resumes after the last finished piece. Several machines share the
work by --part (examples_scaling/training/prepare_slurm.sh), and --dry-run prints what a job costs.
"""

import argparse
import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

# OpenBLAS threads would spin next to the workers; numpy reads this variable at import
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
gc.set_threshold(100_000)  # the default threshold rescans the imported modules, a tenth of the start-up time

import megatron.cli  # noqa: F401  # before slow imports, so that a signal during them is handled
from megatron.cli import create_parser, install_stop_handlers, positive_int, run_main
from megatron.config.megatron_args import load_rows
from megatron.io import explain_disk_full, is_url
from megatron.log import get_logger
from megatron.text.arguments import parse_count, parse_output_prefix
from megatron.text.inputs import add_root, parse_part
from megatron.text.preprocess import PreprocessOptions, PreprocessResult, estimate_job, preprocess
from megatron.tokenizer.kinds import TOKENIZER_FILES, add_tokenizer_options, parse_tokenizer_spec

FORMATS = ("mmap", "lazy", "cached")  # for --dataset-impl; the first is written
FLAGS = [row for row in load_rows() if "preprocessing" in row.conversion]


def drop_ignored_options(args: argparse.Namespace) -> Iterator[str]:
    """Yield a sentence for each given option without effect, and remove files of other kinds of tokenizer."""
    for flag in FLAGS:
        # a switch that is not given is False, another option None
        if getattr(args, flag.name.replace("-", "_")) not in (None, False):
            yield f"--{flag.name}: no effect: {flag.note}."
    if args.dataset_impl != FORMATS[0]:
        yield f"--dataset-impl: got {args.dataset_impl}, writing {FORMATS[0]}, the only format that is read."
    kind = args.tokenizer_type
    used = TOKENIZER_FILES[kind]
    for name in dict.fromkeys(name for names in TOKENIZER_FILES.values() for name in names):
        if getattr(args, name) is not None and name not in used:
            setattr(args, name, None)  # the reader of a tokenizer refuses it
            options = " and ".join(f"--{option.replace('_', '-')}" for option in used)
            yield f"--{name.replace('_', '-')}: no effect: {kind} is read from {options}."


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__, may_stop=True)
    add = parser.add_argument_group("files").add_argument
    inputs = ".jsonl, .json (also compressed), .parquet; folders, patterns; s3://, gs:// and hf:// URLs; or -"
    add("--input", nargs="+", required=True, metavar="PATH", help=inputs)
    output = "prefix of NAME_text_document.bin, .idx and .json; or a URL, uploaded from --work-dir"
    add("--output-prefix", type=parse_output, required=True, metavar="NAME", help=output)
    work_dir = "folder for the outputs until they are uploaded to a URL, deleted then (default: --root)"
    add("--work-dir", type=Path, metavar="DIR", help=work_dir)
    add("--overwrite", action="store_true", help="replace an output of other inputs or settings")
    root = "output folder; an input that is not found is also searched there"
    add("--root", type=Path, default=Path("."), metavar="DIR", help=root)
    add("--dataset-impl", choices=FORMATS, default=FORMATS[0], help=f"always {FORMATS[0]}")
    keys = "keys of the text; each has its own output"
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help=keys)
    on_error = "for a bad line or a damaged file: stop, or skip it and list it in NAME.rejects.jsonl"
    add("--on-error", choices=["fail", "skip"], default="fail", help=on_error)
    most = "keep the fewest first documents that hold N tokens of the first key, as in 100M; default: all"
    add("--max-tokens", type=parse_count, metavar="N", help=most)
    add_tokenizer_options(parser)
    add = parser.add_argument_group("of Megatron's scripts: accepted, without effect").add_argument
    for flag in FLAGS:
        kind = {"action": "store_true"} if flag.form == "switch" else {"metavar": "VALUE"}
        add(f"--{flag.name}", help=flag.note, **kind)
    add = parser.add_argument_group("work").add_argument
    part = "only part I of N equal parts of the input, such as 3/16: jobs on several machines do one each"
    add("--part", type=parse_part, metavar="I/N", help=part)
    add("--dry-run", action="store_true", help="print what the job reads and needs, and write nothing")
    add("--workers", type=positive_int, default=1, metavar="N", help="number of threads")
    add("--quiet", action="store_true", help="no progress bar")
    return parser


def parse_output(word: str) -> str | Path:
    """Parse the prefix of the outputs: a URL or a path."""
    return word if is_url(word) else parse_output_prefix(word)


def print_totals(totals: PreprocessResult) -> None:
    """Print the size of each output, and the number of rejected lines."""
    for output in totals.outputs:
        print(
            f"{output.prefix}.bin: {output.n_tokens:,} tokens per epoch, {output.n_documents:,} documents "
            f"({output.n_empty:,} empty), the longest {output.longest_document:,} tokens"
        )
    if totals.rejected.path:
        files = f", {totals.rejected.n_files:,} damaged files skipped" if totals.rejected.n_files else ""
        print(f"{totals.rejected.path}: {totals.rejected.n_lines:,} lines rejected{files}")


def main(argv: Sequence[str] | None = None) -> int:
    """Tokenize, and print the size of each output."""
    args = build_parser().parse_args(argv)
    for sentence in drop_ignored_options(args):
        get_logger().warning("%s", sentence)
    install_stop_handlers()  # a signal raises KeyboardInterrupt, which ends the workers in order
    gc.freeze()  # exclude the imported modules from garbage collection, also at exit
    is_remote = is_url(args.output_prefix)
    inputs, spec = add_root(args.input, args.root), parse_tokenizer_spec(args)
    # for a URL: the place in the work folder
    folder = (args.work_dir or args.root) if is_remote else args.root
    prefix = folder / (args.output_prefix.rpartition("/")[2] if is_remote else args.output_prefix)
    options = PreprocessOptions(
        keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        special_text=args.special_text == "token",
        skip_bad_lines=args.on_error == "skip",
        max_tokens=args.max_tokens,
        n_workers=args.workers,
        quiet=args.quiet,
        overwrite=args.overwrite,
        part=args.part,
    )
    if args.dry_run:
        print(estimate_job(inputs, prefix, spec, options))
        return 0
    # a full disk is an OSError deep in a worker; this adds the output's folder and the space that is free
    with explain_disk_full(prefix.parent):
        if is_remote:
            from megatron.text.remote_output import preprocess_to_store

            totals = preprocess_to_store(inputs, args.output_prefix, prefix.parent, spec, options)
        else:
            totals = preprocess(inputs, prefix, spec, options)
    print_totals(totals)
    return 0


if __name__ == "__main__":
    run_main(main)
