"""Times operator families on a GPU: `python -m benchmarks gpu norm --out DIR`.

Each family has its own process: an illegal access ends only that one. Its file is rewritten after
each row.
"""

import math
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from benchmarks.harness import report, suites
from benchmarks.harness.case import Case, without_compile
from benchmarks.harness.run import copy_of, run_case
from benchmarks.harness.timing import Call, Machine, interleaved
from fusedops.measuring.environment import environment, slug
from fusedops.measuring.ratios import spread

TIMED_BY = {
    "device": "The device's time with a cold L2. Its ceiling is the copy.",
    "graph": "The device's time in a replayed graph. No percentage: the cache is warm, so memory "
    "bandwidth is not its limit.",
    "host": "The host's time to enqueue a call. No percentage: it has no ceiling.",
}

COPY_BYTES, MATMUL_SIZE = 4 << 30, 8192
IN_QUEUE = 500  # at about 1000 launches the driver makes the host wait

Process = Callable[[Namespace, str], int]  # (args, family) -> exit status


def measure(args: Namespace, process: Process) -> int:
    """Times all of `args.families`. Returns 1 if a kernel was wrong or a process failed."""
    for name in args.families:
        matching(args, name)
    statuses = {name: process(args, name) for name in args.families}
    for name, status in statuses.items():
        if status not in (0, 1):
            print(f"{name}: its process ended with status {status}; its file keeps the rows so far")
    return int(any(statuses.values()))


def in_a_process(args: Namespace, name: str) -> int:
    """Times a family in a process of its own, which has `args.process_s` seconds."""
    command = [sys.executable, "-m", "benchmarks", "gpu", name, "--out", args.out, "--worker"]
    command += ["--match", args.match, "--seconds", str(args.seconds)]
    command += [] if args.compile else ["--no-compile"]
    try:
        return subprocess.run(command, timeout=args.process_s, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"{name}: more than {args.process_s:.0f} s", flush=True)
        return 1


def matching(args: Namespace, name: str) -> list[Case]:
    """Returns the family's rows whose title contains `args.match`."""
    cases = [case for case in suites.family(name).GPU_ROWS if args.match in case.title]
    if not cases:
        raise SystemExit(f"no row of {name} has {args.match!r} in its title")
    return cases if args.compile else [without_compile(case) for case in cases]


def measure_family(args: Namespace, name: str, machine: Machine) -> int:
    """Times a family in this process. Returns 1 if a kernel was wrong or the device is lost."""
    limits = ceilings(machine)
    keep_busy(machine, limits)  # record the clocks under load
    where = environment(torch.get_num_threads(), machine.device)
    path = Path(args.out, slug(where["device"]), f"{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"complete": False, "timed_by": TIMED_BY, "ceilings": limits}
    document |= {"environment": where | report.stamp()}
    rows, results = list[dict](), []
    for case in matching(args, name):
        result = run_case(case, args.seconds, machine, copy=case.clock == "device")
        results.append(result)
        added = list(report.rows(result, "torch's", ceiling=limits["copy"]["gb_per_s"]))
        rows += added
        print(report.text(added), flush=True)
        _write(path, document | {"rows": rows})
        if why := machine.lost():
            print(f"{name}: the device is lost after {case.title}: {why}", flush=True)
            return 1
    print(report.reasons(results), flush=True)
    _write(path, document | {"rows": rows, "complete": not args.match})
    return int(any(result.wrong() for result in results))


def _write(path: Path, document: dict) -> None:
    """Replaces the file atomically: an interrupted run leaves the old file."""
    new = path.with_suffix(".new")
    new.write_text(report.dump(document))
    new.replace(path)


def ceilings(
    machine: Machine,
    budget_s: float = 2.0,
    copy_bytes: int = COPY_BYTES,
    matmul_size: int = MATMUL_SIZE,
) -> dict[str, dict]:
    """Device-to-device copy and bfloat16 matmul, both with random data."""
    product = matmul(matmul_size, machine.device)
    calls = {"copy": copy_of(copy_bytes, machine.device), "matmul": product}
    timed = {name: (call, nullcontext) for name, call in calls.items()}
    seconds = interleaved(timed, budget_s, machine.clocks["device"])
    peaks = {name: spread(samples)._asdict() for name, samples in seconds.items()}
    flops = 2 * matmul_size**3
    copy_s, matmul_s = peaks["copy"]["median"], peaks["matmul"]["median"]
    peaks["copy"] |= {"bytes": copy_bytes, "gb_per_s": copy_bytes / copy_s / 1e9}
    peaks["matmul"] |= {"size": matmul_size, "flops": flops, "tflop_per_s": flops / matmul_s / 1e12}
    return peaks


def keep_busy(machine: Machine, peaks: dict[str, dict], seconds: float = 0.5) -> None:
    """Queues `seconds` of matmuls on the device, and returns while they run."""
    product = matmul(peaks["matmul"]["size"], machine.device)
    for _ in range(min(IN_QUEUE, math.ceil(seconds / peaks["matmul"]["median"]))):
        product()


def matmul(size: int, device: torch.device) -> Call:
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return lambda: a @ b
