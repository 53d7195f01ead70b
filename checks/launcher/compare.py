"""Launches each Triton kernel through Triton and through fusedops, and compares the launches."""

import functools
import importlib
import json
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from checks.launcher import stub as stubs


@dataclass
class Found:
    """The launches that were compared; kernels by variant count."""

    launches: int = 0
    variants: dict[str, list[int]] = field(default_factory=dict)  # kernel -> its handles
    arguments: dict[str, int] = field(default_factory=dict)  # kernel -> how many it is called with
    wrong: list[str] = field(default_factory=list)


def compare(
    stub: stubs.Stub, found: Found, kernel: Any, grid: Any, *args: Any, **kwargs: Any
) -> Any:
    """Makes one launch both ways, with the same arguments."""
    name = f"{kernel.jit.fn.__module__.removeprefix('fusedops.triton.')}.{kernel.jit.fn.__name__}"
    found.launches += 1
    stub.stream = 0x7000 + found.launches
    stub.expect_nothing()
    compiled = kernel.through_triton(grid, *args, **kwargs)
    stub.expect(compiled.src.signature.values())
    kernel.through_triton(grid, *args, **kwargs)
    wanted = stub.launch()
    kernel.launch(grid, *args, **kwargs)  # unknown, perhaps
    launches, through_triton = stub.last.launches, stub.last.through_triton
    made = kernel.launch(grid, *args, **kwargs)
    got = stub.launch()
    if (stub.last.launches, stub.last.through_triton) != (launches + 1, through_triton):
        found.wrong.append(f"{name}: goes through Triton each time")
    if got != wanted:
        found.wrong.append(f"{name}: {got}, not {wanted}")
    if made is not compiled:
        found.wrong.append(f"{name}: another variant")
    handles = found.variants.setdefault(name, [])
    if got.function not in handles:
        handles.append(got.function)
    found.arguments[name] = len(args) + len(kwargs)
    return made


def compare_families(families: list[str], quick: bool) -> Found:
    stub, found = stubs.install(), Found()
    stubs.compile_nothing()
    modules = [importlib.import_module(name) for name in families]
    from fusedops.triton.launcher import Kernel

    Kernel.__getitem__ = lambda self, grid: functools.partial(compare, stub, found, self, grid)
    for module in modules:
        for _, _, call in module.calls(quick):
            call()
    return found


def main(todo: str) -> None:
    print(json.dumps(asdict(compare_families(*json.loads(todo)))))


if __name__ == "__main__":
    main(sys.argv[1])
