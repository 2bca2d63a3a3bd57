"""Adapt models to lm-eval and score its tasks."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.cli import ProgressBar
from megatron.evaluation.harness_files import BOOTSTRAP_ITERS, FEWSHOT_SEED, PARTS, Results
from megatron.evaluation.likelihood import Request
from megatron.evaluation.reader import Reader, Scoring
from megatron.generation.nonfinite_scores import (
    CAUSE,
    NonFiniteError,
    NonFiniteRequestError,
    check_log_p,
)
from megatron.generation.sampling import Sampling
from megatron.parallel.world import World

if TYPE_CHECKING:
    from lm_eval.api.model import LM, CacheHook

CPU_BATCH = 16  # automatic batch size of lm-eval's model on a CPU
RANKS_ONLY = ("multiple_choice",)  # output types that do not use greedy generation


def harness_model(reader: Reader) -> "LM":
    """Return an `LM` for `lm_eval.evaluate` and `lm_eval.simple_evaluate`.

    With several ranks, all must make the same calls: each receives all requests, scores its share, and
    returns all results.
    """
    from lm_eval.api.model import LM

    # LM is imported here only: the class is completed at run time to keep the import of lm_eval lazy
    return type("MegatronModel", (MegatronModel, LM), {})(reader)


class MegatronModel:
    """The abstract methods of `LM`, implemented with `Reader`.

    decode   False: only log-likelihoods are needed, not the greedy flags
    """

    cache_hook: "CacheHook"  # set by LM

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.reader = reader
        self._device = reader.world.device
        self.decode = True

    @property
    def tokenizer_name(self) -> str:
        return self.reader.tokenizer.name.replace("/", "__")

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        encoded = self.reader.make_requests([request.args for request in requests])
        named = _name_request_errors([(request, 1) for request in requests])
        with _open_bar(len(encoded), "log-likelihoods", self.reader) as bar, named:
            likelihoods = self.reader.compute_likelihoods(encoded, bar.update, self.decode)
        answers = list(zip(likelihoods.log_p.tolist(), likelihoods.greedy.tolist(), strict=True))
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        # A diffusion model reads the positions that it predicts, also the last one, which an autoregressive
        # model does not read. A window of it is therefore one token shorter.
        length = self.reader.max_length if self.reader.causal else self.reader.max_length - 1
        encoded: list[Request] = []
        ends: list[int] = []
        for ids in self.reader.encode([request.args[0] for request in requests]):
            windows = get_rolling_token_windows(list(ids), self.reader.prefix_id, length, context_len=1)
            encoded += [Request(tuple(a), tuple(b)) for a, b in map(make_disjoint_window, windows)]
            # windows ends[i - 1] .. ends[i] - 1 belong to text i; their log-likelihoods are summed below
            ends.append(len(encoded))
        with _open_bar(len(encoded), "windows of text", self.reader) as bar:
            begins = [0, *ends[:-1]]
            lengths = [b - a for a, b in zip(begins, ends, strict=True)]
            with _name_request_errors(list(zip(requests, lengths, strict=True))):
                log_p = self.reader.compute_likelihoods(encoded, bar.update, decode=False).log_p
        answers = [float(log_p[a:b].sum()) for a, b in zip(begins, ends, strict=True)]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return answers

    def generate_until(self, requests: list[Any]) -> list[str]:
        from lm_eval.models.utils import normalize_gen_kwargs

        texts = [""] * len(requests)
        # requests with equal generation settings are generated together
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(i)
        with _open_bar(len(requests), "texts", self.reader) as bar:
            for members in groups.values():
                options = normalize_gen_kwargs(requests[members[0]].args[1])
                sampled = options["do_sample"] and options.get("temperature", 1.0) > 0
                new = self.reader.continue_texts(
                    [requests[i].args[0] for i in members],
                    max_new_tokens=options["max_gen_toks"],
                    until=options["until"],
                    sampling=Sampling(
                        temperature=options.get("temperature", 1.0) if sampled else 0.0,
                        top_k=options.get("top_k"),
                        top_p=options.get("top_p"),
                        seed=self.reader.scoring.seed,
                    ),
                    progress=bar.update,
                )
                for i, text in zip(members, new, strict=True):
                    texts[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return texts


@contextmanager
def _name_request_errors(requests: Sequence[tuple[Any, int]]) -> Iterator[None]:
    """Add task and document to a NonFiniteRequestError; `requests`: (lm-eval's request, its window count)."""
    try:
        yield
    except NonFiniteRequestError as error:
        # error.number is an index of windows: requests with 2 and 3 windows have numbers 0 1 and 2 3 4
        owner = [request for request, n in requests for _ in range(n)][error.number]
        raise NonFiniteError(
            f"{owner.task_name}, document {owner.doc_id}, request {owner.idx}: got a log-likelihood of "
            f"{error.log_p}, expected a finite number; {CAUSE}. The task is not scored."
        ) from error


def _open_bar(n: int, what: str, reader: Reader) -> ProgressBar:
    return ProgressBar(what, n, "requests", quiet=not reader.world.is_first)


@dataclass
class TransformersReader:
    """Settings and counts of a model that lm-eval's `hf` model scores; the part of `Reader` used here."""

    scoring: Scoring
    world: World
    max_length: int
    n_truncated: int = 0


class CheckedTransformersModel:
    """Additions to lm-eval's `hf` model: the count of truncated requests, and errors for NaN and Inf."""

    reader: TransformersReader

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)  # type: ignore[misc]
        with _name_request_errors([(request, 1) for request in requests]):
            check_log_p(np.array([log_p for log_p, _ in answers]))
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        answers: list[float] = super().loglikelihood_rolling(requests, disable_tqdm)  # type: ignore[misc]
        with _name_request_errors([(request, 1) for request in requests]):
            check_log_p(np.array(answers))
        return answers

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **more: Any) -> list[tuple[float, bool]]:
        lengths = [len(context) + len(continuation) for _, context, continuation in requests]
        # the last token is only predicted, so max_length + 1 tokens are scored whole
        self.reader.n_truncated += sum(n > self.reader.max_length + 1 for n in lengths)
        return super()._loglikelihood_tokens(requests, *args, **more)  # type: ignore[misc]


def build_hf_model(folder: Path, batch_size: int | str, **more: Any) -> "LM":
    """Return lm-eval's model for transformers, by default on the CPU in float32.

    Raises ValueError if transformers cannot load the folder.
    """
    return _load_hf_model((), folder, batch_size, **more)


def _load_hf_model(
    mixins: tuple[type, ...], folder: Path, batch_size: int | str, device: str = "cpu", **more: Any
) -> Any:
    """Return an instance of lm-eval's class with additional base classes before it."""
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ValueError(
            f"{folder}: {error}. Install transformers and accelerate for models that lm-eval's code scores."
        ) from error
    options = {"dtype": "float32", **more}
    try:
        return type("TransformersModel", (*mixins, HFLM), {})(
            pretrained=str(folder), batch_size=batch_size, device=device, **options
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{folder}: transformers cannot load it ({reason[:300]})") from error


def transformers_model(
    folder: Path, scoring: Scoring, world: World, tokenizer: str | None = None
) -> tuple["LM", TransformersReader]:
    """Return (lm-eval's `hf` model, its settings and counts). Raises ValueError for several ranks."""
    if world.n_ranks > 1:
        raise ValueError(
            f"{folder}: got {world.n_ranks} ranks, expected one, because transformers' model scores it. "
            "Start a single process."
        )
    scoring = scoring.resolve("autoregressive")
    # lm-eval measures with whole logits of the longest rows, which takes minutes on a CPU
    automatic: int | str = "auto" if world.device.type == "cuda" else CPU_BATCH
    size = automatic if scoring.batch_size is None else scoring.batch_size
    more: dict[str, Any] = {} if tokenizer is None else {"tokenizer": tokenizer}
    more |= {"device": world.device.type, "dtype": scoring.dtype}
    model = _load_hf_model((CheckedTransformersModel,), folder, size, **more)
    model.reader = TransformersReader(scoring, world, model.max_length)
    return model, model.reader


def score_task(
    model: "LM",
    reader: Reader | TransformersReader,
    loaded: Any,
    *,
    limit: int | None,
    num_fewshot: int | None,
    samples: bool,
) -> Results:
    """Score a task or group. Return PARTS of lm-eval's results, and its samples if `samples` is True.

    Raises ValueError if the scoring does not apply to the kind of task.
    """
    from lm_eval.evaluator import evaluate

    if (reason := find_mismatch(loaded, reader.scoring)) is not None:
        raise ValueError(reason)
    kinds = {name: task.OUTPUT_TYPE for name, task in loaded["tasks"].items()}
    for task in loaded["tasks"].values():
        # the requested number, else that of the task, else 0, as lm-eval resolves it
        if num_fewshot is not None or task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    model.decode = any(kind not in RANKS_ONLY for kind in kinds.values())
    reader.n_truncated = 0
    output = evaluate(
        lm=model,
        task_dict=loaded,
        limit=limit,
        log_samples=samples,
        bootstrap_iters=BOOTSTRAP_ITERS if reader.world.is_first else 0,
    )
    results = {part: output[part] for part in PARTS if part in output}
    for metrics in results["results"].values():
        _drop_unmeasured(metrics)
    results["n-cut"] = (
        {name: reader.n_truncated for name in loaded["tasks"]}
        if len(kinds) == 1
        else {"all": reader.n_truncated}
    )
    if samples:
        results["samples"] = output["samples"]
    return results


def find_mismatch(loaded: Any, scoring: Scoring) -> str | None:
    """Return the reason why a loaded task or group cannot be scored this way, or None if it can."""
    for name, task in loaded["tasks"].items():
        kind = task.OUTPUT_TYPE
        if scoring.only_generate and kind not in ("loglikelihood", "generate_until"):
            return f"{name}: needs log-likelihoods, not generated text; score it without --only-generate"
        if scoring.only_mc_nll and kind not in RANKS_ONLY:
            return f"{name}: does not rank answers; score it without --only-mc-nll"
    return None


def _drop_unmeasured(metrics: Results) -> None:
    """Remove metrics that are NaN or Inf because they were not computed, with their standard errors.

    A NaN or Inf standard error of a finite metric (of a single document) becomes lm-eval's "N/A".
    """
    non_finite = [
        key for key, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)
    ]
    # keys are "metric,filter" and "metric_stderr,filter"
    for key in non_finite:
        name, _, kind = key.partition(",")
        if name.endswith("_stderr"):
            metrics[key] = "N/A"
    for key in non_finite:
        name, _, kind = key.partition(",")
        if not name.endswith("_stderr"):
            for removed in (key, f"{name}_stderr,{kind}"):
                metrics.pop(removed, None)
