"""Runs quick checks of every kernel family on a GPU: `python -m checks.gpu.smoke`.

Each family runs in a process of its own, so that a crash or an illegal access ends only that; a new
process then does the family's other checks. For each family: forward and backward in three dtypes
against float64, a captured graph that is replayed with other numbers, and a second stream.
OUT/smoke.jsonl gets each outcome at once. A later run does what it lacks. Exit status 1: a check
failed; 2: checks are left.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checks.gpu import families
from checks.gpu.runner import ROOT, end_line, whole_lines
from fusedops import backends

# Most of a first run is the compilation of Triton kernels, which one process does one by one.
AT_A_TIME, FAMILY_S = min(len(backends.FAMILIES), os.cpu_count() or 1), 240
ENDED, BEGUN, PASSED = "ended", "begun", "passed"
PROCESS, DEVICE = "process", "device"  # rows about a process, beside those of its checks
TRIES = 2  # for a check that ends its process
WORDS = 4000  # of an outcome's characters: Triton's errors may contain whole programs

_writing = threading.Lock()  # long rows are written in parts


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
    found = layer.beside(partial(_write, tensors, values), step)
    assert all(map(torch.equal, found, expected)), "other results than on the first stream"


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


def run_family(name: str, layer: Cuda | Cpu, left_out: frozenset[str] = frozenset()) -> int:
    """Prints a line of JSON when a check begins and when it ends. Returns how many failed."""
    failed = 0
    for title, check in checks(name, layer):
        if title in left_out:
            continue
        _say(name, title, BEGUN)
        try:
            check()
            outcome = PASSED
        except Exception as error:  # noqa: BLE001 all other checks still run
            outcome = f"{type(error).__name__}: {error}"[:WORDS]
            failed += 1
        _say(name, title, outcome)
        if failed and (why := layer.lost()):
            _say(name, DEVICE, why)
            return failed
    _say(name, ENDED, PASSED)
    return failed


def _say(family: str, check: str, outcome: str) -> None:
    print(json.dumps({"family": family, "check": check, "outcome": outcome}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m checks.gpu.smoke")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--family", choices=backends.FAMILIES, help="in this process")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    path = args.out / "smoke.jsonl"
    if args.family:
        layer = Cuda() if args.device == "cuda" else Cpu()
        return min(1, run_family(args.family, layer, _left_out(path, args.family)))
    end_line(path)
    todo = [name for name in backends.FAMILIES if not _has_ended(path, name)]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(partial(_family, path, args.device), todo))
    left = [name for name in backends.FAMILIES if not _has_ended(path, name)]
    bad = [row for row in latest(path) if row["outcome"] != PASSED]
    for row in bad:
        print(f"FAILED {row['family']} {row['check']}: {row['outcome']}"[:300])
    if left:
        print(f"checks are left: {', '.join(left)}")
    return 2 if left else int(bool(bad))


def rows(path: Path) -> list[dict[str, Any]]:
    """The outcomes so far."""
    return whole_lines(path)


def latest(path: Path) -> list[dict[str, Any]]:
    """Each check's last row. A check whose last row says that it began has ended its process."""
    found = {(row["family"], row["check"]): row for row in rows(path)}
    return [row for (_, check), row in found.items() if check not in (PROCESS, DEVICE)]


def _has_ended(path: Path, name: str) -> bool:
    return any(row["family"] == name and row["check"] == ENDED for row in rows(path))


def _left_out(path: Path, name: str) -> frozenset[str]:
    """Returns the checks that have an outcome, or have ended their process TRIES times."""
    own = [row for row in rows(path) if row["family"] == name]
    begun = Counter(row["check"] for row in own if row["outcome"] == BEGUN)
    known = {row["check"] for row in own if row["outcome"] != BEGUN}
    return frozenset(known | {check for check, tries in begun.items() if tries >= TRIES})


def _family(path: Path, device: str, name: str) -> None:
    """Runs processes of a family until it has ended, is killed, or makes no progress."""
    before = None
    while before != (known := _left_out(path, name)) and not _has_ended(path, name):
        before = known
        if _process(path, device, name) in (124, 137, -9):
            return


def _process(path: Path, device: str, name: str) -> int:
    """Runs a family's process, and appends its lines to the file as they come."""
    command = [sys.executable, "-m", "checks.gpu.smoke", "--out", str(path.parent)]
    command += ["--family", name, "--device", device]
    # In this process's group, which the runner ends as a whole.
    kill = ["timeout", "--foreground", "--signal=KILL", str(FAMILY_S)]
    log = path.with_name(f"smoke-{name}.log")
    count = 0
    with (
        log.open("a") as errors,
        subprocess.Popen(
            [*kill, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            if not line.startswith('{"family"'):
                print(f"{name}: {line.rstrip()}", flush=True)
                continue
            _append(path, line)
            row = json.loads(line)
            count += row["outcome"] == PASSED
            if row["outcome"] not in (PASSED, BEGUN):
                print(f"{name}: {row['check']}: {row['outcome'][:300]}", flush=True)
    print(f"{name}: {count} passed, exit status {child.returncode}", flush=True)
    if child.returncode not in (0, 1):
        last = " ".join(log.read_text(errors="replace").splitlines()[-3:]) or "no message"
        row = {"family": name, "check": PROCESS, "outcome": f"{child.returncode}: {last}"[:WORDS]}
        _append(path, json.dumps(row) + "\n")
    return child.returncode


def _append(path: Path, line: str) -> None:
    with _writing, path.open("a") as file:
        file.write(line)


if __name__ == "__main__":
    sys.exit(main())
