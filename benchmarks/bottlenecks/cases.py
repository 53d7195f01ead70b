"""Steps with known bottlenecks, and controls for most of them.

A case's function gets a generator for its sizes and whether it is the control, and returns what is
profiled. It runs in a process of its own, so it may set threads and the allocator.
"""

import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fusedops import keep_freed_memory
from fusedops.machine import cpus

__all__ = ["CASES", "PAIRS", "Case", "Subject"]


@dataclass
class Subject:
    """Arguments of fusedops.profile, and `end`, which stops what the case started."""

    step: Callable[[Any], Any]
    data: Any
    options: dict[str, Any] = field(default_factory=dict)
    end: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Case:
    """bounds: what the verdict must be. control: what the control's must not have, or `bounds`."""

    make: Callable[[Random, bool], Subject]
    bounds: tuple[str, ...]
    control: tuple[str, ...] = ()

    @property
    def lost(self) -> tuple[str, ...]:
        return self.control or self.bounds


class Samples(torch.utils.data.Dataset):
    """Rows of random numbers."""

    def __init__(self, count: int, width: int) -> None:
        self.rows = torch.randn(256, width)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index % 256]


class Collate:
    """Stacks samples after a sleep."""

    def __init__(self, sleep: float) -> None:
        self.sleep = sleep

    def __call__(self, samples: list[Tensor]) -> Tensor:
        time.sleep(self.sleep)
        return torch.stack(samples)


def burn(_: int) -> None:
    """Keeps a worker's CPUs busy for as long as it lives. hashlib computes without the GIL."""
    block = bytes(2**24)

    def forever() -> None:
        while True:
            hashlib.sha256(block)

    for _thread in range(cpus()):
        threading.Thread(target=forever, daemon=True).start()


def idle(_: int) -> None:
    """Does nothing at a worker's start: the control of `burn`."""


def products(random: Random, size: int = 1024, rows: int = 1024) -> Callable[[Tensor], Any]:
    """A step of matrix products with fixed weights, whose results go to warm memory."""
    weights = [torch.randn(size, size) for _ in range(2)]
    out = torch.empty(rows, size)

    def step(batch: Tensor) -> None:
        for weight in weights:
            torch.mm(batch, weight, out=out[: len(batch)])

    return step


def repeated(*batches: Any) -> Iterator[Any]:
    """The same batches again and again: a loader that costs nothing."""
    while True:
        yield from batches


def slow_loader(random: Random, control: bool) -> Subject:
    sleep = 0.0 if control else random.uniform(0.025, 0.035)
    data = DataLoader(Samples(10**6, 512), batch_size=512, collate_fn=Collate(sleep))
    return Subject(products(random, 512, 512), data)


def contention(random: Random, control: bool) -> Subject:
    data = DataLoader(
        Samples(10**6, 1024),
        batch_size=random.choice([384, 512, 640]),
        num_workers=2,
        worker_init_fn=idle if control else burn,
        collate_fn=Collate(0.0),
    )
    return Subject(products(random, 1024, 640), data)


def launch(random: Random, control: bool) -> Subject:
    rows, width = (4096, 512) if control else (2, 8)
    count = 8 if control else random.randrange(180, 240)
    keep_freed_memory()

    def step(batch: Tensor) -> None:
        for _ in range(count):
            batch = batch + 1.0

    return Subject(step, repeated(torch.randn(rows, width)))


def bandwidth(random: Random, control: bool) -> Subject:
    keep_freed_memory()
    size = 2**14 if control else 2**24
    other = torch.full((size,), 1.0)

    def step(batch: Tensor) -> None:
        for _ in range(2000 if control else 4):
            batch.mul_(other[: len(batch)])

    return Subject(step, repeated(torch.full((size,), random.random())))


def compute(random: Random, control: bool) -> Subject:
    if control:
        weight = torch.randn(16, 16)

        def tiny(batch: Tensor) -> None:
            for _ in range(300):
                batch @ weight

        return Subject(tiny, repeated(torch.randn(2, 16)))
    rows = random.choice([768, 1024, 1280])
    return Subject(products(random, 1024, rows), repeated(torch.randn(rows, 1024)))


def kernels(random: Random, control: bool) -> Subject:
    """Gathers single numbers from all over 64 MiB; the control copies half of the table."""
    keep_freed_memory()
    table = torch.randn(2**24)
    count = random.choice([2**19, 2**20])
    out = torch.empty(count)

    def gather(batch: Tensor) -> None:
        torch.gather(table, 0, batch, out=out[: len(batch)])

    def copy(batch: Tensor) -> None:
        for _ in range(16):
            table[: 2**23].copy_(table[2**23 :])

    if control:
        return Subject(copy, repeated(torch.zeros(count, dtype=torch.long)))
    return Subject(gather, repeated(torch.randint(2**24, (count,))))


def allocation(random: Random, control: bool) -> Subject:
    """Results of 64 or 68 MiB, which the C library maps freshly each time unless it keeps them."""
    if control:
        keep_freed_memory()
    batch = torch.full((random.choice([2**24, 2**24 + 2**20]),), 1.0)

    def step(batch: Tensor) -> None:
        for _ in range(3):
            batch + 1.0

    return Subject(step, repeated(batch))


def threads(random: Random, control: bool) -> Subject:
    """Many small parallel operators: each ends with all threads waiting for the slowest."""
    keep_freed_memory()
    torch.set_num_threads(cpus() if control else 8 * cpus())
    size = random.choice([2**17, 2**18])

    def step(batch: Tensor) -> None:
        for _ in range(100):
            batch.add_(1.0)

    return Subject(step, repeated(torch.zeros(size)))


def balanced(random: Random, control: bool) -> Subject:
    """Products, traffic, a gather and small operators, so that nothing limits it alone."""
    keep_freed_memory()
    weight, left, out = torch.randn(512, 512), torch.randn(1024, 512), torch.empty(1024, 512)
    big, other = torch.zeros(2**24), torch.ones(2**22)
    table, places = torch.randn(2**24), torch.randint(2**24, (2**17,))
    gathered, count = torch.empty(2**17), random.randrange(1500, 1700)

    def step(batch: Tensor) -> None:
        torch.mm(left, weight, out=out)
        for part in big.view(4, -1)[:2]:
            part.mul_(other)
        torch.gather(table, 0, places, out=gathered)
        small = batch
        for _ in range(count):
            small = small + 1.0

    return Subject(step, repeated(torch.randn(2, 8)))


def noise(random: Random, control: bool) -> Subject:
    """Another program that spins on every CPU: the verdict is that of the same step alone."""
    spin = "while True: pass"
    spinners = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(cpus())]
    rows = random.choice([768, 1024])
    subject = Subject(products(random, 1024, rows), repeated(torch.randn(rows, 1024)))
    subject.end = lambda: [spinner.kill() for spinner in spinners] and None
    return subject


def slow_loader_and_launch(random: Random, control: bool) -> Subject:
    """A loop of small operators, and a loader that takes as long."""
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(random.randrange(600, 700))))

    def step(batch: Tensor) -> None:
        with torch.no_grad():
            layers(batch)

    start = time.thread_time()
    for _ in range(10):
        step(torch.randn(2, 8))
    length = (time.thread_time() - start) / 10
    data = DataLoader(Samples(10**6, 8), batch_size=2, collate_fn=Collate(0 if control else length))
    return Subject(step, data)


CASES = {
    "slow loader": Case(slow_loader, ("input",)),
    "contention": Case(contention, ("input",)),
    "launch": Case(launch, ("launch",)),
    "bandwidth": Case(bandwidth, ("memory",)),
    "compute": Case(compute, ("compute",)),
    "slow kernel": Case(kernels, ("kernels",)),
    "allocation": Case(allocation, ("allocation",)),
    "oversubscribed": Case(threads, ("threads",)),
    "nothing": Case(balanced, ("unknown",)),
    "noise": Case(noise, ("compute",)),
}
PAIRS = {"slow loader and launch": Case(slow_loader_and_launch, ("input", "launch"), ("input",))}
WITHOUT_CONTROL = ("nothing", "noise")
