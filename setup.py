"""Builds fusedops._C: C++ for CPUs always, CUDA where this torch has it and nvcc is found.

FUSEDOPS_CUDA=0|1 overrides the choice; TORCH_CUDA_ARCH_LIST and MAX_JOBS are honoured.
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


def sources(pattern):
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def escaped(path):
    """A path as a ninja file writes it."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def wants_cuda():
    wanted = os.environ.get("FUSEDOPS_CUDA", "")
    found = torch.version.cuda is not None and cpp_extension.CUDA_HOME is not None
    if wanted == "1" and not found:
        raise SystemExit("FUSEDOPS_CUDA=1 needs a torch with CUDA and nvcc on the PATH")
    return found and wanted != "0"


def cuda_sources():
    return sources("csrc/cuda/**/*.cu") if wants_cuda() else []


class Build(cpp_extension.BuildExtension):
    """Compiles csrc/cpu/isa once per instruction set, then everything else once."""

    def run(self):
        super().run()
        # only now does the path say whether the extension was copied into the tree
        cuda = torch.version.cuda if cuda_sources() else None
        record = {"torch": torch.__version__, "cuda": cuda}
        where = Path(self.get_ext_fullpath("fusedops._C")).with_name("_build_info.json")
        where.write_text(json.dumps(record) + "\n")

    def build_extension(self, ext):
        ext.extra_objects = [*ext.extra_objects, *self.isa_objects(ext)]
        super().build_extension(ext)

    def isa_objects(self, ext):
        folder = Path(self.build_temp).resolve() / "isa"
        folder.mkdir(parents=True, exist_ok=True)
        includes = " ".join(f"-I{shlex.quote(str(path))}" for path in ext.include_dirs)
        compiler = os.environ.get("CXX", "g++")
        # GCC 12's own AVX-512 headers set off these two warnings
        flags = " ".join([*FLAGS, "-Wno-uninitialized", "-Wno-maybe-uninitialized"])
        lines = [
            "ninja_required_version = 1.3",
            f"flags = -fPIC {flags} {includes}",
            "rule compile",
            f"  command = {compiler} -MMD -MF $out.d $flags $isa -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
        ]
        objects = []
        for source in sources("csrc/cpu/isa/**/*.cpp"):
            for name, isa in INSTRUCTION_SETS.items():
                target = folder / f"{source.replace('/', '.')}.{name}.o"
                objects.append(str(target))
                lines += [f"build {escaped(target)}: compile {escaped(ROOT / source)}"]
                lines += [f"  isa = -DCPU_CAPABILITY={name} {isa}"]
        (folder / "build.ninja").write_text("\n".join(lines) + "\n")
        jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
        subprocess.run(["ninja", "-C", str(folder), *jobs], check=True)
        return objects


def extension():
    files = sources("csrc/*.cpp") + sources("csrc/ops/**/*.cpp")
    files += [f for f in sources("csrc/cpu/**/*.cpp") if not f.startswith("csrc/cpu/isa/")]
    kernels = cuda_sources()
    make = cpp_extension.CUDAExtension if kernels else cpp_extension.CppExtension
    flags = {"cxx": FLAGS, "nvcc": ["-O3", "-std=c++20", "--expt-relaxed-constexpr"]}
    return make(
        "fusedops._C",
        files + kernels,
        include_dirs=[str(ROOT), *cpp_extension.include_paths()],
        extra_compile_args=flags if kernels else FLAGS,
        extra_link_args=["-fopenmp"],
    )


setup(ext_modules=[extension()], cmdclass={"build_ext": Build})
