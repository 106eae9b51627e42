"""Fisher-weighted averaging, RegMean and KnOTS against their definitions, written out slowly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from merging import MergeError, merge_tensors, merge_to_folder, parse_recipe


def tensors(seed: int, count: int, shape: tuple[int, ...] = (12, 10)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]


class TestFisher:
    def test_weighs_each_entry_by_its_information(self) -> None:
        base, *experts = tensors(0, 3)
        information = [one.abs() for one in tensors(1, 2)]
        found = merge_tensors(
            "fisher", base, experts, [1.0, 2.0], statistics=information, normalize=False
        )
        shares = [information[0], 2 * information[1]]
        expected = sum(s * e for s, e in zip(shares, experts, strict=True)) / sum(shares)
        assert torch.allclose(found, expected, rtol=1e-4)  # but for the floor of 1e-6

    def test_normalised_does_not_depend_on_the_size_of_gradients(self) -> None:
        base, *experts = tensors(2, 3)
        first, second = (one.abs() for one in tensors(3, 2))
        found = [
            merge_tensors("fisher", base, experts, statistics=[first, scale * second])
            for scale in (1.0, 1000.0)
        ]
        assert torch.allclose(*found)
        even = merge_tensors("fisher", base, experts, statistics=[first, 7 * first])
        assert torch.allclose(even, (experts[0] + experts[1]) / 2)

    def test_nothing_known_is_the_mean(self) -> None:
        base, *experts = tensors(4, 3)
        found = merge_tensors("fisher", base, experts, statistics=[torch.zeros_like(base)] * 2)
        assert torch.allclose(found, (experts[0] + experts[1]) / 2)

    def test_negative_information_is_told(self) -> None:
        base, *experts = tensors(5, 3)
        with pytest.raises(MergeError, match=r"expert 0 .* missing or negative"):
            merge_tensors("fisher", base, experts, statistics=[-torch.ones_like(base)] * 2)


class TestRegMean:
    def test_is_the_least_squares_solution(self) -> None:
        """With `reduce: 1` W minimises Σ |X_i W^T - X_i W_i^T|^2 over all inputs: solved by
        stacking the equations."""
        base, *experts = tensors(6, 3)
        inputs = tensors(7, 2, (40, 10))
        grams = [x.T @ x for x in inputs]
        found = merge_tensors("regmean", base, experts, statistics=grams, reduce=1.0)
        targets = torch.cat([x @ e.T for x, e in zip(inputs, experts, strict=True)])
        expected = torch.linalg.lstsq(torch.cat(inputs), targets).solution.T
        assert torch.allclose(found, expected, atol=1e-10)

    def test_reduced_to_the_diagonal_each_input_is_weighed_alone(self) -> None:
        base, *experts = tensors(8, 3)
        grams = [x.T @ x for x in tensors(9, 2, (40, 10))]
        found = merge_tensors("regmean", base, experts, statistics=grams, reduce=0.0)
        first, second = (gram.diagonal() for gram in grams)
        expected = (experts[0] * first + experts[1] * second) / (first + second)
        assert torch.allclose(found, expected)

    def test_an_input_that_no_expert_has_keeps_the_mean(self) -> None:
        base, *experts = tensors(10, 3)
        inputs = tensors(11, 2, (40, 10))
        for x in inputs:
            x[:, 3] = 0
        grams = [x.T @ x for x in inputs]
        found = merge_tensors("regmean", base, experts, statistics=grams)
        assert found.isfinite().all()
        assert torch.allclose(found[:, 3], (experts[0] + experts[1])[:, 3] / 2)

    def test_without_statistics_of_a_tensor_the_weighted_mean(self) -> None:
        base, *experts = tensors(12, 3, (7,))
        found = merge_tensors("regmean", base, experts, [1.0, 3.0], statistics=[None, None])
        assert torch.allclose(found, (experts[0] + 3 * experts[1]) / 4)


class TestKnots:
    @pytest.mark.parametrize("shape", [(12, 10), (30, 8), (8, 30)])
    def test_equals_a_plain_singular_value_decomposition(self, shape: tuple[int, int]) -> None:
        """numpy's SVD of the matrices side by side; TIES on S V_i with a sort. Low rank, as LoRA
        experts are."""
        (base,) = tensors(13, 1, shape)
        deltas = [
            b @ a
            for a, b in zip(
                tensors(14, 2, (3, shape[1])), tensors(15, 2, (shape[0], 3)), strict=True
            )
        ]
        found = merge_tensors("knots", base, [base + delta for delta in deltas], density=0.3)
        u, s, v = torch.linalg.svd(torch.cat(deltas, dim=1), full_matrices=False)
        rank = int((s > 1e-9 * s[0]).sum())
        assert rank == 6
        parts = (s[:rank, None] * v[:rank]).split(shape[1], dim=1)
        count = int(0.3 * (rank * shape[1]))
        trimmed = [
            torch.where(p.abs() >= p.abs().flatten().sort(descending=True)[0][count - 1], p, 0)
            for p in parts
        ]
        elected = torch.where(trimmed[0] + trimmed[1] >= 0, 1.0, -1.0)
        agreeing = [torch.where(t * elected > 0, t, 0) for t in trimmed]
        count_of = sum((t != 0).double() for t in agreeing).clamp(min=1)
        expected = base + u[:, :rank] @ (sum(agreeing) / count_of)
        assert torch.allclose(found, expected, atol=1e-9)

    def test_the_rounding_of_lora_experts_adds_no_directions(self) -> None:
        """In float32 base + BA is of full rank; merged in the true six directions it is a
        matrix of rank six."""
        (base,) = tensors(17, 1, (40, 30))
        factors = zip(tensors(18, 2, (3, 30)), tensors(19, 2, (40, 3)), strict=True)
        experts = [(base + 1e-2 * b @ a).float() for a, b in factors]
        found = merge_tensors("knots", base.float(), experts, density=0.3).double() - base
        values = torch.linalg.svdvals(found)
        assert values[5] > 1e-3
        assert values[6] < 1e-5

    def test_at_density_one_agreeing_experts_give_their_mean(self) -> None:
        base, delta = tensors(16, 2)
        found = merge_tensors("knots", base, [base + delta, base + 3 * delta], density=1.0)
        assert torch.allclose(found, base + 2 * delta)


def files(root: Path, seed: int) -> Path:
    folder = root / str(seed)
    folder.mkdir()
    first, norm = tensors(seed, 1)[0].float(), tensors(seed, 1, (10,))[0].float()
    save_file({"layer.weight": first, "norm.weight": norm}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "x"}')
    return folder


class TestRecipes:
    def recipe(self, root: Path, method: str, statistics: dict[str, Tensor]) -> dict[str, object]:
        base, one, two = (files(root, seed) for seed in range(3))
        models = []
        for number, folder in enumerate((one, two), start=1):
            file = root / f"statistics{number}.safetensors"
            save_file({name: number * t for name, t in statistics.items()}, file)
            models.append({"model": str(folder), "statistics": str(file)})
        return {"method": method, "base": str(base), "models": models}

    def test_fisher_through_files(self, tmp_path: Path) -> None:
        every = {"layer.weight": torch.ones(12, 10), "norm.weight": torch.ones(10)}
        recipe = self.recipe(tmp_path, "fisher", every) | {"parameters": {"normalize": False}}
        out = merge_to_folder(parse_recipe(recipe), tmp_path / "out")
        found = load_file(out / "model.safetensors")["layer.weight"]
        one, two = (tensors(seed, 1)[0].float() for seed in (1, 2))
        assert torch.allclose(found, (one + 2 * two) / 3, atol=1e-6)

    def test_regmean_through_files_leaves_other_tensors_to_the_mean(self, tmp_path: Path) -> None:
        recipe = self.recipe(tmp_path, "regmean", {"layer.weight": torch.eye(10)})
        out = merge_to_folder(parse_recipe(recipe), tmp_path / "out")
        found = load_file(out / "model.safetensors")
        one, two = (tensors(seed, 1, (10,))[0].float() for seed in (1, 2))
        assert torch.allclose(found["norm.weight"], (one + two) / 2, atol=1e-6)
        one, two = (tensors(seed, 1)[0].float() for seed in (1, 2))
        assert torch.allclose(found["layer.weight"], (one + 2 * two) / 3, atol=1e-6)

    @pytest.mark.parametrize(
        ("method", "statistics", "expected"),
        [
            ("fisher", {"layer.weight": torch.ones(12, 10)}, "lack 1 tensors .norm.weight"),
            ("regmean", {"layer.weight": torch.ones(12, 12)}, r"have shape \(12, 12\).*\(10, 10\)"),
            ("linear", {"layer.weight": torch.ones(12, 10)}, "linear takes no statistics"),
            (
                "regmean",
                {"layer.weight": torch.full((10, 10), float("nan"))},
                "hold NaN or infinity",
            ),
        ],
    )
    def test_wrong_statistics_are_told(
        self, tmp_path: Path, method: str, statistics: dict[str, Tensor], expected: str
    ) -> None:
        recipe = parse_recipe(self.recipe(tmp_path, method, statistics))
        with pytest.raises(MergeError, match=expected):
            merge_to_folder(recipe, tmp_path / "out")

    def test_missing_statistics_are_told(self, tmp_path: Path) -> None:
        recipe = self.recipe(tmp_path, "fisher", {})
        recipe["models"] = [{"model": str(tmp_path / "1")}]
        with pytest.raises(MergeError, match="was given 0 for 1; gather them with"):
            merge_to_folder(parse_recipe(recipe), tmp_path / "out")
