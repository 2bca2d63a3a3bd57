"""Our models as an lm-eval model, and its tasks scored with them. The one place that imports lm_eval."""

import difflib
import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from megatron.evaluation.likelihood import Request
from megatron.evaluation.nonfinite import CAUSE, NonFiniteError, NonFiniteRequestError
from megatron.evaluation.reader import Reader, Scoring
from megatron.evaluation.sampling import Sampling
from megatron.evaluation.tasks import write_local_tasks
from megatron.tokenizer.hub import why_hub_is_silent

if TYPE_CHECKING:
    from lm_eval.api.model import LM

Results = dict[str, Any]
PARTS = (
    "results",
    "groups",
    "group_subtasks",
    "configs",
    "versions",
    "n-shot",
    "higher_is_better",
    "n-samples",
)
RANKS_ONLY = ("multiple_choice",)  # output types for which nobody asks what the model would write


def harness_model(reader: Reader) -> "LM":
    """An `LM` that `lm_eval.evaluate` and `lm_eval.simple_evaluate` take.

    With several ranks each must make the same calls: every one gets all requests, scores its share, and has
    all answers.
    """
    from lm_eval.api.model import LM

    return type("MegatronModel", (MegatronModel, LM), {})(reader)


class MegatronModel:
    """What `LM` leaves to a model, with text going through `Reader`.

    decode   False: only rankings are asked for
    """

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.reader = reader
        self._device = reader.world.device
        self.decode = True

    @property
    def tokenizer_name(self) -> str:
        return self.reader.tokenizer.name.replace("/", "__")

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        asked = self.reader.requests([request.args for request in requests])
        named = _named([(request, 1) for request in requests])
        with _bar(len(asked), "log-likelihoods", self.reader) as bar, named:
            found = self.reader.likelihoods(asked, bar.update, self.decode)
        answers = list(zip(found.log_p.tolist(), found.greedy.tolist(), strict=True))
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        # a diffusion model reads what it predicts, so a window has one position less
        length = self.reader.max_length if self.reader.causal else self.reader.max_length - 1
        asked: list[Request] = []
        ends: list[int] = []
        for ids in self.reader.encode([request.args[0] for request in requests]):
            windows = get_rolling_token_windows(list(ids), self.reader.prefix_id, length, context_len=1)
            asked += [Request(tuple(a), tuple(b)) for a, b in map(make_disjoint_window, windows)]
            ends.append(len(asked))
        with _bar(len(asked), "windows of text", self.reader) as bar:
            begins = [0, *ends[:-1]]
            lengths = [b - a for a, b in zip(begins, ends, strict=True)]
            with _named(list(zip(requests, lengths, strict=True))):
                log_p = self.reader.likelihoods(asked, bar.update, decode=False).log_p
        answers = [float(log_p[a:b].sum()) for a, b in zip(begins, ends, strict=True)]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return answers

    def generate_until(self, requests: list[Any]) -> list[str]:
        from lm_eval.models.utils import normalize_gen_kwargs

        texts = [""] * len(requests)
        alike: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            alike.setdefault(repr(sorted(request.args[1].items())), []).append(i)
        with _bar(len(requests), "texts", self.reader) as bar:
            for members in alike.values():
                told = normalize_gen_kwargs(requests[members[0]].args[1])
                sampled = told["do_sample"] and told.get("temperature", 1.0) > 0
                new = self.reader.continue_texts(
                    [requests[i].args[0] for i in members],
                    max_new_tokens=told["max_gen_toks"],
                    until=told["until"],
                    how=Sampling(
                        temperature=told.get("temperature", 1.0) if sampled else 0.0,
                        top_k=told.get("top_k"),
                        top_p=told.get("top_p"),
                        seed=self.reader.scoring.seed,
                    ),
                    progress=bar.update,
                )
                for i, text in zip(members, new, strict=True):
                    texts[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return texts


@contextmanager
def _named(requests: Sequence[tuple[Any, int]]) -> Iterator[None]:
    """Name task and document of a request without a log-likelihood; `requests`: (lm-eval's, its windows)."""
    try:
        yield
    except NonFiniteRequestError as error:
        owner = [request for request, n in requests for _ in range(n)][error.number]
        raise NonFiniteError(
            f"{owner.task_name}, document {owner.doc_id}, request {owner.idx}: got a log-likelihood of "
            f"{error.log_p}, expected a finite number; {CAUSE}. The task is not scored."
        ) from error


def _bar(n: int, what: str, reader: Reader) -> tqdm:
    return tqdm(total=n, desc=what, disable=None if reader.world.is_first else True, mininterval=0.5)


@contextmanager
def open_tasks(names: Sequence[str], data: Path | None) -> Iterator[dict[str, Any]]:
    """{what was asked for: lm-eval's loaded tasks of it} for names of tasks, groups or tags.

    data   folder with the files of `tasks.LOCAL`; None: lm-eval downloads
    Raises ValueError for names that lm-eval does not know, FileNotFoundError for missing files.
    """
    if not names:
        raise ValueError("--tasks: names no task")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"--tasks: {', '.join(twice)} is there twice")
    silent = why_hub_is_silent() if data is None else None
    if data is not None or silent:  # read when the library is imported: without it a minute of attempts
        os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    import lm_eval.tasks

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    own = Path(lm_eval.tasks.__file__).parent
    with tempfile.TemporaryDirectory(prefix="tasks-") as folder:
        if data is None:
            known = lm_eval.tasks.TaskManager()
        else:
            write_local_tasks(names, data, own, Path(folder))
            known = lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False)
        for name in names:
            if name not in known.all_tasks:
                near = difflib.get_close_matches(name, known.all_tasks, 3)
                told = f"; did you mean {' or '.join(near)}?" if near else ""
                raise ValueError(f"--tasks: lm-eval knows no {name!r}{told}")
        yield {name: _Lazy(known, name, silent) for name in names}


class _Lazy:
    """A task that is loaded, and its data read, when it is its turn."""

    def __init__(self, known: Any, name: str, silent: str | None) -> None:
        self.known, self.name, self.silent = known, name, silent

    def load(self) -> Any:
        """lm-eval's own. ValueError where its data are not to be had."""
        try:
            return self.known.load([self.name])
        except (OSError, ConnectionError) as error:
            told = self.silent or (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"{self.name}: its data are not to be had ({told}); give --data-dir") from error

    def requests(self, limit: int | None) -> list[Any]:
        """What the task, a single one, asks of a model about its first documents."""
        task = self.load()["tasks"][self.name]
        task.build_all_requests(limit=limit, rank=0, world_size=1)
        return task.instances


def hf_model(folder: Path, batch_size: int, **more: Any) -> "LM":
    """lm-eval's own model for transformers, on the CPU in float32: what ours is compared with."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), batch_size=batch_size, dtype="float32", device="cpu", **more)


def score_task(
    model: "LM", reader: Reader, loaded: Any, *, limit: int | None, num_fewshot: int | None, samples: bool
) -> Results:
    """One task (or group) scored, in the form of lm-eval's results, of which PARTS; with `samples` if wanted.

    ValueError where the scoring is none for the kind of task.
    """
    from lm_eval.evaluator import evaluate

    if (reason := why_not(loaded, reader.scoring)) is not None:
        raise ValueError(reason)
    kinds = {name: task.OUTPUT_TYPE for name, task in loaded["tasks"].items()}
    for task in loaded["tasks"].values():
        if num_fewshot is not None or task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=1234)  # lm-eval's own
    model.decode = any(kind not in RANKS_ONLY for kind in kinds.values())
    reader.n_cut = 0
    found = evaluate(
        lm=model,
        task_dict=loaded,
        limit=limit,
        log_samples=samples,
        bootstrap_iters=100000 if reader.world.is_first else 0,
    )
    told = {part: found[part] for part in PARTS if part in found}
    for metrics in told["results"].values():
        _drop_unmeasured(metrics)
    told["n-cut"] = (
        {name: reader.n_cut for name in loaded["tasks"]} if len(kinds) == 1 else {"all": reader.n_cut}
    )
    if samples:
        told["samples"] = found["samples"]
    return told


def why_not(loaded: Any, scoring: Scoring) -> str | None:
    """Why a loaded task (or group) is of another kind than the scoring; None where it can be scored."""
    for name, task in loaded["tasks"].items():
        kind = task.OUTPUT_TYPE
        if scoring.only_generate and kind not in ("loglikelihood", "generate_until"):
            return f"{name}: ranks or measures, writes nothing; score it without --only-generate"
        if scoring.only_mc_nll and kind not in RANKS_ONLY:
            return f"{name}: ranks no answers; score it without --only-mc-nll"
    return None


def _drop_unmeasured(metrics: Results) -> None:
    """Take out metrics that are not numbers since nobody asked for them, with their errors.

    An error that is none by itself, of a single document, becomes lm-eval's "N/A".
    """
    odd = [key for key, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)]
    for key in odd:
        name, _, kind = key.partition(",")
        if name.endswith("_stderr"):
            metrics[key] = "N/A"
    for key in odd:
        name, _, kind = key.partition(",")
        if not name.endswith("_stderr"):
            for gone in (key, f"{name}_stderr,{kind}"):
                metrics.pop(gone, None)


def merged(parts: Sequence[Results], about: Results) -> Results:
    """Results of tasks scored one by one as one document of lm-eval's form."""
    from lm_eval import __version__

    whole: Results = {part: {} for part in PARTS}
    for told in parts:
        for part in (*PARTS, "n-cut"):
            whole.setdefault(part, {}).update(told.get(part, {}))
    if not whole["groups"]:
        del whole["groups"]
    return {**whole, "config": about, "date": time.time(), "lm_eval_version": __version__}


def table(results: Results) -> str:
    """lm-eval's table of metrics with their standard errors."""
    from lm_eval.utils import make_table

    told = make_table(results)
    return told + ("\n" + make_table(results, "groups") if "groups" in results else "")
