"""Merging: many checkpoints as one, in parameter space.

    from merging import METHODS, merge_tensors
    merge_tensors("ties", base, [e1, e2], weights=[1, 1], density=0.2, lambda_=1.0)

A method is one file in `merging.methods`; `merged_tensors` streams a whole model through it and
`merge_to_folder` writes one. Nothing here imports transformers.
"""

from __future__ import annotations

from merging.adapter import Adapter, open_adapter
from merging.checkpoint import (
    Checkpoint,
    TensorSource,
    open_checkpoint,
    read_json,
)
from merging.digests import file_digest
from merging.engine import differences, merged_tensors
from merging.errors import MergeError
from merging.methods import METHODS, check_experts, merge_tensors, parse_parameters
from merging.output import merge_to_folder, summary
from merging.recipe import Recipe, load_recipe, parse_recipe

__all__ = [
    "METHODS",
    "Adapter",
    "Checkpoint",
    "MergeError",
    "Recipe",
    "TensorSource",
    "check_experts",
    "differences",
    "file_digest",
    "load_recipe",
    "merge_tensors",
    "merge_to_folder",
    "merged_tensors",
    "open_adapter",
    "open_checkpoint",
    "parse_parameters",
    "parse_recipe",
    "read_json",
    "summary",
]
