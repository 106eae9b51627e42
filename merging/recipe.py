"""A recipe says which models are merged and how. Our own form, or mergekit's YAML.

    method: ties                          merge_method: ties
    base: models/base                     base_model: models/base
    models:                               models:
      - {model: models/math, weight: 1}     - model: models/math
      - models/code                           parameters: {weight: 1, density: 0.2}
    parameters: {density: 0.2}            parameters: {normalize: true, lambda: 1.0}
    dtype: bfloat16                       dtype: bfloat16

Weights and parameters may differ between tensors, see `merging.settings`. A mergekit file is
translated (`merging.mergekit`); what it asks for beyond that is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from merging import settings
from merging.engine import Chosen
from merging.errors import MergeError
from merging.mergekit import translate
from merging.methods import METHODS, check_experts, check_weights, parse_parameters, sentence

Dtype = Literal["float32", "float16", "bfloat16", "float64"]


class Ingredient(BaseModel):
    """One expert of a merge."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    weight: Any = 1.0  # a number, or see `merging.settings`
    statistics: str | None = None  # a file, for a method that weighs by them


class Recipe(BaseModel):
    """One merge; every default is here or in the method's parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    base: str
    models: list[Ingredient] = Field(min_length=1)
    parameters: dict[str, Any] = {}
    dtype: Dtype | None = None
    exclude: list[str] = []
    allow_non_finite: bool = False
    name: str | None = None

    @field_validator("models", mode="before")
    @classmethod
    def _plain_paths(cls, models: Any) -> Any:
        if not isinstance(models, list):
            return models
        return [{"model": model} if isinstance(model, str) else model for model in models]

    @field_validator("exclude")
    @classmethod
    def _regular_expressions(cls, exclude: list[str]) -> list[str]:
        for pattern in exclude:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return exclude


def load_recipe(path: Path) -> Recipe:
    """Reads and checks a recipe.

    Raises:
        MergeError: a line for every fault.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise MergeError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise MergeError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise MergeError(
            f"{path} holds {type(raw).__name__}; expected a mapping with the keys method, base and "
            "models"
        )
    try:
        return parse_recipe(raw)
    except MergeError as error:
        raise MergeError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None


def parse_recipe(raw: Mapping[str, Any]) -> Recipe:
    """A recipe from a mapping in our form or in mergekit's.

    Raises:
        MergeError: a line for every fault, those of the method's parameters included.
    """
    content = translate(raw) if "merge_method" in raw or "slices" in raw else dict(raw)
    faults: list[str] = []
    if isinstance(content.get("method"), str):
        given = content.get("parameters")
        faults += _parameter_faults(content["method"], given if isinstance(given, dict) else {})
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        known = list(Recipe.model_fields)
        raise MergeError(
            "\n".join([*(sentence(f, known) for f in error.errors()), *faults])
        ) from None
    for place, one in enumerate(recipe.models):
        where = f"models.{place}.weight"
        faults += settings.faults(where, one.weight) or [
            f"{where}: found {leaf!r}; expected a finite number"
            for leaf in settings.leaves(one.weight)
            if isinstance(leaf, bool) or not isinstance(leaf, int | float) or not isfinite(leaf)
        ]
    if recipe.method in METHODS and not faults:
        weights = [next(settings.leaves(one.weight)) for one in recipe.models]
        try:
            check_experts(recipe.method, len(recipe.models), weights)
        except MergeError as error:
            faults += str(error).splitlines()
    if faults:
        raise MergeError("\n".join(faults))
    return recipe


def chooser(recipe: Recipe, names: Sequence[str]) -> Callable[[str], Chosen]:
    """Weights and parameters for each of the tensors of a recipe."""
    depths = settings.depths(names)
    fixed = None
    if not any(settings.varies(value) for value in recipe.parameters.values()):
        fixed = parse_parameters(recipe.method, recipe.parameters)

    def choose(name: str) -> Chosen:
        depth = depths[name]
        weights = [settings.value_at(one.weight, name, depth) for one in recipe.models]
        if fixed is not None:
            return Chosen(check_weights(weights, len(weights)), fixed)
        given = {
            key: settings.value_at(value, name, depth) for key, value in recipe.parameters.items()
        }
        return Chosen(check_weights(weights, len(weights)), parse_parameters(recipe.method, given))

    return choose


def resolved(recipe: Recipe) -> dict[str, Any]:
    """The recipe with every default of its method written out."""
    parameters = parse_parameters(recipe.method, settings.first_of(recipe.parameters))
    content = recipe.model_dump(mode="json", exclude_none=True)
    defaults = parameters.model_dump(mode="json", by_alias=True, exclude_none=True)
    content["parameters"] = {**defaults, **recipe.parameters}
    return content


def _parameter_faults(method: str, given: Mapping[str, Any]) -> list[str]:
    """Faults of every value that a parameter takes anywhere."""
    found = [
        fault
        for key, setting in given.items()
        for fault in settings.faults(f"parameters.{key}", setting)
    ]
    if found:
        return found
    plain = settings.first_of(given)
    for variant in [
        plain,
        *({**plain, key: v} for key in given for v in settings.leaves(given[key])),
    ]:
        try:
            parse_parameters(method, variant)
        except MergeError as error:
            found += str(error).splitlines()
    return list(dict.fromkeys(found))
