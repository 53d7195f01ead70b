"""Runs quick checks of every kernel family on a GPU: `python -m checks.gpu.smoke`.

Each family runs in its own process, so that a crash or an illegal access ends only that family's
checks. Each family runs forward and backward in three dtypes against float64, replays a captured
graph with other numbers, and runs on a second stream. The exit status is 1 if a check failed.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from checks.gpu import ROOT, families

# Most of a first run is the compilation of Triton kernels, which one process does one by one.
AT_A_TIME, FAMILY_S = min(len(families.ON_GPUS), os.cpu_count() or 1), 240
WORDS = 4000  # characters shown of an error: Triton's errors may contain whole programs


class Cuda:
    """The GPU: streams and graphs."""

    device = torch.device("cuda")

    def captured(self, call: Callable[[], tuple]) -> tuple[Callable[[], object], tuple]:
        """Returns the replay of a captured call, and the results that it writes."""
        from contract.cuda_graphs import capture

        graph, results = capture(call)
        return graph.replay, results

    def beside(self, write: Callable[[], None], call: Callable[[], tuple]) -> tuple:
        """Writes the inputs late on a second stream, and then runs a call there."""
        side, here = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            torch.cuda._sleep(10**7)  # cycles, several milliseconds
            write()
            results = call()
        here.wait_stream(side)
        torch.cuda.synchronize()
        return results

    def lost(self) -> str | None:
        from benchmarks.harness.cuda import lost

        return lost()


class Cpu:
    """A device without streams and graphs, for the tests of this file."""

    device = torch.device("cpu")

    def captured(self, call: Callable[[], tuple]) -> tuple[Callable[[], object], tuple]:
        results = call()

        def replay() -> None:
            for old, new in zip(results, call(), strict=True):
                old.copy_(new)

        return replay, results

    def beside(self, write: Callable[[], None], call: Callable[[], tuple]) -> tuple:
        write()
        return call()

    def lost(self) -> str | None:
        return None


def checks(name: str, layer: Cuda | Cpu) -> Iterator[families.Named]:
    """A family's checks, the most important ones first."""
    backend = families.backend_of(name, layer.device)
    yield from families.accuracy(name, backend, families.DTYPES[:1])
    for title, step, tensors in families.steps(name, layer.device):
        yield f"{title} on a second stream", partial(_second_stream, layer, step, tensors)
        yield f"{title} in a graph", partial(_graph, layer, step, tensors)
    yield from families.accuracy(name, backend, families.DTYPES[1:])


def _second_stream(layer: Cuda | Cpu, step: Callable[[], tuple], tensors: Sequence[Tensor]) -> None:
    """A kernel on another stream would read the zeros that are there before."""
    expected, values = step(), [t.detach().clone() for t in tensors]
    with torch.no_grad():
        torch._foreach_zero_([t.detach() for t in tensors])
    actual = layer.beside(partial(_write, tensors, values), step)
    assert all(map(torch.equal, actual, expected)), "other results than on the first stream"


@torch.no_grad()
def _write(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for t, value in zip(tensors, values, strict=True):
        t.copy_(value)


def _graph(layer: Cuda | Cpu, step: Callable[[], tuple], tensors: Sequence[Tensor]) -> None:
    replay, results = layer.captured(step)
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(0.5)
    replay()
    assert all(map(torch.equal, results, step())), "the replay gives other results than eager code"


def run_family(name: str, layer: Cuda | Cpu) -> int:
    """Prints each check's outcome. Returns how many failed."""
    failed = 0
    for title, check in checks(name, layer):
        try:
            check()
            outcome = "passed"
        except Exception as error:  # noqa: BLE001 all other checks still run
            outcome = f"FAILED: {type(error).__name__}: {error}"[:WORDS]
            failed += 1
        print(f"{name}, {title}: {outcome}", flush=True)
        if failed and (why := layer.lost()):
            print(f"{name}: the device is lost: {why}", flush=True)
            break
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m checks.gpu.smoke")
    parser.add_argument("--family", choices=families.ON_GPUS, help="in this process")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(arguments)
    if args.family:
        layer = Cuda() if args.device == "cuda" else Cpu()
        return min(1, run_family(args.family, layer))
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        statuses = [*pool.map(partial(_process, args.device), families.ON_GPUS)]
    failed = [name for name, status in zip(families.ON_GPUS, statuses, strict=True) if status]
    print(f"failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


def _process(device: str, name: str) -> int:
    """Runs a family in a process of its own, for FAMILY_S seconds at most."""
    command = [sys.executable, "-m", "checks.gpu.smoke", "--family", name, "--device", device]
    # In this process's group, which `timeout` in run.sh ends as a whole.
    limit = ["timeout", "--foreground", "--signal=KILL", str(FAMILY_S)]
    status = subprocess.run([*limit, *command], cwd=ROOT, check=False).returncode
    print(f"{name}: exit status {status}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
