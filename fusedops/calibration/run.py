"""calibrate: times calls of our kernels and of torch's code, and writes their table."""

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from time import perf_counter

import torch

from fusedops.backends import FAMILIES, linear_of_any_size, unavailable
from fusedops.cache import version
from fusedops.calibration.choice import load, with_threads
from fusedops.calibration.contest import Case, measured_ratio, wrong
from fusedops.calibration.table import Table, TimedCall, cpu_kind, is_off, user_path
from fusedops.machine import usable_cpus
from fusedops.measuring.arguments import check_one_of, check_positive
from fusedops.measuring.environment import environment
from fusedops.measuring.progress import progress
from fusedops.testing import threads

__all__ = ["CALIBRATED", "Calibration", "calibrate", "cases", "measure", "with_earlier"]

# Families whose calls are timed, and their shares of the budget.
CALIBRATED = {"attention": 0.6, "cross_entropy": 0.2, "linear": 0.2}
# Variables that limit the instruction set: a table of an older CPU can be measured on a newer one.
LIMITS = (
    "FUSEDOPS_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
)
CHECKED = 2**20  # product of sizes of the largest call whose results are checked


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` measured, and the file that keeps it.

    seconds: how long it took. wrong: kinds of call whose results were wrong, and what differed;
    torch's code runs for them.
    """

    table: Table
    path: Path
    seconds: float
    wrong: dict[str, str]

    def __str__(self) -> str:
        lines = [f"calibrate: {self.seconds:.0f} s, table in {self.path}"]
        for family in self.table.families():
            ratios = [call.ratio for call in self.table.calls_of(family)]
            faster = sum(ratio <= 1 for ratio in ratios)
            lines.append(f"  {family}: ours is faster in {faster} of {len(ratios)} timed calls")
        for kind, why in self.wrong.items():
            lines.append(f"  {kind}: wrong results, so torch's code runs: {why}")
        return "\n".join(lines)


def calibrate(
    families: Iterable[str] | None = None,
    *,
    device: str = "cpu",
    path: str | Path | None = None,
    budget_s: float = 165,
) -> Calibration:
    """Times our kernels and torch's code on this machine, so that the faster ones run.

    The package ships tables that were measured on some CPUs. This function writes one for this
    machine into the cache folder, which this process and later ones use instead. Let nothing else
    run meanwhile. Calls are timed in pairs, with one thread and with all CPUs, and small calls'
    results are compared with float64 results.

    Args:
        families: the operators to time, all by default: "attention", "cross_entropy" (a
            head's loss with and without logits) and "linear".
        device: "cpu".
        path: another file for the table. Later processes do not use it.
        budget_s: seconds for all families; attention has 60 % of them. More calls are timed in
            more time.

    Returns:
        What was measured, and the file.

    Raises:
        TypeError: if families is not a list of names, or budget_s not a number.
        ValueError: for another family or device, a budget of 0 or less, or if FUSEDOPS_CALIBRATE
            is set.
        RuntimeError: if the kernels cannot run here, or there is no cache folder.
        OSError: if the file cannot be written.

    Example:
        >>> print(fusedops.calibrate())  # doctest: +SKIP
    """
    check_one_of("calibrate", "device", device, ("cpu",))
    check_positive("calibrate", "budget_s", budget_s)
    families = CALIBRATED if families is None else families
    if isinstance(families, str) or not isinstance(families, Iterable):
        raise TypeError(f"calibrate: families must be a list of names, got {families!r}")
    families = tuple(families)
    for family in families:
        check_one_of("calibrate", "families", family, CALIBRATED)
        if reason := unavailable(FAMILIES[family][0], device):
            raise RuntimeError(f"calibrate: the kernels cannot run: {reason}")
    if is_off():
        raise ValueError("calibrate: FUSEDOPS_CALIBRATE=off leaves all timed calls to torch")
    start, path = perf_counter(), Path(path) if path else user_path()
    counts = sorted({1, max(1, int(usable_cpus()))})
    about = environment(max(counts), torch.device(device))
    about |= {"fusedops": version(), "cpu": str(cpu_kind())}
    table = Table(about | {name: os.environ[name] for name in LIMITS if name in os.environ})
    mistakes: dict[str, str] = {}
    any_size = linear_of_any_size(True)
    try:
        turns = [(number, family) for number in counts for family in families]
        with torch.random.fork_rng(devices=()), progress("calibrate", len(turns)) as advance:
            for number, family in turns:
                end = perf_counter() + budget_s * CALIBRATED[family] / len(counts)
                with threads(number):
                    measure(_timed_cases(family, end), table, mistakes, end)
                advance()
    finally:
        linear_of_any_size(any_size)
    table = with_earlier(table, path)
    table.write(path)
    load(table)
    return Calibration(table, path, perf_counter() - start, mistakes)


def cases(families: Iterable[str]) -> Iterator[Case]:
    """The grids of some families."""
    for family in families:
        yield from import_module(f"fusedops.calibration.{family}").cases()


def _timed_cases(family: str, end: float) -> Iterator[Case]:
    """The family's grid in a random order, then random calls while there is time."""
    random, grid = Random(0), [*cases([family])]
    random.shuffle(grid)  # the calls before any end are spread over the whole grid
    yield from grid
    while perf_counter() < end:
        yield import_module(f"fusedops.calibration.{family}").draw(random)


def measure(
    timed: Iterable[Case], table: Table, mistakes: dict[str, str], end: float = math.inf
) -> None:
    """Adds calls to the table, with torch's number of threads.

    After `end`, a `perf_counter` time, only the first call of a kind is timed. Kinds of call with
    wrong results go into `mistakes`, and not into the table, with any number of threads.
    """
    for case in timed:
        kind = with_threads(case.kind, torch.get_num_threads())
        if perf_counter() > end and kind in table.calls:
            continue
        contest = case.make()
        if math.prod(case.sizes) <= CHECKED and (why := wrong(contest)):
            mistakes[case.kind] = f"{case.sizes}: {why}"
        table.calls.setdefault(kind, []).append(TimedCall(case.sizes, measured_ratio(contest)))
    for kind in mistakes:
        for number in (1, 2):
            table.calls.pop(with_threads(kind, number), None)


def with_earlier(table: Table, path: Path) -> Table:
    """The table with the families that only the file has, if it is this version's of this CPU."""
    try:
        earlier = Table.read(path)
    except (OSError, ValueError):
        return table
    fits = all(earlier.about.get(k) == table.about[k] for k in ("fusedops", "cpu"))
    return earlier.merged(table) if fits else table
