"""Adapt models to lm-eval and score its tasks."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.cli import ProgressBar
from megatron.evaluation.harness_files import BOOTSTRAP_ITERS, FEWSHOT_SEED, Results
from megatron.evaluation.likelihood import Request
from megatron.evaluation.reader import Reader, Scoring
from megatron.generation.nonfinite_scores import CAUSE, NonFiniteError, NonFiniteRequestError
from megatron.generation.sampling import Sampling

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM

RANKS_ONLY = ("multiple_choice",)  # output types that do not use greedy generation
HAS_ANSWER = ("multiple_choice", "loglikelihood")  # output types that score the text of an answer
# scores of the right answer, and whether higher is better
ANSWER_SCORES = {"bits_per_byte": False, "choice_probability": True}


def harness_model(reader: Reader) -> "TemplateLM":
    """Return an `LM` for `lm_eval.evaluate` and `lm_eval.simple_evaluate`.

    With several ranks, all must make the same calls: each receives
    all requests, scores its share, and returns all results.
    """
    from lm_eval.api.model import TemplateLM

    # lm-eval's class, which splits requests into context
    # and continuation, is imported here only: the class
    # is completed at run time to keep the import lazy
    return type("MegatronModel", (MegatronModel, TemplateLM), {})(reader)


class MegatronModel:
    """The abstract methods of `TemplateLM`, implemented with `Reader`.

    decode   False: only log-likelihoods are needed, not the greedy flags
    """

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.reader = reader
        self._device = reader.world.device
        self.decode = True
        # the choices of a question share its context, so most texts
        # are encoded several times
        self._encode = lru_cache(maxsize=1 << 12)(reader.encode_text)

    @property
    def tokenizer_name(self) -> str:
        return self.reader.tokenizer.name.replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        return self.reader.end_id

    @property
    def prefix_token_id(self) -> int:
        return self.reader.prefix_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        return list(self._encode(string, begin=add_special_tokens is not False))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        with _name_request_errors([(request, 1) for request in requests]):
            return super().loglikelihood(requests, disable_tqdm=True)  # type: ignore[misc]  # TemplateLM's

    def _loglikelihood_tokens(self, requests: list[Any], **options: Any) -> list[tuple[float, bool]]:
        prefix = (self.reader.prefix_id,)
        encoded = [Request(tuple(context) or prefix, tuple(answer)) for _, context, answer in requests]
        with _open_bar(len(encoded), "log-likelihoods", self.reader) as bar:
            likelihoods = self.reader.compute_likelihoods(encoded, bar.update, self.decode)
        return list(zip(likelihoods.log_p.tolist(), likelihoods.greedy.tolist(), strict=True))

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        # A diffusion model reads the positions
        # that it predicts, also the last one,
        # which an autoregressive model does not read.
        # A window of it is therefore one token shorter.
        length = self.reader.max_length if self.reader.causal else self.reader.max_length - 1
        encoded: list[Request] = []
        ends: list[int] = []
        for ids in (self._encode(request.args[0]) for request in requests):
            windows = get_rolling_token_windows(list(ids), self.reader.prefix_id, length, context_len=1)
            encoded += [Request(tuple(a), tuple(b)) for a, b in map(make_disjoint_window, windows)]
            # windows ends[i - 1] .. ends[i] - 1 belong to
            # text i; their log-likelihoods are summed below
            ends.append(len(encoded))
        with _open_bar(len(encoded), "windows of text", self.reader) as bar:
            begins = [0, *ends[:-1]]
            lengths = [b - a for a, b in zip(begins, ends, strict=True)]
            with _name_request_errors(list(zip(requests, lengths, strict=True))):
                log_p = self.reader.compute_likelihoods(encoded, bar.update, decode=False).log_p
        return [float(log_p[a:b].sum()) for a, b in zip(begins, ends, strict=True)]

    def generate_until(self, requests: list[Any]) -> list[str]:
        from lm_eval.models.utils import normalize_gen_kwargs

        texts: list[str] = []
        with _open_bar(len(requests), "texts", self.reader) as bar:
            # consecutive requests with equal
            # generation settings are generated together
            for settings, group in groupby(requests, key=lambda request: request.args[1]):
                options = normalize_gen_kwargs(settings)
                sampled = options["do_sample"] and options.get("temperature", 1.0) > 0
                texts += self.reader.continue_texts(
                    [request.args[0] for request in group],
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
        return texts


@contextmanager
def _name_request_errors(requests: Sequence[tuple[Any, int]]) -> Iterator[None]:
    """Add task and document to a NonFiniteRequestError; `requests`: (lm-eval's request, its window count)."""
    try:
        yield
    except NonFiniteRequestError as error:
        # error.number is an index of windows: requests
        # with 2 and 3 windows have numbers 0 1 and 2 3 4
        owner = [request for request, n in requests for _ in range(n)][error.number]
        raise NonFiniteError(
            f"{owner.task_name}, document {owner.doc_id}, request {owner.idx}: got a log-likelihood of "
            f"{error.log_p}, expected a finite number; {CAUSE}. The task is not scored."
        ) from error


def _open_bar(n: int, what: str, reader: Reader) -> ProgressBar:
    return ProgressBar(what, n, "requests", quiet=not reader.world.is_first)


def score_task(
    model: Any, loaded: Any, *, limit: int | None, num_fewshot: int | None, samples: bool
) -> Results:
    """Score a task or group. Return lm-eval's results, with its samples if `samples` is True."""
    from lm_eval.evaluator import evaluate

    kinds = {name: task.OUTPUT_TYPE for name, task in loaded["tasks"].items()}
    for task in loaded["tasks"].values():
        # the requested number, else the task's,
        # else 0, as lm-eval resolves it
        if num_fewshot is not None or task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    _add_answer_scores(loaded)
    reader: Reader = model.reader
    model.decode = any(kind not in RANKS_ONLY for kind in kinds.values())
    reader.n_truncated = 0
    output = evaluate(
        lm=model,
        task_dict=loaded,
        limit=limit,
        log_samples=samples,
        bootstrap_iters=BOOTSTRAP_ITERS if reader.world.is_first else 0,
    )
    results: Results = {part: values for part, values in output.items() if part != "samples" or samples}
    for metrics in results["results"].values():
        _drop_unmeasured(metrics)
    names = loaded["tasks"] if len(kinds) == 1 else ["all"]
    results["n-cut"] = dict.fromkeys(names, reader.n_truncated)
    return results


def _add_answer_scores(loaded: Any) -> None:
    """Let lm-eval average `score_answer` over the documents of each task, and over the tasks of a group.

    Nothing is scored twice: lm-eval computes them with its metrics, adds standard errors
    and writes them to its samples. A document without exactly one right answer has none,
    and so has a task that computes its metrics from the requests with a function of its own.
    """
    from lm_eval.api.metrics import mean

    for task in loaded["tasks"].values():
        if task.OUTPUT_TYPE in HAS_ANSWER and hasattr(task, "_metric_fn_list"):
            task.process_results = _process_with_answer(task)
            for name, higher_is_better in ANSWER_SCORES.items():
                task.aggregation().setdefault(name, mean)
                task.higher_is_better().setdefault(name, higher_is_better)
    for group in loaded["groups"].values():
        has_answers = all(task.OUTPUT_TYPE in HAS_ANSWER for task in group.get_all_tasks())
        if group.aggregate_metric_list and has_answers:
            first = group.aggregate_metric_list[0]  # its weights of the tasks
            group.aggregate_metric_list += [replace(first, metric=name) for name in ANSWER_SCORES]


def _process_with_answer(task: Any) -> Callable[[Any, Any], Results]:
    """Return the `process_results` of a task of lm-eval with the scores of the right answer added."""
    from lm_eval.api.metrics import likelihood_fn

    process_results = task.process_results
    is_ranked = task.OUTPUT_TYPE in RANKS_ONLY
    # lm-eval's metric "likelihood" of a document is the pair of the right choice's index
    # and log p of all choices. It is requested here, and removed unless the task has it.
    is_added = is_ranked and task._metric_fn_list.setdefault("likelihood", likelihood_fn) is likelihood_fn

    def process_with_answer(doc: Any, results: Any) -> Results:
        metrics: Results = process_results(doc, results)
        if is_ranked:
            right, log_p = metrics.get("likelihood", (-1, ()))
            if is_added:
                metrics.pop("likelihood", None)
        else:
            right, log_p = 0, [results[0][0]] if "perplexity" in metrics else ()
        # lm-eval: a list of several right answers, -100 for a label outside the choices
        if not log_p or isinstance(right, list) or right < 0:
            return metrics
        # The continuations, from the function that built the requests: where the choices
        # differ in the context (winogrande), all have the same continuation.
        requests = task.construct_requests(doc, [""] * len(log_p))
        answer = (requests[right] if is_ranked else requests).args[1]
        return metrics | score_answer(log_p, right, answer)

    return process_with_answer


def score_answer(log_p: Sequence[float], right: int, answer: str) -> dict[str, float]:
    """Return the scores of a right answer from log p in nats of each choice, or of the answer alone.

    bits_per_byte       -log2 p over the UTF-8 bytes of `answer`, the continuation whose
                        likelihood it is, with the space before it: `bits_per_byte_corr`
                        of OLMES and DataDecide (arXiv 2504.11393)
    choice_probability  p over the sum of p over the choices, not normalised by length:
                        `norm_correct_prob` there; omitted for an answer alone
    """
    from lm_eval.utils import softmax

    n_bytes = max(len(answer.encode()), 1)
    scores = {"bits_per_byte": -log_p[right] / math.log(2) / n_bytes}
    if len(log_p) > 1:
        scores["choice_probability"] = float(softmax(np.array(log_p))[right])
    return scores


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

    A NaN or Inf standard error of a finite metric (of a single
    document) becomes lm-eval's "N/A".
    """
    for key, value in list(metrics.items()):
        # keys are "metric,filter" and "metric_stderr,filter"
        name, _, kind = key.partition(",")
        if key not in metrics or not isinstance(value, float) or math.isfinite(value):
            continue
        if name.endswith("_stderr"):
            metrics[key] = "N/A"
        else:
            del metrics[key]
            metrics.pop(f"{name}_stderr,{kind}", None)
