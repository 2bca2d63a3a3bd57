"""Small inputs for tools/bench/kills.py, partly made with the project's own commands."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron.data.indexed_writer import IndexedWriter

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "tools"
N_TOKENS = 200
# 60 steps with a checkpoint every third one: 20 writes in a few seconds, so that kills often hit one. The
# model is so small that a step takes milliseconds.
TRAIN = (
    *("dataset.seq_len=32", "dataset.batch_size=24", "dist.dtype=float32", "dist.cpu_only=true"),
    *("model.d_model=32", "model.n_heads=2", "model.n_layers=2", "optim.lr=0.01", "misc.n_threads=1"),
    *("lr_scheduler.total_iterations=60", "lr_scheduler.warmup_iterations=3", "evaluation.num_mc=2"),
    *("logging.every_iterations=1", "logging.tensorboard=false", "evaluation.every_iterations=20"),
    "checkpoint.chkpt_saving_iterations=3",
)
STUDY = """
name: kills
directory: {out}
run:
  dist: {{dtype: float32, cpu_only: true}}
  dataset: {{path_train: {train}, path_eval: {held_out}, seq_len: 32, batch_size: 4}}
  optim: {{lr: 1.0e-2}}
  lr_scheduler: {{kind: wsd, warmup_iterations: 2, decay_fraction: 0.5}}
  logging: {{tensorboard: false, every_iterations: 1}}
  evaluation: {{max_samples: 16}}
  misc: {{n_threads: 1}}
sizes:
  small: {{d_model: 16, n_heads: 2, n_layers: 1}}
  large: {{d_model: 32, n_heads: 2, n_layers: 1}}
cells:
  - {{size: [small, large], unique_tokens: [1280], epochs: [1, 2, 4]}}
"""
MIXTURE = """\
catalog: {catalog}
by: [language]
weights: {{Python: 3, Go: 2, C: 1}}
"""


def tool_command(name: str, *words: object) -> list[str]:
    """Return the command line of a tool."""
    return [sys.executable, str(TOOLS / f"{name}.py"), *map(str, words)]


class Inputs:
    """Inputs of the jobs, each made in `folder` at its first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _run_checked(self, words: Sequence[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip().splitlines()[-1:]}")

    @cached_property
    def lines(self) -> Path:
        """80 MB of JSON lines: 40,000 documents of random words, with properties."""
        path = self.folder / "documents.jsonl"
        rng = np.random.default_rng(0)
        words = np.array(["red", "fish", "blue", "document", "12", "one", "two\n", "über", "data"])
        # a document has two of 500 random pieces of 200 words: 80,000 draws instead of 16 million
        pieces = [" ".join(words[rng.integers(len(words), size=200)]) for _ in range(500)]
        with path.open("w") as file:
            for i in range(40_000):
                text = f"{i} " + " ".join(pieces[j] for j in rng.integers(len(pieces), size=2))
                meta = {"language": ("C", "Go", "Python")[i % 3], "stars": i}
                file.write(json.dumps({"text": text, "meta": meta}) + "\n")
        return path

    @cached_property
    def isoflops(self) -> Path:
        """A table of four sizes at each of five budgets."""
        path = self.folder / "isoflops.csv"
        rng = np.random.default_rng(0)
        lines = ["n_params,train_tokens,loss"]
        for flops in np.geomspace(1e17, 1e20, 5):
            # Around the optimum N* = 0.09 C^0.5; D = C / 6N from C = 6 N D. 0.2 % of noise.
            for n in 0.09 * flops**0.5 * np.array([0.4, 0.8, 1.5, 3.0]):
                loss = 1.8 + 480 / n**0.35 + 2080 / (flops / 6 / n) ** 0.37
                lines.append(f"{n},{flops / 6 / n},{loss * np.exp(0.002 * rng.standard_normal())}")
        path.write_text("\n".join(lines) + "\n")
        return path

    @cached_property
    def small_lines(self) -> list[Path]:
        """The first 24,000 of these lines, in three files."""
        with self.lines.open() as file:
            paths = [self.folder / f"part{i}.jsonl" for i in range(3)]
            for path in paths:
                path.write_text("".join(next(file) for _ in range(8_000)))
        return paths

    @cached_property
    def tokenizer(self) -> Path:
        """A tokenizer of 300 ids."""
        from megatron.tokenizer.train_bpe import train_bpe

        folder = self.folder / "tokenizer"
        with self.lines.open() as file:
            train_bpe([json.loads(next(file))["text"] for _ in range(200)], 300, folder)
        return folder

    @cached_property
    def tokens(self) -> Path:
        """The lines as a dataset."""
        words = ("--input", self.lines, "--output-prefix", "all", "--root", self.folder)
        self._run_checked(
            tool_command("preprocess_data_many_cores", *words, "--tokenizer-model", self.tokenizer, "--quiet")
        )
        return self.folder / "all_text_document"

    @cached_property
    def parts(self) -> Path:
        """A folder of 16 datasets of 2 million random ids each."""
        folder = self.folder / "parts"
        folder.mkdir()
        for i in range(16):
            ids = np.random.default_rng(i).integers(0, N_TOKENS, 2_000_000, dtype=np.uint16)
            meta = {"tokenizer": {"n_tokens": N_TOKENS, "sha256": "random"}, "append_eod": False}
            with IndexedWriter(folder / f"part-{i}", np.dtype(np.uint16), meta) as writer:
                writer.add_documents(ids, np.full(2000, 1000))
        return folder

    @cached_property
    def corpora(self) -> tuple[Path, Path]:
        """Datasets to train on and to score, of 4,000 and 40,000 tokens."""
        prefixes = self.folder / "train", self.folder / "held_out"
        for prefix, n_documents in zip(prefixes, (100, 1000), strict=True):
            rng = np.random.default_rng(n_documents)
            with IndexedWriter(prefix, np.dtype(np.uint16), {"tokenizer": {"n_tokens": N_TOKENS}}) as writer:
                for _ in range(n_documents):
                    length = int(rng.integers(20, 60))
                    noise = rng.integers(0, 3, length)
                    writer.add_document(
                        # Each id is the previous one plus 3, with noise of -2 to 2, modulo 200. A model
                        # learns this quickly, so that a run that resumed from wrong weights has another loss.
                        (int(rng.integers(N_TOKENS)) + 3 * np.arange(length) + noise) % N_TOKENS
                    )
        return prefixes

    def train_words(self, run: Path, *changes: str) -> list[str]:
        """Return the arguments of a run of 60 steps with a checkpoint every third step."""
        config = self.folder / "empty.yaml"
        config.write_text("name: kills\n")
        train, held_out = self.corpora
        data = [f"dataset.path_train={train}", f"dataset.path_eval={held_out}", "evaluation.max_samples=64"]
        return [str(config), *data, *TRAIN, f"logging.run_dir={run}", *changes]

    @cached_property
    def trained(self) -> Path:
        """A finished run with two checkpoints."""
        run = self.folder / "trained"
        self._run_checked(tool_command("pretrain", *self.train_words(run)))
        return run

    def study(self, out: Path) -> Path:
        """Write a study of six runs, four of which branch from trunks."""
        # out is FOLDER/JOB/work: one file for each job, outside the folder that is compared
        path = self.folder / f"study-{out.parent.name}.in.yaml"
        train, held_out = self.corpora
        path.write_text(STUDY.format(out=out, train=train, held_out=held_out))
        return path

    @cached_property
    def swept(self) -> Path:
        """The folder of a finished study, for tools that read it."""
        out = self.folder / "swept" / "work"
        self._run_checked(tool_command("sweep", self.study(out), "--jobs", "2"))
        return out

    @property
    def register_words(self) -> list[object]:
        """Arguments of `register_corpus.py` after the catalog."""
        properties = (
            "--property",
            "meta.language AS language category",
            "--property",
            "meta.stars AS stars integer",
        )
        return ["add", "code", *self.small_lines, *properties]

    @cached_property
    def catalog(self) -> Path:
        """A catalog with the corpus `code`."""
        path = self.folder / "catalog"
        self._run_checked(tool_command("register_corpus", path, *self.register_words))
        return path

    def write_mixture(self, work: Path, more: str) -> Path:
        """Write a mixture of the catalog's documents."""
        path = work / "slim.yaml"
        path.write_text(MIXTURE.format(catalog=self.catalog) + more)
        return path


def copy_folder(source: Path, target: Path) -> None:
    """Copy the content of a folder into an existing one, with modification times."""
    shutil.copytree(source, target, dirs_exist_ok=True)
