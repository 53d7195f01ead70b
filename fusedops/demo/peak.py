"""Measures each training setup's peak memory, and torch.compile's compile time, in new processes.

torch.compile compiles there for the first time; in this process it finds the code in its cache.
"""

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch

from fusedops.demo.training import COMPILED, Settings, Trainer, batches

CHILD = "import sys; from fusedops.demo.peak import main; main(*sys.argv[1:])"
STEPS = 3  # from the second step on, memory holds the optimizer's state and old gradients


class Fresh(NamedTuple):
    """Peak resident bytes; seconds of compiling, if the contender is torch.compile."""

    peak_bytes: int
    compile_s: float | None


def in_fresh_processes(
    contenders: Iterable[str], settings: Settings, threads: int
) -> dict[str, Fresh]:
    """The processes run in parallel: no step is timed."""
    few = json.dumps(asdict(replace(settings, steps=STEPS)))
    command = [sys.executable, "-c", CHILD]
    processes = {
        name: subprocess.Popen([*command, name, few, str(threads)], stdout=subprocess.PIPE)
        for name in contenders
    }
    outputs = {name: process.communicate()[0] for name, process in processes.items()}
    failed = [name for name, process in processes.items() if process.returncode]
    if failed:
        raise RuntimeError(f"demo: measuring the peak memory of {', '.join(failed)} failed")
    return {name: Fresh(*json.loads(text.split()[-1])) for name, text in outputs.items()}


def peak_bytes() -> int:
    """This process's peak memory, from the kernel (VmHWM).

    Not ru_maxrss: a child starts with its parent's value, which here is a large training process.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main(contender: str, settings: str, threads: str) -> None:
    """Runs in the child: trains, then prints its numbers as the last word."""
    torch.set_num_threads(int(threads))
    chosen = Settings(**json.loads(settings))
    trainer = Trainer(contender, chosen)
    compiled = trainer.compile(next(batches(chosen))) if contender == COMPILED else None
    for tokens in batches(chosen):
        trainer.step(tokens)
    print(json.dumps([peak_bytes(), compiled], separators=(",", ":")))
