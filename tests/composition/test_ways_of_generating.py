"""The composition as any other model of transformers: each way gives the plain loop's tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, pipeline

from composition import ComposedForCausalLM, CompositionError, compose_logits, explain

PROMPT = "one and two"
COUNT = 12


@pytest.fixture
def models(family: dict[str, Path]) -> list[Any]:
    return [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in family.values()]


@pytest.fixture
def composed(models: list[Any]) -> ComposedForCausalLM:
    return ComposedForCausalLM.from_models(models[0], models[1:], names=["first", "second"])


@pytest.fixture
def words(family: dict[str, Path]) -> Any:
    return AutoTokenizer.from_pretrained(family["base"])


def plain(models: list[Any], ids: list[int], ends: tuple[int, ...] = (2,)) -> list[int]:
    """Greedy, everything computed anew at every step."""
    ids = list(ids)
    start = len(ids)
    while len(ids) < start + COUNT and not (len(ids) > start and ids[-1] in ends):
        with torch.no_grad():
            base, *rest = (m(input_ids=torch.tensor([ids])).logits[0, -1] for m in models)
        ids.append(int(compose_logits(base, rest).argmax()))
    return ids[start:]


def generated(model: Any, words: Any, **options: Any) -> list[int]:
    inputs = words(PROMPT, return_tensors="pt")
    found = model.generate(**inputs, max_new_tokens=COUNT, do_sample=False, **options)
    return list(found[0, inputs["input_ids"].shape[1] :].tolist())


def expected(models: list[Any], words: Any) -> list[int]:
    return plain(models, words(PROMPT)["input_ids"])


def test_a_compiled_forward(models: list[Any], composed: ComposedForCausalLM, words: Any) -> None:
    """By a backend that traces but generates no code; generate compiles the same way on a GPU."""
    composed.forward = torch.compile(composed.forward, backend="eager")
    found = generated(composed, words, cache_implementation="static", disable_compile=True)
    assert found == expected(models, words)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_cache": False},
        {"cache_implementation": "static", "disable_compile": True},
        {"prompt_lookup_num_tokens": 3},
    ],
)
def test_generate(
    models: list[Any], composed: ComposedForCausalLM, words: Any, options: dict[str, Any]
) -> None:
    assert generated(composed, words, **options) == expected(models, words)


def test_an_expert_as_assistant(
    models: list[Any], composed: ComposedForCausalLM, words: Any
) -> None:
    found = generated(composed, words, assistant_model=models[1])
    assert found == expected(models, words)


def test_streamed(
    models: list[Any],
    composed: ComposedForCausalLM,
    words: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    streamer = TextStreamer(words, skip_prompt=True, skip_special_tokens=True)
    ids = generated(composed, words, streamer=streamer)
    assert capsys.readouterr().out.strip() == words.decode(ids, skip_special_tokens=True).strip()


def test_in_a_pipeline(models: list[Any], composed: ComposedForCausalLM, words: Any) -> None:
    generator = pipeline("text-generation", model=composed, tokenizer=words)
    (found,) = generator(PROMPT, max_new_tokens=COUNT, do_sample=False, return_full_text=False)
    text = words.decode(expected(models, words), skip_special_tokens=True)
    assert found["generated_text"].strip() == text.strip()


def test_in_lm_evals_own_model(
    models: list[Any], composed: ComposedForCausalLM, words: Any
) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=composed, tokenizer=words, batch_size=2, device="cpu")
    request = Instance("loglikelihood", {}, (PROMPT, " three"), 0)
    ((found, _),) = lm.loglikelihood([request], disable_tqdm=True)
    context, rest = words(PROMPT)["input_ids"], words(" three")["input_ids"]
    with torch.no_grad():
        base, *others = (m(input_ids=torch.tensor([context + rest])).logits[0] for m in models)
    logprobs = compose_logits(base, others).log_softmax(-1)
    exact = sum(
        float(logprobs[place - 1, token]) for place, token in enumerate(rest, start=len(context))
    )
    assert found == pytest.approx(exact, abs=1e-3)


def test_continuous_batching(models: list[Any], composed: ComposedForCausalLM, words: Any) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    prompts = [PROMPT, "to", "a longer text than the others"]
    ids = [words(prompt)["input_ids"] for prompt in prompts]
    settings = GenerationConfig(max_new_tokens=COUNT, do_sample=False, eos_token_id=2)
    outputs = composed.generate_batch(
        inputs=ids, generation_config=settings, continuous_batching_config=small
    )
    by_prompt = {tuple(one.prompt_ids): list(one.generated_tokens) for one in outputs.values()}
    for prompt in ids:
        assert by_prompt[tuple(prompt)] == plain(models, prompt)


def test_a_components_nan_is_told_by_name(models: list[Any], words: Any) -> None:
    with torch.no_grad():
        models[2].model.norm.weight[0] = float("nan")
    broken = ComposedForCausalLM.from_models(models[0], models[1:], names=["math", "code"])
    with pytest.raises(CompositionError, match="the logits of code hold NaN"):
        generated(broken, words)


def test_what_the_components_say_of_the_chosen_tokens(
    models: list[Any], composed: ComposedForCausalLM
) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        output = composed(input_ids=ids, output_components=True)
        found = explain(output.components, ids, composed.combination.weights)
        singles = [model(input_ids=ids).logits.log_softmax(-1) for model in models]
    for place, logprobs in enumerate(singles):
        exact = logprobs[0, torch.arange(4), ids[0]]
        assert torch.allclose(found.logprobs[place, 0], exact, atol=1e-4)
    kl = (singles[1].exp() * (singles[1] - singles[0])).sum(-1)
    assert torch.allclose(found.kl_to_base[0], kl, atol=1e-4)
    total = (singles[1] + singles[2] - singles[0]).exp().sum(-1).log()  # Σ p_1 p_2 / p_b
    assert torch.allclose(found.log_partition, total, atol=1e-4)


class TestSaved:
    """A folder of a few kilobytes that names its components."""

    def test_round_trip_through_auto_model(
        self, models: list[Any], composed: ComposedForCausalLM, words: Any, tmp_path: Path
    ) -> None:
        composed.save_pretrained(tmp_path / "saved")
        assert {f.name for f in (tmp_path / "saved").iterdir()} == {
            "config.json",
            "generation_config.json",
        }
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert isinstance(again, ComposedForCausalLM)
        assert again.combination == composed.combination
        assert generated(again, words) == expected(models, words)

    def test_each_component_has_its_own_device_map(
        self,
        models: list[Any],
        composed: ComposedForCausalLM,
        words: Any,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Here they are all the CPU's; on GPUs a list such as ["cuda:0", "cuda:1", "auto"]."""
        composed.save_pretrained(tmp_path)
        asked = []
        inner = AutoModelForCausalLM.from_pretrained

        def recorded(source: Any, *args: Any, **kwargs: Any) -> Any:
            asked.append((Path(source).name, kwargs["device_map"]))
            return inner(source, *args, **kwargs)

        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", recorded)
        places = [{"": "cpu"}, "cpu", "auto"]
        again = ComposedForCausalLM.from_pretrained(tmp_path, device_map=places)
        assert asked == list(zip(["base", "first", "second"], places, strict=True))
        assert generated(again, words) == expected(models, words)
        with pytest.raises(CompositionError, match="2 entries; expected one a component, 3"):
            ComposedForCausalLM.from_pretrained(tmp_path, device_map=places[:2])

    def test_the_combination_comes_back(self, models: list[Any], tmp_path: Path) -> None:
        made = ComposedForCausalLM.from_models(
            models[0],
            models[1:],
            [0.3, 0.6],
            rule="mixture",
            gate=0.1,
            gating="soft",
            eos="hazard",
            plausible=0.01,
            temperatures=[1.0, 0.9, 1.1],
            vocab_size=97,
            eos_ids=[2, 1],
        )
        made.save_pretrained(tmp_path / "saved")
        again = ComposedForCausalLM.from_pretrained(tmp_path / "saved")
        assert again.combination == made.combination
        assert (again.real_ids, again.eos_ids) == (97, [2, 1])

    def test_adapters_come_back_stacked(self, family: dict[str, Path], tmp_path: Path) -> None:
        from peft import LoraConfig, get_peft_model

        base = AutoModelForCausalLM.from_pretrained(family["base"]).eval()
        wrapped = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=3))
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.1 * torch.randn_like(parameter))
        wrapped.save_pretrained(tmp_path / "adapter")
        base = AutoModelForCausalLM.from_pretrained(family["base"]).eval()
        made = ComposedForCausalLM.from_adapters(base, {"math": tmp_path / "adapter"})
        made.save_pretrained(tmp_path / "saved")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert type(again.parts).__name__ == "Stacked"
        ids = torch.tensor([[5, 6, 7]])
        with torch.no_grad():
            assert torch.equal(again(input_ids=ids).logits, made(input_ids=ids).logits)

    def test_a_component_that_changed_or_went_is_told(
        self, family: dict[str, Path], models: list[Any], tmp_path: Path
    ) -> None:
        import shutil

        own = tmp_path / "own"
        shutil.copytree(family["first"], own)
        expert = AutoModelForCausalLM.from_pretrained(own).eval()
        made = ComposedForCausalLM.from_models(models[0], [expert], names=["math"])
        made.save_pretrained(tmp_path / "saved")
        state = load_file(own / "model.safetensors")
        state["model.norm.weight"] += 1
        save_file(state, own / "model.safetensors", {"format": "pt"})
        with pytest.raises(CompositionError, match=r"math: the weights in .* have changed"):
            ComposedForCausalLM.from_pretrained(tmp_path / "saved")
        shutil.rmtree(own)
        with pytest.raises(CompositionError, match=r"math: .* is no longer there"):
            ComposedForCausalLM.from_pretrained(tmp_path / "saved")

    def test_models_from_nowhere_and_broken_folders_are_told(
        self, llama: Any, composed: ComposedForCausalLM, tmp_path: Path
    ) -> None:
        made = ComposedForCausalLM.from_models(llama(seed=0), [llama(seed=1)])
        with pytest.raises(CompositionError, match="base was not loaded from a folder"):
            made.save_pretrained(tmp_path / "nowhere")
        composed.save_pretrained(tmp_path / "saved")
        config = json.loads((tmp_path / "saved" / "config.json").read_text())
        config["components"] = []
        (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
        with pytest.raises(CompositionError, match="names no components"):
            ComposedForCausalLM.from_pretrained(tmp_path / "saved")
