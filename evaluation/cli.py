"""The command `mergescope`: thin over the packages, and the place where errors become words.

Exit codes: 0 done; 2 the user's input is at fault, told in words; 1 anything else; 130
interrupted. Heavy libraries are imported inside the commands, so that help and errors are quick.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Is adding skills in weight space the same as adding them in probability space?",
)

ExperimentFile = Annotated[Path, typer.Argument(metavar="EXPERIMENT.yaml", show_default=False)]
Out = Annotated[
    Path | None, typer.Option("--out", help="Folder of the results; runs/NAME without it.")
]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, help="Only the first N items of each benchmark.")
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        envvar="MERGESCOPE_DATA",
        help="Folder with local benchmark files; without it they come from the hub.",
    ),
]
Unsafe = Annotated[
    bool,
    typer.Option(
        "--unsafe-execution", help="Run generated programs without a sandbox. They can do anything."
    ),
]

Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="local|ADDRESS",
        help="Share the items among Ray's workers, one a GPU or a few cores each: `local` starts "
        "a Ray here, an address joins one. Needs mergescope[ray].",
    ),
]


@app.command()
def run(
    experiment: ExperimentFile,
    out: Out = None,
    limit: Limit = None,
    data_dir: DataDir = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget earlier answers.")] = False,
    unsafe_execution: Unsafe = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="MODEL/BENCHMARK", help="Only these cells now; with * and ?, again."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell what would be done, and how long it may take.")
    ] = False,
    ray: Ray = None,
) -> None:
    """Run everything; the same command again finishes what is missing and repeats nothing."""
    _quiet()
    from evaluation.experiment import load_experiment
    from evaluation.run import forecast, run_experiment

    loaded = load_experiment(experiment, _folder(data_dir), unsafe_execution)
    for note in loaded.notes:
        typer.echo(f"note: {note}", err=True)
    folder = out or Path("runs") / loaded.experiment.name
    if dry_run:
        _show_forecast(
            forecast(
                loaded,
                folder,
                limit=limit,
                data_dir=data_dir,
                unsafe_execution=unsafe_execution,
                only=only or (),
            )
        )
        return
    try:
        run_experiment(
            loaded,
            folder,
            limit=limit,
            data_dir=data_dir,
            fresh=fresh,
            unsafe_execution=unsafe_execution,
            only=only or (),
            ray=ray,
        )
    except KeyboardInterrupt:
        typer.echo(
            f"\nInterrupted. What is finished is kept in {folder}; the same command goes on from "
            "there (without --fresh).",
            err=True,
        )
        raise
    _show(folder)


@app.command()
def validate(
    experiment: ExperimentFile, data_dir: DataDir = None, unsafe_execution: Unsafe = False
) -> None:
    """Check an experiment and tell every fault, before any model is loaded."""
    from evaluation.experiment import load_experiment
    from evaluation.models import planned_models

    loaded = load_experiment(experiment, _folder(data_dir), unsafe_execution)
    for note in loaded.notes:
        typer.echo(f"note: {note}")
    models = planned_models(loaded.experiment)
    benchmarks = len(loaded.experiment.benchmarks)
    typer.echo(f"{experiment} is valid: {len(models)} models x {benchmarks} benchmarks")


@app.command()
def merge(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", show_default=False)],
    device: Annotated[
        str, typer.Option("--device", help="Where it is computed: cpu, cuda, cuda:N.")
    ] = "cpu",
) -> None:
    """Merge checkpoints or LoRA adapters into one checkpoint."""
    from evaluation.progress import steps
    from evaluation.references import fetch, resolve, search_path
    from merging import load_recipe, merge_to_folder, summary

    loaded = load_recipe(recipe)
    folders = search_path(recipe.resolve(), None)

    def locate(name: str) -> Path:
        if name.endswith(".safetensors"):  # statistics of an expert
            return next((p / name for p in folders if (p / name).is_file()), Path(name))
        found = fetch(resolve(name, folders), folders)
        return _checkpoint(found.path or Path(name))

    with steps("merging", in_bytes=True) as step:
        merge_to_folder(loaded, out, locate=locate, device=device, progress=step)
    for line in summary(out):
        typer.echo(line)
    typer.echo(f"The merged model is in {out}")


@app.command()
def train(
    expert: Annotated[Path, typer.Argument(metavar="EXPERT.yaml", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", show_default=False)],
    data_dir: DataDir = None,
) -> None:
    """Fine-tune one expert, full or LoRA, from a base."""
    _quiet()
    from evaluation.expert import load_expert_spec, train_expert
    from evaluation.progress import steps

    spec = load_expert_spec(expert)
    with steps("training") as step:
        losses = train_expert(spec, out, beside=expert, data_dir=_folder(data_dir), progress=step)
    typer.echo(f"The loss went from {losses[0]:.3f} to {losses[-1]:.3f} nats a token.")
    typer.echo(f"The expert is in {out}")


@app.command()
def statistics(
    spec: Annotated[Path, typer.Argument(metavar="STATISTICS.yaml", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT.safetensors", show_default=False)],
    data_dir: DataDir = None,
) -> None:
    """Gather what Fisher-weighted and RegMean merges weigh an expert by, on given examples."""
    _quiet()
    from evaluation.progress import steps
    from evaluation.statistics import gather_to_file, load_statistics_spec

    loaded = load_statistics_spec(spec)
    with steps(f"gathering {loaded.kind}") as step:
        count = gather_to_file(loaded, out, beside=spec, data_dir=_folder(data_dir), progress=step)
    typer.echo(f"The statistics over {count} examples are in {out}")


@app.command()
def equivalence(
    experiment: ExperimentFile, out: Out = None, limit: Limit = None, data_dir: DataDir = None
) -> None:
    """Compare every merge with its composition, token by token, and nothing else."""
    _quiet()
    from evaluation.experiment import load_experiment
    from evaluation.run import measure_equivalence

    loaded = load_experiment(experiment, _folder(data_dir))
    folder = out or Path("runs") / loaded.experiment.name
    measure_equivalence(loaded, folder, limit=limit, data_dir=data_dir)
    _show_equivalence(folder)


@app.command()
def grade(
    benchmark: Annotated[str, typer.Argument(metavar="humaneval_plus|mbpp_plus")],
    samples: Annotated[Path, typer.Argument(metavar="SAMPLES.jsonl")],
    out: Annotated[Path | None, typer.Option("--out", help="File of the verdicts.")] = None,
    data_dir: DataDir = None,
    unsafe_execution: Unsafe = False,
) -> None:
    """Grade programs made anywhere in the sandbox; prints pass@1."""
    from evaluation.progress import steps
    from evaluation.sandbox.grade import grade_file

    target = out or samples.with_suffix(".verdicts.jsonl")
    with steps("grading") as step:
        summary = grade_file(
            benchmark,
            samples,
            target,
            data_dir=_folder(data_dir),
            unsafe_execution=unsafe_execution,
            progress=step,
        )
    typer.echo(summary)
    typer.echo(f"The verdicts are in {target}")


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", show_default=False)],
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the report.")] = None,
) -> None:
    """Write leaderboard, page and figures from one or many finished runs."""
    from results.report import write_report

    for path in write_report(*folders, out=out):
        typer.echo(path)


@app.command(name="list")
def list_(what: Annotated[str, typer.Argument(metavar="methods|rules|benchmarks")]) -> None:
    """What there is, with parameters and defaults."""
    from evaluation.catalogue import CATALOGUES
    from evaluation.errors import InputError
    from evaluation.experiment import nearest

    if what not in CATALOGUES:
        raise InputError(f"cannot list {what!r}{nearest(what, list(CATALOGUES))}")
    _table(CATALOGUES[what]())


@app.command(
    name="lm-eval",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def lm_eval(context: typer.Context) -> None:
    """lm-eval's own command, which then knows --model mergescope: run, ls, validate."""
    _quiet()
    from evaluation.lm_eval_model import command

    command(context.args)


def _checkpoint(path: Path) -> Path:
    """A GGUF file is converted to a checkpoint in the cache first; anything else stays."""
    if path.suffix != ".gguf":
        return path
    _quiet()
    from evaluation.family import convert_gguf

    return convert_gguf(path, "float32")


def _folder(data_dir: Path | None) -> Path | None:
    from evaluation.errors import InputError

    if data_dir is not None and not data_dir.is_dir():
        raise InputError(
            f"--data-dir: there is no folder {data_dir}; expected the folder with the benchmark "
            "files (--data-dir or MERGESCOPE_DATA)"
        )
    return data_dir


def _show_forecast(cells: Any) -> None:
    import pandas as pd

    from evaluation.forecast import summary
    from evaluation.progress import duration

    rows = [
        {
            "model": cell.model,
            "benchmark": cell.benchmark,
            "items": cell.items,
            "done": cell.done,
            "at most": duration(cell.seconds),
        }
        for cell in cells
    ]
    _table(pd.DataFrame(rows))
    typer.echo(summary(cells))


def _show(folder: Path) -> None:
    import pandas as pd

    from results import wide

    _table(wide(pd.read_csv(folder / "leaderboard.csv")))
    typer.echo("Scores with 95 % intervals.")
    if (folder / "equivalence.csv").is_file():
        _show_equivalence(folder)
    typer.echo(f"The report is {folder / 'report.html'}")


def _show_equivalence(folder: Path) -> None:
    import pandas as pd

    frame = pd.read_csv(folder / "equivalence.csv")
    shown = frame[frame["metric"].isin(["kl", "top1_agreement"]) & (frame["alpha"] == 1.0)]
    if shown.empty:
        return
    table = shown.assign(
        value=[
            f"{value:.4g} [{low:.4g}, {high:.4g}]"
            for value, low, high in zip(
                shown["value"], shown["ci_low"], shown["ci_high"], strict=True
            )
        ]
    )
    _table(table[["model", "reference", "prompts", "metric", "value", "n"]])


def _table(frame: Any) -> None:
    table = Table(*(str(column) for column in frame.columns))
    for row in frame.itertuples(index=False):
        table.add_row(*("" if value is None else str(value) for value in row))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _quiet() -> None:
    """Other libraries' bars and notes would stand between the user and ours."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers.utils import logging

    logging.disable_progress_bar()


MALLOC = {
    "mmap_threshold": (-3, 1 << 25),
    "trim_threshold": (-1, 1 << 28),
    "top_pad": (-2, 1 << 26),
}


def keep_freed_memory() -> None:
    """Has glibc keep buffers of up to 32 MB for reuse instead of giving each back to the system.

    Torch allocates every intermediate result anew, and on a virtual machine fresh pages are dear:
    TIES by torch on a stretch took 26 ns an entry, 4 with this. It may hold 256 MB longer than
    needed. Another C library has no such switch and is left alone.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in MALLOC.values():
            mallopt(option, value)


FAULTS = {
    "evaluation.errors": "InputError",
    "merging.errors": "MergeError",
    "composition.errors": "CompositionError",
    "results.errors": "ResultsError",
}


def main() -> None:
    """The entry point: runs a command and turns what went wrong into words and an exit code."""
    keep_freed_memory()
    try:
        sys.exit(app(standalone_mode=False))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as error:
        sys.exit(_tell(error))


def _tell(error: Exception) -> int:
    """Says what the user can do about it; what is no fault of theirs goes on as it is."""
    if hasattr(error, "show") and hasattr(error, "exit_code"):  # the command line itself
        error.show()
        return int(error.exit_code)
    # A class can only have been raised when its module was imported; no need to import the rest.
    faults = tuple(
        getattr(sys.modules[module], name)
        for module, name in FAULTS.items()
        if module in sys.modules
    )
    if not isinstance(error, faults):
        raise error
    for line in str(error).splitlines():
        typer.echo(f"error: {line}", err=True)
    return 2
