"""The program inside the sandbox: warm, and a fresh child for every run.

It imports numpy once, says that it is ready, and then answers jobs until its standard input ends.
A job is a program, an entry point and inputs; never an expected value. A forked child loads the
program, calls it and writes one reply an input into a pipe of its own; this process relays the
bytes without looking at them. So whatever the program does to its own process ends with it, and
it holds no descriptor on which it could speak for this process.

Between jobs nothing survives: as process 1 of its namespace, this process kills all others. It
cannot be killed from inside (process 1 takes no signal that it does not handle) and cannot be
traced (not dumpable). Started by root, it runs programs as another user; else a program could
change its limits, and then it says so (`dirty`) and is replaced. Run without bubblewrap it is an
ordinary process, and none of that holds.

Frames in both directions: one byte of kind, four of length (big endian), the body.

    in:   J a job (JSON)      S stop the one that runs
    out:  R ready (JSON)      D bytes of the child's replies      E the run has ended (JSON)

The replies in D: four bytes of length, then `V` and a value (codec.py), or `X` and a JSON list
[exception, message]. The first reply tells how loading the program went, then one an input.

Run as: python -m evaluation.sandbox.worker CONFIG, where CONFIG is JSON of `Config`. Inside the
walls lie this file, codec.py, the standard library and numpy; so nothing else may be imported.
"""

from __future__ import annotations

import ast
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import struct
import sys
from contextlib import suppress
from typing import Any, NamedTuple, TypedDict

from evaluation.sandbox.codec import decode, encode

HEADER = struct.Struct(">cI")
LENGTH = struct.Struct(">I")
CHUNK = 1 << 16
PR_SET_DUMPABLE = 4
WARM = (
    *("bisect", "collections", "copy", "datetime", "fractions", "functools", "heapq", "itertools"),
    *("math", "operator", "random", "re", "string", "typing", "numpy"),
)
WATCHED = (
    resource.RLIMIT_AS,
    resource.RLIMIT_CPU,
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_NOFILE,
    resource.RLIMIT_NPROC,
    resource.RLIMIT_STACK,
)


class Config(TypedDict):
    """What the sandbox is started with."""

    packages: str | None  # folder with numpy
    uid: int | None  # of the programs, where the sandbox was started by root
    alone: bool  # process 1 of its own namespace
    memory_bytes: int
    file_bytes: int
    open_files: int
    processes: int


class Job(TypedDict):
    """One program and what it is called with."""

    program: str
    entry_point: str
    inputs: list[str]  # lists of arguments, as codec.py writes them
    cpu_seconds: int
    trim: bool  # cut the program to its longest prefix of lines that parses
    as_set: bool  # the value asked for is set(what the program returns)
    large: int  # bytes above which a value is told by its digest


def main() -> None:
    config: Config = json.loads(sys.argv[1])
    enter(config)
    send(b"R", json.dumps({"python": sys.version.split()[0], "numpy": "numpy" in sys.modules}))
    while True:
        kind, body = receive()
        if kind == b"J":  # a stop that came after the end of its run finds nothing to do
            run(body, config)


def enter(config: Config) -> None:
    """Limits what the programs inherit, then imports what they may want."""
    if config["alone"]:
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 ignores what has no handler
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: config["file_bytes"],
        resource.RLIMIT_NOFILE: config["open_files"],
        resource.RLIMIT_AS: config["memory_bytes"],
        # deep recursion, as evalplus allows
        resource.RLIMIT_STACK: resource.getrlimit(resource.RLIMIT_STACK)[1],
    }
    if config["alone"]:  # elsewhere the limit would count all the user's processes
        limits[resource.RLIMIT_NPROC] = config["processes"]
    for kind, limit in limits.items():
        try:
            resource.setrlimit(kind, (limit, limit))
        except (ValueError, OSError):  # macOS, which has no walls either, refuses some
            if config["alone"]:
                raise
    if config["packages"]:
        sys.path.append(config["packages"])
    for name in WARM:
        try:
            importlib.import_module(name)
        except ImportError:
            if name != "numpy":
                raise
    gc.freeze()  # the children share these objects' pages


# ---------------------------------------------------------------------------- this process's side


class Condition(NamedTuple):
    """What one job could change of this process for the next: a process may do that to another
    of its user."""

    limits: list[tuple[int, int]]
    priority: int
    cores: set[int]


def condition() -> Condition:
    return Condition(
        limits=[resource.getrlimit(kind) for kind in WATCHED],
        priority=os.getpriority(os.PRIO_PROCESS, 0),
        cores=os.sched_getaffinity(0),
    )


def run(job: bytes, config: Config) -> None:
    alone = config["alone"]
    before = condition() if alone else None
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        answer(job, write_end, config["uid"])
    os.close(write_end)
    with suppress(OSError):
        os.setpgid(child, child)  # the child does so too; whoever comes first
    status = relay(read_end, child)
    os.close(read_end)
    end_all(child, alone)
    dirty = alone and condition() != before
    send(b"E", json.dumps({"status": status, "dirty": dirty}))


def relay(replies: int, child: int) -> int | None:
    """Passes the replies on until the child ends (its exit status) or a stop comes (None)."""
    sources = [0, replies]
    while True:
        ready, _, _ = select.select(sources, [], [], 0.05 if replies in sources else 0.001)
        if 0 in ready and receive()[0] == b"S":
            return None
        if replies in ready:
            if chunk := os.read(replies, CHUNK):
                send(b"D", chunk)
            else:
                sources.remove(replies)  # closed, mostly by the child's end
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:  # though a process it left may hold the pipe open
            return os.waitstatus_to_exitcode(status)


def end_all(child: int, alone: bool) -> None:
    """Kills every other process of the namespace, or where it is shared, the child's group."""
    for target in (-1,) if alone else (-child, child):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(target, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)  # as process 1 it inherits the orphans too


def receive() -> tuple[bytes, bytes]:
    kind, length = HEADER.unpack(read_exactly(HEADER.size))
    return kind, read_exactly(length)


def read_exactly(count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        chunk = os.read(0, count - len(data))
        if not chunk:  # the other side has gone, and with it everything here
            os._exit(0)
        data += chunk
    return bytes(data)


def send(kind: bytes, body: str | bytes) -> None:
    data = body.encode("ascii") if isinstance(body, str) else body
    write_all(1, HEADER.pack(kind, len(data)) + data)


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


# ------------------------------------------------------------------------------ the child's side


def answer(job: bytes, replies: int, uid: int | None) -> None:
    """Runs one job in the child and ends it; never returns."""
    try:
        task: Job = json.loads(job)
        with suppress(OSError):
            os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.closerange(3, replies)
        os.closerange(replies + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        resource.setrlimit(resource.RLIMIT_CPU, (task["cpu_seconds"], task["cpu_seconds"] + 1))
        if uid is not None:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        call(task, replies)
        os._exit(0)
    finally:
        os._exit(1)


def call(job: Job, replies: int) -> None:
    namespace: dict[str, Any] = {}
    try:
        program = longest_parsing_prefix(job["program"]) if job["trim"] else job["program"]
        exec(compile(program, "<program>", "exec"), namespace)
        if job["entry_point"] not in namespace:
            raise NameError(f"the program defines no {job['entry_point']}")
        function = namespace[job["entry_point"]]
    except BaseException as error:  # SystemExit and KeyboardInterrupt are failures as well
        tell_exception(error, replies)
        return
    tell(b"V" + b"null", replies)
    for text in job["inputs"]:
        try:
            arguments = decode(text)
            value = function(*arguments)
            reply = encode(set(value) if job["as_set"] else value, job["large"]).encode("ascii")
        except BaseException as error:
            tell_exception(error, replies)
        else:
            tell(b"V" + reply, replies)
            del value, reply


def tell(reply: bytes, replies: int) -> None:
    write_all(replies, LENGTH.pack(len(reply)) + reply)


def tell_exception(error: BaseException, replies: int) -> None:
    try:
        words = [str(type(error).__name__)[:80], str(error)[:200]]
    except BaseException:  # a hostile __str__
        words = ["exception", ""]
    tell(b"X" + json.dumps(words).encode("ascii"), replies)


def longest_parsing_prefix(program: str) -> str:
    """The program without the trailing lines that keep it from parsing.

    A completion may end in the middle of a statement, since generation ends at a number of
    tokens. Lines are dropped from the end until the rest is Python; a program of which no prefix
    is, stays as it is and fails by its syntax error. Definitions are never chosen or reordered:
    evalplus's `sanitize` does that and loses correct programs.
    """
    lines = program.splitlines(keepends=True)
    for count in range(len(lines), 0, -1):
        prefix = "".join(lines[:count])
        try:
            ast.parse(prefix)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if prefix.strip():
            return prefix
    return program


if __name__ == "__main__":
    main()
