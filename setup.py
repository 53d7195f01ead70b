"""Builds fusedops._C: C++ for CPUs always, CUDA where this torch has it and nvcc is found.

FUSEDOPS_CUDA=0|1 overrides the choice; TORCH_CUDA_ARCH_LIST and MAX_JOBS are honoured.
FUSEDOPS_SIMT=1 adds the CUDA kernels as csrc/simt runs them on a CPU, for the tests; a build for a
GPU has none of these.
FUSEDOPS_SANITIZE=address,undefined builds everything with these sanitizers.
"""

import json
import os
import shlex
import subprocess
from pathlib import Path

from setuptools import setup

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    raise SystemExit(
        "fusedops is compiled against the torch that it will run with: install torch first, then "
        "run pip with --no-build-isolation"
    ) from error

ROOT = Path(__file__).parent.resolve()

# Every file of csrc/cpu/isa is compiled once for each. CPU_CAPABILITY names the namespace, there
# and in at::vec; CPU_CAPABILITY_X chooses at::vec's implementation.
AVX2 = "-DCPU_CAPABILITY_AVX2 -mavx2 -mfma -mf16c"
AVX512 = "-DCPU_CAPABILITY_AVX512 -mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma -mf16c"
INSTRUCTION_SETS = {
    "AVX2": AVX2,
    "AVX512": AVX512,
    "AVX512_BF16": f"{AVX512} -mavx512bf16 -mavx512vnni",
}
FLAGS = ["-O3", "-std=c++20", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas"]
NVCC_FLAGS = ["-O3", "-std=c++20", "--expt-relaxed-constexpr"]
SANITIZERS = os.environ.get("FUSEDOPS_SANITIZE", "")
SANITIZE = [f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
# At -O1 GCC would contract no product and sum: other roundings than those that are shipped.
SANITIZE = [*SANITIZE, "-O2", "-g1"] if SANITIZERS else []
# The emulator's races: the compiler reports accesses to functions that csrc/simt/hooks.h defines.
# Shared memory is what needs it, so that a sanitizer of the whole build goes first.
SIMT_FLAGS = ["-O1", "-g1", "-Wno-unknown-pragmas", "-DFUSEDOPS_SIMT"]
SIMT_FLAGS += [] if SANITIZERS else ["-fsanitize=thread"]


def sources(pattern):
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def escaped(path):
    """A path as a ninja file writes it."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def wants_cuda():
    """What FUSEDOPS_CUDA says, else what is found; a GPU as well where the emulator is wanted."""
    wanted = os.environ.get("FUSEDOPS_CUDA", "")
    found = torch.version.cuda is not None and cpp_extension.CUDA_HOME is not None
    if wanted == "1" and not found:
        raise SystemExit("FUSEDOPS_CUDA=1 needs a torch with CUDA and nvcc on the PATH")
    if not wanted and os.environ.get("FUSEDOPS_SIMT") == "1":
        return found and torch.cuda.is_available()
    return found and wanted != "0"


def wants_simt():
    return os.environ.get("FUSEDOPS_SIMT") == "1" and not wants_cuda()


def cuda_sources():
    return sources("csrc/cuda/**/*.cu") if wants_cuda() else []


class Build(cpp_extension.BuildExtension):
    """Compiles csrc/cpu/isa once per instruction set and csrc/cuda for a CPU, then the rest."""

    def run(self):
        super().run()
        # only now does the path say whether the extension was copied into the tree
        cuda = torch.version.cuda if cuda_sources() else None
        record = {"torch": torch.__version__, "cuda": cuda, "simt": wants_simt()}
        where = Path(self.get_ext_fullpath("fusedops._C")).with_name("_build_info.json")
        where.write_text(json.dumps(record) + "\n")

    def build_extension(self, ext):
        ext.extra_objects = [*ext.extra_objects, *self.objects(ext)]
        super().build_extension(ext)

    def objects(self, ext):
        """The object files of what is not compiled once for the baseline, brought up to date."""
        folder = Path(self.build_temp).resolve() / "objects"
        wanted = [*isa_objects(), *(simt_objects() if wants_simt() else [])]
        return compiled(wanted, folder, ext.include_dirs)


def isa_objects():
    """(source, name, flags) of the files that are compiled for several instruction sets."""
    # GCC 12's own AVX-512 headers set off these two warnings
    quiet = "-Wno-uninitialized -Wno-maybe-uninitialized"
    for source in sources("csrc/cpu/isa/**/*.cpp"):
        for name, isa in INSTRUCTION_SETS.items():
            yield source, name, f"-DCPU_CAPABILITY={name} {isa} {quiet}"


def simt_objects():
    for source in sources("csrc/cuda/**/*.cu"):
        yield source, "simt", " ".join(["-x c++", *SIMT_FLAGS])


def compiled(objects, folder, include_dirs):
    folder.mkdir(parents=True, exist_ok=True)
    includes = " ".join(f"-I{shlex.quote(str(path))}" for path in include_dirs)
    compiler = os.environ.get("CXX", "g++")
    lines = [
        "ninja_required_version = 1.3",
        f"flags = -fPIC {' '.join([*FLAGS, *SANITIZE])} {includes}",
        "rule compile",
        f"  command = {compiler} -MMD -MF $out.d $flags $own -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
    ]
    targets = []
    for source, name, own in objects:
        targets.append(str(folder / f"{source.replace('/', '.')}.{name}.o"))
        lines += [f"build {escaped(targets[-1])}: compile {escaped(ROOT / source)}"]
        lines += [f"  own = {own}"]
    (folder / "build.ninja").write_text("\n".join(lines) + "\n")
    jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
    subprocess.run(["ninja", "-C", str(folder), *jobs], check=True)
    return targets


def extension():
    files = sources("csrc/*.cpp") + sources("csrc/ops/**/*.cpp")
    files += [f for f in sources("csrc/cpu/**/*.cpp") if not f.startswith("csrc/cpu/isa/")]
    if wants_cuda() or wants_simt():
        files += sources("csrc/cuda/**/*.cpp")
    kernels = cuda_sources()
    make = cpp_extension.CUDAExtension if kernels else cpp_extension.CppExtension
    flags = [*FLAGS, *SANITIZE, *(["-DFUSEDOPS_SIMT"] if wants_simt() else [])]
    return make(
        "fusedops._C",
        files + kernels,
        include_dirs=[str(ROOT), *cpp_extension.include_paths()],
        extra_compile_args={"cxx": flags, "nvcc": NVCC_FLAGS} if kernels else flags,
        extra_link_args=["-fopenmp", *SANITIZE],
    )


setup(ext_modules=[extension()], cmdclass={"build_ext": Build})
