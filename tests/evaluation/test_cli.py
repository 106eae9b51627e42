"""The command: exit codes, and sentences instead of tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from evaluation import cli

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["mergescope", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    told = capsys.readouterr()
    return int(left.value.code or 0), told.out + told.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["validate", "nothing.yaml"], "there is no file nothing.yaml"),
        (["run", "nothing.yaml"], "there is no file nothing.yaml"),
        (["equivalence", "nothing.yaml"], "there is no file nothing.yaml"),
        (["merge", "nothing.yaml", "out"], "nothing.yaml cannot be read"),
        (["train", "nothing.yaml", "out"], "nothing.yaml cannot be read"),
        (["report", "nowhere"], "nowhere"),
        (["list", "metods"], "did you mean 'methods'"),
        (["grade", "humanevl", "samples.jsonl"], "unknown benchmark 'humanevl'"),
        (["run", str(EXAMPLES / "letters.yaml"), "--data-dir", "nowhere"], "there is no folder"),
        (["run", str(EXAMPLES / "letters.yaml"), "--limit", "0"], "--limit"),
        (["runs"], "No such command"),
    ],
)
def test_bad_input_ends_with_two_and_a_sentence(
    words: list[str],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, told = call(capsys, monkeypatch, *words)
    assert code == 2
    assert expected in told
    assert "Traceback" not in told


def test_a_missing_data_file_is_told_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = tmp_path / "e.yaml"
    experiment.write_text(
        "name: x\nbase: org/base\nexperts: {a: org/a}\nbenchmarks: [gsm8k, mbpp_plus]\n"
    )
    code, told = call(capsys, monkeypatch, "run", str(experiment), "--data-dir", str(tmp_path))
    assert code == 2
    assert "gsm8k_test.jsonl" in told
    assert "MbppPlus.jsonl" in told


def test_lists_name_parameters_and_defaults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for what, expected in (
        ("methods", "density=0.2"),
        ("rules", "gate=None"),
        ("benchmarks", "humaneval_plus"),
    ):
        code, told = call(capsys, monkeypatch, "list", what)
        assert code == 0
        assert expected in told


@pytest.mark.parametrize("name", ["gemma-2-2b.yaml", "letters.yaml"])
def test_shipped_experiments_are_valid(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MERGESCOPE_DATA", raising=False)
    code, told = call(capsys, monkeypatch, "validate", str(EXAMPLES / name), "--unsafe-execution")
    assert (code, "is valid" in told) == (0, True), told


def test_merge_starts_without_the_libraries_it_does_not_need(tmp_path: Path) -> None:
    program = (
        "import sys; from evaluation import cli\n"
        "sys.argv = ['mergescope', 'merge', 'x.yaml', 'y']\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "print(json.dumps([m for m in ('transformers', 'pandas', 'lm_eval') if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import json\n{program}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_merge_writes_a_checkpoint(
    tmp_path: Path,
    family: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"method: linear\nbase: {family['base']}\nmodels: [{family['first']}, {family['second']}]\n"
    )
    code, told = call(capsys, monkeypatch, "merge", str(recipe), str(tmp_path / "out"))
    assert code == 0, told
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert "21 tensors merged, 0 kept from the base" in told
    assert "in sign conflict" in told


def test_statistics_are_gathered_and_merged_with(
    tmp_path: Path,
    family: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The files are named relative to the recipe, wherever the command is given."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"q": "one", "a": "two"}\n{"q": "three", "a": "four"}\n')
    for name in ("first", "second"):
        (folder / f"{name}.yaml").write_text(
            f"kind: fisher\nbase: {family['base']}\nmodel: {family[name]}\n"
            "data: [{file: rows.jsonl, prompt: '{q}', completion: '{a}'}]\n"
        )
        out = folder / f"{name}.safetensors"
        code, told = call(capsys, monkeypatch, "statistics", str(folder / f"{name}.yaml"), str(out))
        assert code == 0, told
        assert "over 2 examples" in told
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"method: fisher\nbase: {family['base']}\nmodels:\n"
        f"  - {{model: {family['first']}, statistics: first.safetensors}}\n"
        f"  - {{model: {family['second']}, statistics: second.safetensors}}\n"
    )
    code, told = call(capsys, monkeypatch, "merge", str(recipe), str(tmp_path / "out"))
    assert code == 0, told
    recipe.write_text(recipe.read_text().replace("second.safetensors", "absent.safetensors"))
    code, told = call(capsys, monkeypatch, "merge", str(recipe), str(tmp_path / "out"))
    assert (code, "there is no checkpoint absent.safetensors" in told) == (2, True), told
