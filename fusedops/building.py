"""Compiles csrc with ninja, into one library for each version of torch.

setup.py and `fusedops build` call it. Importing it needs only the standard library. A build imports
the installed torch for its headers, unless FUSEDOPS_TORCHES is set.

Environment variables:
    CXX, CXXFLAGS         the compiler and its extra flags
    MAX_JOBS              how many compilers run at a time
    DEBUG=1               keeps debug information
    FUSEDOPS_CUDA=0|1     overrides whether csrc/cuda is compiled
    TORCH_CUDA_ARCH_LIST  the GPUs to compile for
    FUSEDOPS_SIMT=1       adds the CUDA kernels that csrc/simt emulates on a CPU, for the tests;
                          a build for GPUs leaves them out
    FUSEDOPS_SANITIZE     sanitizers to build with, such as address,undefined
    FUSEDOPS_TORCHES      a folder: compiles for each package folder/*/torch instead of the
                          installed torch
"""

import itertools
import os
import re
import shlex
import subprocess
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusedops.cache import installed_cache_folder, locked, publish, work_folder
from fusedops.toolchain import (
    ROOT,
    Toolkit,
    Torch,
    compiler,
    jobs_at_a_time,
    library_name,
    ninja,
    requested_torches,
    sources,
    toolkit,
    unbuildable,
)

__all__ = ["build", "build_in_cache", "steps"]

# Each file in csrc/cpu/isa is compiled once per instruction set. CPU_CAPABILITY names the
# namespace, in our code and in at::vec; CPU_CAPABILITY_X chooses at::vec's implementation.
AVX2 = "-DCPU_CAPABILITY_AVX2 -mavx2 -mfma -mf16c"
AVX512 = "-DCPU_CAPABILITY_AVX512 -mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma -mf16c"
INSTRUCTION_SETS = {
    "AVX2": AVX2,
    "AVX512": AVX512,
    "AVX512_BF16": f"{AVX512} -mavx512bf16 -mavx512vnni",
}
# Files in csrc/cpu/isa that do not use bfloat16 instructions: CPUs with them run the AVX512 code.
WITHOUT_BF16 = ("adamw/step", "linear/product", "quantized_linear/quantize", "tile_product")
# GCC 12's own AVX-512 headers cause these two warnings.
QUIET = "-Wno-uninitialized -Wno-maybe-uninitialized"
FLAGS = ["-O3", "-std=c++20", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-DNDEBUG"]
FLAGS += ["-Wall", "-Wno-unknown-pragmas"]
ARCHITECTURES = "8.0;9.0+PTX"  # the GPUs to compile for if no GPU is visible
NVCC_FLAGS = ["-O3", "-std=c++20", "--expt-relaxed-constexpr"]
# Not -O1: there GCC does not fuse multiplies and adds, so results would round differently from the
# shipped build's.
SANITIZE = ["-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O2", "-g1"]
UNIT = 6  # files per unit: reading the precompiled header alone takes 4 s
# The emulator detects data races in shared memory: with -fsanitize=thread the compiler reports each
# memory access to functions in csrc/simt/hooks.h. FUSEDOPS_SANITIZE replaces this sanitizer.
SIMT_FLAGS = ["-O1", "-g1", "-Wno-unknown-pragmas", "-DFUSEDOPS_SIMT"]

RULES = """\
ninja_required_version = 1.3
rule compile
  description = $made
  command = {cxx} -MMD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
rule nvcc
  description = $made
  command = {nvcc} -MD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  description = link $made
  command = {cxx} -shared $in $flags -o $out
"""


@dataclass(frozen=True)
class Step:
    """One build statement in the ninja file: a rule, its output and its inputs."""

    rule: str
    made: str
    sources: tuple[str, ...]
    flags: str
    needs: tuple[str, ...] = ()

    def __str__(self) -> str:
        of, needs = map(_listed, (self.sources, self.needs))
        head = f"build {_escaped(self.made)}: {self.rule} {of}"
        name = Path(self.made).name.removesuffix(".o")
        return f"{head}{needs and ' | '}{needs}\n  flags = {self.flags}\n  made = {name}\n"


def build(into: Path, work: Path, jobs: int | None = None) -> list[Path]:
    """Compiles for the installed torch, or for FUSEDOPS_TORCHES; returns the libraries' paths.

    into: the folder for the libraries. work: the folder for objects; keep it, and the next build
    compiles only changed files. Raises RuntimeError if something is missing, which the message
    names, or if the compiler fails.
    """
    if reason := unbuildable():
        raise RuntimeError(reason)
    number = jobs_at_a_time(jobs)
    torches = requested_torches() or [Torch.installed()]
    work.mkdir(parents=True, exist_ok=True)
    lock = work / ".lock"
    lock.touch()
    with locked(lock):
        _write(work / "build.ninja", rules() + "".join(map(str, steps(torches, work.resolve()))))
        _run([*ninja(), "-C", str(work), "-j", str(number)])
        return [publish(work / library_name(torch.version), torch, into) for torch in torches]


def build_in_cache(jobs: int | None = None) -> Path:
    """Builds into the cache folder, where the next import finds the library; returns its path.

    Leaves no other files behind. Raises RuntimeError like `build`.
    """
    if reason := unbuildable():
        raise RuntimeError(reason)
    with work_folder() as work:
        return build(installed_cache_folder(), work, jobs)[0]


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError("the compiler failed, see above") from error


def rules() -> str:
    """The head of the ninja file."""
    cxx = shlex.join(compiler()).replace("$", "$$")
    cuda = toolkit()
    return RULES.format(cxx=cxx, nvcc=_quoted(cuda.nvcc if cuda else "nvcc"))


def steps(torches: Sequence[Torch], work: Path) -> Iterator[Step]:
    """Every step from the sources to one library per torch. All libraries share kernel objects."""
    shared = [*kernels(torches[0], work / "kernels")]
    if torches[0].simt:
        shared += emulated(torches[0], work / "simt")
    if torches[0].cuda is not None:
        shared += for_gpus(torches[0], work / "cuda")
    yield from shared
    for torch in torches:
        glue_steps = [*glue(torch, work / f"glue_{torch.name}")]
        yield from glue_steps
        objects = tuple(step.made for step in [*shared, *glue_steps] if step.made.endswith(".o"))
        library = work / library_name(torch.version)
        yield Step("link", str(library), objects, " ".join(_link_flags(torch)))


def kernels(torch: Torch, folder: Path) -> Iterator[Step]:
    """Compiles csrc/cpu/isa once per instruction set, with one precompiled header for each."""
    flags = {
        name: [*_flags(torch), f"-DCPU_CAPABILITY={name} {isa} {QUIET}"]
        for name, isa in INSTRUCTION_SETS.items()
    }
    version = _version_file(torch, folder)
    shared = {name: folder / name / "vec.h" for name in INSTRUCTION_SETS}
    for name, header in shared.items():
        unit = _unit_file(["csrc/cpu/isa/vec.h"], header)
        yield _header(unit, f"{header}.gch", flags[name], version)
    for source in sources("csrc/cpu/isa/**/*.cpp"):
        same = source.removeprefix("csrc/cpu/isa/").removesuffix(".cpp") in WITHOUT_BF16
        for name in [n for n in INSTRUCTION_SETS if not (same and n == "AVX512_BF16")]:
            object_file, header = folder / f"{_flat(source)}.{name}.o", shared[name]
            yield _compile(ROOT / source, object_file, flags[name], header)


def glue(torch: Torch, folder: Path, limit: int = UNIT) -> Iterator[Step]:
    """Compiles the code that calls kernels: operators, autograd, the Python module.

    In these files the compiler spends most of its time on torch's headers and their templates. So
    the headers are precompiled, and up to `limit` files of one folder are compiled as one unit.
    """
    files = sources("csrc/python/*.cpp") + sources("csrc/ops/**/*.cpp")
    files += [f for f in sources("csrc/cpu/**/*.cpp") if not f.startswith("csrc/cpu/isa/")]
    flags, header = _glue_flags(torch), folder / "all.h"
    version = _version_file(torch, folder)
    yield _header(_unit_file(["csrc/precompiled.h"], header), f"{header}.gch", flags, version)
    for unit in _units(files, limit):
        object_file = folder / f"{_flat(unit[0])}.o"
        yield _compile(_unit_file(unit, object_file.with_suffix("")), object_file, flags, header)
    if torch.simt or torch.cuda is not None:
        extra = ["-DFUSEDOPS_SIMT"] if torch.simt else [_cuda_headers()]
        for source in sources("csrc/cuda/**/*.cpp"):
            object_file = folder / f"{_flat(source)}.o"
            yield _compile(ROOT / source, object_file, [*flags, *extra], header)


def _units(files: Iterable[str], limit: int) -> Iterator[tuple[str, ...]]:
    """Groups of up to `limit` files of one folder; each group is compiled as one unit."""
    in_folders = sorted(files, key=os.path.dirname)  # a folder's files, then its subfolders'
    for _, group in itertools.groupby(in_folders, key=os.path.dirname):
        folder_files = list(group)
        yield from (tuple(folder_files[i : i + limit]) for i in range(0, len(folder_files), limit))


def _unit_file(unit: Sequence[str], file: Path) -> Path:
    """The compiler's input for a unit: its only .cpp file, or a file that includes all of them."""
    if len(unit) == 1 and file.suffix == ".cpp":
        return ROOT / unit[0]
    file.parent.mkdir(parents=True, exist_ok=True)
    _write(file, "".join(f'#include "{source}"\n' for source in unit))
    return file


def emulated(torch: Torch, folder: Path) -> Iterator[Step]:
    """Compiles csrc/cuda as C++, with csrc/simt instead of CUDA."""
    version = _version_file(torch, folder)
    races = [] if os.environ.get("FUSEDOPS_SANITIZE") else ["-fsanitize=thread"]
    for source in sources("csrc/cuda/**/*.cu"):
        flags = [*_flags(torch), "-x c++", *SIMT_FLAGS, *races]
        yield _compile(ROOT / source, folder / f"{_flat(source)}.o", flags, needs=(version,))


def for_gpus(torch: Torch, folder: Path) -> Iterator[Step]:
    """Compiles csrc/cuda with nvcc."""
    from torch.utils import cpp_extension

    version = _version_file(torch, folder)
    flags = [*cpp_extension.COMMON_NVCC_FLAGS, *NVCC_FLAGS, "--compiler-options", "-fPIC"]
    flags += [*_arch_flags(), f"-I{_quoted(ROOT)}", *_headers(torch), _cuda_headers()]
    for source in sources("csrc/cuda/**/*.cu"):
        object_file = folder / f"{_flat(source)}.o"
        yield Step("nvcc", str(object_file), (str(ROOT / source),), " ".join(flags), (version,))


def _arch_flags() -> list[str]:
    """nvcc's flags for the GPUs in TORCH_CUDA_ARCH_LIST, else this machine's, else ARCHITECTURES.

    torch's function fails if no GPU is visible and the variable is empty.
    """
    import torch
    from torch.utils import cpp_extension

    if os.environ.get("TORCH_CUDA_ARCH_LIST") or torch.cuda.device_count():
        return cpp_extension._get_cuda_arch_flags()
    os.environ["TORCH_CUDA_ARCH_LIST"] = ARCHITECTURES
    try:
        return cpp_extension._get_cuda_arch_flags()
    finally:
        del os.environ["TORCH_CUDA_ARCH_LIST"]


def _version_file(torch: Torch, folder: Path) -> str:
    """A copy of torch's version.py; everything that includes torch's headers depends on it.

    The compiler does not list system headers as dependencies. The copy is rewritten only when its
    content changes, so a torch whose files have older dates causes a rebuild too.
    """
    copy, original = folder / f"{torch.name}.version", torch.folder / "version.py"
    folder.mkdir(parents=True, exist_ok=True)
    _write(copy, original.read_text() if original.exists() else torch.version)
    return str(copy)


def _compile(
    source: Path,
    object_file: Path,
    flags: Iterable[str],
    header: Path | None = None,
    needs: tuple[str, ...] = (),
) -> Step:
    """A compile step. header: a precompiled header to include first. needs: other dependencies."""
    if header is None:
        return Step("compile", str(object_file), (str(source),), " ".join(flags), needs)
    with_it = " ".join([*flags, "-include", _quoted(header)])
    return Step("compile", str(object_file), (str(source),), with_it, (f"{header}.gch", *needs))


def _header(source: Path, output: str, flags: Iterable[str], version: str) -> Step:
    """A step that precompiles a header. version: the file from `_version_file`."""
    return Step("compile", output, (str(source),), " ".join([*flags, "-x c++-header"]), (version,))


def _flags(torch: Torch) -> list[str]:
    """Flags for all C++. torch's headers are system headers, so they cause no warnings."""
    flags = [*FLAGS, "-g" if _debug() else "-g0"]
    if sanitizers := os.environ.get("FUSEDOPS_SANITIZE"):
        flags += [f"-fsanitize={sanitizers}", *SANITIZE]
    return [*flags, os.environ.get("CXXFLAGS", ""), f"-I{_quoted(ROOT)}", *_headers(torch)]


def _headers(torch: Torch) -> list[str]:
    include = torch.folder / "include"
    folders = (include, include / "torch" / "csrc" / "api" / "include")
    return [f"-isystem {_quoted(path)}" for path in folders]


def _glue_flags(torch: Torch) -> list[str]:
    """Flags for `glue`. Warnings are off: a precompiled header loses the system headers' marks."""
    abi = "-D_GLIBCXX_USE_CXX11_ABI=1"  # every supported torch's, and not every compiler's default
    python = f"-isystem {_quoted(sysconfig.get_paths()['include'])}"
    module = "-DTORCH_API_INCLUDE_EXTENSION_H -DTORCH_EXTENSION_NAME=_C"
    return [*_flags(torch), QUIET, abi, module, python]


def _cuda_headers() -> str:
    """The flag for CUDA's headers, which cpp_extension expects beside any nvcc, wrappers too."""
    return f"-isystem {_quoted(_toolkit().include)}"


def _toolkit() -> Toolkit:
    cuda_toolkit = toolkit()
    assert cuda_toolkit is not None, "Torch.cuda is set only if there is a toolkit"
    return cuda_toolkit


def _link_flags(torch: Torch) -> list[str]:
    """The linker's flags, without OpenMP: torch loads its own, and a process must have only one."""
    folders, names = [str(torch.folder / "lib")], ["c10", "torch", "torch_cpu", "torch_python"]
    if torch.cuda is not None:
        folders.append(str(_toolkit().libraries))
        names += ["c10_cuda", "torch_cuda", "cudart"]
    flags = [*(f"-L{_quoted(f)}" for f in folders), *(f"-l{n}" for n in names)]
    if sanitizers := os.environ.get("FUSEDOPS_SANITIZE"):
        flags.append(f"-fsanitize={sanitizers}")
    kept = _debug() or sanitizers
    return [*flags, *([] if kept else ["-s"]), os.environ.get("LDFLAGS", "")]


def _debug() -> bool:
    return os.environ.get("DEBUG", "0") not in ("", "0")


def _flat(source: str) -> str:
    return source.replace("/", ".")


def _quoted(path: str | Path) -> str:
    return shlex.quote(str(path)).replace("$", "$$")


def _escaped(path: str) -> str:
    """A path as a ninja file writes it."""
    return re.sub(r"([$ :])", r"$\1", path)


def _listed(paths: Sequence[str]) -> str:
    return " ".join(map(_escaped, paths))


def _write(path: Path, text: str) -> None:
    """Writes a file unless it already has this text: ninja rebuilds by modification time."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
