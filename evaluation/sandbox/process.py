"""Our side of a warm worker: jobs in, replies out, with the clock on this side of the wall.

Everything the worker sends is taken for hostile: lengths are checked before anything is kept, a
reply may be no longer than the caller allows, every wait ends at a deadline, and a worker that
breaks the rules is killed with all its processes and replaced.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import IO, Any, Literal, NamedTuple, Self

from evaluation.sandbox.bubblewrap import worker_command, worker_environment
from evaluation.sandbox.codec import LARGE
from evaluation.sandbox.worker import CHUNK, HEADER, LENGTH, Job

START_SECONDS = 120.0  # numpy's import from a cold disk on a busy machine
GRACE_SECONDS = 1.5  # for the worker to end a run; then it is ended itself
CONTROL_BYTES = 4096


class SandboxError(RuntimeError):
    """The sandbox itself cannot be started."""


class Stopped(Exception):  # noqa: N818 (an ending, not an error of ours)
    """A run ended without all its replies; `status` is what the program's verdict shall be."""

    def __init__(self, status: Literal["fail", "timeout", "crash"], reason: str) -> None:
        self.status: Literal["fail", "timeout", "crash"] = status
        self.reason = reason
        super().__init__(reason)


class Reply(NamedTuple):
    """What became of one input."""

    returned: str | None  # the value's text (codec.py); None where an exception was raised
    raised: str = ""
    seconds: float = 0.0


class Program(NamedTuple):
    """What runs: source text and the function that is called; the rest as in `Job`."""

    text: str
    entry_point: str
    trim: bool = False
    as_set: bool = False
    large: int = LARGE


class Budget(NamedTuple):
    """What a run may use; `seconds` and `reply_bytes` have one entry an input."""

    loading_seconds: float
    seconds: Sequence[float]
    total_seconds: float
    reply_bytes: Sequence[int]


class Sandbox:
    """One worker, started when first needed and replaced when it is spent.

    Use it as a context manager, in one thread: bubblewrap ends with the thread that started it.
    """

    def __init__(self, unsafe: bool = False) -> None:
        self._unsafe = unsafe
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._buffer = bytearray()  # what has come from the worker and is not yet a frame

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker and everything in its namespace."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(BrokenPipeError):
                    _opened(pipe).close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def kill(self) -> None:
        """Ends the worker from another thread; the run in progress is told as a crash."""
        process = self._process
        if process is not None:
            process.kill()

    def start(self) -> None:
        """Starts a worker if none is there; raises `SandboxError` with what bubblewrap said."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._buffer.clear()
        if self._unsafe:
            self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        with tempfile.TemporaryFile() as words:
            try:
                self._process = subprocess.Popen(
                    worker_command(self._unsafe),
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=words,
                    env=worker_environment(self._unsafe),
                    cwd=self._folder.name if self._folder else None,
                )
                kind, _ = self._frame(time.monotonic() + START_SECONDS)
            except OSError as error:
                raise SandboxError(str(error)) from error
            except Stopped as stopped:
                self.close()
                words.seek(0)
                said = " ".join(words.read(2000).decode(errors="replace").split())
                raise SandboxError(said or stopped.reason) from None
        if kind != b"R":
            self.close()
            raise SandboxError("the worker did not say that it is ready")

    def run(
        self, program: Program, inputs: Sequence[str], budget: Budget
    ) -> Generator[Reply, None, None]:
        """Runs a program: first the reply to its loading, then one an input, as they come.

        Leaving the loop early (closing the iterator) stops the run. The clock of an input starts
        when its reply is asked for. Raises `Stopped` at a limit or where the program ended.
        """
        self.start()
        job = Job(
            program=program.text,
            entry_point=program.entry_point,
            inputs=list(inputs),
            cpu_seconds=int(budget.total_seconds + budget.loading_seconds) + 2,
            trim=program.trim,
            as_set=program.as_set,
            large=program.large,
        )
        text = json.dumps(job).encode("ascii")
        try:
            self._send(b"J", text)
        except Stopped:  # it had ended while it waited: no fault of this program
            self.start()
            self._send(b"J", text)
        replies = bytearray()
        ended = False
        try:
            latest = time.monotonic() + budget.loading_seconds + budget.total_seconds
            limits = zip(
                (budget.loading_seconds, *budget.seconds),
                (CONTROL_BYTES, *budget.reply_bytes),
                strict=True,
            )
            for seconds, length in limits:
                started = time.monotonic()
                deadline = min(started + seconds, latest)
                while (reply := _take_reply(replies, length)) is None:
                    kind, body = self._frame(deadline)
                    if kind == b"E":
                        ended = True
                        self._after(body)
                        raise Stopped("crash", _ending(body))
                    replies += body
                yield reply._replace(seconds=time.monotonic() - started)
        finally:
            if not ended:
                self._stop()

    def _stop(self) -> None:
        """Ends the run: the worker confirms within the grace, or is itself ended."""
        if self._process is None:
            return
        try:
            self._send(b"S", b"")
            deadline = time.monotonic() + GRACE_SECONDS
            while True:
                kind, body = self._frame(deadline)
                if kind == b"E":
                    self._after(body)
                    return
        except Stopped:
            self.close()

    def _after(self, ending: bytes) -> None:
        if _ended(ending).get("dirty") is not False:
            self.close()  # the next run gets a new one

    def _send(self, kind: bytes, body: bytes) -> None:
        """Writes a frame; a worker that does not read or has gone is no hang."""
        assert self._process is not None
        descriptor = _opened(self._process.stdin).fileno()
        view = memoryview(HEADER.pack(kind, len(body)) + body)
        deadline = time.monotonic() + START_SECONDS
        while view:
            _, ready, _ = select.select([], [descriptor], [], max(0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise Stopped("crash", "the sandbox took no input")
            try:
                view = view[os.write(descriptor, view[: select.PIPE_BUF]) :]
            except BrokenPipeError:
                self.close()
                raise Stopped("crash", "the sandbox was ended") from None

    def _frame(self, deadline: float) -> tuple[bytes, bytes]:
        """The next frame of the worker; `Stopped` at the deadline or where the worker has gone."""
        if self._process is None:
            raise Stopped("crash", "the sandbox was ended")
        descriptor = _opened(self._process.stdout).fileno()
        while True:
            left = deadline - time.monotonic()
            if left < 0:
                raise Stopped("timeout", "the time limit was reached")
            if len(self._buffer) >= HEADER.size:
                kind, length = HEADER.unpack_from(self._buffer)
                if length > CHUNK or kind not in (b"R", b"D", b"E"):
                    self.close()
                    raise Stopped("crash", "the sandbox broke its protocol")
                if len(self._buffer) >= HEADER.size + length:
                    body = bytes(self._buffer[HEADER.size : HEADER.size + length])
                    del self._buffer[: HEADER.size + length]
                    return kind, body
            ready, _, _ = select.select([descriptor], [], [], left)
            if not ready:
                continue
            chunk = os.read(descriptor, CHUNK)
            if not chunk:
                self.close()
                raise Stopped("crash", "the sandbox was ended, most likely for want of memory")
            self._buffer += chunk


def _take_reply(data: bytearray, most: int) -> Reply | None:
    """The first complete reply of a run's bytes, taken out of them."""
    if len(data) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(data)
    if length > max(most, CONTROL_BYTES):
        raise Stopped("fail", f"a value of {length} bytes; a right one has at most {most}")
    if len(data) < LENGTH.size + length:
        return None
    text = data[LENGTH.size : LENGTH.size + length].decode("ascii", errors="replace")
    del data[: LENGTH.size + length]
    return Reply(text[1:]) if text[:1] == "V" else Reply(None, _exception(text[1:]))


def _exception(text: str) -> str:
    try:
        name, message = json.loads(text)
        said = " ".join(f"{name}: {message}".split()) if message else str(name)
    except (ValueError, TypeError, RecursionError):
        return "an exception"
    return "".join(letter if letter.isprintable() else "?" for letter in said)[:200]


def _ended(body: bytes) -> dict[str, Any]:
    try:
        ending = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return ending if isinstance(ending, dict) else {}


def _ending(body: bytes) -> str:
    status = _ended(body).get("status")
    how = f"signal {-status}" if isinstance(status, int) and status < 0 else f"exit code {status}"
    return f"the program ended its process ({how})"


def _opened(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
