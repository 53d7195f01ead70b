"""Runs every kernel for compute-sanitizer; with `--rows`, one benchmark row per family for ncu."""

import sys
from dataclasses import replace

import torch

from benchmarks.harness.gpu import by_doubt
from checks.gpu import families
from fusedops import backends

LARGEST = 10**8  # elements: ncu saves and restores the memory that a kernel writes
ROW = {"cross_entropy": 1}  # whose first row consists of a hundred launches, most of them torch's


def every_kernel(device: torch.device) -> int:
    """Calls each variant of each family's kernels with few numbers. Returns how many raised."""
    failed = 0
    for name in by_doubt(backends.FAMILIES):
        for title, run in families.kernels(name, device):
            try:
                run()
            except Exception as error:  # noqa: BLE001 all other kernels still run
                print(f"{name}, {title}: {type(error).__name__}: {error}", flush=True)
                failed += 1
        print(f"{name}: done", flush=True)
    return failed


def first_rows(device: torch.device) -> None:
    """Calls our contender of each family's first benchmark row (or ROW), for the profiler."""
    from benchmarks.harness import suites
    from benchmarks.harness.case import bind, grad_mode
    from benchmarks.harness.expected import leaves
    from benchmarks.harness.goals import OURS

    for name in by_doubt(backends.FAMILIES):
        case = suites.family(name).GPU_FIRST[ROW.get(name, 0)]
        case = replace(case, shape=tuple(min(n, LARGEST) for n in case.shape))
        inputs = case.operation.inputs(case.shape, case.dtype, device)
        run = case.contenders()[OURS].prepare(*inputs)
        with grad_mode(case.mode):
            outputs = run()
            grads = [torch.ones_like(t) for t in outputs] if isinstance(outputs, tuple) else None
            grads = [torch.ones_like(outputs)] if isinstance(outputs, torch.Tensor) else grads
            call = bind(run, case.mode, leaves(inputs), grads)
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()
        print(f"{name}: {case.title}", flush=True)


def main(arguments: list[str]) -> int:
    device = torch.device("cpu" if "--cpu" in arguments else "cuda")
    if "--rows" in arguments:
        first_rows(device)
        return 0
    return min(1, every_kernel(device))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
