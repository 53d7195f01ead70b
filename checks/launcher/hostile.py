"""Tests with unusual arguments that equal fusedops cache keys imply equal Triton cache keys.

Each kernel's own calls are changed: one argument after the other gets every value of a list, and
then several get random ones. Triton's key is what Triton's own code computes. Each call is also
made both ways, and must reach the driver alike or raise the same error.
"""

import importlib
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from checks.launcher import stub as stubs

RANDOM = 150  # calls of each kernel with several changed arguments
BASES = 2  # calls of each kernel that are changed
INTEGERS = sorted(
    {
        sign * base + d
        for sign in (1, -1)
        for base in (0, 16, 2**31, 2**32, 2**63)
        for d in range(-2, 3)
    }
    | {1, 8, 32, 48, 2**64 - 16, 2**64 - 1, 2**64}
)
OTHERS: list[Any] = [None, True, False, 0.0, -0.0, 1.0, 16.0, float("nan"), 1e300, "", "1", "none"]
OTHERS += ["none\0", "folded", torch.bfloat16, (1, 16), (), [1], object, 1 + 0j, b"1"]
OPTIONS: dict[str, list[Any]] = {
    "num_warps": [1, 2, 4, 8, 4.0, True],
    "num_stages": [1, 2, 3],
    "maxnreg": [None, 0, 80, 128],
    "enable_fp_fusion": [True, False, 1, None],
    "num_ctas": [1, 2],
    "debug": [True, False, None],
    "nonsense": [1],
}

Call = tuple[tuple, dict[str, Any]]


class Stop(Exception):
    """Ends a launch when Triton has computed its key."""


class Subclass(torch.Tensor):
    """A tensor that Triton takes, and that might do anything."""


class Pointer:
    """What Triton takes for a tensor."""

    dtype = torch.float32

    def data_ptr(self) -> int:
        return 16


@dataclass
class Found:
    """calls: with keys of ours; refused: without; kernels: ours and Triton's keys of each."""

    calls: int = 0
    refused: int = 0
    launches: int = 0
    kernels: dict[str, tuple[int, int]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def tensors() -> list[Any]:
    """Tensors of several types and alignments, and what looks like one."""
    made: list[Any] = []
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int32,
        torch.uint8,
    ):
        memory = torch.empty(64, dtype=dtype)
        made += [memory, memory[1:], memory[16:], memory[:0]]
    made += [torch.empty(4, device="meta"), torch.empty(4).as_subclass(Subclass), Pointer()]
    return [*made, torch.nn.Parameter(torch.empty(4)), torch.empty(4).to_sparse()]


def calls_of(families: list[str]) -> dict[Any, list[Call]]:
    """The first calls of every kernel with its own set of keywords."""
    from fusedops.triton.launcher import Kernel

    found: dict[Any, dict[Any, Call]] = {}

    def keep(self: Kernel, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> None:
            none = tuple(name for name, value in kwargs.items() if value is None)
            found.setdefault(self, {}).setdefault((len(args), none), (args, kwargs))

        return launch

    subscript, Kernel.__getitem__ = Kernel.__getitem__, keep
    for family in families:
        for _, _, call in importlib.import_module(family).calls(True):
            call()
    Kernel.__getitem__ = subscript
    return {kernel: [*calls.values()][:BASES] for kernel, calls in found.items()}


def changed(jit: Any, base: Call) -> Iterator[Call]:
    """The base with other values of one argument or option, and then of several."""
    args, kwargs = base
    names = [p.name for p in jit.params]
    values = [*INTEGERS, *OTHERS, *tensors()]
    yield base
    for name in names:
        for value in values:
            yield with_values(names, base, {name: value})
    for name, some in OPTIONS.items():
        for value in some:
            yield args, kwargs | {name: value}
    options = [name for name in kwargs if name not in names]
    for order in itertools.islice(itertools.permutations(options), 6):
        yield args, {k: kwargs[k] for k in (*(k for k in kwargs if k in names), *order)}
    yield (*args, *range(len(names))), kwargs
    yield args[:-1] if args else args, kwargs
    yield args, dict([*kwargs.items()][1:])
    draw = random.Random(0)
    for _ in range(RANDOM):
        some = draw.sample(names, min(len(names), draw.randint(2, 5)))
        yield with_values(names, base, {name: draw.choice(values) for name in some})


def with_values(names: list[str], base: Call, values: dict[str, Any]) -> Call:
    args, kwargs = [*base[0]], dict(base[1])
    for name, value in values.items():
        at = names.index(name)
        if at < len(args):
            args[at] = value
        else:
            kwargs[name] = value
    return tuple(args), kwargs


@contextmanager
def keys_only() -> Iterator[list[Any]]:
    """Triton's launches end with its key, which is appended to the list."""
    from triton.runtime import jit

    found: list[Any] = []

    def stop(_: Any, specialization: Any, options: Any) -> None:
        found.append((repr(specialization), str(options)))
        raise Stop

    compute, jit.compute_cache_key = jit.compute_cache_key, stop
    try:
        yield found
    finally:
        jit.compute_cache_key = compute


def outcome(stub: stubs.Stub, launch: Callable[..., Any], call: Call) -> Any:
    """What reached the driver, or the error's type."""
    args, kwargs = call
    before = stub.last.launches
    stub.expect_nothing()
    try:
        compiled = launch((2, 3), *args, **kwargs)
        stub.expect(compiled.src.signature.values())
        launch((2, 3), *args, **kwargs)
    except Exception as error:  # noqa: BLE001, Triton's own, of any type
        return type(error)
    return stub.launch() if stub.last.launches > before else "nothing"


def examine(stub: stubs.Stub, found: Found, kernel: Any, bases: list[Call], launches: bool) -> None:
    name = f"{kernel.jit.fn.__module__.removeprefix('fusedops.triton.')}.{kernel.jit.fn.__name__}"
    theirs: dict[bytes, Any] = {}
    keyed = []
    with keys_only() as made:
        for call in itertools.chain.from_iterable(changed(kernel.jit, base) for base in bases):
            ours = kernel.key(*call[0], **call[1])
            if ours is None:
                found.refused += 1
                continue
            found.calls += 1
            made.clear()
            try:
                kernel.through_triton((1,), *call[0], **call[1])
            except Exception as error:  # noqa: BLE001, Triton's own, of any type
                key = made[0] if made else repr(error)
            if theirs.setdefault(ours, key) != key:
                found.wrong.append(f"{name}: one key of ours, two of Triton: {key}, {theirs[ours]}")
            keyed.append(call)
    found.kernels[name] = len(theirs), len({*theirs.values()})
    for call in keyed if launches else ():
        found.launches += 1
        wanted = outcome(stub, kernel.through_triton, call)
        got = [outcome(stub, kernel.launch, call) for _ in range(2)]
        if got != [wanted, wanted]:
            found.wrong.append(f"{name}: {got}, not {wanted}, of {call}")


def examine_all(families: list[str], launches: bool) -> Found:
    stub, found = stubs.install(), Found()
    stubs.compile_nothing()
    for kernel, bases in calls_of(families).items():
        examine(stub, found, kernel, bases, launches)
    return found


def main(todo: str) -> None:
    print(json.dumps(asdict(examine_all(*json.loads(todo)))))


if __name__ == "__main__":
    main(sys.argv[1])
