"""The registry of merging methods, and merging single tensors by name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from merging.errors import MergeError
from merging.lazy import torch
from merging.methods.breadcrumbs import BREADCRUMBS, BREADCRUMBS_TIES
from merging.methods.consensus import CONSENSUS
from merging.methods.contract import Inputs, Method, Parameters, settle
from merging.methods.dare import DARE_LINEAR, DARE_TIES
from merging.methods.della import DELLA, DELLA_LINEAR
from merging.methods.fisher import FISHER
from merging.methods.karcher import KARCHER
from merging.methods.knots import KNOTS
from merging.methods.linear import LINEAR
from merging.methods.model_stock import MODEL_STOCK
from merging.methods.nuslerp import NUSLERP
from merging.methods.regmean import REGMEAN
from merging.methods.sce import SCE
from merging.methods.slerp import SLERP
from merging.methods.spectral import ISO_C, TSV_M
from merging.methods.task_arithmetic import TASK_ARITHMETIC
from merging.methods.ties import TIES

if TYPE_CHECKING:
    from torch import Tensor

METHODS: dict[str, Method] = {
    "linear": LINEAR,
    "task_arithmetic": TASK_ARITHMETIC,
    "ties": TIES,
    "dare_linear": DARE_LINEAR,
    "dare_ties": DARE_TIES,
    "della": DELLA,
    "della_linear": DELLA_LINEAR,
    "breadcrumbs": BREADCRUMBS,
    "breadcrumbs_ties": BREADCRUMBS_TIES,
    "slerp": SLERP,
    "nuslerp": NUSLERP,
    "model_stock": MODEL_STOCK,
    "karcher": KARCHER,
    "sce": SCE,
    "consensus": CONSENSUS,
    "tsv_m": TSV_M,
    "iso_c": ISO_C,
    "knots": KNOTS,
    "fisher": FISHER,
    "regmean": REGMEAN,
}


def parse_parameters(method: str, given: Mapping[str, Any]) -> Parameters:
    """A method's parameters with every default filled in.

    Raises:
        MergeError: a line a fault; unknown methods and keys name the nearest.
    """
    if method not in METHODS:
        anywhere = {key: None for entry in METHODS.values() for key in entry.params.spelled()}
        raise MergeError(
            "\n".join(
                [
                    f"unknown method {method!r}{nearest(method, list(METHODS))}",
                    *(
                        f"{key}: unknown key{nearest(str(key), list(anywhere))}"
                        for key in given
                        if key not in anywhere
                    ),
                ]
            )
        )
    params = METHODS[method].params
    try:
        return params.model_validate(dict(given))
    except ValidationError as error:
        known = params.spelled()
        raise MergeError("\n".join(sentence(fault, known) for fault in error.errors())) from None


def merge_tensors(
    method: str,
    base: Tensor,
    experts: Sequence[Tensor],
    weights: Sequence[float] | None = None,
    statistics: Sequence[Tensor | None] = (),
    **parameters: Any,
) -> Tensor:
    """Merges one tensor by name: `merge_tensors("ties", base, [e1, e2], density=0.2)`.

    Args:
        base, experts: floating tensors of one shape; computed in float32, or in float64 where
            the base is float64.
        weights: one an expert; 1 each if left out.
        statistics: one an expert, for a method that weighs by them.
        parameters: the method's own, as in a recipe.

    Returns:
        The merged tensor, in the precision it was computed in.

    Raises:
        MergeError: unknown method or parameter, shapes or weights that do not fit, NaN or inf.
    """
    params = parse_parameters(method, parameters)
    chosen = check_weights(weights, len(experts))
    check_experts(method, len(experts), weights)
    for index, expert in enumerate(experts):
        if expert.shape != base.shape:
            raise MergeError(
                f"expert {index} has shape {tuple(expert.shape)} where the base has "
                f"{tuple(base.shape)}; expected tensors of one shape"
            )
    for name, tensor in [("the base", base), *((f"expert {i}", e) for i, e in enumerate(experts))]:
        if not bool(tensor.isfinite().all()):
            raise MergeError(f"{name} holds NaN or infinity; expected finite numbers")
    dtype = torch.float64 if base.dtype == torch.float64 else torch.float32
    entry, known = METHODS[method], None
    if len(statistics) != (len(experts) if entry.statistics else 0):
        raise MergeError(
            f"{method} was given {len(statistics)} statistics; expected "
            f"{'one an expert' if entry.statistics else 'none'}"
        )
    experts = [expert.to(dtype) for expert in experts]
    inputs = Inputs(base.to(dtype), experts, statistics=statistics)
    survey = entry.survey
    if survey is not None and survey.scope(params) is not None:

        def look(hint: Any) -> list[Any]:
            return [survey.observe(inputs, params, hint)]

        hint = survey.begin([d.flatten().cpu().numpy() for d in inputs.deltas], params)
        (known,) = settle(survey, params, hint, look(hint), look)
    return entry.merge(inputs, chosen, params, known)


def check_weights(weights: Sequence[float] | None, experts: int) -> list[float]:
    """One finite weight an expert, 1 each if left out.

    Raises:
        MergeError: no expert, a weight too many or too few, or one that is not finite.
    """
    if experts == 0:
        raise MergeError("there are no experts; expected at least one model beside the base")
    chosen = [1.0] * experts if weights is None else [float(weight) for weight in weights]
    if len(chosen) != experts:
        raise MergeError(f"{len(chosen)} weights for {experts} experts; expected one an expert")
    if not all(map(math.isfinite, chosen)):
        raise MergeError(f"the weights are {chosen}; expected finite numbers")
    return chosen


def check_experts(method: str, experts: int, weights: Sequence[float] | None) -> None:
    """The method takes so many experts, and weights where there are any.

    Raises:
        MergeError: with a line for every fault.
    """
    entry = METHODS[method]
    faults = []
    if experts < entry.least or (entry.most is not None and experts > entry.most):
        expected = f"at least {entry.least}"
        if entry.most is not None:
            several = entry.most != entry.least
            expected = f"{entry.least} to {entry.most}" if several else f"exactly {entry.most}"
        faults.append(f"{method} merges {expected} experts beside the base; found {experts}")
    if not entry.weighted and any(weight != 1 for weight in weights or ()):
        faults.append(f"{method} takes no weights; found {list(weights or ())}")
    if faults:
        raise MergeError("\n".join(faults))


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'? There are: ...` for the end of a sentence."""
    close = difflib.get_close_matches(name, known, n=1)
    guess = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{guess} There are: {', '.join(known)}"


def sentence(fault: Any, known: Sequence[str]) -> str:
    """One of pydantic's faults in our words."""
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"{where}: unknown key{nearest(str(fault['loc'][-1]), known)}"
    if fault["type"] == "missing":
        return f"{where}: this key is missing"
    return f"{where}: found {fault['input']!r}; {fault['msg'].removeprefix('Value error, ')}"


__all__ = [
    "METHODS",
    "Method",
    "Parameters",
    "check_experts",
    "merge_tensors",
    "parse_parameters",
]
