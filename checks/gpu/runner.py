"""Runs commands within time limits, and archives their results.

A step that fails, hangs or is killed does not keep the others from running, and loses nothing that
it wrote to OUT.
"""

import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
# Before its limit, a step is interrupted; it may still write its results.
GRACE_S = 8.0
PASSED, FAILED, LATE, NOT_RUN = "passed", "failed", "ended at its limit", "not run"


@dataclass(frozen=True)
class Step:
    """One command with its share of the time.

    needs: the steps that must have passed. resumes: whether a later call continues where this one
    ended. environment: variables to add.
    """

    name: str
    seconds: float
    command: Sequence[str]
    needs: tuple[str, ...] = ()
    resumes: bool = False
    environment: dict[str, str] = field(default_factory=dict)


class Run:
    """One call of `gpu-once` or `gpu-rest`: what ran so far, in OUT/state.json.

    started: names the results, so that a later call continues them. scale: seconds of real time in
    a second of the plan; below 1 in a dry run.
    """

    def __init__(self, out: Path, seconds: float, scale: float = 1.0) -> None:
        self.out, self.scale, self.file = out, scale, out / "state.json"
        self.begin, self.seconds = time.monotonic(), seconds
        out.mkdir(parents=True, exist_ok=True)
        known = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.steps: dict[str, dict] = known.get("steps", {})
        self.started: str = known.get("started") or time.strftime(
            "%Y-%m-%dT%H:%M:%SZ", time.gmtime()
        )

    def now(self) -> float:
        """Seconds of the plan since this call began."""
        return (time.monotonic() - self.begin) / self.scale

    def left(self) -> float:
        return self.seconds - self.now()

    def passed(self, name: str) -> bool:
        return self.steps.get(name, {}).get("status") == PASSED

    def say(self, name: str, text: str) -> None:
        minutes, seconds = divmod(int(self.now()), 60)
        print(f"[{minutes}:{seconds:02} {name}] {text}", flush=True)

    def note(self, step: Step, status: str, seconds: float = 0.0, code: int | None = None) -> None:
        """Records a step's outcome; the file is replaced atomically."""
        self.steps[step.name] = {"status": status, "seconds": round(seconds, 1), "code": code}
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps({"started": self.started, "steps": self.steps}, indent=1))
        new.replace(self.file)

    def step(self, step: Step, limit: float) -> str:
        """Runs a step for at most `limit` seconds. Returns its status, which is recorded."""
        missing = [name for name in step.needs if not self.passed(name)]
        if missing:
            self.say(step.name, f"{NOT_RUN}: {', '.join(missing)} did not pass")
            self.note(step, NOT_RUN)
            return NOT_RUN
        self.say(step.name, f"at most {limit:.0f} s: {' '.join(step.command)[:200]}")
        self.note(step, LATE)  # stands if this process is killed
        begin = self.now()
        try:
            code = self._process(step, begin + limit)
        except OSError as error:  # the command cannot start; the others may
            self.say(step.name, f"{type(error).__name__}: {error}")
            code = 127
        status = LATE if code is None else PASSED if code == 0 else FAILED
        self.note(step, status, self.now() - begin, code)
        self.say(step.name, f"{status} after {self.now() - begin:.0f} s")
        return status

    def _process(self, step: Step, end: float) -> int | None:
        """The exit status; None if the step was stopped at its limit."""
        readable = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        environment = os.environ | step.environment | readable
        with (self.out / f"{step.name}.log").open("a") as log:
            process = subprocess.Popen(
                step.command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            assert process.stdout is not None
            reader = threading.Thread(target=self._show, args=(step.name, process.stdout, log))
            reader.daemon = True
            reader.start()
            try:
                code = self._wait(process, end - GRACE_S)
                if code is None:
                    self.say(step.name, "interrupted at its limit")
                    self._stop(process, end)
            finally:
                _kill(process)
                reader.join(timeout=2.0)
        return code

    def _wait(self, process: subprocess.Popen, end: float) -> int | None:
        try:
            return process.wait(max(0.0, end - self.now()) * self.scale)
        except subprocess.TimeoutExpired:
            return None

    def _stop(self, process: subprocess.Popen, end: float) -> None:
        """Interrupts the step's processes, then terminates them; `_process` kills them."""
        for number, share in ((signal.SIGINT, 0.7), (signal.SIGTERM, 0.2)):
            _signal(process, number)
            if self._wait(process, self.now() + share * (end - self.now())) is not None:
                return

    def _show(self, name: str, lines: Iterable[str], log: IO[str]) -> None:
        for line in lines:
            log.write(line)
            log.flush()
            self.say(name, line.rstrip())

    def archive(self, path: Path, more: Iterable[Path] = ()) -> None:
        """Packs OUT and `more` into one file, replaced atomically."""
        new = path.with_name(path.name + ".new")
        with tarfile.open(new, "w:gz", compresslevel=3) as packed:
            for file in sorted(self.out.rglob("*")):
                if file.is_file() and file not in (path, new):
                    packed.add(file, Path("gpu") / file.relative_to(self.out))
            for file in more:
                packed.add(file, file.relative_to(ROOT))
        new.replace(path)

    def table(self, names: Iterable[str]) -> str:
        """A line for each step."""
        lines = [f"{'step':<16}{'seconds':>8}  outcome"]
        for name in names:
            found = self.steps.get(name, {"status": NOT_RUN, "seconds": 0.0})
            lines.append(f"{name:<16}{found['seconds']:>8.1f}  {found['status']}")
        return "\n".join(lines)


def _signal(process: subprocess.Popen, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _kill(process: subprocess.Popen) -> None:
    """Kills what is left of the step's process group."""
    _signal(process, signal.SIGKILL)
    process.wait()


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a file of JSON lines. Skips a line that a killed process left incomplete."""
    found = []
    for line in path.read_text(errors="replace").split("\n") if path.exists() else []:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def end_line(path: Path) -> None:
    """Ends a line that was cut short, so that the next one stands by itself."""
    if path.exists() and path.stat().st_size and path.read_bytes()[-1:] != b"\n":
        with path.open("a") as file:
            file.write("\n")


def end_on_signals() -> None:
    """Turns SIGTERM and SIGHUP into SystemExit, so that the archive is still written."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
