"""A pytest plugin that writes each test's outcome to a file as it occurs.

Usage: `-p checks.gpu.outcomes --outcomes FILE`.

A run that is killed loses nothing: the file has a line of JSON for each test; a failed test's line
has its traceback. SIGTERM ends the run as Ctrl-C does. A later run with the same file skips the
tests that the file already has; its exit status is 1 if any of these failed. After an illegal
memory access every later test would fail, so the process ends; pytest-xdist starts another one.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from checks.gpu.runner import end_line, whole_lines

WORDS = 20000  # of a traceback's characters, the last


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "file for each test's outcome; tests in it are left out"
    parser.addoption("--outcomes", type=Path, help=help)


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = frozenset(
        row["test"] for row in rows(config.option.outcomes) if row["begun"] < _begin()
    )
    left_out = [item for item in items if item.nodeid in known]
    items[:] = [item for item in items if item.nodeid not in known]
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def _begin() -> float:
    """When this run began, in all of its processes: a worker that restarts collects the same."""
    return float(os.environ.setdefault("FUSEDOPS_TESTS_BEGIN", str(time.time())))


def rows(path: Path | None) -> list[dict[str, Any]]:
    """The outcomes in a file."""
    return [] if path is None else whole_lines(path)


class Writer:
    """Appends outcomes, in the process that gets all reports."""

    def __init__(self, path: Path) -> None:
        self.path = path
        end_line(path)

    @pytest.hookimpl(trylast=True)  # then what a signal ends here is in pytest's report, too
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Writes a test's call, or its setup if that failed or skipped it."""
        if report.when == "call" or report.outcome != "passed":
            row = {"test": report.nodeid, "outcome": report.outcome, "begun": _begin()}
            row |= {"seconds": round(report.duration, 2)}
            if report.outcome == "failed":
                row["why"] = report.longreprtext[-WORDS:]
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Counts earlier runs' failures. No test left to run is no error."""
        known = rows(self.path)
        nothing = exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and known
        if exitstatus == pytest.ExitCode.OK or nothing:
            failed = any(row["outcome"] == "failed" for row in known)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED if failed else pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        earlier = [row for row in rows(self.path) if row["begun"] < _begin()]
        for row in earlier:
            if row["outcome"] == "failed":
                terminalreporter.write_line(f"FAILED in an earlier run: {row['test']}")


class Worker:
    """Ends a process whose device is lost."""

    def __init__(self) -> None:
        self.failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.outcome == "failed"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self.failed and (why := _lost()):
            print(f"the device is lost after {nodeid}: {why}", flush=True)
            time.sleep(1)  # the report is still on its way
            os._exit(3)
        self.failed = False


def _lost() -> str | None:
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


def pytest_sessionstart(session: pytest.Session) -> None:
    _begin()
    config = session.config
    parallel = config.pluginmanager.has_plugin("dsession")  # runs no test itself
    if not parallel:
        config.pluginmanager.register(Worker())
    if config.option.outcomes is not None and not hasattr(config, "workerinput"):
        config.option.outcomes.parent.mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(Writer(config.option.outcomes))
