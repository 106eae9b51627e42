"""mergekit's YAML as a recipe of ours.

mergekit's own defaults are written out, since ours differ: `linear` and `ties` normalise by the
weights, `task_arithmetic` does not; `density` is 1 where it is not given. What has no equal here is
refused by name, never ignored. Semantics: mergekit 0.1.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from merging.errors import MergeError
from merging.methods import nearest

SUPPORTED = ("linear", "task_arithmetic", "ties")
KEYS = ("merge_method", "base_model", "models", "parameters", "dtype", "out_dtype", "name")
IGNORED = {"tokenizer_source": ("base",)}  # asks for what happens here anyway
MODEL_KEYS = ("weight", "density")
GLOBAL_KEYS = ("weight", "density", "normalize", "lambda")


def translate(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's mapping from mergekit's.

    Raises:
        MergeError: a line for everything that is not supported here.
    """
    method = raw.get("merge_method")
    faults = _unsupported(raw, method)
    shared = raw.get("parameters") or {}
    entries = raw.get("models") or []
    if faults or not isinstance(shared, dict) or not isinstance(entries, list):
        raise MergeError(
            "\n".join(faults or ["models and parameters: expected a list and a mapping"])
        )
    base = raw.get("base_model")
    experts = [e for e in entries if method == "linear" or e["model"] != base]
    if not experts:
        raise MergeError("models: found no model beside the base; expected at least one")
    weights = [_number(entry, shared, "weight", 1.0) for entry in experts]
    densities = {_number(entry, shared, "density", 1.0) for entry in experts}
    normalize = bool(shared.get("normalize", method != "task_arithmetic"))
    parameters: dict[str, Any] = {"lambda": float(shared.get("lambda", 1.0))}
    if method == "linear":
        parameters = {"normalize": normalize}
    elif method == "ties":
        if len(densities) > 1:
            raise MergeError(
                f"density differs between the models ({sorted(densities)}); expected one"
            )
        parameters |= {"density": densities.pop(), "preset": "mergekit"}
        parameters |= {} if normalize else {"divisor": "none"}
    elif normalize:
        weights = _normalized(weights)
    return {
        "method": method,
        "base": base or experts[0]["model"],
        "models": [
            {"model": entry["model"], "weight": weight}
            for entry, weight in zip(experts, weights, strict=True)
        ],
        "parameters": parameters,
        "dtype": raw.get("out_dtype") or raw.get("dtype"),
    }


def _normalized(weights: list[float]) -> list[float]:
    total = sum(weights)
    if total == 0:
        raise MergeError(f"the weights {weights} sum to 0 and cannot be normalised")
    return [weight / total for weight in weights]


def _unsupported(raw: Mapping[str, Any], method: Any) -> list[str]:
    faults = []
    if method not in SUPPORTED:
        faults.append(f"merge_method: {method!r} is not supported{nearest(str(method), SUPPORTED)}")
    elif method != "linear" and not raw.get("base_model"):
        faults.append(f"base_model: this key is missing; {method} needs a base")
    for key, value in raw.items():
        if key not in KEYS and value not in IGNORED.get(key, ()):
            faults.append(f"{key}: this part of mergekit's YAML is not supported here")
    for key in raw.get("parameters") or {}:
        if key not in GLOBAL_KEYS:
            faults.append(f"parameters.{key}: not supported here{nearest(str(key), GLOBAL_KEYS)}")
    for place, entry in enumerate(raw.get("models") or []):
        faults += _entry_faults(place, entry)
    return faults


def _entry_faults(place: int, entry: Any) -> list[str]:
    if not isinstance(entry, dict) or not isinstance(entry.get("model"), str):
        return [f"models.{place}: expected a mapping with the key model"]
    faults = [
        f"models.{place}.{key}: not supported here"
        for key in entry
        if key not in ("model", "parameters")
    ]
    for key, value in (entry.get("parameters") or {}).items():
        if key not in MODEL_KEYS:
            faults.append(f"models.{place}.parameters.{key}: not supported here")
        elif isinstance(value, list | dict):
            faults.append(
                f"models.{place}.parameters.{key}: gradients and filters are not supported here; "
                "expected one number"
            )
    return faults


def _number(entry: Mapping[str, Any], shared: Mapping[str, Any], key: str, default: float) -> float:
    value = (entry.get("parameters") or {}).get(key, shared.get(key, default))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MergeError(f"{key}: found {value!r}; expected one number")
    return float(value)
