"""Child script: for each request, forks a process in which given modules are already imported.

`python -m children.fork_server FD MODULE...` in tests/ reads requests from the socket FD;
`children.forked` sends them. A process has its own environment, working directory and streams, and
imports its own fusedops. It does not wait for torch, which takes seconds to import.
"""

import atexit
import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
import types
from contextlib import suppress
from typing import NoReturn

LARGEST = 2**18  # bytes of a request; sockets take a little less than 2**18 at a time


def serve(requests: socket.socket) -> None:
    """Forks for each request, and writes exit statuses, until the other side closes the socket."""
    running: dict[int, int] = {}  # process -> the pipe that takes its status
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            report_ended(running)
        if requests in ready:
            content, files, *_ = socket.recv_fds(requests, LARGEST, 3)
            if not content:
                return
            *streams, status = files
            process = os.fork()
            if not process:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.close()
                end(status_of(*json.loads(content), streams))
            os.write(status, b"%d\n" % process)
            running[process] = status
            for stream in streams:
                os.close(stream)


def report_ended(running: dict[int, int]) -> None:
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            return
        to = running.pop(process)
        with suppress(BrokenPipeError):  # nobody waits for it
            os.write(to, b"%d\n" % os.waitstatus_to_exitcode(status))
        os.close(to)


def status_of(*request) -> int:
    """Runs a request; returns its exit status."""
    try:
        become(*request)
    except SystemExit as error:
        if isinstance(error.code, int | None):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001 - like Python, which prints whatever ends a program
        traceback.print_exc()
        return 1
    return 0


def end(status: int) -> NoReturn:
    """Ends without what Python frees last, which takes half a second for all of torch."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def become(words: list[str], folder: str, environment: dict, streams: list[int]) -> None:
    """Runs `python *words` in this process, as Python's own command line would."""
    for stream, number in zip(streams, (1, 2), strict=True):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    outside = [path for path in sys.path[1:] if path not in listed(os.environ)]
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = ["", *listed(os.environ), *outside]
    del sys.modules["children"]  # the folder or the path may have another
    first, *rest = words
    if first == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif first == "-m":
        sys.argv[:] = rest
        sys.path[0] = os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        sys.path[0] = os.path.dirname(os.path.abspath(first))
        runpy.run_path(first, run_name="__main__")


def listed(environment) -> list[str]:
    return [os.path.abspath(p) for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]


if __name__ == "__main__":
    _, file, *modules = sys.argv
    for module in modules:
        with suppress(ImportError):
            importlib.import_module(module)
    faulthandler.register(signal.SIGUSR1)  # `children.forked` sends it to a process that hangs
    gc.freeze()  # a collection would write to all the memory that the processes share
    serve(socket.socket(fileno=int(file)))
    end(0)
