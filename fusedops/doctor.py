"""`fusedops doctor`: checks the machine and the installation, and prints fixes.

Each check takes its inputs (files, the environment, versions) as arguments and returns a Finding,
so tests can run it on other machines' files. `run` calls all checks for this machine.
"""

import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fusedops import extension, toolchain
from fusedops.cache import caches, source_hash
from fusedops.calibration.table import VARIABLE, Choice, chosen, cpu_kind
from fusedops.machine import cpu_quota, cpus, read
from fusedops.toolchain import nvcc_version, output, without_cuda

__all__ = ["Finding", "run"]

OK, WARNING, PROBLEM = "ok", "warning", "problem"
OLDEST_TORCH = (2, 11)
OLDEST_GCC = 11  # the first version whose -std=c++20 compiles torch's headers
BUILD = "fusedops build"
CALIBRATE = "fusedops calibrate"
CUDNN_WITHOUT_ATTENTION = 91500  # the last version that torch's attention does not try first


@dataclass(frozen=True)
class Finding:
    """The result of a check: its level ("ok", "warning" or "problem"), its text and the fix."""

    level: str
    check: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.level:8} {self.check:10} {self.text}"
        return f"{line}\n{'':20}fix: {self.fix}" if self.fix else line


def run() -> int:
    """Prints the findings for this machine. Returns the exit status: 1 if there is a problem."""
    all_findings = list(findings())
    print("\n".join(map(str, all_findings)))
    return int(any(finding.level == PROBLEM for finding in all_findings))


def findings() -> Iterator[Finding]:
    environment, reason, built = os.environ, extension.UNCOMPILED, extension.BUILD
    allowed, quota = cpus(), cpu_quota()
    if not toolchain.unsupported():
        yield compiler(environment, needed=bool(reason))
        yield python_header(toolchain.python_header(), needed=bool(reason))
        yield ninja(toolchain.ninja(), needed=bool(reason))
    yield torch_version(torch.__version__)
    yield compiled_part(reason, built, torch.__version__, extension.FIX)
    if not reason:
        yield from sources(built)
    yield instruction_set(read(Path("/proc/cpuinfo")), environment)
    if not reason:
        yield calibration(chosen(), str(cpu_kind()), environment)
    yield threads(torch.get_num_threads(), allowed, quota)
    yield from openmp(environment, allowed if quota is None else min(allowed, quota))
    toolkit, devices = nvcc_version(environment), torch.cuda.device_count()
    yield cuda(torch.version.cuda, toolkit, devices, bool(reason or built.get("cuda")))
    if devices:
        capabilities = [torch.cuda.get_device_capability(i) for i in range(devices)]
        yield from cudnn(torch.backends.cudnn.version(), capabilities, environment)
    yield from cache_of(environment, needed=bool(reason))


def compiler(environment: Mapping[str, str], needed: bool) -> Finding:
    """Checks the C++ compiler, $CXX or g++. needed: whether there is no compiled part yet."""
    level = PROBLEM if needed else WARNING
    try:
        command = toolchain.compiler(environment)
    except RuntimeError as error:
        return Finding(level, "compiler", f"{error}.", "set CXX to a compiler, or unset it")
    path = shutil.which(command[0], path=environment.get("PATH"))
    fix = "apt-get install g++, or set CXX to a compiler"
    if path is None:
        text = f"There is no C++ compiler: {command[0]} is not on PATH."
        return Finding(level, "compiler", text, fix)
    version = _first_number(output([path, *command[1:], "-dumpfullversion", "-dumpversion"]))
    if version is None:
        return Finding(level, "compiler", f"{command[0]} does not print a version.", fix)
    oldest = OLDEST_GCC if "clang" not in command[0] else 14
    if int(version.split(".")[0]) < oldest:
        text = f"{command[0]} {version} cannot compile the C++20 in torch's headers."
        return Finding(level, "compiler", text, f"install g++ {OLDEST_GCC} or newer, or set CXX")
    return Finding(OK, "compiler", f"{command[0]} {version} compiles C++20.")


def python_header(path: Path, needed: bool) -> Finding:
    """Checks for Python's C headers. needed: whether there is no compiled part yet."""
    if path.exists():
        return Finding(OK, "headers", f"Python's C headers are in {path.parent}.")
    level, fix = PROBLEM if needed else WARNING, f"apt-get install {toolchain.python_package()}"
    return Finding(level, "headers", f"Python's C headers are missing: there is no {path}.", fix)


def ninja(command: Sequence[str], needed: bool) -> Finding:
    """Checks for ninja. command: how to run it, empty without it. needed: as in `compiler`."""
    if command:
        return Finding(OK, "ninja", f"{' '.join(command)} runs the build.")
    level = PROBLEM if needed else WARNING
    return Finding(level, "ninja", "ninja is missing.", "pip install ninja")


def torch_version(version: str) -> Finding:
    """Compares the installed torch with the oldest one that the package supports."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_TORCH:
        text = f"torch {version} is too old: fusedops needs torch {oldest} or newer."
        return Finding(PROBLEM, "torch", text, f"pip install 'torch>={oldest}'")
    return Finding(OK, "torch", f"torch {version} is supported.")


def compiled_part(
    reason: str, record: Mapping, version: str, remedy: str = f"Compile it: {BUILD}"
) -> Finding:
    """Compares the compiled part's record with the installed torch.

    reason: why it is not loaded. remedy: the fix for that, such as "Compile it: fusedops build".
    """
    if reason:
        fix = remedy.partition(": ")[2]
        text = f"Operators run as plain PyTorch: {reason}."
        return Finding(PROBLEM if fix else WARNING, "kernels", text, fix)
    built = str(record.get("torch", "an unknown version"))
    if _minor(built) != _minor(version):
        text = f"The kernels were compiled for torch {built}, and torch {version} is installed."
        return Finding(PROBLEM, "kernels", text, BUILD)
    text = f"The kernels were compiled for torch {built}; torch {version} is installed."
    return Finding(OK, "kernels", text)


def sources(record: Mapping) -> Iterator[Finding]:
    """Warns if the package's sources have changed since the kernels were compiled."""
    if record.get("source") not in (None, source_hash()):
        text = "The package's sources have changed since the kernels were compiled."
        yield Finding(WARNING, "kernels", text, f"make build, or {BUILD}")


def instruction_set(cpuinfo: str, environment: Mapping[str, str]) -> Finding:
    """The CPU's instruction sets, as /proc/cpuinfo lists them, and FUSEDOPS_CPU_ISA."""
    listed = re.search(r"^flags\s*:(.*)$", cpuinfo, re.M)
    if listed is None:
        text = "The CPU kernels need x86-64. On this CPU, PyTorch's operators run instead."
        return Finding(WARNING, "CPU", text)
    flags = set(listed[1].split())
    chosen = environment.get("FUSEDOPS_CPU_ISA", "")
    if not {"avx2", "fma", "f16c"} <= flags:
        text = "The CPU has no AVX2, so PyTorch's operators run instead of the CPU kernels."
        return Finding(PROBLEM, "CPU", text, "in a virtual machine, pass through the host's CPU")
    if not {"avx512f", "avx512dq", "avx512bw", "avx512vl"} <= flags:
        best, text = "avx2", "The CPU has AVX2 but not AVX-512."
    elif not {"avx512_bf16", "avx512_vnni"} <= flags:
        best, text = "avx512", "The CPU has AVX-512 without bfloat16 instructions."
    else:
        best, text = "avx512_bf16", "The CPU has AVX-512 with bfloat16 instructions."
    if chosen and chosen != best:
        text = f"{text[:-1]}, but FUSEDOPS_CPU_ISA={chosen} chooses other kernels."
        return Finding(WARNING, "CPU", text, "unset FUSEDOPS_CPU_ISA")
    return Finding(OK, "CPU", text)


def calibration(choice: Choice | None, here: str, environment: Mapping[str, str]) -> Finding:
    """Says which timed calls choose between our kernels and torch's code.

    choice: the table and its file; None without kernels. here: this CPU's kind.
    """
    if environment.get(VARIABLE):
        text = f"{VARIABLE}=off leaves the calls that were timed to torch."
        return Finding(WARNING, "choices", text, f"unset {VARIABLE}")
    if choice is None:
        return Finding(WARNING, "choices", "There are no kernels to choose on this CPU.")
    about = choice.table.about
    text = (
        f"Calls timed on {about.get('device')}, {str(about.get('date'))[:10]}, choose between our"
        f" kernels and torch's ({choice.path})."
    )
    if choice.refused:
        return Finding(WARNING, "choices", f"{text} {choice.refused}.", CALIBRATE)
    if about.get("cpu") != here:
        text += f" They are of {about.get('cpu')}; this CPU is {here}."
        return Finding(WARNING, "choices", text, CALIBRATE)
    return Finding(OK, "choices", text)


def threads(number: int, allowed: int, quota: float | None) -> Finding:
    """Compares torch's threads with the process's limits.

    allowed: the number of CPUs that it may run on. quota: CPU time in CPUs, from its cgroup.
    """
    usable = allowed if quota is None else min(allowed, max(1, math.floor(quota)))
    limits = f"{allowed} CPU{'s' if allowed > 1 else ''}"
    limits += "" if quota is None else f", and its cgroup limits CPU time to {quota:g}"
    if number > usable:
        text = f"torch runs {number} threads, but the process may use {limits}."
        return Finding(PROBLEM, "threads", text, f"export OMP_NUM_THREADS={usable}")
    text = f"torch runs {number} thread{'s' if number > 1 else ''}; the process may use {limits}."
    return Finding(OK, "threads", text)


def openmp(environment: Mapping[str, str], cpus: float) -> Iterator[Finding]:
    """Finds OpenMP settings that slow torch down. cpus: how many the process may use."""
    harmful = [
        Finding(WARNING, "OpenMP", text, f"unset {name}")
        for name, text in _harmful(environment, cpus)
    ]
    yield from harmful or [Finding(OK, "OpenMP", "No setting slows torch down.")]


def _harmful(environment: Mapping[str, str], cpus: float) -> Iterator[tuple[str, str]]:
    """Yields each harmful variable's name and effect."""

    def value(name: str) -> str:
        return environment.get(name, "").strip().lower()

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if value(name) == "1" and cpus >= 4:
            yield name, f"{name}=1 limits torch to one thread on {cpus:g} CPUs."
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


def cuda(torchs: str | None, toolkit: str | None, devices: int, compiled: bool = True) -> Finding:
    """Compares torch's CUDA version with nvcc's (`toolkit`); None means missing.

    devices: the number of GPUs. compiled: False if the compiled part has no GPU kernels.
    """
    level = PROBLEM if devices else WARNING
    if torchs is None:
        return Finding(OK, "CUDA", "torch is built without CUDA, so only CPU kernels can run.")
    if toolkit is None:
        text = f"torch has CUDA {torchs} but nvcc is missing, so GPUs run Triton kernels."
        fix = f"install the CUDA {torchs} toolkit, then {BUILD}"
        return Finding(WARNING, "CUDA", text, fix) if devices else Finding(OK, "CUDA", text)
    if without_cuda(torchs, toolkit):
        text = f"nvcc is from CUDA {toolkit}, which cannot compile for torch's CUDA {torchs}."
        fix = f"install the CUDA {torchs} toolkit and set CUDA_HOME to it"
        return Finding(level, "CUDA", text, fix)
    gpus = f"{devices} GPU{'' if devices == 1 else 's'}"
    if devices and not compiled:
        text = f"There are {gpus} and nvcc {toolkit}, but the compiled part has no GPU kernels."
        text = text.replace("There are 1 GPU ", "There is 1 GPU ")
        return Finding(PROBLEM, "CUDA", text, BUILD)
    return Finding(OK, "CUDA", f"nvcc {toolkit} can compile for torch's CUDA {torchs}; {gpus}.")


def cudnn(
    version: int | None, capabilities: Sequence[tuple[int, int]], environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Whether torch's attention uses cuDNN on Hopper and Blackwell, where it is the fastest.

    torch tries cuDNN first there from 9.15.1: earlier versions are wrong for some lengths. version:
    as torch gives it, such as 91501. capabilities: of the GPUs.
    """
    if not any(major in (9, 10) for major, _ in capabilities):
        return
    if environment.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        text = "TORCH_CUDNN_SDPA_DEPRIORITIZED keeps torch's attention from using cuDNN."
        yield Finding(WARNING, "cuDNN", text, "unset TORCH_CUDNN_SDPA_DEPRIORITIZED")
    elif version is None or version <= CUDNN_WITHOUT_ATTENTION:
        name = "no cuDNN" if version is None else f"cuDNN {_cudnn_name(version)}"
        text = f"torch finds {name}, so its attention does not use it: that needs 9.15.1 or newer."
        fix = "keep other cuDNN libraries off LD_LIBRARY_PATH, or install a newer torch"
        yield Finding(WARNING, "cuDNN", text, fix)
    else:
        text = f"torch's attention tries cuDNN {_cudnn_name(version)} first."
        yield Finding(OK, "cuDNN", text)


def _cudnn_name(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def cache_of(environment: Mapping[str, str], needed: bool) -> Iterator[Finding]:
    """Checks the cache folder that these environment variables choose."""
    try:
        yield cache(caches(environment), needed)
    except RuntimeError as error:
        yield _unwritable(f"{BUILD} has no cache folder: {error}.", needed)


def cache(folder: Path, needed: bool) -> Finding:
    """Checks that a folder can be written to or created. needed: as in `compiler`."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
            return Finding(OK, "cache", f"{BUILD} can write to {folder}.")
        return _unwritable(f"{BUILD} cannot write to {folder}.", needed)
    except OSError as error:
        return _unwritable(f"{BUILD} cannot read {folder}: {error.strerror}.", needed)


def _unwritable(text: str, needed: bool) -> Finding:
    level = PROBLEM if needed else WARNING
    return Finding(level, "cache", text, "set FUSEDOPS_CACHE to a folder that you can write to")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _first_number(text: str) -> str | None:
    match = re.search(r"\d+(\.\d+)*", text)
    return match[0] if match else None
