"""Compiles csrc/cuda's kernels with nvcc for each GPU architecture, without a GPU.

The flags are the build's. The C++ operators (*.cpp) are only parsed, against CUDA's headers.
Results are cached under build/, by the content of everything they depend on.
"""

import functools
import hashlib
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch.utils import cpp_extension

from checks.machine_code import BUILD, ROOT
from checks.machine_code.cuda import DEMANDS, NAMES
from checks.machine_code.gates import Compiled, Demand
from checks.machine_code.sass import read, write
from fusedops import building, toolchain

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")
PARSE = ("-std=c++20", "-Xcompiler", "-fsyntax-only", "-c")
SHORT = {"c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "double": "fp64"}
SHORT |= NAMES


def sources(suffix: str) -> list[Path]:
    return sorted((ROOT / "csrc" / "cuda").rglob(f"*{suffix}"))


def compiled(source: Path, architectures: Sequence[str] = ARCHITECTURES) -> list[Compiled]:
    """Returns every kernel of a file, sorted by name."""
    resources = read(device_code(source, architectures))
    names = dict(zip(resources, demangled(name for _, name in resources), strict=True))
    order = sorted(resources, key=lambda key: (names[key], architectures.index(key[0])))
    return [
        Compiled(version(), names[key], "", "", key[0], resources[key], demand_of(names[key]))
        for key in order
    ]


def demand_of(kernel: str) -> Demand:
    return next((DEMANDS[p] for p in DEMANDS if fnmatchcase(kernel, p)), Demand())


def device_code(source: Path, architectures: Sequence[str]) -> bytes:
    """Returns the kernels' fatbin: nvcc parses the launchers, but g++ does not compile them."""
    arguments = [flag for arch in architectures for flag in gencode(arch)]
    path = BUILD / "nvcc" / f"{source.stem}-{_key(source, arguments)}.fatbin"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.fatbin")
        if _nvcc(source, unfinished, *flags(), "-fatbin", "-t", "2", *arguments):
            raise SystemExit(f"nvcc does not compile {source}")
        unfinished.rename(path)
    return path.read_bytes()


def bridges() -> Path:
    """One file with all bridges from tensors: their headers take most of the time of each.

    Each line has its file's digest, so that `parses` sees a change.
    """
    lines = [
        f'#include "{path.relative_to(ROOT)}"  // {hashlib.sha256(path.read_bytes()).hexdigest()}'
        for path in sources(".cpp")
    ]
    path = BUILD / "nvcc" / "bridges.cpp"
    write(path, "\n".join([*lines, ""]).encode())
    return path


def parses(source: Path) -> bool:
    """Whether g++ accepts a C++ file that includes CUDA's headers; prints why not."""
    path = BUILD / "nvcc" / f"{source.stem}-{_key(source, [])}.parsed"
    if path.exists():
        return True
    fine = not _nvcc(source, path.with_suffix(".o"), *PARSE)
    if fine:
        write(path, b"")
    return fine


def gencode(arch: str) -> list[str]:
    return ["-gencode", f"arch=compute_{arch.removeprefix('sm_')},code={arch}"]


@functools.cache
def flags() -> list[str]:
    """Returns the build's flags, plus the flags that torch adds to every extension."""
    return [*cpp_extension.COMMON_NVCC_FLAGS, *building.NVCC_FLAGS]


def demangled(names: Iterable[str]) -> list[str]:
    run = ["c++filt", *names]
    lines = subprocess.run(run, check=True, capture_output=True, text=True).stdout.splitlines()
    return [short(line) for line in lines]


def short(name: str) -> str:
    """`void a::(anonymous namespace)::f<c10::BFloat16, true>(int*)` is f<bf16, true>."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    name = re.sub(r"\((?:\w+::)*(\w+)\)(\d+)", r"\1 \2", name)  # an enum's value
    name = name.partition("(")[0]  # the rest is the parameters
    for long, brief in SHORT.items():
        name = re.sub(rf"\b{long}\b", brief, name)
    return re.sub(r"\b(?:\w+::)+", "", name)


@functools.cache
def find() -> str | None:
    toolkit = toolchain.toolkit()
    return str(toolkit.nvcc) if toolkit else None


@functools.cache
def version() -> str:
    text = subprocess.run([str(find()), "--version"], capture_output=True, text=True).stdout
    match = re.search(r"V([\d.]+)", text)
    return f"nvcc {match[1] if match else 'unknown'}"


def _nvcc(source: Path, target: Path, *arguments: str) -> int:
    includes = [ROOT, stub(), *cpp_extension.include_paths()]
    run = [str(find()), str(source), "-o", str(target), *arguments]
    return subprocess.run([*run, *(f"-I{path}" for path in includes)], check=False).returncode


def stub() -> Path:
    """Returns a folder with an empty version of the header that a torch without CUDA lacks."""
    header = BUILD / "include" / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    write(header, b"#pragma once\n")
    return BUILD / "include"


def _key(source: Path, arguments: list[str]) -> str:
    headers = (p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cuh"))
    files = [source, *sorted(headers)]
    words = [version(), torch.__version__, *flags(), *arguments, *map(str, files)]
    content = b"".join(path.read_bytes() for path in files)
    return hashlib.sha256(" ".join(words).encode() + content).hexdigest()[:24]
