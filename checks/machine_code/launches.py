"""Compiles the Triton kernels that an operator family launches, for a given GPU architecture.

The launchers themselves run, on CPU tensors, with a driver that has an architecture but no GPU. A
hook stops each launch before it compiles, and records what Triton derived from the arguments; that
is compiled afterwards. So nothing here duplicates a signature, an alignment or a launcher's choice.

TRITON_INTERPRET=1 replaces triton.jit, and a process has only one triton: `compiled` starts another
process.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from checks.machine_code import BUILD, ROOT
from checks.machine_code.gates import Compiled, Demand
from checks.machine_code.sass import Resources, read
from fusedops import backends

ARCHITECTURES = (80, 90, 100)
# The families with Triton kernels; their cases are in modules of the same names.
FAMILIES = tuple(
    f"checks.machine_code.{family}"
    for family in backends.FAMILIES
    if find_spec(f"fusedops.triton.{family}")
)

Call = tuple[str, str, Callable[[], object]]  # variant, case, and the launching call


@dataclass(frozen=True)
class Launch:
    """A kernel as its launcher wants it compiled."""

    kernel: Any  # triton.JITFunction
    types: dict[str, str]  # each argument's type: "*bf16", "i32", "constexpr"
    aligned: frozenset[str]  # arguments that are multiples of 16
    constants: dict[str, Any]
    num_warps: int
    specialization: str  # the whole specialisation, as Triton writes it


class NoGPU:
    """A Triton driver that knows only the architecture to compile for."""

    def __init__(self, arch: int):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # Triton keeps a cache per device

    def get_current_stream(self, device: int) -> int:
        return 0


class Recorder:
    """A compile hook that records each launch once, with its first case."""

    def __init__(self) -> None:
        self.launches: dict[str, tuple[str, str, Launch]] = {}
        self.case = ("", "")

    def __call__(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        self.launches.setdefault(f"{fn.name} {key}", (*self.case, launch_of(fn, compile)))
        return True  # tells Triton to compile and run nothing


def recorded(calls: Iterable[Call]) -> list[tuple[str, str, Launch]]:
    """Returns the launches of all calls, each with its variant and case."""
    from triton import knobs

    recorder = knobs.runtime.jit_cache_hook = Recorder()
    for variant, case, call in calls:
        recorder.case = variant, case
        call()
    knobs.runtime.jit_cache_hook = None
    return list(recorder.launches.values())


def launch_of(fn: Any, compile: dict[str, Any]) -> Launch:
    names = fn.jit_function.arg_names
    return Launch(
        kernel=fn.jit_function,
        types=compile["signature"],
        aligned=frozenset(names[at] for (at,), facts in compile["configs"][0].items() if facts),
        constants={names[at]: value for (at,), value in compile["constants"].items()},
        num_warps=compile["num_warps"],
        specialization=compile["specialization_data"],
    )


def compile_launch(launch: Launch) -> Resources:
    binary = launch.kernel.preload(launch.specialization)
    (resources,) = read(binary.asm["cubin"]).values()
    return replace(resources, shared=resources.shared + binary.metadata.shared)


def compile_family(family: Any, arch: int, quick: bool) -> Iterator[Compiled]:
    """Compiles every launch of a family: a module with `calls(quick)` and `demand(launch)`."""
    import triton

    triton.runtime.driver.set_active(NoGPU(arch))
    version = f"triton {triton.__version__}"
    for variant, case, launch in recorded(family.calls(quick)):
        resources, name = compile_launch(launch), launch.kernel.__name__
        row = version, name, variant, case, f"sm_{arch}"
        yield Compiled(*row, resources, family.demand(launch), launch.num_warps)


def compiled(
    family: str, arch: int, path: Path | None = None, quick: bool = False
) -> list[Compiled]:
    """Returns every launch of a family, under the triton in folder `path` or the installed one."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    first = [str(path.resolve(strict=True))] if path else []
    env["PYTHONPATH"] = os.pathsep.join([*first, str(ROOT), env.get("PYTHONPATH", "")])
    env |= {"TRITON_CACHE_DIR": str(BUILD / "triton"), "TRITON_DEFAULT_FP_FUSION": "1"}
    todo = json.dumps([family, arch, quick])
    run = [sys.executable, "-m", __name__, todo]
    out = subprocess.run(run, env=env, check=True, stdout=subprocess.PIPE).stdout
    return [from_json(values) for values in json.loads(out)]


def from_json(values: dict[str, Any]) -> Compiled:
    resources = values["resources"] | {"tensor_cores": tuple(values["resources"]["tensor_cores"])}
    return Compiled(
        **values | {"resources": Resources(**resources), "demand": Demand(**values["demand"])}
    )


def main(todo: str) -> None:
    family, arch, quick = json.loads(todo)
    compiled = compile_family(importlib.import_module(family), arch, quick)
    print(json.dumps([asdict(kernel) for kernel in compiled]))


if __name__ == "__main__":
    main(sys.argv[1])
