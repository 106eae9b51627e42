"""Evaluation: one protocol for every model of an experiment, from YAML to results.

`Experiment` is the experiment file's schema, `load_experiment` reads and checks one, and
`run_experiment` does everything it asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evaluation.experiment import Experiment, load_experiment
    from evaluation.run import run_experiment

__all__ = ["Experiment", "load_experiment", "run_experiment"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: `mergescope merge` and `--help` must not wait for transformers.
    if name in ("Experiment", "load_experiment"):
        from evaluation import experiment

        return getattr(experiment, name)
    if name == "run_experiment":
        from evaluation import run

        return run.run_experiment
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
