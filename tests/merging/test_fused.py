"""The fused loops give the methods' own numbers, bit for bit, and are there where they can be."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from merging import fused, merged_tensors, open_checkpoint, parse_parameters
from merging.methods import METHODS as REGISTRY
from merging.methods.contract import RawInputs
from merging.report import MergeReport, moments

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}),
    ("linear", {"normalize": False}),
    ("task_arithmetic", {"lambda": 0.7}),
    ("task_arithmetic", {"lambda": 0}),
    *(
        ("ties", {"preset": preset, "density": density, "lambda": 0.7})
        for preset, density in itertools.product(("mergekit", "peft", "paper"), (0, 0.1, 0.5, 1))
    ),
    ("ties", {"divisor": "none"}),
]


@pytest.fixture
def compiled() -> None:
    if fused.kernels is None:
        pytest.skip("kernels.c was not built here")


def test_the_loops_are_built_where_they_can_be() -> None:
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    assert fused.kernels is not None or shutil.which("cc") is None or not headers.exists()


def written(folder: Path, state: dict[str, Tensor]) -> Any:
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "x"}))
    return open_checkpoint(folder)


def models(root: Path, dtypes: list[torch.dtype]) -> list[Any]:
    """Sizes around the loops' blocks; entries that are 0, -0, equal, subnormal or huge."""
    found = []
    for seed, dtype in enumerate(dtypes):
        generator = torch.Generator().manual_seed(0)
        change = torch.Generator().manual_seed(seed)
        state = {}
        for number, size in enumerate((1, 5, 1023, 1024, 1025, 70_000)):
            base = torch.randn(size, generator=generator) * 0.02
            if seed:
                base = base.bfloat16().float()
                base += torch.randn(size, generator=change) * 0.001
            special = torch.tensor([0.0, -0.0, 1e-7, -1e-7, 3e4, -3e4, 1e-40])
            if size > 100:
                base[:7] = special if seed % 2 else special.roll(seed)
                base[50:60] = -0.0
            state[f"t{number}"] = base.to(dtype)
        found.append(written(root / str(seed), state))
    return found


@pytest.mark.parametrize(("method", "given"), METHODS)
@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.3, 0.9], [1.0, -0.4], [0.5, 0.0]])
def test_fused_merges_are_the_methods_bit_for_bit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiled: None,
    method: str,
    given: dict[str, Any],
    weights: list[float],
) -> None:
    params = parse_parameters(method, given)
    for number, (dtypes, out) in enumerate(
        [
            ([torch.bfloat16] * 3, torch.bfloat16),
            ([torch.float32, torch.bfloat16, torch.float16], torch.float16),
            ([torch.float16] * 3, torch.float32),
        ]
    ):
        root = tmp_path / str(number)
        root.mkdir()
        base, *experts = models(root, dtypes)
        options = {"weights": weights, "parameters": params, "dtype": out}
        with monkeypatch.context() as without:
            without.setattr(fused, "kernels", None)
            expected = dict(merged_tensors(base, experts, method, **options))
        found = dict(merged_tensors(base, experts, method, **options))
        for name, tensor in found.items():
            bits = torch.int32 if out == torch.float32 else torch.int16
            same = tensor.view(bits) == expected[name].view(bits)
            assert bool(same.all()), (name, dtypes, int((~same).sum()))


def test_many_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: None) -> None:
    base, *experts = models(tmp_path, [torch.bfloat16] * 6)
    found = dict(merged_tensors(base, experts, "ties"))
    monkeypatch.setattr(fused, "kernels", None)
    expected = dict(merged_tensors(base, experts, "ties"))
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_moments_are_those_of_the_task_vectors(tmp_path: Path, compiled: None, count: int) -> None:
    base, *experts = models(tmp_path, [torch.bfloat16] * (count + 1))
    types = fused.types_of(["BF16"] * (count + 1))
    assert types is not None
    size = 70_000
    raw = tuple(source.read_raw("t5", 0, size) for source in (base, *experts))
    entry = REGISTRY["linear"]
    assert entry.fused is not None
    arguments = entry.fused.arguments([1.0] * count, parse_parameters("linear", {}), None)
    _, found = fused.merge(entry.fused, RawInputs(size, raw, types), "F32", arguments)
    deltas = [e.read("t5").double() - base.read("t5").double() for e in experts]
    expected = moments(deltas)
    assert found.conflicts == expected.conflicts
    assert (found.entries, found.non_finite) == (size, 0)
    for mine, theirs in zip(found.products, expected.products, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    survey = MergeReport([str(i) for i in range(count)])
    survey.add("model.layers.3.x", [found])
    assert survey.summary(["model.layers.3.x"])["sign_conflict_share_by_layer"].keys() == {"3"}


def test_hostile_arguments_are_refused(compiled: None) -> None:
    """The loops see sizes before they touch memory."""
    import numpy

    kernels = fused.kernels
    assert kernels is not None
    good, small = numpy.zeros(64, dtype=numpy.uint8), numpy.zeros(8, dtype=numpy.uint8)
    out = numpy.zeros(64, dtype=numpy.uint8)
    for arguments in (
        ((good, small), b"\0\0", 32, out, 0, 0, 1.0, [1.0]),  # an input too short
        ((good, good), b"\0\0", 32, small, 0, 0, 1.0, [1.0]),  # no room for the output
        ((good, good), b"\0\7", 32, out, 0, 0, 1.0, [1.0]),  # an unknown type
        ((good, good), b"\0\0", -1, out, 0, 0, 1.0, [1.0]),
        ((good, good), b"\0\0", 32, out, 9, 0, 1.0, [1.0]),
        ((good, good), b"\0\0", 32, out, 0, 5, 1.0, [1.0]),  # around no input
        ((good, good), b"\0\0", 32, out, 0, 0, 1.0, [1.0, 2.0]),  # a weight too many
        ((good,), b"\0", 32, out, 0, 0, 1.0, []),  # no expert
        ((good,) * 40, b"\0" * 40, 32, out, 0, 0, 1.0, [1.0] * 39),  # too many
    ):
        with pytest.raises(ValueError, match=r"expected|unknown|buffer|around"):
            kernels.combine(*arguments)
    with pytest.raises(ValueError, match="buffer"):
        kernels.look((good, good), b"\0\0", 32, [0.0], [1.0], (small,))


def test_a_fused_merge_does_not_load_torch(tmp_path: Path, compiled: None) -> None:
    models(tmp_path, [torch.bfloat16] * 3)
    program = """
import sys
from pathlib import Path
from merging import merge_to_folder, parse_recipe
root = Path(sys.argv[1])
for method in ("linear", "task_arithmetic", "ties"):
    recipe = parse_recipe({"method": method, "base": str(root / "0"),
                           "models": [str(root / "1"), str(root / "2")]})
    merge_to_folder(recipe, root / method)
assert "torch._C" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
