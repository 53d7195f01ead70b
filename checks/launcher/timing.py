"""Measures kernel launches' host time through Triton and through fusedops, with a stub driver.

The first call of each launch is recorded with its arguments, and repeated both ways in turns.
"""

import gc
import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

from checks.launcher import stub as stubs

ROUNDS, REPEATS = 60, 500


@dataclass(frozen=True)
class Time:
    """Medians of microseconds."""

    launch: str
    arguments: int
    triton: float
    ours: float


def cases() -> dict[str, Callable[[], object]]:
    """Calls, each named after the kernel that is timed."""
    from checks.machine_code import attention, cross_entropy, experts, quantized_linear

    bf16 = torch.bfloat16
    loss = partial(cross_entropy.forward, 128256, cross_entropy.PLAIN, bf16, bf16)
    decode = partial(attention.decode, bf16, 128, "causal")
    backward = partial(attention.backward, bf16, 128, "causal")
    _, _, mixture = next(iter(experts.calls(True)))
    return {
        "attention forward, forward_kernel": partial(attention.forward, bf16, 128, "causal"),
        "attention decode, forward_kernel": decode,
        "attention decode, join_kernel": decode,
        "attention backward, query_kernel": backward,
        "attention backward, key_kernel": backward,
        "cross entropy, forward_kernel": loss,
        "quantized linear int4, product_kernel": partial(
            quantized_linear.forward, "int4", 16, "bf16"
        ),
        "experts, product_kernel": mixture,
    }


def measured(quick: bool) -> list[Time]:
    from fusedops.triton.launcher import Kernel

    stubs.install()
    stubs.compile_nothing()
    launches: list[tuple] = []

    def keep(self: Kernel, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: launches.append((self, grid, args, kwargs))

    subscript, times = Kernel.__getitem__, []
    for name, call in cases().items():
        launches.clear()
        Kernel.__getitem__ = keep  # type: ignore[method-assign]
        call()
        Kernel.__getitem__ = subscript  # type: ignore[method-assign]
        wanted = name.rpartition(" ")[2]
        kernel, *launch = next(one for one in launches if one[0].jit.fn.__name__ == wanted)
        times.append(timed(name, 10 if quick else ROUNDS, kernel, *launch))
    return times


def timed(name: str, rounds: int, kernel: Any, grid: Any, args: tuple, kwargs: dict) -> Time:
    ways = {"triton": kernel.jit, "ours": kernel}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    order = random.Random(0)
    gc.disable()
    for _ in range(rounds):
        for way in order.sample(list(ways), 2):
            launched = ways[way]
            launched[grid](*args, **kwargs)
            start = perf_counter()
            for _ in range(REPEATS):
                launched[grid](*args, **kwargs)
            seconds[way].append((perf_counter() - start) / REPEATS)
    gc.enable()
    return Time(name, len(args) + len(kwargs), *(1e6 * median(seconds[way]) for way in ways))


def main(todo: str) -> None:
    print(json.dumps([asdict(time) for time in measured(*json.loads(todo))]))


if __name__ == "__main__":
    main(sys.argv[1])
