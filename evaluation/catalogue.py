"""What `mergescope list` shows: the registries of the packages as tables."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
from pydantic import BaseModel


def methods() -> pd.DataFrame:
    """Merging methods with parameters and defaults."""
    from merging import METHODS

    return pd.DataFrame(
        [
            {"method": name, "parameters": _parameters(method.params), "what": method.summary}
            for name, method in METHODS.items()
        ]
    )


def rules() -> pd.DataFrame:
    """Composition rules with parameters and defaults; gate and eos combine with any rule."""
    from composition import RULES, Combination

    options = _parameters(Combination, without=("rule",))
    return pd.DataFrame(
        [
            {"rule": name, "parameters": options, "what": rule.summary}
            for name, rule in RULES.items()
        ]
    )


def benchmarks() -> pd.DataFrame:
    """Benchmarks with their primary metric."""
    from evaluation.benchmarks import BENCHMARKS

    return pd.DataFrame(
        [
            {
                "benchmark": name,
                "metric": entry.metric,
                "better": "higher" if entry.higher_is_better else "lower",
                "what": entry.summary,
            }
            for name, entry in BENCHMARKS.items()
        ]
    )


def _parameters(model: type[BaseModel], without: tuple[str, ...] = ()) -> str:
    return ", ".join(
        f"{field.alias or name}={field.get_default(call_default_factory=True)}"
        for name, field in model.model_fields.items()
        if name not in without
    )


CATALOGUES: dict[str, Callable[[], pd.DataFrame]] = {
    "methods": methods,
    "rules": rules,
    "benchmarks": benchmarks,
}
