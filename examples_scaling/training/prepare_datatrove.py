"""Tokenise a folder of text with datatrove: on this machine, on Slurm or on Ray.

    python examples_scaling/training/prepare_datatrove.py c4 tokens/c4 --glob 'train-*.json.gz' --tasks 16
    python examples_scaling/training/prepare_datatrove.py c4 tokens/c4 --glob 'train-*.json.gz' \\
        --executor slurm --partition cpu --workers 128

Each task writes one part, tokens/c4-part-RRRRR-of-NNNNN_text_document. The same command resumes after a stop:
it starts the tasks that have not finished. With a task per file, the parts joined by rank are in the order of
the file names.
"""

import argparse
from pathlib import Path

from datatrove.executor.base import PipelineExecutor
from datatrove.io import get_datafolder
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.readers import ParquetReader

from megatron.text.datatrove_step import EncodeToMegatron, StrictJsonlReader


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("input", help="folder, or URL that fsspec reads, such as s3://bucket/c4")
    parser.add_argument("output", type=Path, help="prefix of the parts, on a file system of all nodes")
    parser.add_argument("--glob", default="**", help="pattern of the files, default all")
    parser.add_argument("--text-key", default="text", help="key or column of the text")
    parser.add_argument("--tokenizer", default="gpt2", help="as --tokenizer-model of the preprocessing tool")
    parser.add_argument("--tasks", type=int, help="number of parts, default one a file")
    parser.add_argument("--workers", type=int, default=1, help="tasks at the same time, one core each")
    parser.add_argument("--executor", choices=["local", "slurm", "ray"], default="local")
    parser.add_argument("--partition", default="", help="of Slurm")
    parser.add_argument("--time", default="4:00:00", help="limit of one Slurm task")
    parser.add_argument(
        "--logs", help="folder of logs and of the list of finished tasks, default OUTPUT.logs"
    )
    return parser


def build_steps(args: argparse.Namespace) -> tuple[list[PipelineStep], int]:
    """Return the pipeline and its number of tasks. Add filters and deduplication between the two steps."""
    folder = args.input if "://" in args.input else str(Path(args.input).absolute())
    files = get_datafolder(folder).list_files(glob_pattern=args.glob)
    if not files:
        raise SystemExit(f"error: {args.input}: no file matches {args.glob}")
    read = ParquetReader if files[0].endswith(".parquet") else StrictJsonlReader
    reader = read(folder, glob_pattern=args.glob, text_key=args.text_key)
    encoder = EncodeToMegatron(args.output, args.tokenizer, append_eod=True)
    return [reader, encoder], args.tasks or len(files)


def build_executor(args: argparse.Namespace) -> PipelineExecutor:
    """Return the executor; a task that is listed as finished in the logs is not run again."""
    logs = Path(args.logs or f"{args.output}.logs").absolute()
    steps, n_tasks = build_steps(args)
    if args.executor == "slurm":
        from datatrove.executor import SlurmPipelineExecutor

        return SlurmPipelineExecutor(
            steps, n_tasks, args.time, args.partition, workers=args.workers, qos="", logging_dir=str(logs),
            job_name=args.output.name,
        )  # fmt: skip
    if args.executor == "ray":
        import ray
        from datatrove.executor import RayPipelineExecutor

        ray.init(address="auto", ignore_reinit_error=True)
        return RayPipelineExecutor(steps, n_tasks, args.workers, logging_dir=str(logs))
    from datatrove.executor import LocalPipelineExecutor

    return LocalPipelineExecutor(steps, n_tasks, args.workers, logging_dir=str(logs))


if __name__ == "__main__":
    build_executor(build_parser().parse_args()).run()
