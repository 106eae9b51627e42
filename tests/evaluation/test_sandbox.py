"""Programs that mean harm: none passes, none leaves a trace, and the grader lives on.

All of `HOSTILE` are graded together against the problem "add two numbers", with hosts of things
to harm outside: a file to change, a server to reach, a token in the environment.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from evaluation.sandbox import bubblewrap, grade, process
from evaluation.sandbox.codec import encode
from evaluation.sandbox.grade import Verdict
from evaluation.sandbox.problems import Problem
from evaluation.sandbox.process import Budget, Program, Sandbox, Stopped
from evaluation.sandbox.samples import Sample

FAULTS = bubblewrap.sandbox_faults()
pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(bool(FAULTS), reason=f"no sandbox here: {FAULTS}"),
]

ADD = Problem(
    dataset="humaneval",
    task_id="Add/0",
    prompt="def add(x, y):\n",
    entry_point="add",
    reference="def add(x, y):\n    return x + y\n",
    atol=0.0,
    raw={"base": [[1, 2], [3, 4]], "plus": [[10, 20], [-1, 1], [0, 0]]},
)
CORRECT = ADD.reference
TOKEN = "secret-token-of-the-host"

HOSTILE = {
    # ---- escape: read, write or reach something outside
    "opens a connection": """
        import socket
        def add(x, y):
            s = socket.create_connection(("127.0.0.1", PORT), timeout=1)
            s.sendall(b"hello"); return x""",
    "reads the token from the environment": """
        import os
        def add(x, y): return os.environ["HF_TOKEN"]""",
    "reads the token from another process": """
        def add(x, y): return open("/proc/%d/environ" % HOST_PID).read()""",
    "writes by io.open": """
        import io
        def add(x, y): io.open("FILE", "w").write("harmed"); return x""",
    "deletes by posix": """
        import posix
        def add(x, y): posix.unlink("FILE"); return x""",
    "deletes after reloading os": """
        import os, importlib
        def add(x, y): importlib.reload(os).remove("FILE"); return x""",
    "starts a shell by posix_spawn": """
        import os
        def add(x, y):
            os.posix_spawn("/bin/sh", ["sh", "-c", "echo harmed > FILE"], {}); return x""",
    "starts a shell by subprocess": """
        import subprocess
        def add(x, y): subprocess.run("echo harmed > FILE", shell=True, check=True); return x""",
    "writes into the interpreter's library": """
        import os
        open(os.__file__, "a").write("harmed")
        def add(x, y): return x""",
    "changes the worker's code": """
        import evaluation.sandbox.worker as w
        open(w.__file__, "w").write("harmed")
        def add(x, y): return x""",
    "mounts by ctypes": """
        import ctypes
        def add(x, y):
            return ctypes.CDLL(None).mount(b"/", b"/dev", None, 4096, None)""",
    "becomes root": """
        import os
        def add(x, y): os.setuid(0); return x""",
    # ---- fake: pass without computing
    "an object that equals everything": """
        class Any:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
        def add(x, y): return Any()""",
    "an int that equals everything": """
        class Any(int):
            def __eq__(self, other): return True
            __hash__ = int.__hash__
        def add(x, y): return Any(0)""",
    "a list of what equals everything": """
        class Any(int):
            def __eq__(self, other): return True
        def add(x, y): return [Any()]""",
    "a class whose instances claim to be ints": """
        class Meta(type):
            def __instancecheck__(cls, other): return True
            def __eq__(cls, other): return True
            __hash__ = type.__hash__
        class Any(metaclass=Meta):
            __class__ = int
            def __eq__(self, other): return True
        def add(x, y): return Any()""",
    "expected values from the callers' frames": """
        import sys
        def add(x, y):
            frame = sys._getframe()
            while frame:
                for name, value in {**frame.f_globals, **frame.f_locals}.items():
                    if "expect" in name or "truth" in name: return value[0]
                frame = frame.f_back""",
    "expected values from the memory": """
        import gc
        def add(x, y):
            for thing in gc.get_objects():
                if isinstance(thing, dict) and ("expected" in thing or "values" in thing):
                    return thing.get("expected", thing.get("values"))[0]""",
    "patched comparisons": """
        import numpy, builtins, operator
        numpy.allclose = lambda *a, **k: True
        builtins.all = builtins.any = builtins.isinstance = lambda *a: True
        operator.eq = lambda a, b: True
        def add(x, y): return 0""",
    "a patched encoder": """
        import evaluation.sandbox.codec as codec, evaluation.sandbox.worker as worker, sys
        for module in (codec, worker, sys.modules["__main__"]):
            module.encode = lambda value: '{"opaque":"anything"}'
        def add(x, y): return 0""",
    "forged replies": """
        import os, struct
        for fd in range(3, 64):
            try:
                for body in [b"Vnull"] * 100:
                    os.write(fd, struct.pack(">I", len(body)) + body)
            except OSError: pass
        def add(x, y): return 0""",
    "forged frames of the worker": """
        import os, struct
        for fd in range(64):
            try: os.write(fd, struct.pack(">cI", b"E", 2) + b"{}")
            except OSError: pass
        def add(x, y): return 0""",
    "an exit with code 0": """
        import os
        def add(x, y): os._exit(0)""",
    "an exit while loading": """
        import sys
        sys.exit(0)""",
    "success by exception": """
        class Done(BaseException):
            def __str__(self): raise self
            def __repr__(self): raise self
        def add(x, y): raise Done""",
    # ---- exhaust
    "allocates without end": """
        def add(x, y):
            keep = []
            while True: keep.append(bytearray(1 << 26))""",
    "a fork bomb": """
        import os
        def add(x, y):
            while True:
                try: os.fork()
                except OSError: pass""",
    "threads without end": """
        import threading, time
        def add(x, y):
            while True: threading.Thread(target=time.sleep, args=(60,)).start()""",
    "recursion without a limit": """
        import sys
        sys.setrecursionlimit(10**9)
        def add(x, y): return [add(x, y)]""",
    "fills shared memory": """
        import os
        def add(x, y):
            fds = []
            while True:
                fds.append(os.memfd_create("m")); os.write(fds[-1], bytes(1 << 25))
                os.write(fds[-1], b"x")""",
    "a program of a megabyte of brackets": "(" * 1_000_000,
    # ---- hang
    "a loop that swallows every exception": """
        def add(x, y):
            while True:
                try:
                    while True: pass
                except BaseException: pass""",
    "sleeps with all signals ignored": """
        import signal, time
        for s in range(1, 32):
            try: signal.signal(s, signal.SIG_IGN)
            except OSError: pass
        def add(x, y):
            while True: time.sleep(60)""",
    "loops while loading": "while True: pass",
    "leaves processes that hold the channel": """
        import os, time
        def add(x, y):
            for _ in range(3):
                if os.fork() == 0:
                    os.setsid(); time.sleep(600)
            os._exit(0)""",
    "reads the jobs": """
        import os, sys
        def add(x, y): return os.read(0, 1000) + sys.stdin.buffer.read()""",
    "stops halfway through a reply": """
        import os, struct, time
        for fd in range(3, 64):
            try: os.write(fd, struct.pack(">I", 50) + b"V")
            except OSError: pass
        time.sleep(600)""",
    # ---- kill
    "kills its parent": """
        import os, signal
        def add(x, y):
            for s in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP):
                os.kill(os.getppid(), s)
            return 0""",
    "kills everything": """
        import os
        def add(x, y): os.kill(-1, 9); return 0""",
    "segmentation fault": """
        import ctypes
        def add(x, y): return ctypes.string_at(0)""",
    "traces the worker": """
        import ctypes, os
        def add(x, y):
            libc = ctypes.CDLL(None)
            return libc.ptrace(16, 1, 0, 0) + libc.ptrace(7, 1, 0, 0)""",
    "starves the worker of processes": """
        import resource
        def add(x, y): resource.prlimit(1, resource.RLIMIT_NPROC, (0, 0)); return 0""",
    "slows the worker": """
        import os
        def add(x, y): os.setpriority(os.PRIO_PROCESS, 1, 19); return 0""",
    # ---- flood and exotic values
    "returns a gigabyte": """
        def add(x, y): return "a" * (1 << 30)""",
    "floods the channel": """
        import os
        def add(x, y):
            while True:
                for fd in range(3, 64):
                    try: os.write(fd, b"\\xff" * 65536)
                    except OSError: pass""",
    "prints without end": """
        def add(x, y):
            while True: print("a" * 65536)""",
    "a number of a million digits": """
        def add(x, y): return 1 << 4_000_000""",
    "a value that holds itself": """
        def add(x, y):
            a = []; a.append(a); return a""",
    "a value that doubles at every level": """
        def add(x, y):
            a = []
            for _ in range(60): a = [a, a]
            return a""",
    "an iterator without end": """
        import itertools
        def add(x, y): return itertools.count()""",
    "a generator": """
        def add(x, y): yield x + y""",
    "not a number": """
        def add(x, y): return float("nan")""",
    "no such function": "def sub(x, y): return x - y",
    "no Python": "def add(x, y) return x + y",
}  # fmt: skip


class Outside(NamedTuple):
    """What stood outside while the hostile programs ran."""

    file: Path
    connections: list[object]
    verdicts: dict[str, Verdict]
    afterwards: Verdict


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    folder = tmp_path_factory.mktemp("outside")
    folder.chmod(0o777)
    file = folder / "file"
    file.write_text("unharmed")
    file.chmod(0o666)
    connections: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.MonkeyPatch.context() as patch:
        threading.Thread(target=accept, args=(server, connections), daemon=True).start()
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setattr(grade, "MIN_SECONDS", 1.0)  # of every input; several programs use all of it
        words = {"PORT": server.getsockname()[1], "HOST_PID": os.getpid(), "FILE": file}
        samples = [Sample("Add/0", program(source, words)) for source in HOSTILE.values()]
        verdicts = grade.grade({"Add/0": ADD}, samples)
        patch.undo()
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        (afterwards,) = grade.grade({"Add/0": ADD}, [Sample("Add/0", CORRECT)])
        yield Outside(file, connections, dict(zip(HOSTILE, verdicts, strict=True)), afterwards)


def accept(server: socket.socket, connections: list[object]) -> None:
    try:
        while True:
            connections.append(server.accept())
    except OSError:  # closed
        return


def program(source: str, words: dict[str, object]) -> str:
    for word, meaning in words.items():
        source = source.replace(word, str(meaning))
    indent = 8 if source.startswith("\n") else 0
    return "\n".join(line[indent:] for line in source.split("\n"))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_does_not_pass(outside: Outside, name: str) -> None:
    verdict = outside.verdicts[name]
    assert verdict.status in ("fail", "timeout", "crash"), verdict
    assert not verdict.base and not verdict.plus
    assert verdict.reason
    assert TOKEN not in verdict.reason


@pytest.mark.parametrize("name", HOSTILE)
def test_its_verdict_comes_within_its_limits(outside: Outside, name: str) -> None:
    """A second to load, one for each of two inputs, and a grace to end and to replace a worker."""
    assert outside.verdicts[name].seconds < 3 * 1.0 + process.GRACE_SECONDS + 5


def test_nothing_outside_was_touched(outside: Outside) -> None:
    assert outside.file.read_text() == "unharmed"
    assert outside.connections == []


def test_the_grader_lives_on(outside: Outside) -> None:
    assert outside.afterwards.status == "pass", outside.afterwards


SLEEPER = "import time\ndef f(): time.sleep(600)"
BUDGET = Budget(20.0, [20.0], 40.0, [100_000])


def value(sandbox: Sandbox, source: str, budget: Budget = BUDGET) -> str:
    """The text of what `f()` returns, or the exception, prefixed by `!`."""
    *_, last = sandbox.run(Program(program(source, {}), "f"), [encode([])], budget)
    return f"!{last.raised}" if last.returned is None else last.returned


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as shared:
        yield shared


@pytest.mark.parametrize(
    ("what", "source"),
    [
        ("home", f"import os\ndef f(): return os.path.exists({str(Path.home())!r})"),
        ("project", f"import os\ndef f(): return os.path.exists({bubblewrap.__file__!r})"),
        ("processes", "import os\ndef f(): return os.path.exists('/proc/1')"),
        (
            "packages",
            "from importlib.util import *\ndef f(): return bool(find_spec('torch'))",
        ),
        ("users", "import os\ndef f(): return os.path.exists('/etc/passwd')"),
        ("network", "import socket\ndef f(): return len(socket.if_nameindex()) > 1"),  # lo alone
        ("root", "import os\ndef f(): return os.getuid() == 0 or os.getgid() == 0"),
        ("shared files", "import os\ndef f(): return os.path.exists('/tmp')"),
    ],
)
def test_the_program_sees_none_of_this(sandbox: Sandbox, what: str, source: str) -> None:
    assert value(sandbox, source) == "false", what


def test_the_environment_is_empty_but_for_our_settings(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    names = value(sandbox, "import os\ndef f(): return sorted(os.environ)")
    settings = set(bubblewrap._settings("")) | {"PWD"}
    assert set(names.strip('[]"').split('","')) <= settings


def test_numpy_and_the_standard_library_are_there(sandbox: Sandbox) -> None:
    source = "import numpy, sqlite3, decimal\ndef f(): return int(numpy.arange(4).sum())"
    assert value(sandbox, source) == "6"


def test_nothing_of_one_program_reaches_the_next(sandbox: Sandbox) -> None:
    first = """
        import os, builtins, math, time
        builtins.leak = math.leak = 1
        def f():
            if os.fork() == 0:
                os.setsid(); time.sleep(600)
            return 1"""
    second = """
        import builtins, math, os
        def f():
            try: os.kill(-1, 0); others = True
            except ProcessLookupError: others = False
            return [hasattr(builtins, "leak"), hasattr(math, "leak"), others]"""
    assert value(sandbox, first) == "1"
    assert value(sandbox, second) == "[false,false,false]"


def test_a_worker_keeps_its_limits_or_is_replaced(sandbox: Sandbox) -> None:
    """Where root started it the change is refused, elsewhere it is noticed."""
    harm = "import resource as r\ndef f(): r.prlimit(1, r.RLIMIT_NPROC, (0, 0)); return 1"
    assert value(sandbox, harm) in ("1", "!PermissionError: [Errno 1] Operation not permitted")
    assert value(sandbox, "import os\ndef f():\n if os.fork() == 0: os._exit(0)\n return 1") == "1"


def test_leaving_the_replies_early_ends_the_run(sandbox: Sandbox) -> None:
    replies = sandbox.run(Program(SLEEPER, "f"), [encode([])], BUDGET)
    assert next(replies).returned == "null"
    replies.close()
    assert value(sandbox, "def f(): return 2") == "2"


def test_the_clock_is_kept_outside(sandbox: Sandbox) -> None:
    source = "import time\ntime.monotonic = time.time = lambda: 0\ndef f():\n while True: pass"
    with pytest.raises(Stopped) as stopped:
        value(sandbox, source, Budget(20.0, [0.2], 40.0, [100]))
    assert stopped.value.status == "timeout"


def test_closing_ends_every_process_inside() -> None:
    with Sandbox() as one:
        replies = one.run(Program(SLEEPER, "f"), [encode([])], BUDGET)
        next(replies)
        assert one._process is not None
        inside = descendants(one._process.pid)
        assert len(inside) >= 2
        replies.close()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in inside) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in inside)


def test_killing_a_sandbox_from_another_thread_ends_its_run(sandbox: Sandbox) -> None:
    replies = sandbox.run(Program(SLEEPER, "f"), [encode([])], Budget(20.0, [600.0], 600.0, [10]))
    next(replies)
    threading.Timer(0.2, sandbox.kill).start()
    with pytest.raises(Stopped, match="the sandbox was ended"):
        next(replies)
    assert value(sandbox, "def f(): return 2") == "2"


def descendants(pid: int) -> list[int]:
    children = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue
        if parent == pid:
            children.append(int(status.parent.name))
    return [pid] + [each for child in children for each in descendants(child)]


def test_without_bubblewrap_the_fault_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (fault,) = bubblewrap.sandbox_faults()
    assert "apt install bubblewrap" in fault and "--unsafe-execution" in fault
    assert bubblewrap.sandbox_faults(unsafe=True) == []
