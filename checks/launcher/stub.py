"""Stubs the CUDA driver library and Triton's compiler, for launches without a GPU.

`install` comes before anything loads CUDA's own library.
"""

import ctypes
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks.launcher import BUILD

SOURCE = Path(__file__).with_name("libcuda.c")
MOST = 128  # as in libcuda.c
DEVICE = 0
# Bytes of an argument in the kernel's signature.
BYTES = {"1": 1, "8": 1, "16": 2, "32": 4, "64": 8}


class Last(ctypes.Structure):
    """libcuda.c's Launch."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("launches", "through_triton", "function", "stream")),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("attributes", ctypes.c_uint32),
        ("values", ctypes.c_uint64 * MOST),
    ]


@dataclass(frozen=True)
class Launch:
    """What a launch gave the driver."""

    function: int
    stream: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    attributes: int
    values: tuple[int, ...]


class Stub:
    """The library: `last` is its last launch."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.last = Last.in_dll(library, "last")
        self.device = DEVICE
        self.stream = 0

    def expect(self, signature: Iterable[str]) -> None:
        """The types of the next launches' arguments; two pointers to scratch memory follow them."""
        types = [t for t in signature if t != "constexpr"]
        sizes = [8 if t.startswith("*") else BYTES[t.lstrip("iufpb")] for t in types] + [8, 8]
        (ctypes.c_uint32 * MOST).in_dll(self.library, "argument_bytes")[: len(sizes)] = sizes
        self.set("arguments", len(sizes))

    def expect_nothing(self) -> None:
        """The next launches' arguments are not read: their types are unknown."""
        self.set("arguments", 0)

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, name).value = value

    def launch(self) -> Launch:
        last, count = self.last, ctypes.c_int.in_dll(self.library, "arguments").value
        return Launch(
            last.function,
            last.stream,
            tuple(last.grid),
            tuple(last.block),
            last.shared_bytes,
            last.attributes,
            tuple(last.values[:count]),
        )


def install() -> Stub:
    """Loads the library and makes Triton use it. Its driver takes CPU tensors."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = BUILD / digest
    made = folder / "libcuda.so.1"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        compiler = shutil.which("cc") or shutil.which("gcc") or "cc"
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as part:
            command = [compiler, "-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
            subprocess.run([*command, "-o", part.name, str(SOURCE)], check=True)
        os.replace(part.name, made)
    stub = Stub(ctypes.CDLL(str(made), mode=ctypes.RTLD_GLOBAL))
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    import torch
    import triton
    from triton.backends.nvidia.driver import CudaDriver

    class Driver(CudaDriver):  # as it is on a GPU machine, but for the device and the stream
        def __init__(self) -> None:
            super().__init__()
            self.get_device_capability = lambda device: (9, 0)
            self.get_current_device = lambda: stub.device
            self.get_current_stream = lambda device: stub.stream

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    triton.runtime.driver.set_active(Driver())
    return stub


def compile_nothing() -> None:
    """Replaces Triton's compiler: a kernel has everything that its launch needs, and no code."""
    import triton.compiler
    from triton.compiler.compiler import CompiledKernel, make_backend

    folder = tempfile.TemporaryDirectory(prefix="launcher-")  # gone when the process ends
    counts = itertools.count(1)  # threads compile, too

    def compile(src: Any, target: Any, options: dict[str, Any], **_: Any) -> CompiledKernel:
        count = next(counts)
        scratch = {"global_scratch_size": 0, "profile_scratch_size": 0}
        aligned = {"global_scratch_align": 1, "profile_scratch_align": 1}
        chosen = make_backend(target).parse_options(dict(options)).__dict__
        facts = chosen | scratch | aligned | {"target": target, "hash": str(count), "tmem_size": 0}
        facts |= {"name": src.fn.__name__, "shared": 16 * count}
        files = {name: Path(folder.name, f"{count}.{name}") for name in ("json", "cubin")}
        src.hash()  # finds the globals that the source uses, which a launch checks
        files["json"].write_text(json.dumps(facts, default=vars))
        files["cubin"].write_bytes(b"no code")
        return CompiledKernel(src, {p.name: str(p) for p in files.values()}, str(count))

    triton.compiler.compile = compile
