"""The walls: a bubblewrap command in which the worker sees next to nothing.

Namespaces of its own for processes, network (without any device), IPC and host name; an empty
environment; no capabilities; a file system that holds the Python interpreter, its library, numpy
and two files of ours, under paths that tell nothing about this machine; nothing in it can be
written, no /tmp, no /proc, no /sys, and of /dev four harmless devices. Limits on memory,
processes, open files and file sizes are the worker's own (`Config`); time is kept by process.py.

An ordinary user gets a user namespace. Root needs none, and would stay root behind one for
everything the kernel counts by user (a limit on processes does not bind root); so root's worker
keeps the right to start programs as another user, one without a name or a file, and to end them.

With `unsafe`, the same worker runs without walls: for machines that cannot have them, and only
where a person asks for it.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from evaluation.sandbox import codec, worker

MEMORY_BYTES = 4 << 30
FILE_BYTES = 32 << 20
OPEN_FILES = 64
PROCESSES = 16  # threads count
FIRST_UID = 30_000  # within what a container maps, above people, below systemd's own
UIDS = 30_000

PYTHON = "/python"
PACKAGES = "/packages"
OURS = "/ours"
FOLDERS = (
    *(PYTHON, f"{PYTHON}/bin", PACKAGES, "/dev"),
    *(OURS, f"{OURS}/evaluation", f"{OURS}/evaluation/sandbox"),
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
# What a dynamically linked interpreter reads beside its own folders, where it exists.
SYSTEM = (
    *("/usr/lib", "/usr/lib64", "/lib", "/lib64"),
    *("/etc/ld.so.cache", "/etc/alternatives"),
)

_uids = itertools.count(os.getpid() * 37)


def worker_command(unsafe: bool = False) -> list[str]:
    """The command that starts one worker, ready for `subprocess.Popen`.

    Args:
        unsafe: without bubblewrap, in the caller's working directory.
    """
    root = os.geteuid() == 0
    config = worker.Config(
        packages=None if unsafe else PACKAGES,
        uid=FIRST_UID + next(_uids) % UIDS if root and not unsafe else None,
        alone=not unsafe,
        memory_bytes=MEMORY_BYTES,
        file_bytes=FILE_BYTES,
        open_files=OPEN_FILES,
        processes=PROCESSES,
    )
    python = sys.executable if unsafe else f"{PYTHON}/bin/{_interpreter().name}"
    inside = [python, "-B", "-s", "-m", worker.__name__, json.dumps(config)]
    if unsafe:
        return inside
    # The kernel, should memory run out, is to end the sandbox and nothing else.
    first = 'echo 1000 >/proc/self/oom_score_adj 2>/dev/null; exec "$@"'
    return ["sh", "-c", first, "sh", *_walls(root), *inside]


def worker_environment(unsafe: bool = False) -> Mapping[str, str]:
    """The whole environment of the command; bubblewrap hands only its own setting on."""
    path = {"PATH": os.environ.get("PATH", os.defpath)}
    return {**_settings(str(Path(__file__).parents[2])), **path} if unsafe else path


def _settings(ours: str) -> dict[str, str]:
    return {
        "PATH": f"{PYTHON}/bin",
        "LANG": "C.UTF-8",
        "PYTHONPATH": ours,
        "PYTHONHASHSEED": "0",  # the order of a set must not decide a verdict
        "LD_LIBRARY_PATH": f"{PYTHON}/lib",  # for interpreters linked to their own libpython
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    }


def _walls(root: bool) -> list[str]:
    spaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    spaces += ["--unshare-cgroup-try", "--cap-drop", "ALL"]
    if root:
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_KILL"):
            spaces += ["--cap-add", capability]
    else:
        spaces += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    settings = [("--setenv", name, value) for name, value in _settings(OURS).items()]
    return [
        *("bwrap", "--die-with-parent", "--new-session", "--as-pid-1"),
        *(*spaces, "--hostname", "sandbox", "--clearenv"),
        *itertools.chain.from_iterable(settings),
        *_file_system(),
        *("--remount-ro", "/", "--chdir", "/", "--"),
    ]


@functools.cache
def _file_system() -> tuple[str, ...]:
    prefix = Path(sys.base_prefix).resolve()
    # Made first: bubblewrap would make them for its own user alone.
    shown: list[tuple[str, ...]] = [("--perms", "0755", "--dir", folder) for folder in FOLDERS]
    shown += [("--ro-bind", path, path) for path in SYSTEM if Path(path).exists()]
    shown += [("--dev-bind", device, device) for device in DEVICES]
    shown.append(("--ro-bind", str(_interpreter()), f"{PYTHON}/bin/{_interpreter().name}"))
    for folder in ("lib", "lib64"):
        if (prefix / folder).is_dir():
            shown.append(("--ro-bind", str(prefix / folder), f"{PYTHON}/{folder}"))
    for part in _numpy():
        shown.append(("--ro-bind", str(part), f"{PACKAGES}/{part.name}"))
    for module in (worker, codec):
        path = f"{OURS}/{module.__name__.replace('.', '/')}.py"
        shown.append(("--ro-bind", str(module.__file__), path))
    hidden = [("--tmpfs", place) for place in _installed_packages(prefix)]
    return tuple(itertools.chain.from_iterable([*shown, *hidden]))


def _interpreter() -> Path:
    """The real executable behind a virtual environment's link."""
    return Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()


def _numpy() -> list[Path]:
    spec = importlib.util.find_spec("numpy")
    if spec is None or spec.origin is None:
        return []
    package = Path(spec.origin).resolve().parent
    return [part for part in (package, package.with_name("numpy.libs")) if part.is_dir()]


def _installed_packages(prefix: Path) -> list[str]:
    """Folders of other packages below the bound ones, as seen inside."""
    version = f"python{sysconfig.get_python_version()}"
    places = (f"{version}/site-packages", f"{version}/dist-packages", "python3/dist-packages")
    found = []
    for folder in ("lib", "lib64"):
        for below in places:
            if (prefix / folder / below).is_dir():
                found.append(f"{PYTHON}/{folder}/{below}")
            if Path("/usr", folder, below).is_dir():
                found.append(f"/usr/{folder}/{below}")
    return found


GET_BUBBLEWRAP = (
    "install it (Debian, Ubuntu: apt install bubblewrap; Fedora: dnf install bubblewrap), or run "
    "generated programs unprotected with --unsafe-execution"
)


def sandbox_faults(unsafe: bool = False) -> list[str]:
    """What keeps generated programs from running on this machine: nothing, or one sentence."""
    if unsafe:
        return []
    if shutil.which("bwrap") is None:
        return [
            "generated programs run only inside bubblewrap, and the command bwrap was not found; "
            f"{GET_BUBBLEWRAP}"
        ]
    problem = _trial()
    if problem is None:
        return []
    return [
        f"bubblewrap does not work here: {problem}. It must be version 0.5 or newer, and user "
        "namespaces must be allowed (as root: sysctl kernel.unprivileged_userns_clone=1; on "
        "Ubuntu 24.04 and later also sysctl kernel.apparmor_restrict_unprivileged_userns=0, or an "
        "AppArmor profile for bwrap; in a container: the privilege CAP_SYS_ADMIN). Else run "
        "generated programs unprotected with --unsafe-execution"
    ]


@functools.cache
def _trial() -> str | None:
    """Starts a worker and runs one program; what went wrong, or None."""
    from evaluation.sandbox.process import Budget, Program, Sandbox, SandboxError, Stopped

    budget = Budget(30.0, [30.0], 60.0, [100])
    try:
        with Sandbox() as sandbox:
            *_, last = sandbox.run(Program("def trial(): return 1", "trial"), ["[]"], budget)
    except (SandboxError, Stopped) as error:
        return str(error)
    return None if last.returned == "1" else last.raised
