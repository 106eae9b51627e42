"""Linear layers on a CPU with their weights laid out once for oneDNN.

torch multiplies few rows with a weight as it lies in memory: three rows of a decoding step cost up
to four times one row (SmolLM2's head in float32: 11 ms for one, 42 ms for three; laid out, 4 and 5
ms). oneDNN's own layout is better for every number of rows; torch's compiler uses it when it
freezes a model, and here it is used without compiling, for any shape.

The layer gives the same sums in another order: float32 results differ in the last digits, as they
do between batch sizes.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)
ROWS = 16
"""Rows that the layout is chosen for; those for 3 and for 96 measured alike at every size."""


class PackedLinear(nn.Module):
    """`nn.Linear` for inference: (..., in) -> (..., out).

    Args:
        linear: a layer on the CPU in float32 or bfloat16; it can be forgotten afterwards.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        bias = linear.bias
        self.bias: Tensor | None = None if bias is None else bias.detach()
        self._dtype = linear.weight.dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    @property
    def weight(self) -> Tensor:
        """The weight as `nn.Linear` has it, (out, in), a copy."""
        return self._packed.to_dense()  # type: ignore[no-any-return]

    def forward(self, rows: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        product = torch.ops.mkldnn._linear_pointwise
        result: Tensor = product(rows.to(self._dtype), self._packed, self.bias, "none", [], "")
        return result

    def __deepcopy__(self, memo: Any) -> nn.Linear:
        """A plain layer again: packed weights cannot be copied as they are."""
        layer = _empty(self.in_features, self.out_features, self.bias is not None)
        layer.weight = nn.Parameter(self.weight, requires_grad=False)
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias.clone(), requires_grad=False)
        return layer


def pack(model: nn.Module) -> int:
    """Packs all linear layers of a model on the CPU, in place; afterwards it can only infer.

    Layers of other kinds (quantised, on a GPU, in another dtype) stay as they are, and so does
    everything where this build of torch has no oneDNN. The layers' own weights are freed unless
    something else holds them, as the embeddings do a tied head's.

    Returns:
        The number of packed layers.
    """
    if not _works():
        log.info("this build of torch packs no weights; linear layers stay as they are")
        return 0
    packed: dict[int, nn.Module] = {}  # a layer that stands in two places stays one layer
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, nn.Linear) and _packable(child):
                if id(child) not in packed:
                    packed[id(child)] = PackedLinear(child)
                setattr(parent, name, packed[id(child)])
    return len(packed)


def _empty(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """A layer without the random weights that would move the global generator."""
    return nn.Linear(inputs, outputs, bias, device="meta").to_empty(device="cpu")


def _packable(layer: nn.Linear) -> bool:
    if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    weight = layer.weight
    return weight.device.type == "cpu" and weight.dtype in DTYPES


@cache
def _works() -> bool:
    """Has torch the products, and are they right? They are no part of its documented interface."""
    if not torch.backends.mkldnn.enabled or not torch._C._has_mkldnn:
        return False
    layer = _empty(5, 3)
    rows = torch.linspace(-1, 1, 2 * 4 * 5).view(2, 4, 5)
    with torch.inference_mode():
        layer.weight.copy_(torch.linspace(-2, 1, 15).view(3, 5))
        layer.bias.copy_(torch.tensor([0.5, -1.0, 2.0]))
        try:
            return torch.allclose(PackedLinear(layer)(rows), layer(rows), atol=1e-5)
        except (RuntimeError, AttributeError, NotImplementedError):
            return False
