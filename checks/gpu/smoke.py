"""The first look at every family on a GPU: `python -m checks.gpu.smoke`.

Each family runs in a process of its own, so that a crash or an illegal access ends only that. For
each family: forward and backward in three dtypes against float64, a captured graph that is replayed
with other numbers, and a second stream. OUT/smoke.jsonl gets each outcome at once. A later run does
not repeat the families that came to an end.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from checks.gpu import families
from checks.gpu.runner import ROOT, end_line, whole_lines
from fusedops import backends

AT_A_TIME, FAMILY_S = 4, 75
ENDED = "ended"


class Cuda:
    """The GPU: streams and graphs."""

    device = torch.device("cuda")

    def captured(self, call: Callable[[], tuple]) -> tuple[Callable[[], object], tuple]:
        """Returns the replay of a captured call, and the results that it writes."""
        from contract.cuda_graphs import capture

        graph, results = capture(call)
        return graph.replay, results

    def beside(self, call: Callable[[], tuple]) -> tuple:
        """Runs a call on a second stream, while the first one is busy."""
        side, here = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(here)
        torch.cuda._sleep(10**7)
        with torch.cuda.stream(side):
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

    def beside(self, call: Callable[[], tuple]) -> tuple:
        return call()

    def lost(self) -> str | None:
        return None


def checks(name: str, layer: Cuda | Cpu) -> Iterator[families.Named]:
    yield from families.accuracy(name, families.backend_of(name, layer.device))
    for title, step, tensors in families.steps(name, layer.device):
        yield f"{title} on a second stream", partial(_second_stream, layer, step)
        yield f"{title} in a graph", partial(_graph, layer, step, tensors)


def _second_stream(layer: Cuda | Cpu, step: Callable[[], tuple]) -> None:
    expected, found = step(), layer.beside(step)
    assert all(map(torch.equal, found, expected)), "other results than on the first stream"


def _graph(layer: Cuda | Cpu, step: Callable[[], tuple], tensors: list[torch.Tensor]) -> None:
    replay, results = layer.captured(step)
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(0.5)
    replay()
    assert all(map(torch.equal, results, step())), "the replay gives other results than eager code"


def run_family(name: str, layer: Cuda | Cpu) -> int:
    """Prints a line of JSON for each check. Returns how many failed."""
    failed = 0
    for title, check in checks(name, layer):
        try:
            check()
            outcome = "passed"
        except Exception as error:  # noqa: BLE001 all other checks still run
            outcome = f"{type(error).__name__}: {error}"
            failed += 1
        print(json.dumps({"family": name, "check": title, "outcome": outcome}), flush=True)
        if failed and (why := layer.lost()):
            print(json.dumps({"family": name, "check": "device", "outcome": why}), flush=True)
            return failed
    print(json.dumps({"family": name, "check": ENDED, "outcome": "passed"}), flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m checks.gpu.smoke")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--family", choices=backends.FAMILIES, help="in this process")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.family:
        return min(1, run_family(args.family, Cuda() if args.device == "cuda" else Cpu()))
    path = args.out / "smoke.jsonl"
    ended = {row["family"] for row in rows(path) if row["check"] == ENDED}
    end_line(path)
    todo = [name for name in backends.FAMILIES if name not in ended]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        statuses = list(pool.map(partial(_family, path, args.device), todo))
    bad = [row for row in rows(path) if row["outcome"] != "passed"]
    for row in bad:
        print(f"FAILED {row['family']} {row['check']}: {row['outcome']}"[:300])
    return int(any(statuses) or bool(bad))


def rows(path: Path) -> list[dict]:
    """The outcomes so far."""
    return whole_lines(path)


def _family(path: Path, device: str, name: str) -> int:
    """Runs a family's process, and appends its lines to the file as they come."""
    command = [sys.executable, "-m", "checks.gpu.smoke", "--out", str(path.parent)]
    command += ["--family", name, "--device", device]
    kill = ["timeout", "--signal=KILL", str(FAMILY_S)]
    count = 0
    with subprocess.Popen(
        [*kill, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        for line in child.stdout:
            with path.open("a") as file:
                file.write(line)
            row = json.loads(line)
            count += row["outcome"] == "passed"
            if row["outcome"] != "passed":
                print(f"{name}: {row['check']}: {row['outcome'][:300]}", flush=True)
        errors = child.stderr.read()
    print(f"{name}: {count} passed, exit status {child.returncode}", flush=True)
    if child.returncode not in (0, 1):
        last = " ".join(errors.splitlines()[-3:]) or "no message"
        row = {"family": name, "check": "process", "outcome": f"{child.returncode}: {last}"}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return child.returncode


if __name__ == "__main__":
    sys.exit(main())
