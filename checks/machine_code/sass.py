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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from checks.machine_code import BUILD

USAGE = re.compile(r"^ Function (\S+):\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", re.M)
CODE = re.compile(r"^\s*Function : (\S+)\n(.*?)(?=^\s*Function : |\Z)", re.M | re.S)
OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?([A-Z][\w.]*)")  # @: its predicate

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
    system = RESERVED_SHARED if int(re.sub(r"\D", "", arch)) >= 90 and shared else 0
    return Resources(
        registers=registers,
        shared=shared - system,
        local=stack + local,
        spills=sum(count[op] for op in count if op.startswith(("LDL", "STL"))),
        loads=sum(count[op] for op in count if _is_wide(op, "LDG", "LD", "LDGSTS")),
        stores=sum(count[op] for op in count if _is_wide(op, "STG", "ST")),
        tensor_cores=tuple(sorted({op.split(".")[0] for op in count if _is_tensor_core(op)})),
    )


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
    return hashlib.sha256(Path(__file__).read_bytes()).digest()


@functools.cache
def tool(name: str) -> str:
    """Returns a CUDA toolkit program that comes with triton."""
    spec = importlib.util.find_spec("triton")  # not imported: it may not be interpreting here
    if spec is None or spec.origin is None:
        raise SystemExit(f"machine-code needs {name}, which comes with the package triton")
    return str(Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name)
