"""`fusedops doctor`: checks what the package runs on, and says how to fix what is wrong.

A check is a function of what it reads (files, the environment, versions) and returns a Finding, so
that the tests run it on other machines' files. `run` calls them all for this machine.
"""

import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fusedops import extension
from fusedops.building import caches

__all__ = ["Finding", "run"]

OK, WARNING, PROBLEM = "ok", "warning", "problem"
OLDEST_GCC = 11  # the first whose -std=c++20 compiles torch's headers
BUILD = "fusedops build"


@dataclass(frozen=True)
class Finding:
    """The result of a check: "ok", "warning" or "problem", what was found, and how to fix it."""

    level: str
    check: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.level:8} {self.check:10} {self.text}"
        return f"{line}\n{'':20}fix: {self.fix}" if self.fix else line


def run() -> int:
    """Prints the findings for this machine. The exit status is 1 where there is a problem."""
    found = list(findings())
    print("\n".join(map(str, found)))
    return int(any(finding.level == PROBLEM for finding in found))


def findings() -> Iterator[Finding]:
    compiled = not without_compiled_part()
    environment = os.environ
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    allowed = len(affinity) or os.cpu_count() or 1
    quota = cpu_quota()
    yield compiler(environment, needed=not compiled)
    yield compiled_part(
        without_compiled_part(),
        extension.BUILD,
        torch.__version__,
        torch.compiled_with_cxx11_abi(),
    )
    yield instruction_set(_read(Path("/proc/cpuinfo")), environment)
    yield threads(torch.get_num_threads(), allowed, quota)
    yield from openmp(environment, allowed if quota is None else min(allowed, quota))
    yield cuda(torch.version.cuda, nvcc_version(environment), torch.cuda.device_count())
    yield cache(caches(environment), needed=not compiled)


def without_compiled_part() -> str:
    """Why the package runs without a compiled part; empty where it has one."""
    return getattr(extension, "UNCOMPILED", "")


def compiler(environment: Mapping[str, str], needed: bool) -> Finding:
    """The C++ compiler, $CXX or g++. needed: whether there is no compiled part yet."""
    level = PROBLEM if needed else WARNING
    command = shlex.split(environment.get("CXX", "")) or ["g++"]
    path = shutil.which(command[0], path=environment.get("PATH"))
    fix = "apt-get install g++, or set CXX to a compiler"
    if path is None:
        text = f"There is no C++ compiler: {command[0]} is not on PATH."
        return Finding(level, "compiler", text, fix)
    version = _first_number(_output([path, *command[1:], "-dumpfullversion", "-dumpversion"]))
    if version is None:
        return Finding(level, "compiler", f"{command[0]} does not print a version.", fix)
    oldest = OLDEST_GCC if "clang" not in command[0] else 14
    if int(version.split(".")[0]) < oldest:
        text = f"{command[0]} {version} does not compile C++20 as torch's headers need it."
        return Finding(level, "compiler", text, f"install g++ {OLDEST_GCC} or newer, or set CXX")
    return Finding(OK, "compiler", f"{command[0]} {version} compiles C++20.")


def compiled_part(reason: str, record: Mapping, version: str, cxx11_abi: bool) -> Finding:
    """The compiled part's record against the installed torch. reason: why it is not loaded."""
    if reason:
        return Finding(PROBLEM, "kernels", f"Operators run as plain PyTorch: {reason}.", BUILD)
    built = str(record.get("torch", "an unknown version"))
    if _minor(built) != _minor(version):
        text = f"The kernels were compiled for torch {built}, and torch {version} is installed."
        return Finding(PROBLEM, "kernels", text, BUILD)
    if record.get("cxx11_abi", cxx11_abi) != cxx11_abi:
        text = "The kernels were compiled for the other C++ ABI (_GLIBCXX_USE_CXX11_ABI) of torch."
        return Finding(PROBLEM, "kernels", text, BUILD)
    abi = "the C++11 ABI" if cxx11_abi else "the ABI before C++11"
    text = f"The kernels were compiled for torch {built} with {abi}; torch {version} is installed."
    return Finding(OK, "kernels", text)


def instruction_set(cpuinfo: str, environment: Mapping[str, str]) -> Finding:
    """The CPU's instruction sets, as /proc/cpuinfo lists them, and FUSEDOPS_CPU_ISA."""
    listed = re.search(r"^flags\s*:(.*)$", cpuinfo, re.M)
    if listed is None:
        text = "The CPU kernels are for x86-64, and this CPU is another: PyTorch's operators run."
        return Finding(WARNING, "CPU", text)
    flags = set(listed[1].split())
    chosen = environment.get("FUSEDOPS_CPU_ISA", "")
    if not {"avx2", "fma", "f16c"} <= flags:
        text = "The CPU has no AVX2, so the CPU kernels cannot run and PyTorch's operators do."
        return Finding(PROBLEM, "CPU", text, "in a virtual machine, pass on the host's CPU model")
    if not {"avx512f", "avx512dq", "avx512bw", "avx512vl"} <= flags:
        best, text = "avx2", "The CPU has AVX2 and not AVX-512."
    elif not {"avx512_bf16", "avx512_vnni"} <= flags:
        best, text = "avx512", "The CPU has AVX-512 without bfloat16 instructions."
    else:
        best, text = "avx512_bf16", "The CPU has AVX-512 with bfloat16 instructions."
    if chosen and chosen != best:
        text = f"{text[:-1]}, but FUSEDOPS_CPU_ISA={chosen} chooses other kernels."
        return Finding(WARNING, "CPU", text, "unset FUSEDOPS_CPU_ISA")
    return Finding(OK, "CPU", text)


def threads(number: int, allowed: int, quota: float | None) -> Finding:
    """torch's threads. allowed: CPUs the process may use. quota: its cgroup's, in CPUs' time."""
    cpus = allowed if quota is None else min(allowed, max(1, math.floor(quota)))
    limits = f"{allowed} CPU{'s' if allowed > 1 else ''}"
    limits += "" if quota is None else f" and its cgroup {quota:g} of CPU time"
    if number > cpus:
        text = f"torch runs {number} threads, but the process may use {limits}."
        return Finding(PROBLEM, "threads", text, f"export OMP_NUM_THREADS={cpus}")
    text = f"torch runs {number} thread{'s' if number > 1 else ''}; the process may use {limits}."
    return Finding(OK, "threads", text)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """How many CPUs' time the process's cgroup grants, the least of its parents'; None: all."""
    quotas = [
        quota
        for line in _read(root / "proc/self/cgroup").splitlines()
        for folder in _cgroup_folders(root / "sys/fs/cgroup", line)
        if (quota := _quota_of(folder)) is not None
    ]
    return min(quotas, default=None)


def _cgroup_folders(mounted: Path, line: str) -> Iterator[Path]:
    """A cgroup's folder and its parents'. In a container its own path may not be mounted.

    line: of /proc/self/cgroup, "0::/path" (version 2) or "4:cpu,cpuacct:/path" (version 1).
    """
    _, controllers, path = line.split(":", 2)
    if controllers and "cpu" not in controllers.split(","):
        return
    tops = {mounted / controllers, mounted / "cpu"} if controllers else {mounted}
    inside = Path(path.lstrip("/"))
    yield from (top / part for top in tops for part in (inside, *inside.parents))


def _quota_of(folder: Path) -> float | None:
    quota, period, *_ = [*_read(folder / "cpu.max").split(), "", ""]
    if not quota:
        quota = _read(folder / "cpu.cfs_quota_us").strip()
        period = _read(folder / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def openmp(environment: Mapping[str, str], cpus: float) -> Iterator[Finding]:
    """OpenMP's settings that slow torch down. cpus: that the process may use."""
    found = [
        Finding(WARNING, "OpenMP", text, f"unset {name}")
        for name, text in _harmful(environment, cpus)
    ]
    yield from found or [Finding(OK, "OpenMP", "No setting slows torch down.")]


def _harmful(environment: Mapping[str, str], cpus: float) -> Iterator[tuple[str, str]]:
    """Names of variables, each with what it does."""

    def value(name: str) -> str:
        return environment.get(name, "").strip().lower()

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if value(name) == "1" and cpus >= 4:
            yield name, f"{name}=1 leaves {cpus:g} CPUs to one thread."
    if value("OMP_DYNAMIC") == "true":
        yield "OMP_DYNAMIC", "OMP_DYNAMIC lets OpenMP change the number of threads at each call."
    if value("OMP_WAIT_POLICY") == "active":
        yield "OMP_WAIT_POLICY", "OMP_WAIT_POLICY=active lets idle threads keep their CPUs busy."
    if value("OMP_PROC_BIND") not in ("", "false"):
        text = "OMP_PROC_BIND binds the threads of several processes to the same CPUs."
        yield "OMP_PROC_BIND", text
    if value("GOMP_CPU_AFFINITY"):
        text = "GOMP_CPU_AFFINITY binds the threads of several processes to the same CPUs."
        yield "GOMP_CPU_AFFINITY", text
    if value("OMP_THREAD_LIMIT") == "1":
        yield "OMP_THREAD_LIMIT", "OMP_THREAD_LIMIT=1 makes every operator run on one thread."


def cuda(torchs: str | None, toolkit: str | None, devices: int) -> Finding:
    """nvcc's version against that of torch's CUDA, None where there is none. devices: GPUs."""
    level = PROBLEM if devices else WARNING
    if torchs is None:
        text = "torch is built without CUDA, so CPU kernels are all that is needed."
        return Finding(OK, "CUDA", text)
    if toolkit is None:
        text = f"torch has CUDA {torchs} and there is no nvcc: GPUs run Triton kernels."
        fix = f"install the CUDA {torchs} toolkit, then {BUILD}"
        return Finding(WARNING, "CUDA", text, fix) if devices else Finding(OK, "CUDA", text)
    if toolkit.split(".")[0] != torchs.split(".")[0]:
        text = f"nvcc is of CUDA {toolkit} and torch of CUDA {torchs}: they do not go together."
        fix = f"install the CUDA {torchs} toolkit and set CUDA_HOME to it"
        return Finding(level, "CUDA", text, fix)
    gpus = f"{devices} GPU{'' if devices == 1 else 's'}"
    return Finding(OK, "CUDA", f"nvcc {toolkit} goes with torch's CUDA {torchs}; {gpus}.")


def nvcc_version(environment: Mapping[str, str]) -> str | None:
    """The release of the nvcc in $CUDA_HOME or on PATH; None where there is none."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH") or "/usr/local/cuda"
    path = os.pathsep.join([str(Path(home) / "bin"), environment.get("PATH", "")])
    command = shutil.which("nvcc", path=path)
    found = re.search(r"release (\d+\.\d+)", _output([command, "--version"])) if command else None
    return found[1] if found else None


def cache(folder: Path, needed: bool) -> Finding:
    """Whether a folder can be written to, or made. needed: there is no compiled part yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Finding(OK, "cache", f"{BUILD} can write to {folder}.")
    text = f"{BUILD} cannot write to {folder}."
    level = PROBLEM if needed else WARNING
    return Finding(level, "cache", text, "set FUSEDOPS_CACHE to a folder that you can write to")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _first_number(text: str) -> str | None:
    found = re.search(r"\d+(\.\d+)*", text)
    return found[0] if found else None


def _output(command: list[str]) -> str:
    """What a command prints; empty where it cannot run or fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout


def _read(path: Path) -> str:
    """A file's text, empty where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
