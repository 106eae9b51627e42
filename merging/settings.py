"""Numbers that differ between tensors: by their names, or along the layers.

    density: 0.2                                        everywhere
    density: [0.5, 0.2]                                 a gradient from the first layer to the last
    density: [{filter: mlp, value: 0.1}, {value: 0.3}]  the first filter that is found in the name

A filter is a regular expression; its value may be a gradient. A gradient is interpolated linearly
over the layers; tensors outside of layers (embeddings, the last norm, the head) take its first
number, as in mergekit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from merging.errors import MergeError

LAYER = re.compile(r"\.(\d+)\.")
CONDITION = {"filter", "value"}


def varies(setting: Any) -> bool:
    """Whether the setting is more than one value."""
    return isinstance(setting, list | dict)


def depths(names: Sequence[str]) -> dict[str, float]:
    """Where each tensor stands between the first layer (0) and the last (1)."""
    found = {name: match for name in names if (match := LAYER.search(name))}
    last = max((int(match[1]) for match in found.values()), default=0)
    return {
        name: (int(found[name][1]) / last if last else 1.0) if name in found else 0.0
        for name in names
    }


def value_at(setting: Any, name: str, depth: float) -> Any:
    """The setting's value for one tensor.

    Raises:
        MergeError: no filter is found in the name.
    """
    if isinstance(setting, dict):
        setting = [setting]
    if not isinstance(setting, list):
        return setting
    if isinstance(setting[0], dict):
        for condition in setting:
            if condition.get("filter") is None or re.search(condition["filter"], name):
                return value_at(condition["value"], name, depth)
        raise MergeError(
            f"no filter is found in the name {name}; end the list with a value without filter"
        )
    place = depth * (len(setting) - 1)
    first = int(place)
    second = min(first + 1, len(setting) - 1)
    return setting[first] + (place - first) * (setting[second] - setting[first])


def faults(where: str, setting: Any) -> list[str]:
    """What is wrong with the form of a setting; its numbers are the method's matter."""
    if isinstance(setting, dict):
        setting = [setting]
    if not isinstance(setting, list):
        return []
    if not setting:
        return [f"{where}: the list is empty; expected numbers or conditions"]
    if all(isinstance(one, int | float) and not isinstance(one, bool) for one in setting):
        return []
    if not all(isinstance(one, dict) for one in setting):
        return [f"{where}: expected numbers (a gradient) or mappings of filter and value"]
    found = []
    for place, condition in enumerate(setting):
        inside = f"{where}.{place}"
        unknown = set(condition) - CONDITION
        if unknown or "value" not in condition:
            found.append(f"{inside}: expected the keys filter and value; found {list(condition)}")
            continue
        try:
            re.compile(str(condition.get("filter") or ""))
        except re.error as error:
            found.append(f"{inside}.filter: no regular expression: {error}")
        value = condition["value"]
        if isinstance(value, list) and any(isinstance(one, dict) for one in value):
            found.append(f"{inside}.value: expected a number or a gradient")
        else:
            found += faults(f"{inside}.value", value)
    return found


def leaves(setting: Any) -> Iterator[Any]:
    """Every single value in a setting."""
    if isinstance(setting, dict):
        yield from leaves(setting.get("value"))
    elif isinstance(setting, list):
        for one in setting:
            yield from leaves(one)
    else:
        yield setting


def first_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """One value of each setting, to check a set of parameters as a whole."""
    return {key: next(leaves(setting), setting) for key, setting in settings.items()}
