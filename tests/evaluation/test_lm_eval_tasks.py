"""GSM8K, MATH and any task of lm-eval: its prompts, its filters, its scores, item by item."""

from __future__ import annotations

import json
import math
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from evaluation.benchmarks.contract import BenchmarkEntry, Generate, Output, Score, Settings
from evaluation.benchmarks.lm_eval_tasks import GSM8K, MATH, lm_eval_entry
from evaluation.errors import InputError


def lm_eval_folder(name: str) -> Path:
    """A folder of lm-eval's own tasks; indexing one takes milliseconds, all of them 15 seconds."""
    spec = find_spec("lm_eval")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "tasks" / name


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def local(tmp_path: Path) -> Settings:
    for split, numbers in (("test", (3, 500, 21)), ("train", range(30, 60))):
        rows = [
            {"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"}
            for n in numbers
        ]
        write_rows(tmp_path / f"gsm8k_{split}.jsonl", rows)
    rows = [
        {
            "problem": f"Find ${n}/4$.",
            "type": kind,
            "solution": rf"It is $\boxed{{\frac{{{n}}}{{4}}}}$.",
        }
        for kind in ("Algebra", "Geometry")
        for n in (1, 3)
    ]
    write_rows(tmp_path / "math_test.jsonl", rows)
    return Settings(data_dir=tmp_path)


@pytest.fixture
def own_task(tmp_path: Path) -> Any:
    """Makes an entry of a task written here: fields of its YAML and its rows."""

    def make(rows: list[dict[str, Any]], num_fewshot: int | None = None, **config: Any) -> Any:
        folder = tmp_path / "tasks"
        folder.mkdir()
        write_rows(folder / "rows.jsonl", rows)
        data = {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder)}
        config = {
            "task": "mine",
            "dataset_path": "json",
            "dataset_kwargs": data,
            "test_split": "test",
            "metadata": {"version": 1.0},
            **config,
        }
        (folder / "mine.yaml").write_text(yaml.safe_dump(config))
        return lm_eval_entry("mine", num_fewshot, include_path=folder)

    return make


COLOURS: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{q}}",
    "doc_to_choice": ["red", "green"],
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}
COLOUR_ROWS = [{"q": "Grass is", "answer": 1}, {"q": "Blood is", "answer": 0}]


def texts(*completions: str) -> list[list[Output]]:
    return [[Output(text=completion)] for completion in completions]


def prompts(entry: BenchmarkEntry, settings: Settings, limit: int | None) -> list[str]:
    requests = [item.requests[0] for item in entry.open(settings).items(limit)]
    return [request.prompt for request in requests if isinstance(request, Generate)]


def test_gsm8k_has_eight_shots_and_the_tasks_stops(local: Settings) -> None:
    items = GSM8K.open(local).items(None)
    request = items[1].requests[0]
    assert isinstance(request, Generate)
    assert request.prompt.count("Q: ") == 9
    assert request.prompt.endswith("Q: What is 500 + 500?\nA:")
    assert request.stops == ("Q:", "</s>", "<|im_end|>")
    assert request.max_new_tokens == 512
    assert [item.id for item in items] == ["gsm8k/0", "gsm8k/1", "gsm8k/2"]


@pytest.mark.parametrize(
    ("entry", "file"),
    [
        (GSM8K, "gsm8k/gsm8k-cot.yaml"),
        (MATH, "minerva_math/minerva_math_algebra.yaml"),
    ],
)
def test_prompts_equal_those_that_lm_eval_builds_from_a_file(
    local: Settings, tmp_path: Path, entry: BenchmarkEntry, file: str
) -> None:
    """The reference is lm-eval's own road: a task file over a JSON file, its manager, and
    `build_all_requests`. MATH's rows are in another order there (the file's)."""
    from lm_eval.tasks import TaskManager

    source = tmp_path / f"{'gsm8k' if entry is GSM8K else 'math'}_test.jsonl"
    reference = {
        "include": str(lm_eval_folder(file)),
        "task": "reference",
        "dataset_path": "json",
        "dataset_name": None,
        "training_split": None,
        "dataset_kwargs": {"data_files": {"test": str(source)}, "cache_dir": str(tmp_path)},
    }
    (tmp_path / "reference.yaml").write_text(yaml.safe_dump(reference))
    manager = TaskManager(include_path=tmp_path, include_defaults=False)
    task = manager.load("reference")["tasks"]["reference"]
    task.build_all_requests()
    expected = [instance.args for instance in task.instances]
    assert sorted(prompts(entry, local, None)) == sorted(context for context, _ in expected)
    request = entry.open(local).items(1)[0].requests[0]
    assert isinstance(request, Generate)
    assert request.stops == tuple(expected[0][1]["until"])


def test_gsm8k_flexible_takes_the_last_number_and_strict_the_sentence(local: Settings) -> None:
    benchmark = GSM8K.open(local)
    items = list(benchmark.items(1)) * 4
    found = benchmark.score(
        items,
        texts(" 3 + 3 = 6. The answer is 6.", " It is 7, no: 6", " The answer is 7.", " no idea"),
    )
    assert [m["exact_match"] for m in found] == [1, 1, 0, 0]
    assert [m["exact_match_strict"] for m in found] == [1, 0, 0, 0]


def test_math_knows_equal_fractions_and_keeps_nested_braces(local: Settings) -> None:
    r"""1/4 is written three ways; \frac{3}{4} differs, which cutting at the first brace hides."""
    benchmark = MATH.open(local)
    items = [item for item in benchmark.items(None) if item.id == "algebra/0"] * 5
    found = benchmark.score(
        items,
        texts(
            r" Final Answer: The final answer is $\frac{1}{4}$. I hope it is correct.",
            r" so $\boxed{\frac{1}{4}}$",
            r" so $\boxed{0.25}$",
            r" so $\boxed{\frac{3}{4}}$",
            "",
        ),
    )
    assert [m["math_verify"] for m in found] == [1, 1, 1, 0, 0]
    assert [m["exact_match"] for m in found] == [1, 0, 0, 0, 0]


def test_math_takes_its_subjects_in_turn(local: Settings) -> None:
    benchmark = MATH.open(local)
    ids = [item.id for item in benchmark.items(None)]
    assert ids == ["algebra/0", "geometry/0", "algebra/1", "geometry/1"]
    assert [item.id for item in benchmark.items(3)] == ids[:3]
    request = benchmark.items(1)[0].requests[0]
    assert isinstance(request, Generate)
    assert request.prompt.count("Problem:") == 5
    assert request.prompt.endswith("Problem:\nFind $1/4$.\n\nSolution:")


def test_a_score_does_not_depend_on_its_batch(local: Settings) -> None:
    benchmark = GSM8K.open(local)
    items = list(benchmark.items(None))
    answers = texts(" The answer is 6.", " The answer is 1,000.", " The answer is 9.")
    together = benchmark.score(items, answers)
    apart = [benchmark.score([i], [a])[0] for i, a in zip(items[::-1], answers[::-1], strict=True)]
    assert together == apart[::-1]
    assert [m["exact_match"] for m in together] == [1, 1, 0]


@pytest.mark.parametrize(
    "hostile",
    ["\\boxed{9**9**9**9}", "\\boxed{" * 2000, "$" * 5000, "\ud800 \x00", "\\frac{1}{0}" * 50],
)
def test_hostile_answers_score_zero_and_return(local: Settings, hostile: str) -> None:
    for entry in (GSM8K, MATH):
        benchmark = entry.open(local)
        metrics = benchmark.score(benchmark.items(1), texts(hostile))[0]
        assert metrics[entry.metric] == 0


@given(completion=st.text(max_size=200))
@hypothesis_settings(max_examples=100, deadline=None)
def test_any_completion_of_gsm8k_scores_zero_or_one(completion: str) -> None:
    metrics = _gsm8k().score(_gsm8k().items(1), texts(completion))[0]
    assert set(metrics) == {"exact_match", "exact_match_strict"}
    assert set(metrics.values()) <= {0.0, 1.0}


OPENED: list[Any] = []


def _gsm8k() -> Any:
    if not OPENED:
        from evaluation.benchmarks.lm_eval_adapter import LmEvalBenchmark
        from evaluation.benchmarks.lm_eval_local import built_in, task_over

        task = task_over(
            built_in("gsm8k/gsm8k-cot.yaml"), {"test": [{"question": "1 + 1?", "answer": "#### 2"}]}
        )
        OPENED.append(LmEvalBenchmark("gsm8k", task, Settings(), "flexible-extract"))
    return OPENED[0]


GOOD = '{"question": "x", "answer": "y #### 1"}\n'


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (GOOD + '{"question": "x"}\n', "line 2: the fields answer"),
        ("not json\n", "line 1: no valid JSON"),
        ("[" * 100_000, "line 1: no valid JSON"),
        ("[1]\n", "line 1: list; expected a JSON object"),
        ("", "is empty"),
        (GOOD + '\n{"question": "x", "answer": "y"}\n', "line 3: answer is 'y'; .*####"),
        (GOOD + '{"question": 7, "answer": "#### 1"}\n', "line 2: question is 7; expected text"),
        ('{"question": "\\ud800", "answer": "#### 1"}\n', "line 1: question is .*expected text"),
    ],
)
def test_a_broken_gsm8k_file_is_told_with_its_line(
    local: Settings, content: str, expected: str
) -> None:
    assert local.data_dir is not None
    (local.data_dir / "gsm8k_test.jsonl").write_text(content)
    with pytest.raises(InputError, match=expected):
        GSM8K.open(local)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"solution": "It is 2."}, r"line 2: solution is 'It is 2.'; .*boxed"),
        ({"type": "Topology"}, "line 2: type is 'Topology'; .*Algebra"),
        ({"problem": None}, "line 2: problem is None; expected text"),
    ],
)
def test_a_broken_math_file_is_told_with_its_line(
    local: Settings, change: dict[str, Any], expected: str
) -> None:
    assert local.data_dir is not None
    row = {"problem": "1 + 1", "type": "Algebra", "solution": r"$\boxed{2}$"}
    write_rows(local.data_dir / "math_test.jsonl", [row, {**row, **change}])
    with pytest.raises(InputError, match=expected):
        MATH.open(local)


def test_a_missing_file_is_a_fault_before_anything_is_opened(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    assert "gsm8k_test.jsonl" in GSM8K.faults(settings)[0]
    assert "math_test.jsonl" in MATH.faults(settings)[0]
    assert GSM8K.faults(Settings(data_dir=None)) == []
    paper = lm_eval_entry("gsm8k", 8, include_path=lm_eval_folder("gsm8k"))
    assert ["gsm8k_train" in fault for fault in paper.faults(settings)] == [True, False]


def test_changed_data_are_another_version(local: Settings) -> None:
    before = GSM8K.open(local).version
    assert local.data_dir is not None
    file = local.data_dir / "gsm8k_test.jsonl"
    file.write_text(file.read_text().replace("21", "22"))
    assert GSM8K.open(local).version != before


def test_random_shots_are_the_same_under_any_limit_and_follow_the_seed(local: Settings) -> None:
    """lm-eval's `gsm8k` draws its shots from one generator, a document after the other."""
    entry = lm_eval_entry("gsm8k", 3, include_path=lm_eval_folder("gsm8k"))
    every = prompts(entry, local, None)
    assert [prompts(entry, local, limit) for limit in (1, 2, 3)] == [every[:1], every[:2], every]
    assert [prompt.count("Question:") for prompt in every] == [4, 4, 4]
    assert len({prompt.rpartition("Question:")[0] for prompt in every}) == 3
    assert prompts(entry, local._replace(seed=1), None) != every


def test_global_generators_are_left_as_they_were(local: Settings) -> None:
    random.seed(5)
    expected = random.Random(5).random()
    lm_eval_entry("gsm8k", 3, include_path=lm_eval_folder("gsm8k")).open(local).items(2)
    assert random.random() == expected


def test_the_tasks_flexible_filter_is_primary_and_the_strict_one_beside_it(
    local: Settings,
) -> None:
    """Flexible takes the last number of the text, strict the one behind `####`."""
    benchmark = lm_eval_entry("gsm8k", 0, include_path=lm_eval_folder("gsm8k")).open(local)
    items = list(benchmark.items(1)) * 2
    found = benchmark.score(items, texts("#### 6", "so 6"))
    assert [m["exact_match"] for m in found] == [1, 1]
    assert [m["exact_match_strict"] for m in found] == [1, 0]


def test_more_shots_than_there_are_is_told(local: Settings) -> None:
    entry = lm_eval_entry("gsm8k_cot", 9, include_path=lm_eval_folder("gsm8k"))
    with pytest.raises(InputError, match=r"gsm8k_cot/0: .* 9 shots .*exceeds the 8"):
        entry.open(local).items(1)


def test_multiple_choice_is_scored_by_log_likelihood(own_task: Any) -> None:
    benchmark = own_task(COLOUR_ROWS, **COLOURS).open(Settings())
    items = benchmark.items(None)
    assert items[0].requests == (Score("Grass is", " red"), Score("Grass is", " green"))
    outputs = [[Output(logprob=-5.0), Output(logprob=-1.0)]] * 2
    assert [m["acc"] for m in benchmark.score(items, outputs)] == [1.0, 0.0]
    assert [m["acc"] for m in benchmark.score(items[1:], outputs[1:])] == [0.0]


def test_in_a_chat_a_choice_begins_the_answer(own_task: Any) -> None:
    """lm-eval leaves the delimiter between question and choice out where it makes messages."""
    benchmark = own_task(COLOUR_ROWS, **COLOURS).open(Settings(chat=True))
    items = benchmark.items(None)
    assert items[0].requests == (Score("Grass is", "red"), Score("Grass is", "green"))
    outputs = [[Output(logprob=-5.0), Output(logprob=-1.0)]] * 2
    assert [m["acc"] for m in benchmark.score(items, outputs)] == [1.0, 0.0]


def test_metrics_of_a_whole_corpus_are_left_out(own_task: Any) -> None:
    """F1 over classes has no value for one item; accuracy, the second metric, becomes primary."""
    metrics = [{"metric": "f1", "aggregation": "f1"}, {"metric": "acc"}]
    entry = own_task(COLOUR_ROWS, **{**COLOURS, "metric_list": metrics})
    assert (entry.metric, entry.binary) == ("acc", True)
    benchmark = entry.open(Settings())
    outputs = [[Output(logprob=-5.0), Output(logprob=-1.0)]]
    assert benchmark.score(benchmark.items(1), outputs) == [{"acc": 1.0}]


def test_a_log_likelihood_task_scores_whether_the_target_is_greedy(own_task: Any) -> None:
    entry = own_task(
        [{"q": "The sky is", "a": " blue"}],
        output_type="loglikelihood",
        doc_to_text="{{q}}",
        doc_to_target="{{a}}",
        metric_list=[{"metric": "perplexity"}, {"metric": "acc"}],
    )
    benchmark = entry.open(Settings())
    items = benchmark.items(None)
    assert items[0].requests == (Score("The sky is", " blue"),)
    for greedy in (True, False):
        output = Output(logprob=math.log(0.5), is_greedy=greedy)
        assert benchmark.score(items, [[output]]) == [{"acc": float(greedy)}]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"output_type": "loglikelihood_rolling"}, "its kind is loglikelihood_rolling"),
        ({"unsafe_code": True}, "runs generated programs outside any sandbox"),
        ({"doc_to_image": ["image"]}, "needs images or sound"),
        ({"generation_kwargs": {"do_sample": True}}, "it samples"),
        ({"generation_kwargs": {"temperature": 0.7}}, "it samples"),
        ({"generation_kwargs": {"num_beams": 4}}, "4 beams"),
        ({"metric_list": [{"metric": "bleu"}]}, r"its metrics \(bleu\) are no means"),
    ],
)
def test_a_task_that_cannot_run_here_is_refused_with_the_reason(
    own_task: Any, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InputError, match=f"the task mine is not supported: .*{reason}"):
        own_task(COLOUR_ROWS, **{**COLOURS, **change})


def test_a_temperature_without_sampling_is_greedy(own_task: Any) -> None:
    config = {
        **COLOURS,
        "output_type": "generate_until",
        "metric_list": [{"metric": "exact_match"}],
    }
    asked = {"do_sample": False, "temperature": 0.7, "until": "\n", "max_gen_toks": 7}
    benchmark = own_task(COLOUR_ROWS, **config, generation_kwargs=asked).open(Settings())
    assert benchmark.items(1)[0].requests == (Generate("Grass is", ("\n",), 512),)


def test_an_unknown_task_names_the_nearest_and_a_group_its_tasks() -> None:
    folder = lm_eval_folder("minerva_math")
    with pytest.raises(InputError, match=r"no task 'minerva_math_algebr'.*mean minerva"):
        lm_eval_entry("minerva_math_algebr", include_path=folder)
    with pytest.raises(InputError, match=r"a group of tasks; .*: minerva_math500, minerva_math_al"):
        lm_eval_entry("math_word_problems", include_path=folder)


def test_a_subject_of_math_comes_from_the_local_folder(local: Settings) -> None:
    entry = lm_eval_entry("minerva_math_geometry", include_path=lm_eval_folder("minerva_math"))
    items = entry.open(local).items(None)
    assert [item.id for item in items] == ["geometry/0", "geometry/1"]


def test_without_a_network_the_local_folder_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(InputError, match=r"openai/gsm8k .*--data-dir .*no route to host"):
        GSM8K.open(Settings())
    entry = lm_eval_entry("gsm8k", include_path=lm_eval_folder("gsm8k"))
    with pytest.raises(InputError, match=r"the task gsm8k cannot be loaded; .*network"):
        entry.open(Settings())


@pytest.mark.data
def test_gold_answers_of_the_real_data_score_one(data_dir: Path) -> None:
    settings = Settings(data_dir=data_dir)
    gsm8k, math_ = GSM8K.open(settings), MATH.open(settings)
    assert (len(gsm8k.items(None)), len(math_.items(None))) == (1319, 5000)
    items = gsm8k.items(200)
    golds = [f" The answer is {item.doc.doc['answer'].split('#### ')[1]}." for item in items]
    assert all(set(m.values()) == {1.0} for m in gsm8k.score(items, texts(*golds)))
    items = math_.items(70)
    solutions = [item.doc.doc["solution"] for item in items]
    assert all(m["math_verify"] == 1 for m in math_.score(items, texts(*solutions)))
