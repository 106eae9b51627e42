"""A LoRA adapter on its base as a source of tensors: W + scaling * B A, exact in float32.

scaling = alpha / r, or alpha / sqrt(r) with rank-stabilised LoRA; ranks and alphas may differ by
module. What is more than a low-rank addition to a weight matrix (DoRA, trained biases, saved
modules, other PEFT types) is refused by name: a wrong expert is worse than none.

Source: LoRA (Hu et al. 2021, arXiv:2106.09685), rsLoRA (Kalajdzievski 2023, arXiv:2312.03732).
Reference: PEFT's `merge_and_unload`, which rounds to the base's dtype; here float32 is kept.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merging.checkpoint import Checkpoint, TensorSource, open_checkpoint, read_json
from merging.digests import file_digest
from merging.errors import MergeError
from merging.lazy import torch
from merging.raw import Raw, to_raw, to_tensor

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "base_model.model."
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
PAIRS_KEPT = 8  # of factors in memory: those of the tensors that are being read
FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")

REFUSED = {
    "use_dora": "DoRA rescales columns",
    "modules_to_save": "whole modules are replaced",
    "lora_bias": "biases are trained",
    "layer_replication": "layers are repeated",
    "use_qalora": "QA-LoRA pools its input",
    "use_bdlora": "BD-LoRA has block-diagonal factors",
    "alora_invocation_tokens": "aLoRA is active at some tokens only",
    "trainable_token_indices": "single embeddings are trained",
    "target_parameters": "parameters without a module are adapted",
    "arrow_config": "Arrow routes between adapters",
    "monteclora_config": "MonteCLoRA samples its factors",
}


class Adapter:
    """A base with a LoRA adapter applied; see `open_adapter`."""

    def __init__(
        self,
        base: TensorSource,
        folder: Path,
        factors: Checkpoint,
        config: Mapping[str, Any],
        adapted: Mapping[str, str],
    ) -> None:
        self.folder = base.folder  # config and tokenizer are the base's
        self.adapter_folder = folder
        self._base, self._factors, self._config = base, factors, config
        self._adapted = dict(adapted)  # the base's tensor -> the adapter's module
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """To another process goes where the files are, not what has been read of them."""
        folders = {name: getattr(self, name).absolute() for name in ("folder", "adapter_folder")}
        return {**vars(self), **folders, "_pairs": {}}

    def names(self) -> list[str]:
        return self._base.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(name)

    def code(self, name: str) -> str:
        found = self._base.code(name)
        return "F32" if name in self._adapted and found != "F64" else found

    def read(self, name: str) -> Tensor:
        weight = self._base.read(name)
        module = self._adapted.get(name)
        if module is None:
            return weight
        left, right = self._factor_pair(module)
        return weight.to(torch.promote_types(weight.dtype, torch.float32)) + left @ right

    def read_raw(self, name: str, start: int, stop: int) -> Raw:
        entries = self._base.read_raw(name, start, stop)
        module = self._adapted.get(name)
        if module is None:
            return entries
        left, right = self._factor_pair(module)
        columns = right.shape[1]
        first, last = start // columns, -(-stop // columns)  # the rows that hold the span
        delta = (left[first:last] @ right).flatten()[start - first * columns :][: stop - start]
        weight = to_tensor(entries, self._base.code(name))
        return to_raw(weight.to(torch.promote_types(weight.dtype, torch.float32)) + delta)

    def digest(self) -> str:
        return self._digest

    def unchanged(self) -> bool:
        return self._hashed() == self._digest and self._base.unchanged()

    @cached_property
    def _digest(self) -> str:
        return self._hashed()

    def _hashed(self) -> str:
        files = [self.adapter_folder / name for name in ("adapter_config.json", *WEIGHTS)]
        parts = [self._base.digest(), *(file_digest(file) for file in files if file.is_file())]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def _scaling(self, module: str, rank: int) -> float:
        name = module.removeprefix(PREFIX)
        alpha = _pattern(self._config.get("alpha_pattern"), name, self._config["lora_alpha"])
        root = math.sqrt(rank) if self._config.get("use_rslora") else rank
        return float(alpha) / float(root)

    def _factor_pair(self, module: str) -> tuple[Tensor, Tensor]:
        """(rows, r) and (r, columns) in float32, whose product is the addition to the weight."""
        found = self._pairs.get(module)
        if found is None:
            a, b = (self._factors.read(f"{module}.lora_{factor}.weight").float() for factor in "AB")
            b = b * self._scaling(module, rank=a.shape[0])
            found = (a.T, b.T) if self._config.get("fan_in_fan_out") else (b, a)
            latest = list(self._pairs.items())[1 - PAIRS_KEPT :]
            self._pairs = {**dict(latest), module: found}
        return found


def open_adapter(base: TensorSource, folder: Path) -> Adapter:
    """Opens a PEFT LoRA adapter on the base it was trained from.

    Raises:
        MergeError: another kind of adapter, or one that does not fit the base.
    """
    config = read_json(folder / "adapter_config.json")
    faults = _kind_faults(config)
    if faults:
        raise MergeError("\n".join(f"{folder}: {fault}" for fault in faults))
    file = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if file is None:
        raise MergeError(f"{folder} holds no adapter_model.safetensors; the adapter is incomplete")
    factors = open_checkpoint(file)
    adapted, faults = _match(base, factors, transposed=bool(config.get("fan_in_fan_out")))
    if faults:
        raise MergeError("\n".join(f"{folder}: {fault}" for fault in faults))
    return Adapter(base, folder, factors, config, adapted)


def _kind_faults(config: Mapping[str, Any]) -> list[str]:
    kind = config.get("peft_type")
    if kind != "LORA":
        return [f"peft_type is {kind!r}; expected LORA"]
    faults = [
        f"{key} is set ({why}); only a plain low-rank addition can be merged exactly"
        for key, why in REFUSED.items()
        if config.get(key)
    ]
    if config.get("bias", "none") != "none":
        faults.append(f"bias is {config['bias']!r}; expected none: trained biases are not merged")
    if not isinstance(config.get("lora_alpha"), int | float) or not config.get("r"):
        faults.append("r or lora_alpha is missing")
    return faults


def _match(
    base: TensorSource, factors: Checkpoint, transposed: bool
) -> tuple[dict[str, str], list[str]]:
    """The base's tensor for every pair of factors, and what does not fit."""
    known = set(base.names())
    pairs: dict[str, set[str]] = {}
    faults = []
    for name in factors.names():
        match = FACTOR.fullmatch(name)
        if match is None:
            faults.append(
                f"{name} is no LoRA factor; expected ...lora_A.weight or ...lora_B.weight"
            )
        else:
            pairs.setdefault(match["module"], set()).add(match["factor"])
    adapted = {}
    for module, found in pairs.items():
        target = f"{module.removeprefix(PREFIX)}.weight"
        if found != {"A", "B"}:
            faults.append(f"{module} has lora_{''.join(found)} only; expected lora_A and lora_B")
        elif target not in known:
            faults.append(f"{module} adapts {target}, which the base does not have")
        else:
            adapted[target] = module
            faults += _shape_faults(base, factors, module, target, transposed)
    return adapted, faults[:5] + ([f"and {len(faults) - 5} more faults"] if len(faults) > 5 else [])


def _shape_faults(
    base: TensorSource, factors: Checkpoint, module: str, target: str, transposed: bool
) -> list[str]:
    a, b = (factors.shape(f"{module}.lora_{factor}.weight") for factor in "AB")
    shape = base.shape(target)
    expected = shape[::-1] if transposed else shape
    if len(a) == len(b) == 2 and a[0] == b[1] and (b[0], a[1]) == expected:
        return []
    return [
        f"{module}: factors {b} and {a} do not fit {target} of shape {shape}; the adapter was "
        "trained on another base"
    ]


def _pattern(patterns: Any, name: str, default: Any) -> Any:
    """PEFT's rule: the first pattern that matches the end of the module's name."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default
