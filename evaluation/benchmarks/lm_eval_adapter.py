"""One task of lm-eval as a benchmark: its prompts, shots, stops, filters and metrics.

The definitions are lm-eval's own; only who answers is ours. An item's context becomes a request;
its answer goes through the task's filters and `process_results`, as in lm-eval's evaluator, but
item by item, so a score depends on nothing but the item and its answer. lm-eval's caches are not
used: their keys lack the model.

Source: lm-evaluation-harness 0.4.13, `evaluator.evaluate` and `Task.build_all_requests`. Where we
differ: the limit of new tokens is the experiment's and not the task's; metrics that exist only
for a whole corpus (BLEU, F1 over classes, perplexity) are left out, since items are what we store.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

from evaluation.benchmarks.contract import Generate, Item, Output, Request, Score, Settings
from evaluation.benchmarks.local_data import rows_digest, told
from evaluation.errors import InputError

KINDS = ("generate_until", "loglikelihood", "multiple_choice")
ID = "mergescope_id"
"""Field of a row that names its item; without it, items are numbered."""


class Document(NamedTuple):
    """What the score of an item needs."""

    doc: Any
    context: Any  # the prompt; a list of prompts where the choices are contexts


class LmEvalBenchmark:
    """A task of lm-eval; see `Benchmark`.

    Args:
        name: what the items are called after.
        task: an lm-eval `ConfigurableTask`.
        main_filter: the filter whose metrics have the plain name; those of another filter carry
            its name, as `exact_match_strict` does.

    Raises:
        InputError: the task is of a kind that cannot run here.
    """

    def __init__(
        self,
        name: str,
        task: Any,
        settings: Settings,
        main_filter: str = "none",
    ) -> None:
        reason = refused(vars(task.config))
        if reason is not None:
            raise InputError(f"lm_eval: the task {name} is not supported: {reason}")
        self._name, self._task, self._settings = name, task, settings
        self._main_filter = main_filter
        digest = rows_digest([dict(doc) for doc in task.task_docs])
        self.version = f"lm-eval {version('lm-eval')}, {name} {task.VERSION}, data {digest}"

    def items(self, limit: int | None) -> Sequence[Item]:
        """The first documents. Random shots come from one generator over all documents in their
        order, so an item's prompt is the same under any limit."""
        task, found = self._task, []
        task.set_fewshot_seed(self._settings.seed)
        with seeded(self._settings.seed):
            for number, doc in enumerate(task.task_docs):
                if limit is not None and number >= limit:
                    break
                found.append(self._item(doc, str(doc.get(ID, f"{self._name}/{number}"))))
        return found

    def _item(self, doc: Any, name: str) -> Item:
        task = self._task
        with told(f"{name}: lm-eval cannot make the prompt with {_shots(task)} shots"):
            context = task.fewshot_context(doc, _shots(task), gen_prefix=task.doc_to_prefix(doc))
            instances = _instances(task, doc, context, self._settings.chat)
        requests = tuple(self._request(instance) for instance in instances)
        return Item(name, requests, Document(doc, context))

    def _request(self, instance: Any) -> Request:
        if instance.request_type == "loglikelihood":
            context, continuation = instance.args
            return Score(context, continuation)
        context, asked = instance.args
        until = asked.get("until") or []
        stops = (until,) if isinstance(until, str) else until
        return Generate(
            context, tuple(stop for stop in stops if stop), self._settings.max_new_tokens
        )

    def score(
        self, items: Sequence[Item], outputs: Sequence[Sequence[Output]]
    ) -> list[dict[str, float]]:
        """The metrics of each item; on the main thread, since MATH limits its time by SIGALRM.

        Raises:
            InputError: the task's own code fails on an answer, or gives no finite number.
        """
        return [self._score(item, answers) for item, answers in zip(items, outputs, strict=True)]

    def _score(self, item: Item, answers: Sequence[Output]) -> dict[str, float]:
        task, (doc, context) = self._task, item.doc
        metrics: dict[str, float] = {}
        with told(f"{item.id}: the scoring of lm-eval's task {self._name} failed"):
            instances = _instances(task, doc, context, self._settings.chat)
            for instance, output in zip(instances, answers, strict=True):
                scored = instance.request_type == "loglikelihood"
                instance.resps = [(output.logprob, output.is_greedy) if scored else output.text]
            for each in task._filters:  # the public `apply_filters` does this for all documents
                each.apply(instances)
            for name in instances[0].filtered_resps:
                results = [instance.filtered_resps[name] for instance in instances]
                for metric, value in task.process_results(doc, results).items():
                    if _is_mean(task, metric):
                        metrics[self._metric(metric, name)] = _number(item.id, metric, value)
        return metrics

    def _metric(self, metric: str, of_filter: str) -> str:
        if of_filter == self._main_filter:
            return metric
        return f"{metric}_{of_filter.removesuffix('-match')}"


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Some tasks shuffle their choices with Python's or NumPy's global generator; lm-eval seeds
    both. They are put back afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@cache
def calm() -> None:
    """lm-eval, datasets and math_verify report much; what matters is told by our own errors."""
    import datasets

    for name in ("lm_eval", "datasets", "math_verify"):
        logging.getLogger(name).setLevel(logging.ERROR)
    datasets.disable_progress_bars()


def refused(config: Mapping[str, Any]) -> str | None:
    """Why a task of this configuration cannot run here; None where it can."""
    kind = config.get("output_type") or "generate_until"
    if kind not in KINDS:
        return f"its kind is {kind}; expected one of {', '.join(KINDS)}"
    if config.get("unsafe_code"):
        return (
            "it runs generated programs outside any sandbox; the benchmarks humaneval_plus and "
            "mbpp_plus run them inside one"
        )
    if config.get("doc_to_image") or config.get("doc_to_audio"):
        return "it needs images or sound; only text is supported"
    asked = config.get("generation_kwargs") or {}
    if asked.get("do_sample", float(asked.get("temperature") or 0) > 0):
        return "it samples its answers; only greedy decoding is supported"
    if int(asked.get("num_beams") or 1) > 1:
        return f"it searches with {asked['num_beams']} beams; only greedy decoding is supported"
    return None


def _shots(task: Any) -> int:
    return int(task.config.num_fewshot or 0)


def _instances(task: Any, doc: Any, context: Any, chat: bool) -> list[Any]:
    """The task's requests; in a chat lm-eval puts no space in front of a choice."""
    made = task.construct_requests(
        doc=doc, ctx=context, metadata=(task.config.task, 0, 1), apply_chat_template=chat
    )
    return list(made) if isinstance(made, list) else [made]


def _is_mean(task: Any, metric: str) -> bool:
    """Is the task's figure the mean of the items' values? It is where the task says nothing."""
    from lm_eval.api.metrics import mean

    return task.aggregation().get(metric, mean) is mean


def _number(item: str, metric: str, value: Any) -> float:
    if isinstance(value, bool | int | float | np.bool_ | np.number) and math.isfinite(value):
        return float(value)
    raise InputError(f"{item}: the metric {metric} is {value!r:.60}; expected a finite number")
