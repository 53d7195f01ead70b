"""Compiles the C++ and CUDA part of the package, one library for each torch, with ninja.

setup.py and `fusedops build` call it. At import it needs the standard library alone. A build
imports the installed torch, whose headers the sources include, unless FUSEDOPS_TORCHES is set.

Environment: CXX and CXXFLAGS; MAX_JOBS; DEBUG=1 keeps debug information; FUSEDOPS_CUDA=0|1
overrides whether csrc/cuda is compiled, and TORCH_CUDA_ARCH_LIST says for which GPUs;
FUSEDOPS_SIMT=1 adds the CUDA kernels as csrc/simt runs them on a CPU, for the tests, and a build
for a GPU has none of these; FUSEDOPS_SANITIZE=address,undefined builds with these sanitizers;
FUSEDOPS_TORCHES=folder compiles for each torch package folder/*/torch, not the installed one.
"""

import functools
import hashlib
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

__all__ = ["build", "build_in_cache", "cache_folder", "library_name", "unbuildable"]

PACKAGE = Path(__file__).resolve().parent
# An installed package has its sources inside, a checkout beside it.
ROOT = PACKAGE if (PACKAGE / "csrc").is_dir() else PACKAGE.parent
SUFFIXES = (".h", ".cpp", ".cuh", ".cu")

# Every file of csrc/cpu/isa is compiled once for each. CPU_CAPABILITY names the namespace, there
# and in at::vec; CPU_CAPABILITY_X chooses at::vec's implementation.
AVX2 = "-DCPU_CAPABILITY_AVX2 -mavx2 -mfma -mf16c"
AVX512 = "-DCPU_CAPABILITY_AVX512 -mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma -mf16c"
INSTRUCTION_SETS = {
    "AVX2": AVX2,
    "AVX512": AVX512,
    "AVX512_BF16": f"{AVX512} -mavx512bf16 -mavx512vnni",
}
# Files of csrc/cpu/isa that hold nothing for bfloat16 instructions: AVX512's code serves there.
WITHOUT_BF16 = ("adamw/step", "linear/product", "quantized_linear/quantize")
# GCC 12's own AVX-512 headers set off these two warnings.
QUIET = "-Wno-uninitialized -Wno-maybe-uninitialized"
FLAGS = ["-O3", "-std=c++20", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-DNDEBUG"]
FLAGS += ["-Wall", "-Wno-unknown-pragmas"]
NVCC_FLAGS = ["-O3", "-std=c++20", "--expt-relaxed-constexpr"]
# At -O1 GCC would contract no product and sum: other roundings than those that are shipped.
SANITIZE = ["-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O2", "-g1"]
UNIT = 3  # files: what takes 5 s each alone takes 2 s as one of three
# The emulator's races: the compiler reports accesses to functions that csrc/simt/hooks.h defines.
# Shared memory is what needs it, so that a sanitizer of the whole build goes first.
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
class Torch:
    """What a library is compiled against."""

    folder: Path  # the package's, with include/ and lib/
    version: str
    cxx11_abi: bool = True
    cuda: str | None = None  # the version of CUDA, where GPU kernels are compiled too
    simt: bool = False

    @classmethod
    def installed(cls) -> "Torch":
        import torch

        cuda = torch.version.cuda if _wants_cuda() else None
        simt = os.environ.get("FUSEDOPS_SIMT") == "1" and cuda is None
        folder, abi = Path(torch.__file__).parent, torch.compiled_with_cxx11_abi()
        return cls(folder, torch.__version__, abi, cuda, simt)

    @classmethod
    def unpacked(cls, folder: Path) -> "Torch":
        """A torch package that is not imported: for CPUs. Since 2.7 all have the newer C++ ABI."""
        found = re.search(r"^__version__ = '(.+)'$", (folder / "version.py").read_text(), re.M)
        assert found is not None
        return cls(folder, found[1])

    @property
    def name(self) -> str:
        """Its minor version as file names have it: torch2_13."""
        major, minor = self.version.split(".")[:2]
        return f"torch{major}_{minor}"


@dataclass(frozen=True)
class Step:
    """A line of the ninja file: what is made of which sources, and how."""

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


def library_name(torch_version: str) -> str:
    """The file name of the library for a torch: `_C_torch2_13` and Python's suffix."""
    return f"_C_{Torch(Path(), torch_version).name}{EXTENSION_SUFFIXES[0]}"


def cache_folder(torch_version: str, cxx11_abi: bool) -> Path:
    """Where `fusedops build` leaves the library for a torch, and the import looks for it.

    A folder for each version of the package, torch's minor version, its C++ ABI, Python, and the
    sources.
    """
    minor = ".".join(torch_version.split(".")[:2])
    name = f"torch{minor}-cxx11abi{cxx11_abi:d}-{sys.implementation.cache_tag}-{source_hash()}"
    return caches(os.environ) / version() / name


def caches(environment: Mapping[str, str]) -> Path:
    """$FUSEDOPS_CACHE, else $XDG_CACHE_HOME/fusedops, else ~/.cache/fusedops."""
    home = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(environment.get("FUSEDOPS_CACHE") or home / "fusedops")


def version() -> str:
    """The package's, which may not be installed yet."""
    found = re.search(r'^__version__ = "(.+)"$', (PACKAGE / "__init__.py").read_text(), re.M)
    assert found is not None
    return found[1]


@functools.cache
def source_hash() -> str:
    """16 hexadecimal digits of the paths and contents of csrc and of this file."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix in SUFFIXES:
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def build(into: Path, work: Path, jobs: int | None = None) -> list[Path]:
    """Compile for the installed torch, or for those of FUSEDOPS_TORCHES; return the libraries.

    into: the libraries' folder. work: where objects stay, so that the next build compiles what has
    changed. Raises RuntimeError that says what is missing, and CalledProcessError where the
    compiler fails.
    """
    if reason := unbuildable():
        raise RuntimeError(reason)
    torches = requested_torches() or [Torch.installed()]
    work.mkdir(parents=True, exist_ok=True)
    nvcc = shutil.which("nvcc") if torches[0].cuda is None else _nvcc()
    rules = RULES.format(cxx=_compiler(), nvcc=nvcc)
    _write(work / "build.ninja", rules + "".join(map(str, steps(torches, work.resolve()))))
    subprocess.run([*_ninja(), "-C", str(work), "-j", str(jobs or _jobs())], check=True)
    into.mkdir(parents=True, exist_ok=True)
    return [_install(torch, work, into) for torch in torches]


def _install(torch: Torch, work: Path, into: Path) -> Path:
    """Copies a library, and writes its record beside it."""
    library = into / library_name(torch.version)
    _replace(library, (work / library.name).read_bytes())
    library.chmod(0o755)
    _replace(library.with_suffix(".json"), json.dumps(record(torch)).encode() + b"\n")
    return library


def build_in_cache(jobs: int | None = None) -> Path:
    """`build` into the folder that the next import looks in; nothing else is left behind."""
    if reason := unbuildable():
        raise RuntimeError(reason)
    torch = Torch.installed()
    with tempfile.TemporaryDirectory(prefix="fusedops-") as work:
        return build(cache_folder(torch.version, torch.cxx11_abi), Path(work), jobs)[0]


def record(torch: Torch) -> dict[str, object]:
    """What is written beside a library."""
    about = {"torch": torch.version, "cxx11_abi": torch.cxx11_abi, "cuda": torch.cuda}
    return about | {"simt": torch.simt, "fusedops": version(), "source": source_hash()}


def steps(torches: Sequence[Torch], work: Path) -> Iterator[Step]:
    """From the sources to a library for each torch. All of them share the kernels' objects."""
    shared = [*kernels(torches[0], work / "kernels")]
    if torches[0].simt:
        shared += emulated(torches[0], work / "simt")
    if torches[0].cuda is not None:
        shared += for_gpus(work / "cuda")
    yield from shared
    for torch in torches:
        own = [*glue(torch, work / f"glue_{torch.name}")]
        yield from own
        objects = tuple(step.made for step in [*shared, *own] if step.made.endswith(".o"))
        library = work / library_name(torch.version)
        yield Step("link", str(library), objects, " ".join(_link_flags(torch)))


def kernels(torch: Torch, folder: Path) -> Iterator[Step]:
    """csrc/cpu/isa, once for each instruction set; what all files include is compiled once."""
    flags = {
        name: [*_flags(torch), f"-DCPU_CAPABILITY={name} {isa} {QUIET}"]
        for name, isa in INSTRUCTION_SETS.items()
    }
    shared = {name: folder / name / "vec.h" for name in INSTRUCTION_SETS}
    for name, header in shared.items():
        yield _header(_unit_file(["csrc/cpu/isa/vec.h"], header), f"{header}.gch", flags[name])
    for source in sources("csrc/cpu/isa/**/*.cpp"):
        same = source.removeprefix("csrc/cpu/isa/").removesuffix(".cpp") in WITHOUT_BF16
        for name in [n for n in INSTRUCTION_SETS if not (same and n == "AVX512_BF16")]:
            made, header = folder / f"{_flat(source)}.{name}.o", shared[name]
            yield _compile(ROOT / source, made, flags[name], header)


def glue(torch: Torch, folder: Path, most: int = UNIT) -> Iterator[Step]:
    """What calls kernels: operators, autograd, the Python module.

    Of each such file the compiler spends most of its time on torch's headers, which are compiled
    once, and on the templates in them, so that a unit is a few files of a folder, `most` at most.
    """
    files = sources("csrc/python/*.cpp") + sources("csrc/ops/**/*.cpp")
    files += [f for f in sources("csrc/cpu/**/*.cpp") if not f.startswith("csrc/cpu/isa/")]
    flags, header = _glue_flags(torch), folder / "all.h"
    yield _header(_unit_file(["csrc/precompiled.h"], header), f"{header}.gch", flags)
    for unit in _units(files, most):
        made = folder / f"{_flat(unit[0])}.o"
        yield _compile(_unit_file(unit, made.with_suffix("")), made, flags, header)
    if torch.simt or torch.cuda is not None:
        more = ["-DFUSEDOPS_SIMT"] if torch.simt else _cuda_includes()
        for source in sources("csrc/cuda/**/*.cpp"):
            yield _compile(ROOT / source, folder / f"{_flat(source)}.o", [*flags, *more])


def _units(files: Iterable[str], most: int) -> Iterator[tuple[str, ...]]:
    """Files that are compiled as one: of the same folder, so many of them at most."""
    for folder, group in itertools.groupby(files, key=os.path.dirname):
        found, step = list(group), 1 if folder == "csrc/python" else most  # own headers
        yield from (tuple(found[i : i + step]) for i in range(0, len(found), step))


def _unit_file(unit: Sequence[str], file: Path) -> Path:
    """What the compiler is given for files that are one unit."""
    if len(unit) == 1 and file.suffix == ".cpp":
        return ROOT / unit[0]
    file.parent.mkdir(parents=True, exist_ok=True)
    _write(file, "".join(f'#include "{source}"\n' for source in unit))
    return file


def emulated(torch: Torch, folder: Path) -> Iterator[Step]:
    """csrc/cuda as C++ with csrc/simt in place of CUDA."""
    races = [] if os.environ.get("FUSEDOPS_SANITIZE") else ["-fsanitize=thread"]
    for source in sources("csrc/cuda/**/*.cu"):
        flags = [*_flags(torch), "-x c++", *SIMT_FLAGS, *races]
        yield _compile(ROOT / source, folder / f"{_flat(source)}.o", flags)


def for_gpus(folder: Path) -> Iterator[Step]:
    from torch.utils import cpp_extension

    flags = [*cpp_extension.COMMON_NVCC_FLAGS, *NVCC_FLAGS, "--compiler-options", "-fPIC"]
    flags += [*cpp_extension._get_cuda_arch_flags(), f"-I{_quoted(ROOT)}", *_cuda_includes()]
    for source in sources("csrc/cuda/**/*.cu"):
        made = folder / f"{_flat(source)}.o"
        yield Step("nvcc", str(made), (str(ROOT / source),), " ".join(flags))


def sources(pattern: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))


def unbuildable() -> str:
    """Why nothing can be compiled here; empty where it can."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return f"kernels are for Linux on x86-64, this is {sys.platform} on {os.uname().machine}"
    if not (ROOT / "csrc").is_dir():
        return f"the sources are missing: there is no {ROOT / 'csrc'}"
    if not requested_torches() and importlib.util.find_spec("torch") is None:
        return "torch is not installed: pip install torch"
    if shutil.which(shlex.split(_compiler())[0]) is None:
        return f"there is no C++ compiler: {_compiler()} is not on PATH (apt-get install g++)"
    if not _ninja():
        return "ninja is missing: pip install ninja"
    return ""


def _compile(source: Path, made: Path, flags: Iterable[str], header: Path | None = None) -> Step:
    """header: one that is compiled, put before the source."""
    if header is None:
        return Step("compile", str(made), (str(source),), " ".join(flags))
    with_it = " ".join([*flags, "-include", _quoted(header)])
    return Step("compile", str(made), (str(source),), with_it, (f"{header}.gch",))


def _header(source: Path, made: str, flags: Iterable[str]) -> Step:
    return Step("compile", made, (str(source),), " ".join([*flags, "-x c++-header"]))


def _flags(torch: Torch) -> list[str]:
    """Of all C++. torch's headers are system headers: nobody here mends their warnings."""
    include = torch.folder / "include"
    headers = (include, include / "torch" / "csrc" / "api" / "include")
    own = [*FLAGS, "-g" if _debug() else "-g0"]
    if sanitizers := os.environ.get("FUSEDOPS_SANITIZE"):
        own += [f"-fsanitize={sanitizers}", *SANITIZE]
    system = (f"-isystem {_quoted(path)}" for path in headers)
    return [*own, os.environ.get("CXXFLAGS", ""), f"-I{_quoted(ROOT)}", *system]


def _glue_flags(torch: Torch) -> list[str]:
    """Warnings about torch's own headers are off, which a compiled header does not mark as such."""
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={torch.cxx11_abi:d}"
    python = f"-isystem {_quoted(sysconfig.get_paths()['include'])}"
    module = "-DTORCH_API_INCLUDE_EXTENSION_H -DTORCH_EXTENSION_NAME=_C"
    return [*_flags(torch), QUIET, abi, module, python]


def _cuda_includes() -> list[str]:
    from torch.utils import cpp_extension

    return [f"-isystem {_quoted(path)}" for path in cpp_extension.include_paths("cuda")]


def _link_flags(torch: Torch) -> list[str]:
    """Without OpenMP's library: torch has loaded its own, and a process needs one alone."""
    folders, names = [str(torch.folder / "lib")], ["c10", "torch", "torch_cpu", "torch_python"]
    if torch.cuda is not None:
        from torch.utils import cpp_extension

        folders += cpp_extension.library_paths("cuda")
        names += ["c10_cuda", "torch_cuda", "cudart"]
    flags = [*(f"-L{_quoted(f)}" for f in folders), *(f"-l{n}" for n in names)]
    if sanitizers := os.environ.get("FUSEDOPS_SANITIZE"):
        flags.append(f"-fsanitize={sanitizers}")
    kept = _debug() or sanitizers
    return [*flags, *([] if kept else ["-s"]), os.environ.get("LDFLAGS", "")]


def _wants_cuda() -> bool:
    """What FUSEDOPS_CUDA says, else what is found; a GPU as well where the emulator is wanted."""
    import torch

    wanted = os.environ.get("FUSEDOPS_CUDA", "")
    if torch.version.cuda is None and wanted != "1":
        return False
    found = torch.version.cuda is not None and _nvcc() is not None
    if wanted == "1" and not found:
        raise RuntimeError("FUSEDOPS_CUDA=1 needs a torch with CUDA and nvcc on the PATH")
    if not wanted and os.environ.get("FUSEDOPS_SIMT") == "1":
        return found and torch.cuda.is_available()
    return found and wanted != "0"


def _nvcc() -> str | None:
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    return home and str(Path(home) / "bin" / "nvcc")


def _compiler() -> str:
    return os.environ.get("CXX") or "g++"


def _ninja() -> list[str]:
    """The command, of the package of this Python or of the system; empty where there is none."""
    if importlib.util.find_spec("ninja") is not None:
        return [sys.executable, "-m", "ninja"]
    found = shutil.which("ninja")
    return [found] if found else []


def _jobs() -> int:
    """MAX_JOBS, or as many as there are CPUs, at most one for each 2 GiB of memory."""
    if asked := os.environ.get("MAX_JOBS"):
        return int(asked)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**31
    return max(1, min(len(os.sched_getaffinity(0)), memory))


def requested_torches() -> list[Torch]:
    """FUSEDOPS_TORCHES, oldest first: the kernels are compiled with the oldest headers."""
    asked = os.environ.get("FUSEDOPS_TORCHES")
    folders = Path(asked).resolve().glob("*/torch") if asked else ()
    if not (found := [Torch.unpacked(folder) for folder in folders]) and asked:
        raise RuntimeError(f"FUSEDOPS_TORCHES: {asked} holds no folder */torch")
    return sorted(found, key=lambda torch: [*map(int, re.findall(r"\d+", torch.version))])


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
    """Leaves a file alone that says so already."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _replace(path: Path, content: bytes) -> None:
    """At once: who reads meanwhile has the old file or the new one, whole."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as made:
        made.write(content)
    os.chmod(made.name, 0o644)
    os.replace(made.name, path)
