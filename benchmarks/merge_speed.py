"""mergescope against mergekit: whole commands, side by side, on synthetic Llama checkpoints.

    python benchmarks/merge_speed.py --mergekit /path/to/mergekit-env/bin/mergekit-yaml

mergekit 0.1.5 lives in an environment of its own (`pip install mergekit==0.1.5`); without it only
our own figures are measured. A base and two experts in bfloat16 are written to the cache folder
once and stay there. Reported are medians; the machine's noise is in the range beside them.

    first    the whole command where no digest of the inputs is known yet: they are hashed
    again    the whole command from the second time on
    inside   `merge_to_folder` in a process that has its imports
    floor    plain reading of the inputs and writing of one output, one thread
    anon     peak of anonymous memory, polled: mapped files and libraries are not in it
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from merging.raw import to_raw
from merging.writer import Planned, Shards

VOCABULARY = 32_000
SIZES = {  # hidden, intermediate, layers
    "100M": (640, 1728, 12),
    "500M": (1280, 3456, 21),
    "1B": (2048, 5504, 18),
    "2B": (2048, 5504, 37),
}
SPARSE = {"weight": 0.5, "density": 0.5}
METHODS = {  # mergekit's parameters: shared, and of each expert
    "linear": ({"normalize": True}, {"weight": 0.5}),
    "task_arithmetic": ({"lambda": 1.0}, {"weight": 0.5}),
    "ties": ({"normalize": True, "lambda": 1.0}, {"weight": 0.5, "density": 0.2}),
    "dare_linear": ({}, SPARSE),
    "dare_ties": ({}, SPARSE),
    "della": ({}, SPARSE),
    "slerp": ({"t": 0.5}, {}),
    "model_stock": ({}, {}),
}
BLOCK = 1 << 24


class Cost(NamedTuple):
    """What a command took."""

    seconds: float
    anonymous: int  # bytes at the peak
    resident: int


def shapes(
    hidden: int, intermediate: int, layers: int, vocabulary: int = VOCABULARY
) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama, head and embeddings apart."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found[f"{prefix}.self_attn.{name}.weight"] = (hidden, hidden)
        for name in ("gate_proj", "up_proj"):
            found[f"{prefix}.mlp.{name}.weight"] = (intermediate, hidden)
        found[f"{prefix}.mlp.down_proj.weight"] = (hidden, intermediate)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}.{name}.weight"] = (hidden,)
    return {**found, "model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def checkpoints(size: str, root: Path) -> list[Path]:
    """A base and two experts, written once."""
    folders = [root / size / name for name in ("base", "one", "two")]
    for seed, folder in enumerate(folders):
        if folder.is_dir():
            continue
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(partial, size, seed)
        partial.rename(folder)
    return folders


def _write(folder: Path, size: str, seed: int) -> None:
    hidden, intermediate, layers = SIZES[size]
    planned = [
        Planned(name, shape, "BF16") for name, shape in shapes(hidden, intermediate, layers).items()
    ]
    base, change = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    with closing(Shards(folder, planned, 5_000_000_000)) as shards:
        for tensor in planned:
            values = torch.randn(tensor.shape, generator=base).mul_(0.02)
            if seed:
                values = values.bfloat16().float()
                values += torch.randn(tensor.shape, generator=change).mul_(0.001)
            shards.write(tensor.name, 0, to_raw(values.bfloat16()))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def recipe(method: str, folders: list[Path]) -> str:
    """mergekit's YAML, which both read."""
    shared, each = METHODS[method]
    models = [{"model": str(folder), "parameters": dict(each)} for folder in folders[1:]]
    if method == "slerp":  # between the base and one expert
        models = [{"model": str(folders[0])}, models[0]]
    content = {
        "merge_method": method,
        "models": models,
        "parameters": dict(shared),
        "dtype": "bfloat16",
    }
    if method != "linear":  # which takes its base for another model to average
        content["base_model"] = str(folders[0])
    return yaml.safe_dump(content)


def measured(command: list[str], cache: Path | None = None) -> Cost:
    """Runs a command, with a cache of its own where one is given, and watches its memory."""
    environment = {**os.environ, **({"XDG_CACHE_HOME": str(cache)} if cache else {})}
    os.sync()  # what the last command wrote is not written at this one's expense
    start = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        anonymous = resident = 0
        while process.poll() is None:
            for found in _memory(process.pid):
                anonymous, resident = max(anonymous, found[0]), max(resident, found[1])
            time.sleep(0.005)
        seconds = time.perf_counter() - start
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{log.read().decode()[-2000:]}")
    return Cost(seconds, anonymous, resident)


def _memory(pid: int) -> Iterator[tuple[int, int]]:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return
    found = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    if "RssAnon" in found:
        yield (
            int(found["RssAnon"].split()[0]) * 1024,
            int(found["VmRSS"].split()[0]) * 1024,
        )


def forget(folders: list[Path]) -> None:
    """Drops the inputs from the page cache, so that the next command reads them from the disk."""
    os.sync()  # only what is written can be dropped
    for file in (file for folder in folders for file in folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def floor(folders: list[Path], out: Path) -> float:
    """Seconds to read the inputs once and write one output, block by block."""
    os.sync()
    start = time.perf_counter()
    buffer = memoryview(bytearray(BLOCK))
    for place, folder in enumerate(folders):
        target = out if place == 0 else Path(os.devnull)
        with (
            (folder / "model.safetensors").open("rb", buffering=0) as source,
            target.open("wb", buffering=0) as sink,
        ):
            while count := source.readinto(buffer):
                if place == 0:
                    sink.write(buffer[:count])
    found = time.perf_counter() - start
    out.unlink()
    return found


INSIDE = """
import sys, time
from pathlib import Path
from evaluation.cli import keep_freed_memory
from merging import load_recipe, merge_to_folder
keep_freed_memory()
recipe = load_recipe(Path(sys.argv[1]))
start = time.perf_counter()
merge_to_folder(recipe, Path(sys.argv[2]))
print(time.perf_counter() - start)
"""


def inside(file: Path, out: Path) -> float:
    """Seconds of the merge itself."""
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    done = subprocess.run(
        [sys.executable, "-c", INSIDE, str(file), str(out)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["100M"], choices=list(SIZES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS)[:3], choices=list(METHODS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--mergekit", help="mergekit-yaml of mergekit 0.1.5")
    parser.add_argument("--cold", action="store_true", help="drop the inputs from the page cache")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("--folder", type=Path, default=cache / "mergescope" / "benchmarks")
    arguments = parser.parse_args()
    ours = str(Path(sys.executable).parent / "mergescope")
    work = arguments.folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    print(
        "| size | method | first, s | again, s | inside, s | floor, s | inside/floor | anon, MB "
        "| mergekit, s | its anon, MB | faster, first | again |"
    )
    print(f"|---|---|{'---:|' * 10}")
    for size in arguments.sizes:
        folders = checkpoints(size, arguments.folder)
        bottom = [floor(folders, work / "floor") for _ in range(arguments.repeat + 1)][1:]
        for method in arguments.methods:
            file, out = work / f"{method}.yaml", work / "out"
            file.write_text(recipe(method, folders))
            rows: dict[str, list[Cost]] = {"first": [], "again": [], "theirs": []}
            within = []
            for _ in range(arguments.repeat):
                with tempfile.TemporaryDirectory() as cache:
                    for when in ("first", "again"):
                        shutil.rmtree(out, ignore_errors=True)
                        if arguments.cold:
                            forget(folders)
                        cost = measured([ours, "merge", str(file), str(out)], Path(cache))
                        rows[when].append(cost)
                within.append(inside(file, out))
                if arguments.mergekit:
                    shutil.rmtree(out)
                    if arguments.cold:
                        forget(folders)
                    rows["theirs"].append(measured([arguments.mergekit, str(file), str(out)]))
            shutil.rmtree(out)
            print(_row(size, method, rows, within, bottom), flush=True)


def _row(
    size: str, method: str, rows: dict[str, list[Cost]], within: list[float], bottom: list[float]
) -> str:
    middle = statistics.median
    seconds = {who: [cost.seconds for cost in costs] for who, costs in rows.items()}
    anonymous = {
        who: max((cost.anonymous for cost in costs), default=0) for who, costs in rows.items()
    }
    cells = [
        size,
        method,
        _range(seconds["first"]),
        _range(seconds["again"]),
        _range(within),
        _range(bottom),
        f"{middle(within) / middle(bottom):.2f}",
        f"{max(anonymous['first'], anonymous['again']) / 1e6:.0f}",
    ]
    if seconds["theirs"]:
        cells += [_range(seconds["theirs"]), f"{anonymous['theirs'] / 1e6:.0f}"]
        cells += [
            f"{middle(seconds['theirs']) / middle(seconds[when]):.1f} times"
            for when in ("first", "again")
        ]
    else:
        cells += [""] * 4
    return f"| {' | '.join(cells)} |"


def _range(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


if __name__ == "__main__":
    main()
