"""Reads a kernel's registers, memory accesses and tensor-core use from its machine code."""

import functools
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from checks.machine_code import BUILD, sass_loops

USAGE = re.compile(r"^ Function (\S+):\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", re.M)
CODE = re.compile(r"^\s*Function : (\S+)\n(.*?)(?=^\s*Function : |\Z)", re.M | re.S)
OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?([A-Z][\w.]*)")  # @: its predicate

SHORTEST = 40  # instructions of a loop over a row's elements
RESERVED_SHARED = 1024  # shared memory that the system reserves per block, since sm_90


@dataclass(frozen=True)
class Resources:
    """One kernel's resources. Instructions are counted in the code, not as executed."""

    registers: int
    shared: int  # static bytes per block
    local: int  # bytes per thread: spilled registers, and arrays that do not fit in registers
    spills: int  # instructions that load or store local memory
    loads: int  # of at least 16 bytes of global memory
    stores: int
    tensor_cores: tuple[str, ...]  # tensor core instructions
    intensity: float = 0  # FLOP per loaded byte, in the loop with the fewest; 0 without such a loop
    early: int = 0  # wide loads in flight under a loop's exponentials, in the loop with the fewest


def read(binary: bytes) -> dict[tuple[str, str], Resources]:
    """(architecture, mangled kernel) -> its resources, for each kernel in a cubin or object."""
    key = hashlib.sha256(binary + _own_hash()).hexdigest()
    cached = BUILD / "sass" / f"{key}.json"
    if not cached.exists():
        kernels = [[*name, asdict(r)] for name, r in parse(disassembled(binary))]
        write(cached, json.dumps(kernels).encode())
    return {
        (arch, name): Resources(**{**r, "tensor_cores": tuple(r["tensor_cores"])})
        for arch, name, r in json.loads(cached.read_text())
    }


def parse(text: str) -> Iterator[tuple[tuple[str, str], Resources]]:
    """Parses `cuobjdump -sass -res-usage`: per architecture, all usage, then code."""
    for part in re.split(r"^Resource usage:", text, flags=re.M)[1:]:
        usages, arch, code = re.split(r"^\s*code for (sm_\w+)", part, flags=re.M)
        usage = {name: numbers for name, *numbers in USAGE.findall(usages)}
        for name, body in CODE.findall(code):
            yield (arch, name), _resources(arch, [int(n) for n in usage[name]], body)


def _resources(arch: str, usage: Sequence[int], code: str) -> Resources:
    registers, stack, shared, local = usage
    count = Counter(OPCODE.findall(code))
    loops = [list(sass_loops.executed(x)) for x in sass_loops.loops(sass_loops.parsed(code))]
    system = RESERVED_SHARED if int(re.sub(r"\D", "", arch)) >= 90 and shared else 0
    return Resources(
        registers=registers,
        shared=shared - system,
        local=stack + local,
        spills=sum(count[op] for op in count if op.startswith(("LDL", "STL"))),
        loads=sum(count[op] for op in count if _is_wide(op, "LDG", "LD", "LDGSTS")),
        stores=sum(count[op] for op in count if _is_wide(op, "STG", "ST")),
        tensor_cores=tuple(sorted({op.split(".")[0] for op in count if _is_tensor_core(op)})),
        intensity=min(_intensities(loops), default=0),
        early=min(_early(code), default=0),
    )


def _early(code: str) -> Iterator[int]:
    """Of the loops with wide loads and exponentials, the loads issued well before their use.

    At least a third of the loop's exponentials are issued while such a load is in flight.
    """
    for loop in sass_loops.loops(sass_loops.parsed(code), SHORTEST):
        run = list(sass_loops.executed(loop))
        loads = [i for i, inst in enumerate(run) if _is_wide(inst.op, "LDG")]
        exponentials = _exponentials(run)
        if loads and exponentials:
            yield sum(
                3 * _exponentials(sass_loops.until_use(run, i)) >= exponentials for i in loads
            )


def _exponentials(run: Iterable[sass_loops.Instruction]) -> int:
    return sum(inst.op.startswith("MUFU.EX2") for inst in run)


def _intensities(loops: Sequence[Sequence[sass_loops.Instruction]]) -> Iterator[float]:
    """Of the loops that load and multiply. The number of warps does not matter."""
    for loop in loops:
        intensity = sass_loops.intensity(loop)
        if intensity:
            yield intensity


def _is_wide(op: str, *names: str) -> bool:
    name, *modifiers = op.split(".")
    return name in names and not {"128", "256"}.isdisjoint(modifiers)


def _is_tensor_core(op: str) -> bool:
    """HMMA, IMMA; on sm_90 HGMMA, QGMMA; on sm_100 UTCHMMA, UTCQMMA."""
    return op.split(".")[0].endswith("MMA")


def disassembled(binary: bytes) -> str:
    with tempfile.NamedTemporaryFile() as file:
        file.write(binary)
        file.flush()
        run = [tool("cuobjdump"), "-sass", "-res-usage", file.name]
        return subprocess.run(run, check=True, capture_output=True, text=True).stdout


def write(path: Path, content: bytes) -> None:
    """Writes a file atomically: others see the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    unfinished.write_bytes(content)
    unfinished.rename(path)


@functools.cache
def _own_hash() -> bytes:
    files = Path(__file__), Path(sass_loops.__file__)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).digest()


@functools.cache
def tool(name: str) -> str:
    """Returns a CUDA toolkit program that comes with triton."""
    spec = importlib.util.find_spec("triton")  # not imported: it may not be interpreting here
    if spec is None or spec.origin is None:
        raise SystemExit(f"machine-code needs {name}, which comes with the package triton")
    return str(Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name)
