"""Scripts that tests run in separate processes, and functions that start them."""

import atexit
import fcntl
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]  # where `forked("-m", "children.NAME")` finds a script


class forked:
    """A process that runs `python *words`, and starts with torch imported.

    It imports its own fusedops, under its own environment. For tests of what an import does, of
    Python's options and its end, or of what torch reads when it is imported, use subprocess.
    """

    def __init__(
        self,
        *words: Any,
        cwd: str | Path = TESTS,
        env: Mapping[str, str] = os.environ,
        large: bool = False,
        bare: bool = False,
    ) -> None:
        """large: whether LARGE is imported, instead of SMALL. bare: whether torch alone is."""
        self.words = [*map(str, words)]
        self.streams = _stream("stdout"), _stream("stderr")
        self.status, theirs = os.pipe()
        request = json.dumps([self.words, str(cwd), dict(env)]).encode()
        files = [*self.streams, theirs]
        modules = LARGE if large else ("torch",) if bare else SMALL
        socket.send_fds(_server(modules), [request], files)
        os.close(theirs)
        self.process = int(self._line(None))  # after the server has imported its modules

    def has_ended(self) -> bool:
        return bool(select.select([self.status], [], [], 0)[0])

    def result(self, timeout: float = 300) -> subprocess.CompletedProcess:
        """Returns what subprocess.run does; see `results`."""
        return results([self], timeout)[0]

    def printed(self, timeout: float = 300) -> str:
        """Returns stdout; fails with all that the process has printed if it fails."""
        done = self.result(timeout)
        assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
        return done.stdout

    def stacks(self) -> str:
        """The Python stacks of the process and its children; native ones with gdb."""
        processes = self._running()
        for process in processes:  # one after the other: their lines would mix
            before, deadline = self._dumps(), time.monotonic() + 10
            _send(process, signal.SIGUSR1)  # the fork server's faulthandler prints to stderr
            while self._dumps() == before and time.monotonic() < deadline:
                time.sleep(0.02)
        native = [_native_stacks(process) for process in processes if shutil.which("gdb")]
        printed = [self._read(stream)[-20000:] for stream in self.streams]
        return "\n".join([*printed, *native])

    def _dumps(self) -> int:
        """How many stacks faulthandler has printed up to their last frame, runpy's."""
        return self._read(self.streams[1]).count(" in _run_module_as_main\n")

    def kill(self) -> None:
        for process in self._running():
            _send(process, signal.SIGKILL)

    def _running(self) -> list[int]:
        return [] if self.has_ended() else _tree(self.process)

    def _result(self, timeout: float | None) -> subprocess.CompletedProcess:
        code = int(self._line(timeout))
        os.close(self.status)
        out, errors = (self._read(stream) for stream in self.streams)
        for stream in self.streams:
            os.close(stream)
        return subprocess.CompletedProcess(self.words, code, out, errors)

    def _line(self, timeout: float | None) -> str:
        if not select.select([self.status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.words, timeout or 0.0)
        line = b""
        while not line.endswith(b"\n"):
            if not (more := os.read(self.status, 1)):
                raise EOFError("the fork server has ended")
            line += more
        return line.decode()

    @staticmethod
    def _read(stream: int) -> str:
        os.lseek(stream, 0, os.SEEK_SET)
        with open(stream, encoding="utf-8", errors="replace", closefd=False) as file:
            return file.read()


def results(processes: Sequence[forked], timeout: float) -> list[subprocess.CompletedProcess]:
    """Waits for processes that may wait for each other.

    If one runs longer than `timeout`, the exception's notes are the stacks of all that still run.
    After any exception all are killed.
    """
    deadline, done = time.monotonic() + timeout, []
    try:
        for process in processes:
            done.append(process._result(max(0, deadline - time.monotonic())))
    except subprocess.TimeoutExpired as late:
        for process in processes[len(done) :]:
            late.add_note(process.stacks())
        raise
    finally:
        for process in processes[len(done) :]:
            process.kill()
    return done


def _tree(process: int) -> list[int]:
    """A process and all that it started, first the process."""
    processes = [process]
    with suppress(OSError):  # it ends meanwhile
        for thread in os.listdir(f"/proc/{process}/task"):
            with suppress(OSError):
                children = Path(f"/proc/{process}/task/{thread}/children").read_text()
                for child in children.split():
                    processes += _tree(int(child))
    return processes


def _send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


def _native_stacks(process: int) -> str:
    words = ["gdb", "-nx", "-batch", "-p", str(process), "-ex", "thread apply all backtrace 30"]
    with suppress(subprocess.TimeoutExpired):
        return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout[-20000:]
    return f"gdb did not read the stacks of {process} in 60 s"


def _stream(name: str) -> int:
    """A file in memory, in which processes that write at once do not overwrite each other."""
    stream = os.memfd_create(name)
    fcntl.fcntl(stream, fcntl.F_SETFL, os.O_APPEND)
    return stream


def on_ranks(
    script: str, ranks: int, cases: Sequence[Any], folder: Path, limit: float = 280
) -> list[subprocess.CompletedProcess]:
    """Runs `python -m children.SCRIPT RANK RANKS FILE CASES FOLDER` for each rank, all at once."""
    meeting = folder / f"{cases[0]}-{ranks}"
    words = ranks, meeting, ",".join(map(str, cases)), folder
    started = [forked("-m", f"children.{script}", i, *words, large=True) for i in range(ranks)]
    return results(started, limit)


def assert_ranks_pass(
    script: str, ranks: int, cases: Sequence[Any], folder: Path, limit: float = 280
) -> None:
    """Fails with what the ranks that failed have printed."""
    failed = [done for done in on_ranks(script, ranks, cases, folder, limit) if done.returncode]
    assert not failed, "\n".join((done.stdout + done.stderr)[-4000:] for done in failed)


# Optimizers import torch._dynamo.
SMALL = ("torch._dynamo", "numpy", "pytest")
LARGE = (*SMALL, "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict")
LARGE += ("transformers.models.llama.modeling_llama",)


@functools.cache
def _server(modules: tuple[str, ...]) -> socket.socket:
    """Starts a server of this process, which ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = subprocess.Popen(
        [sys.executable, "-m", "children.fork_server", str(theirs.fileno()), *modules],
        cwd=TESTS,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours
