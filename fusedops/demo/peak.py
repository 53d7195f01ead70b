"""Measures one contender's peak memory during training, in a new process."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from fusedops.demo.training import CONTENDERS, Settings, Trainer, batches

CHILD = "import sys; from fusedops.demo.peak import main; main(*sys.argv[1:])"
STEPS = 3  # from the second step on, memory holds the optimizer's state and old gradients


def measure_peaks(settings: Settings, threads: int) -> dict[str, int]:
    """Peak resident bytes of each contender. The processes run in parallel: nothing is timed."""
    few = json.dumps(asdict(replace(settings, steps=STEPS)))
    command = [sys.executable, "-c", CHILD]
    processes = {
        name: subprocess.Popen([*command, name, few, str(threads)], stdout=subprocess.PIPE)
        for name in CONTENDERS
    }
    outputs = {name: process.communicate()[0] for name, process in processes.items()}
    failed = [name for name, process in processes.items() if process.returncode]
    if failed:
        raise RuntimeError(f"demo: measuring the peak memory of {', '.join(failed)} failed")
    return {name: int(output.split()[-1]) for name, output in outputs.items()}


def peak_bytes() -> int:
    """This process's peak memory, from the kernel (VmHWM).

    Not ru_maxrss: a child starts with its parent's value, which here is a large training process.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main(contender: str, settings: str, threads: str) -> None:
    """Runs in the child: trains, then prints its peak as the last word."""
    torch.set_num_threads(int(threads))
    chosen = Settings(**json.loads(settings))
    trainer = Trainer(contender, chosen)
    for tokens in batches(chosen):
        trainer.step(tokens)
    print(peak_bytes())
