"""mergekit's YAML as a recipe of ours.

mergekit's own defaults are written out, since ours differ: `linear`, `ties` and `della` normalise
by the weights, the others do not; `density` is 1 where it is not given, and DARE restores the L1
norm. What has no equal here is refused by name, never ignored. Semantics: mergekit 0.1.5. What is
drawn at random (DARE, DELLA) follows the same distribution, not the same draw.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from merging.errors import MergeError
from merging.methods import nearest
from merging.settings import faults as setting_faults
from merging.settings import varies

KEYS = ("merge_method", "base_model", "models", "parameters", "dtype", "out_dtype", "name")
IGNORED = {"tokenizer_source": ("base",)}  # asks for what happens here anyway


class Form(NamedTuple):
    """How mergekit writes a method down."""

    numbers: Mapping[str, float] = {}  # of the method, one for all experts; with its defaults
    flags: Mapping[str, bool] = {}  # which we have in one setting only
    weight: bool = True
    normalize: bool | None = None  # its default; None where there is no such key
    rescale: bool | None = None
    needs_base: bool = True
    averages: bool = False  # whether the base, where listed, is one more model


SPARSE = {"density": 1.0, "lambda": 1.0}
MASK = {"int8_mask": False}  # how a mask is stored: no matter here
FORMS = {
    "linear": Form(normalize=True, needs_base=False, averages=True),
    "task_arithmetic": Form({"lambda": 1.0}, MASK | {"density": True}, normalize=False),
    "ties": Form(SPARSE, MASK | {"rescale": False}, normalize=True),
    "dare_linear": Form(SPARSE, MASK, normalize=False, rescale=True),
    "dare_ties": Form(SPARSE, MASK, normalize=False, rescale=True),
    "della": Form(SPARSE | {"epsilon": 0.15}, MASK, normalize=True, rescale=True),
    "della_linear": Form(SPARSE | {"epsilon": 0.15}, MASK, normalize=False, rescale=True),
    "breadcrumbs": Form(SPARSE | {"gamma": 0.01}, MASK | {"rescale": False}, normalize=False),
    "breadcrumbs_ties": Form(SPARSE | {"gamma": 0.01}, MASK | {"rescale": False}, normalize=False),
    "slerp": Form({"t": 0.5}, weight=False),
    "nuslerp": Form(flags={"nuslerp_flatten": True, "nuslerp_row_wise": False}),
    "model_stock": Form(flags={"filter_wise": False}, weight=False),
    "karcher": Form({"max_iter": 10, "tol": 1e-5}, weight=False, needs_base=False, averages=True),
    "sce": Form({"select_topk": 1.0}, MASK, weight=False),
}
SUPPORTED = tuple(FORMS)
IRRELEVANT = ("int8_mask", "density")  # as a flag: any setting gives the same numbers


def translate(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's mapping from mergekit's.

    Raises:
        MergeError: a line for everything that is not supported here.
    """
    faults = _unsupported(raw)
    if faults:
        raise MergeError("\n".join(faults))
    method, base = str(raw["merge_method"]), raw.get("base_model")
    form, shared = FORMS[method], raw.get("parameters") or {}
    entries = [e for e in raw["models"] if form.averages or e["model"] != base]
    if not entries:
        raise MergeError("models: found no model beside the base; expected at least one")
    weights = [1.0] * len(entries)
    if form.weight:
        weights = [_number(entry, shared, "weight", 1.0) for entry in entries]
    parameters: dict[str, Any] = {
        key: _common(entries, shared, key, default) for key, default in form.numbers.items()
    }
    if form.normalize is not None:
        normalize = bool(shared.get("normalize", form.normalize))
        if method == "task_arithmetic":
            weights = _normalized(weights) if normalize else weights
        elif method == "ties":
            parameters |= {"preset": "mergekit"} | ({} if normalize else {"divisor": "none"})
        else:
            parameters["normalize"] = normalize
    if form.rescale is not None:
        parameters["rescale"] = "l1" if shared.get("rescale", form.rescale) else "none"
    if "max_iter" in parameters:
        parameters["max_iter"] = int(parameters["max_iter"])
    return {
        "method": method,
        "base": base or entries[0]["model"],
        "models": [
            {"model": entry["model"], "weight": weight}
            for entry, weight in zip(entries, weights, strict=True)
        ],
        "parameters": parameters,
        "dtype": raw.get("out_dtype") or raw.get("dtype"),
    }


def _normalized(weights: list[Any]) -> list[Any]:
    if any(varies(weight) for weight in weights):
        raise MergeError(
            "weight: gradients and filters cannot be normalised here; normalize: false"
        )
    total = sum(weights)
    if total == 0:
        raise MergeError(f"the weights {weights} sum to 0 and cannot be normalised")
    return [weight / total for weight in weights]


def _unsupported(raw: Mapping[str, Any]) -> list[str]:
    faults = []
    method = raw.get("merge_method")
    form = FORMS.get(str(method))
    if form is None:
        faults.append(f"merge_method: {method!r} is not supported{nearest(str(method), SUPPORTED)}")
    elif form.needs_base and not raw.get("base_model"):
        faults.append(f"base_model: this key is missing; {method} needs a base")
    for key, value in raw.items():
        if key not in KEYS and value not in IGNORED.get(key, ()):
            faults.append(f"{key}: this part of mergekit's YAML is not supported here")
    shared, entries = raw.get("parameters") or {}, raw.get("models") or []
    if not isinstance(shared, dict) or not isinstance(entries, list):
        return [*faults, "models and parameters: expected a list and a mapping"]
    form = form or Form()
    for key, value in shared.items():
        faults += _key_faults(f"parameters.{key}", str(key), value, form)
    for place, entry in enumerate(entries):
        faults += _entry_faults(place, entry, form)
    return faults


def _key_faults(where: str, key: str, value: Any, form: Form) -> list[str]:
    known = [*form.numbers, *form.flags]
    known += ["weight"] * form.weight
    known += ["normalize"] * (form.normalize is not None)
    known += ["rescale"] * (form.rescale is not None)
    if key not in known:
        return [f"{where}: not supported here{nearest(key, known)}"]
    if key in form.flags:
        if key not in IRRELEVANT and bool(value) != form.flags[key]:
            return [f"{where}: found {value!r}; only {form.flags[key]} is supported here"]
    elif varies(value) and key in ("normalize", "rescale", "max_iter"):
        return [f"{where}: gradients and filters are not supported here; expected one value"]
    return []


def _entry_faults(place: int, entry: Any, form: Form) -> list[str]:
    if not isinstance(entry, dict) or not isinstance(entry.get("model"), str):
        return [f"models.{place}: expected a mapping with the key model"]
    faults = [
        f"models.{place}.{key}: not supported here"
        for key in entry
        if key not in ("model", "parameters")
    ]
    for key, value in (entry.get("parameters") or {}).items():
        faults += _key_faults(f"models.{place}.parameters.{key}", str(key), value, form)
    return faults


def _common(
    entries: Sequence[Mapping[str, Any]], shared: Mapping[str, Any], key: str, default: float
) -> Any:
    """A setting that mergekit has for each model and we for all."""
    found = [_number(entry, shared, key, default) for entry in entries]
    if any(one != found[0] for one in found):
        raise MergeError(f"{key} differs between the models ({found}); expected one")
    return found[0]


def _number(entry: Mapping[str, Any], shared: Mapping[str, Any], key: str, default: float) -> Any:
    """A number, a gradient, or conditions with our kind of filters."""
    value = (entry.get("parameters") or {}).get(key, shared.get(key, default))
    if varies(value):
        return _setting(value, key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MergeError(f"{key}: found {value!r}; expected a number")
    return float(value)


def _setting(value: Any, key: str) -> Any:
    """mergekit finds a filter as it stands in the name, `*` in every name."""
    conditions = [value] if isinstance(value, dict) else value
    faults = setting_faults(key, conditions)
    if faults:
        raise MergeError("\n".join(faults))
    if not isinstance(conditions[0], dict):
        return conditions
    return [
        {
            "filter": None if one.get("filter") in (None, "*") else re.escape(str(one["filter"])),
            "value": one["value"],
        }
        for one in conditions
    ]
