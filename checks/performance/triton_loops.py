"""Compiles Triton's attention kernels for sm_90 and counts instructions in their loops.

In a process of their own, the launchers run on CPU tensors and choose the tiles, as in
checks/machine_code/launches.py.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial

from checks.machine_code import BUILD, ROOT, attention, launches, sass
from checks.performance.model import Loop, resident
from checks.performance.sass_loops import loops, loops_of, parsed

WIDTH = 128
RUNS = {
    "forward": attention.forward,
    "forward, few keys": attention.few_keys,
    "backward": attention.backward,
    "decode": attention.decode,
}


@dataclass(frozen=True)
class Counted:
    """A launched kernel: its tile of M queries by N keys, and its loops in the code's order."""

    compiler: str
    call: str  # of RUNS
    kernel: str
    gradients: str  # of a key_kernel: "dk", "dv" or both
    m: int
    n: int
    registers: int
    resident: int
    loops: list[Loop]
    ahead: int = 1  # tiles that are loaded ahead
    descriptors: int = 0  # that a block makes, for the copy engine
    together: bool = False  # whether blocks run in order across heads

    @property
    def edge(self) -> Loop:
        """The loop over tiles that need a mask; it has more instructions."""
        return max(self.loops, key=lambda loop: loop.instructions)

    @property
    def whole(self) -> Loop:
        return min(self.loops, key=lambda loop: loop.instructions)


def compiler() -> str:
    """For example, "triton 3.9.0"."""
    return _all()[0].compiler


@cache
def counted(call: str) -> tuple[Counted, ...]:
    """The kernels that a bfloat16 causal call with heads of width 128 launches."""
    return tuple(one for one in _all() if one.call == call)


@cache
def _all() -> tuple[Counted, ...]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    env |= {"TRITON_CACHE_DIR": str(BUILD / "triton"), "TRITON_DEFAULT_FP_FUSION": "1"}
    run = [sys.executable, "-m", __name__]
    return from_json(subprocess.run(run, env=env, check=True, stdout=subprocess.PIPE).stdout)


def from_json(text: str | bytes) -> tuple[Counted, ...]:
    found = json.loads(text)
    return tuple(Counted(**one | {"loops": [Loop(**x) for x in one["loops"]]}) for one in found)


def compile_all() -> Iterator[Counted]:
    import triton

    triton.runtime.driver.set_active(launches.NoGPU(90))
    calls = (
        (name, "", partial(run, attention.BF16, WIDTH, "causal")) for name, run in RUNS.items()
    )
    for name, _, launch in launches.recorded(calls):
        binary = launch.kernel.preload(launch.specialization)
        code, warps = sass.disassembled(binary.asm["cubin"]), launch.num_warps
        (facts,) = (found for _, found in sass.parse(code))
        outputs = "dk", "dv"
        yield Counted(
            compiler=f"triton {triton.__version__}",
            call=name,
            kernel=launch.kernel.__name__,
            gradients=" ".join(out for out in outputs if launch.types.get(out, "")[:1] == "*"),
            m=launch.constants.get("M", 0),
            n=launch.constants.get("N", 0),
            registers=facts.registers,
            resident=resident(facts.registers, facts.shared + binary.metadata.shared, warps),
            loops=[each for loop in loops(parsed(code)) for each in loops_of(loop, warps)],
            ahead=max(1, binary.metadata.num_stages - 1),
            together="together" in launch.types,
            descriptors=sum(one.name == "UTMACCTL" for one in parsed(code)),
        )


if __name__ == "__main__":
    print(json.dumps([asdict(one) for one in compile_all()]))
