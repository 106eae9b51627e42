"""vLLM's part of the engine against our own, with a stand-in for vLLM's API (no GPU is needed)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import stand_in_vllm
import yaml
from sums import write_sums

from composition import new_cache
from evaluation.benchmarks.contract import Generate, Output, Request, Score, Tag
from evaluation.engine import answer
from evaluation.errors import InputError
from evaluation.experiment import load_experiment
from evaluation.family import load_tokenizer
from evaluation.run import run_experiment
from evaluation.runtime import Runtime
from evaluation.served import Served, start

PROMPTS = ["a", "hello world", "def f(x):\n    return", "Q: 1+1?\nA:", "zz top", "-", "long " * 9]


def runtime(folder: Path, eos: frozenset[int]) -> Runtime:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = load_tokenizer(folder)
    return Runtime(model, tokenizer, eos, lambda: new_cache(model.config), "llama", 256)


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in, as if it were installed."""
    about = tmp_path / "site" / "vllm-0.11.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.11.0\n")
    monkeypatch.syspath_prepend(about.parent)
    monkeypatch.setitem(sys.modules, "vllm", stand_in_vllm)
    monkeypatch.setattr(stand_in_vllm, "started", [])
    return stand_in_vllm


def served(folder: Path, eos: frozenset[int] = frozenset({2}), longest: int = 256) -> Served:
    llm = start(folder, folder, "float32", 0, {"max_model_len": longest})
    return Served(llm, load_tokenizer(folder), eos, "llama", longest)


def answers(ready: Any, requests: list[Request], batch: int | None = None) -> list[Output]:
    found = dict(pair for part in answer(ready, requests, batch) for pair in part)
    return [found[place] for place in range(len(requests))]


def what(output: Output) -> Any:
    """What does not depend on the hour."""
    return output._replace(seconds=0.0, batch_size=0, logprob=round(output.logprob, 3))


@pytest.mark.usefixtures("vllm")
def test_answers_equal_those_of_our_own_engine(family: dict[str, Path]) -> None:
    """Ends of every kind: EOS ids, stop strings, the limit; texts to score, greedy and not."""
    folder, eos = family["base"], frozenset({2, 40})
    requests: list[Request] = [
        Generate(prompt, ("e", "ZQ"), 12 + place) for place, prompt in enumerate(PROMPTS)
    ]
    requests += [Generate(prompt, (), 6) for prompt in PROMPTS]
    requests += [Score(prompt, " and so on") for prompt in PROMPTS]
    own = answers(runtime(folder, eos), requests, 4)
    likely = own[len(PROMPTS)].text  # what the model says itself is greedy
    requests += [Score(PROMPTS[0], likely, separate=True)]
    own = answers(runtime(folder, eos), requests, 4)
    assert own[-1].is_greedy and not all(output.is_greedy for output in own[:-1])
    assert len({output.truncated for output in own}) == 2
    for batch in (None, 3):
        found = answers(served(folder, eos), requests, batch)
        assert [what(output) for output in found] == [what(output) for output in own]
        assert found[0].batch_size == (batch or len(requests))


@pytest.mark.usefixtures("vllm")
def test_what_is_done_is_not_asked_again(family: dict[str, Path]) -> None:
    requests = [Generate(prompt, (), 2) for prompt in PROMPTS]
    found = list(answer(served(family["base"]), requests, 2, done={0, 1, 2, 3}))
    assert [[place for place, _ in part] for part in found] == [[4, 5], [6]]


@pytest.mark.usefixtures("vllm")
def test_what_does_not_fit_is_an_error_with_numbers(family: dict[str, Path]) -> None:
    ready = served(family["base"], longest=20)
    with pytest.raises(InputError, match=r"the longest has 15 tokens and 9 more .* takes 20"):
        answers(ready, [Generate("x" * 15, (), 9)])
    with pytest.raises(InputError, match="the longest has 15 tokens and 6 more"):
        answers(ready, [Score("x" * 15, "y" * 5)])  # vLLM makes a token, whatever is asked
    with pytest.raises(InputError, match="most probable token at every position"):
        answers(ready, [Tag("x")])


@pytest.mark.usefixtures("vllm")
def test_what_vllm_refuses_is_told(family: dict[str, Path]) -> None:
    with pytest.raises(InputError, match=r"cannot serve .*base \(Free memory on device is less"):
        start(family["base"], family["base"], "float32", 0, {"gpu_memory_utilization": 0.99})


@pytest.fixture
def experiment(tmp_path: Path, family: dict[str, Path]) -> Path:
    """A base, a whole expert, a LoRA expert, a merge and a composition."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    for name in ("base", "first"):
        shutil.copytree(family[name], tmp_path / name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    write_sums(tmp_path / "data", 6)
    content = {
        "name": "served",
        "base": "base",
        "experts": {"whole": "first", "lora": "adapter"},
        "models": [
            {"name": "ta", "method": "task_arithmetic"},
            {"name": "logit", "rule": "product"},
        ],
        "benchmarks": ["gsm8k_loglik"],
        "generation": {"batch_size": 2, "device": "cpu"},
    }
    path = tmp_path / "served.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def board(path: Path, data: Path, out: Path) -> pd.DataFrame:
    run_experiment(load_experiment(path, data), out, data_dir=data)
    return pd.read_csv(out / "leaderboard.csv").set_index("model")


def test_all_models_but_compositions_are_served(
    experiment: Path, tmp_path: Path, vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out, data = tmp_path / "out", tmp_path / "data"
    own = board(experiment, data, out)
    content = yaml.safe_load(experiment.read_text())
    content["generation"] |= {"engine": "vllm", "vllm": {"gpu_memory_utilization": 0.5}}
    experiment.write_text(yaml.safe_dump(content))
    answered = []
    inner = vllm.LLM.generate
    monkeypatch.setattr(
        vllm.LLM, "generate", lambda *args, **kw: answered.append(1) or inner(*args, **kw)
    )
    found = board(experiment, data, out)
    assert found["score"].to_dict() == pytest.approx(own["score"].to_dict(), abs=1e-5)
    # The base, the adapter merged into it, the whole expert, and the merge.
    folders = [Path(each["model"]).parent.name for each in vllm.started]
    assert folders == [tmp_path.name, "merges", tmp_path.name, "merges"]
    assert {each["dtype"] for each in vllm.started} == {"float32"}
    assert {each["generation_config"] for each in vllm.started} == {"vllm"}
    assert len(answered) == 4 * 3  # of 6 items, 2 at a time
    # What the composition said stands; its times are those of the first run.
    assert found.loc["logit", "seconds"] == own.loc["logit", "seconds"]
    resolved = yaml.safe_load((out / "experiment.yaml").read_text())
    assert resolved["provenance"]["versions"]["vllm"] == "0.11.0"
    assert board(experiment, data, out).equals(found)
    assert len(vllm.started) == 4  # nothing is left to answer, nothing is loaded


def test_a_merge_that_the_cache_cannot_hold_is_told(
    experiment: Path, tmp_path: Path, vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MERGESCOPE_CACHE_GB", "0")
    content = yaml.safe_load(experiment.read_text())
    content["generation"] |= {"engine": "vllm"}
    experiment.write_text(yaml.safe_dump(content))
    with pytest.raises(
        InputError, match=r"lora: vLLM reads models from files.*MERGESCOPE_CACHE_GB"
    ):
        board(experiment, tmp_path / "data", tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"generation": {"engine": "vllm"}}, "the package vllm is not installed; install it with"),
        ({"generation": {"vllm": {"max_model_len": 9}}}, "options need `engine: vllm`"),
        ({"generation": {"engine": "vllm", "vllm": {"quantization": "fp8"}}}, "quantization"),
        (
            {"generation": {"engine": "vllm"}, "benchmarks": ["letters_aligned"]},
            "letters_aligned asks for a token at every position",
        ),
    ],
)
def test_faults_are_told_before_anything_runs(
    experiment: Path, changes: dict[str, Any], fault: str
) -> None:
    content = {**yaml.safe_load(experiment.read_text()), **changes}
    experiment.write_text(yaml.safe_dump(content))
    with pytest.raises(InputError, match=fault):
        load_experiment(experiment)
