"""Adapt models to lm-eval and score its tasks."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from megatron.cli import ProgressBar
from megatron.evaluation.harness_files import BOOTSTRAP_ITERS, FEWSHOT_SEED, Results
from megatron.evaluation.likelihood import Request
from megatron.evaluation.reader import Reader, Scoring
from megatron.generation.nonfinite_scores import CAUSE, NonFiniteError, NonFiniteRequestError
from megatron.generation.sampling import Sampling

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM

RANKS_ONLY = ("multiple_choice",)  # output types that do not use greedy generation


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
