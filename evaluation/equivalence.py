"""Is a merge the same function as its composition? Measured token by token.

For f affine in its parameters, merging task vectors and composing logits are the same function.
In general their gap at task vectors scaled by alpha grows as alpha^2 and the KL divergence as
alpha^4 (task arithmetic at lambda = 1; linear averages likewise for the geometric mean where the
self-curvature cancels only in part). So every merge is compared with the composition it stands
for, on reference texts, at several alphas, in float64: at alpha = 1/256 float32 has nothing left
to measure.

Transformers casts inside RMSNorm and softmax even in double models; `keep_double` stops that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from composition import compose_logits, divergences
from evaluation import merges
from evaluation.benchmarks import BENCHMARKS
from evaluation.benchmarks.contract import Generate, Score, Settings
from evaluation.experiment import (
    Experiment,
    Model,
    benchmark_entry,
    differs_between_tensors,
    merge_recipe,
)
from evaluation.family import Family, build, choose_device, load_tokenizer, read_config
from evaluation.models import PlannedModel, identity, planned_models, resolved_parameters
from evaluation.progress import Bar
from evaluation.text import encode, encode_pair
from evaluation.training import suit_threads
from merging import TensorSource
from merging.engine import tensors_of
from merging.output import prepare_recipe
from merging.raw import FLOATING, Raw, to_raw, to_tensor
from results import Divergence, Store

CHUNK = 64  # positions whose logits are compared at a time: (k + 2) * CHUNK * V doubles


class Text(NamedTuple):
    """A reference text as ids; its tokens from `start` on are compared."""

    prompts: str
    item: str
    ids: list[int]
    start: int


class Pair(NamedTuple):
    """A merge and the composition it stands for."""

    planned: PlannedModel
    weights: list[float]

    @property
    def reference(self) -> str:
        """The composition's name in the table, such as `product(1, 1)`."""
        return f"product({', '.join(f'{weight:g}' for weight in self.weights)})"


class ScaledSource:
    """base + alpha * (expert - base) in float64, as a source of tensors."""

    def __init__(self, base: TensorSource, expert: TensorSource, alpha: float) -> None:
        self._base, self._expert, self._alpha = base, expert, alpha
        self.folder = expert.folder

    def names(self) -> list[str]:
        return list(self._base.names())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._base.shape(name))

    def code(self, name: str) -> str:
        found = self._base.code(name)
        return "F64" if found in FLOATING else found

    def read(self, name: str) -> Tensor:
        return self._scaled(self._base.read(name), lambda: self._expert.read(name))

    def read_raw(self, name: str, start: int, stop: int) -> Raw:
        def entries(source: TensorSource) -> Tensor:
            return to_tensor(source.read_raw(name, start, stop), source.code(name))

        return to_raw(self._scaled(entries(self._base), lambda: entries(self._expert)))

    def _scaled(self, base: Tensor, expert: Callable[[], Tensor]) -> Tensor:
        if not base.is_floating_point():
            return base
        base = base.double()
        return base if self._alpha == 0 else base + self._alpha * (expert().double() - base)

    def digest(self) -> str:
        content = f"{self._base.digest()} {self._expert.digest()} {self._alpha!r}"
        return hashlib.sha256(content.encode()).hexdigest()

    def unchanged(self) -> bool:
        return self._base.unchanged() and self._expert.unchanged()


class StateSource:
    """A built model's weights as a source of tensors, under the names of the checkpoint they came
    from; where the model's own names differ from those, the checkpoint itself."""

    def __init__(self, model: Any, origin: TensorSource) -> None:
        self._origin, self.folder = origin, origin.folder
        self._state: dict[str, Tensor] = model.state_dict()

    def names(self) -> list[str]:
        return self._origin.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._origin.shape(name)

    def code(self, name: str) -> str:
        return self._origin.code(name)

    def read(self, name: str) -> Tensor:
        own = self._state.get(name)
        return self._origin.read(name) if own is None else own.cpu()

    def read_raw(self, name: str, start: int, stop: int) -> Raw:
        own = self._state.get(name)
        if own is None:
            return self._origin.read_raw(name, start, stop)
        return to_raw(own.reshape(-1)[start:stop])

    def digest(self) -> str:
        return self._origin.digest()

    def unchanged(self) -> bool:
        return self._origin.unchanged()


class _KeepDouble(TorchFunctionMode):
    """Leaves float64 tensors alone where model code asks for float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        double = bool(args) and isinstance(args[0], Tensor) and args[0].dtype is torch.float64
        if double:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextmanager
def keep_double() -> Iterator[None]:
    """Within it, a model in float64 computes in float64 throughout."""
    with _KeepDouble():
        yield


def pairs(experiment: Experiment) -> list[Pair]:
    """Every merge that stands for a composition, with that one's weights."""
    count = len(experiment.experts)
    return [
        Pair(planned, weights)
        for planned in planned_models(experiment)
        if planned.kind == "merge" and planned.model is not None
        for weights in (counterpart(planned.model, count),)
        if weights is not None
    ]


MEANS = ("linear", "nuslerp", "karcher", "model_stock", "sce", "fisher", "regmean")


def counterpart(model: Model, count: int) -> list[float] | None:
    """The weights w_i of the product that equals the merge to first order, or would if all task
    vectors were kept whole and at one angle; None where they differ between tensors.

    A mean stands for w_i = weight_i / sum, SLERP for its t, all others for w_i = lambda * weight_i
    (TIES and its like for the experts as they are, unmasked).
    """
    if differs_between_tensors(model):
        return None
    parameters = resolved_parameters(model, count)
    weights = [float(weight) for weight in model.weights or [1.0] * count]
    if model.method == "slerp":
        return [float(parameters["t"])]
    averaged = parameters.get("normalize", model.method in MEANS) or model.method == "fisher"
    if averaged and model.method in (*MEANS, "dare_linear", "della_linear", "breadcrumbs"):
        total = sum(weights) or 1.0
        weights = [weight / total for weight in weights]
    scale = float(parameters.get("lambda", 1.0))
    return [scale * weight for weight in weights]


def texts(
    experiment: Experiment, settings: Settings, tokenizer: Any, model_type: str, limit: int | None
) -> list[Text]:
    """The reference texts of the experiment's prompt sets: a benchmark's reference solutions
    where it has a log-likelihood form, else its prompts."""
    spec = experiment.equivalence
    if spec is None:
        return []
    count = spec.count if limit is None else min(limit, spec.count)
    chat = experiment.generation.chat
    found = []
    for name in spec.prompts:
        scored = f"{name}_loglik"
        entry = BENCHMARKS[scored] if scored in BENCHMARKS else benchmark_entry(name)
        for item in entry.open(settings).items(count):
            request = item.requests[0]
            if isinstance(request, Score):
                context, rest = encode_pair(tokenizer, request, model_type, chat)
                found.append(Text(name, item.id, context + rest, len(context)))
            elif isinstance(request, Generate):
                ids = encode(tokenizer, request.prompt, model_type, chat)
                found.append(Text(name, item.id, ids, 1))
            else:
                found.append(Text(name, item.id, encode(tokenizer, request.text, model_type), 1))
    return [text for text in found if len(text.ids) > text.start]


def steps(experiment: Experiment, limit: int | None) -> int:
    """Units of work that `measure` reports, for a progress bar."""
    spec = experiment.equivalence
    if spec is None:
        return 0
    count = spec.count if limit is None else min(limit, spec.count)
    return len(spec.alphas) * count * len(spec.prompts)


def measure(
    experiment: Experiment,
    family: Family,
    settings: Settings,
    store: Store,
    bar: Bar,
    limit: int | None = None,
) -> None:
    """Compares every merge with its composition; what the store already holds is not repeated.

    Raises:
        InputError: float64 is not to be had on the device.
    """
    spec, compared = experiment.equivalence, pairs(experiment)
    if spec is None or not compared:
        return
    folder = family.base.folder
    tokenizer = load_tokenizer(folder)
    model_type = str(read_config(folder).get("model_type", ""))
    found = texts(experiment, settings, tokenizer, model_type, limit)
    keys = {
        (alpha, pair.planned.name, text.prompts, text.item): _key(pair, family, alpha, text)
        for alpha in spec.alphas
        for pair in compared
        for text in found
    }
    store.select_divergences(keys.values())
    done = store.finished_divergences(keys.values())
    models: dict[str, Any] = {}  # in float64; from alpha to alpha only their weights change
    for alpha in spec.alphas:
        missing = [
            text
            for text in found
            if any(
                keys[alpha, p.planned.name, text.prompts, text.item] not in done for p in compared
            )
        ]
        bar.advance(len(found) - len(missing))
        if not missing:
            continue
        bar.describe(f"equivalence · alpha {alpha:g}")
        _scale(models, experiment, family, compared, alpha)
        suit_threads(models["base"])
        for text in missing:
            store.add_divergences(_compare(models, compared, text, alpha, keys))
            bar.advance()


def _key(pair: Pair, family: Family, alpha: float, text: Text) -> str:
    content = {
        "model": pair.planned.name,
        "merge": identity(pair.planned, family),
        "weights": pair.weights,
        "alpha": alpha,
        "ids": text.ids,
        "start": text.start,
        "torch": torch.__version__,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _scale(
    models: dict[str, Any],
    experiment: Experiment,
    family: Family,
    compared: Sequence[Pair],
    alpha: float,
) -> None:
    """Gives `models` the base, and experts and merges with task vectors scaled by alpha."""
    if "base" not in models:
        _place(models, "base", experiment, family, _read(family.base))
    sources: dict[str, TensorSource] = {"base": ScaledSource(family.base, family.base, 0.0)}
    for name, expert in family.experts.items():
        sources[name] = ScaledSource(family.base, expert, alpha)
        _place(models, name, experiment, family, _read(sources[name]))
    # What has just been computed need not be read and scaled again for every merge.
    sources = {name: StateSource(models[name], source) for name, source in sources.items()}
    for pair in compared:
        model = pair.planned.model
        if model is None or model.method is None:
            continue
        job = prepare_recipe(
            merge_recipe(model, list(family.experts), "float64"),
            sources["base"],
            [sources[name] for name in family.experts],
            merges.statistics(model, family),
        )
        _place(models, pair.planned.name, experiment, family, tensors_of(job))


def _read(source: TensorSource) -> Iterator[tuple[str, Tensor]]:
    for name in source.names():
        tensor = source.read(name)
        yield name, tensor.double() if tensor.is_floating_point() else tensor


@torch.inference_mode()
def _place(
    models: dict[str, Any],
    name: str,
    experiment: Experiment,
    family: Family,
    tensors: Iterator[tuple[str, Tensor]],
) -> None:
    """Builds a float64 model of the tensors, or gives them to the one that is there."""
    own = models[name].state_dict() if name in models else {}
    if own and set(family.base.names()) <= set(own):
        for tensor_name, tensor in tensors:
            own[tensor_name].copy_(tensor)
        return
    device = choose_device(experiment.generation.device)
    if device.type == "mps":  # has no float64
        device = torch.device("cpu")
    models.pop(name, None)
    models[name] = build(family.base.folder, dict(tensors), torch.float64, device)


@torch.inference_mode()
def _compare(
    models: Mapping[str, Any],
    compared: Sequence[Pair],
    text: Text,
    alpha: float,
    keys: Mapping[tuple[float, str, str, str], str],
) -> list[Divergence]:
    """One row a merge: the measures summed over the text's tokens."""
    merged = [pair.planned.name for pair in compared]
    experts = [name for name in models if name != "base" and name not in merged]
    positions = torch.arange(text.start - 1, len(text.ids) - 1)
    logits = {name: _logits(model, text.ids, positions) for name, model in models.items()}
    sums: dict[str, dict[str, float]] = {name: {} for name in merged}
    for start in range(0, len(positions), CHUNK):
        # (CHUNK, V) each
        part = {name: values[start : start + CHUNK] for name, values in logits.items()}
        for pair in compared:
            composed = compose_logits(
                part["base"], [part[expert] for expert in experts], weights=pair.weights
            )
            found = divergences(composed, part[pair.planned.name])
            total = sums[pair.planned.name]
            for measure, values in found._asdict().items():
                total[measure] = total.get(measure, 0.0) + float(values.double().sum())
    return [
        Divergence(
            key=keys[alpha, pair.planned.name, text.prompts, text.item],
            model=pair.planned.name,
            reference=pair.reference,
            prompts=text.prompts,
            alpha=alpha,
            prompt=text.item,
            tokens=len(positions),
            **sums[pair.planned.name],
        )
        for pair in compared
    ]


def _logits(model: Any, ids: Sequence[int], positions: Tensor) -> Tensor:
    """Float64 logits at some positions of a text, (positions, V)."""
    row = torch.tensor([list(ids)], device=model.device)
    with keep_double():
        output = model(input_ids=row, logits_to_keep=positions.to(model.device))
    logits: Tensor = output.logits[0]
    return logits
