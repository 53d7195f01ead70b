"""Checks predicted memory of batches that a sweep skips: `python -m benchmarks sweep-memory`.

Sweeps training steps of the four models of `sweep` in float32 within 1 GiB. Every point that is
skipped as too large then runs in a process of its own, which measures its peak.
"""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial

import torch
import transformers

from benchmarks.figures.sweeps import LIMIT
from benchmarks.harness import goals, report
from benchmarks.workloads.sweep import QUICK, Settings, configs, swept, trained
from fusedops.measuring.memory import measure_memory
from fusedops.sweeping.modes import runner
from fusedops.sweeping.run import WARMUP
from fusedops.sweeping.variants import variant

CHILD = "benchmarks.workloads.sweep_memory"
NEAR = 0.15  # the largest error of a skipped point's prediction
BATCHES = 1, 2, 4, 16  # the last one is predicted from those before it


def measure(args: Namespace) -> int:
    """Returns the exit status: 1 if a prediction is too far off."""
    settings = QUICK if args.quick else Settings()
    rows = [] if args.quick else [*_skipped(settings)]
    verdicts = _goals(rows)
    report.save(args, rows, verdicts, settings=asdict(settings))
    return int(any(not verdict["met"] for verdict in verdicts))


def _skipped(settings: Settings) -> Iterator[dict]:
    """Each point that a sweep within LIMIT skips: its predicted peak, and the measured one."""
    for name in configs(settings):
        small = {"batch": BATCHES, "budget_s": 120.0, "memory_limit": LIMIT}
        sweep = swept(name, torch.float32, settings, **small)
        print(f"{name}\n{sweep}", flush=True)
        for row in sweep.rows:
            if row.skipped_reason.startswith("its predicted peak"):
                point = {"model": name, "variant": row.variant, "batch": row.batch}
                peak = _peak(**point)
                print(f"{point}: predicted {row.predicted_bytes}, measured {peak}", flush=True)
                yield point | {"predicted_bytes": row.predicted_bytes, "peak_bytes": peak}


def _peak(model: str, variant: str, batch: int) -> int:
    """The peak of one point, in a process of its own."""
    command = [sys.executable, "-m", CHILD, model, variant, str(batch)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(run.stdout.splitlines()[-1])


def _child(name: str, variant_name: str, batch: str) -> None:
    """Prints the peak of one step, measured as a sweep measures it."""
    transformers.logging.set_verbosity_error()
    settings, chosen = Settings(), variant(variant_name, "train")
    asked = trained(name, torch.float32, settings)
    model, optimizer = chosen.model(asked["model"]), asked["optimizer"]
    step = runner("train", model, optimizer, chosen, 0)
    run = partial(step, asked["make_batch"](int(batch), settings.length))
    for _ in range(WARMUP):
        run()
    print(measure_memory(run, model=model, optimizer=optimizer).peak)


def _goals(skipped: Sequence[dict]) -> list[dict]:
    if not skipped:
        return []
    errors = [abs(row["predicted_bytes"] / row["peak_bytes"] - 1) for row in skipped]
    title = f"largest error of {len(errors)} skipped points' predicted peaks"
    return [report.goal(title, goals.SHARE, NEAR, max(errors), at_most=True)]


if __name__ == "__main__":
    _child(*sys.argv[1:])
