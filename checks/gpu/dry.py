"""Replaces the GPU steps for `DRY=1` with fake ones that need no GPU.

The fake steps take the times of a table. They write the files that the real steps write, line by
line, with invented content, so that the runner, its limits and its archive can be tried. DRY_BROKEN
breaks some of them: DRY_BROKEN="smoke=fails rows=hangs counters=dies". A step that hangs also
ignores SIGINT and SIGTERM.
"""

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

from checks.gpu.runner import Run, Step

SCALE = 1 / 20  # seconds of real time in a second of the plan
LINES = 10  # that a step writes
# Seconds of the plan: invented, and below the limits.
TAKES = {
    "build": 40.0,
    "smoke": 30.0,
    "tests": 40.0,
    "rows": 30.0,
    "counters": 5.0,
    "memcheck": 5.0,
    "racecheck": 5.0,
    "extension": 5.0,
    "all-tests": 60.0,
    "other-rows": 60.0,
    "profile": 20.0,
    "profiler-tests": 10.0,
    "train": 20.0,
    "compiled-rows": 60.0,
}
# The step's file, if it has one beside its log.
WRITES = {
    "smoke": "smoke.jsonl",
    "tests": "outcomes.jsonl",
    "all-tests": "outcomes.jsonl",
    "rows": "toy-gpu/attention.json",
    "other-rows": "toy-gpu/norm.json",
    "counters": "counters.csv",
    "memcheck": "memcheck.txt",
    "profile": "profile.json",
    "train": "train.json",
}


def replaced(step: Step, run: Run) -> Step:
    """The step with an invented command that takes the table's time."""
    command = [sys.executable, "-m", "checks.gpu.dry", step.name, str(run.out), str(run.scale)]
    return dataclasses.replace(step, command=command)


def broken(name: str) -> str:
    words = os.environ.get("DRY_BROKEN", "").split()
    return dict(word.split("=") for word in words).get(name, "")


def main(name: str, out: str, scale: str) -> int:
    fault, path = broken(name), Path(out, WRITES.get(name, f"{name}.txt"))
    path.parent.mkdir(parents=True, exist_ok=True)
    if fault == "hangs":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for line in range(LINES):
        print(f"{name}: {line + 1} of {LINES}", flush=True)
        with path.open("a") as file:
            file.write(json.dumps({"step": name, "line": line}) + "\n")
        if line == LINES // 2:
            if fault == "hangs":
                time.sleep(3600)
            if fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "fails":
                print(f"{name}: a planted failure", flush=True)
                return 1
        time.sleep(TAKES[name] * float(scale) / LINES)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
