"""Finds what a build needs: sources, torch, C++ compiler, ninja, CUDA toolkit.

building.py compiles with them, `fusedops doctor` checks them, and the import names the missing
ones. Importing this module needs only the standard library. building.py lists the environment
variables.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from fusedops.machine import compilers

PACKAGE = Path(__file__).resolve().parent
# An installed package contains csrc; in a checkout, csrc is next to the package.
ROOT = PACKAGE if (PACKAGE / "csrc").is_dir() else PACKAGE.parent
SUFFIXES = (".h", ".cpp", ".cuh", ".cu")
NO_TORCH = "torch is not installed: pip install torch"


@dataclass(frozen=True)
class Torch:
    """A torch package that a library is compiled against."""

    folder: Path  # the package's folder, with include/ and lib/
    version: str
    cuda: str | None = None  # the CUDA version if GPU kernels are compiled too
    simt: bool = False

    @classmethod
    def installed(cls) -> "Torch":
        import torch

        cuda = cuda_to_compile_for()
        simt = os.environ.get("FUSEDOPS_SIMT") == "1" and cuda is None
        return cls(Path(torch.__file__).parent, torch.__version__, cuda, simt)

    @classmethod
    def unpacked(cls, folder: Path) -> "Torch":
        """A torch that is not imported.

        GPU kernels are compiled only with FUSEDOPS_CUDA=1. Raises RuntimeError if they cannot be.
        """
        text = (folder / "version.py").read_text()
        version = re.search(r"^__version__ = '(.+)'$", text, re.M)
        assert version is not None
        if os.environ.get("FUSEDOPS_CUDA") != "1":
            return cls(folder, version[1])
        cuda = re.search(r"^cuda\b.* = '(.+)'$", text, re.M)
        if reason := without_cuda(cuda and cuda[1], nvcc_version()):
            raise RuntimeError(f"FUSEDOPS_CUDA=1: {folder}: {reason}")
        return cls(folder, version[1], cuda=cuda and cuda[1])

    @property
    def name(self) -> str:
        """Its minor version as used in file names, such as torch2_13."""
        major, minor = self.version.split(".")[:2]
        return f"torch{major}_{minor}"


def library_name(torch_version: str) -> str:
    """The file name of the library for a torch: `_C_torch2_13` and Python's suffix."""
    return f"_C_{Torch(Path(), torch_version).name}{EXTENSION_SUFFIXES[0]}"


def requested_torches() -> list[Torch]:
    """The torches in FUSEDOPS_TORCHES, oldest first: the oldest headers compile the kernels."""
    asked = os.environ.get("FUSEDOPS_TORCHES")
    folders = Path(asked).glob("*/torch") if asked else ()
    if not (torches := [Torch.unpacked(folder.resolve()) for folder in folders]) and asked:
        raise RuntimeError(f"FUSEDOPS_TORCHES: {asked} must contain folders */torch, but has none")
    return sorted(torches, key=lambda torch: _numbers(torch.version))


def sources(pattern: str) -> list[str]:
    """The paths below ROOT that a pattern matches."""
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))


def unsupported() -> str:
    """Why no kernel can run on this machine; empty if kernels can run."""
    if sys.platform == "linux" and os.uname().machine == "x86_64":
        return ""
    machine = os.uname().machine if hasattr(os, "uname") else "an unknown machine"
    return f"kernels need Linux on x86-64, but this is {sys.platform} on {machine}"


def unbuildable(no_torch: str = NO_TORCH) -> str:
    """Why nothing can be compiled here; empty if it can. no_torch: the reason without a torch."""
    if reason := unsupported():
        return reason
    if not (ROOT / "csrc").is_dir():
        return f"the sources are missing: there is no {ROOT / 'csrc'}"
    try:
        command, torches = compiler()[0], requested_torches()
    except RuntimeError as error:
        return str(error)
    if not torches and importlib.util.find_spec("torch") is None:
        return no_torch
    if shutil.which(command) is None:
        return f"there is no C++ compiler: {command} is not on PATH (apt-get install g++)"
    if not python_header().exists():
        return f"there is no {python_header()} (apt-get install {python_package()})"
    if not ninja():
        return "ninja is missing: pip install ninja"
    return ""


def compiler(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The C++ compiler's command: CXX, or g++. Raises RuntimeError if CXX has an unclosed quote."""
    asked = environment.get("CXX", "")
    try:
        return shlex.split(asked) or ["g++"]
    except ValueError as error:
        raise RuntimeError(f"CXX must be a command, got {asked!r}: {error}") from error


def python_header() -> Path:
    """The path where this Python's Python.h should be."""
    return Path(sysconfig.get_paths()["include"], "Python.h")


def python_package() -> str:
    """Debian's package with this Python's C headers."""
    return f"python{sys.version_info.major}.{sys.version_info.minor}-dev"


def ninja() -> list[str]:
    """ninja's command, from this Python's package or from PATH; empty if it is missing."""
    if importlib.util.find_spec("ninja") is not None:
        return [sys.executable, "-m", "ninja"]
    path = shutil.which("ninja")
    return [path] if path else []


def jobs_at_a_time(asked: int | None = None) -> int:
    """How many compilers run at a time: `asked`, else MAX_JOBS, else this machine's limit."""
    text = os.environ.get("MAX_JOBS", "") if asked is None else str(asked)
    if not text:
        return compilers()
    if not text.isdecimal() or int(text) == 0:
        name = "MAX_JOBS" if asked is None else "--jobs"
        raise RuntimeError(f"{name} must be a whole number above 0, got {text!r}")
    return int(text)


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: its compiler, and the folders of its headers and libraries."""

    nvcc: Path
    include: Path
    libraries: Path


def toolkit(environment: Mapping[str, str] = os.environ) -> Toolkit | None:
    """The CUDA toolkit that has nvcc and cuda_runtime.h; None if there is none.

    Looks only in $CUDA_HOME or $CUDA_PATH if one is set. Otherwise it looks beside nvcc on PATH,
    then in the toolkit that this nvcc names, because it may be a script that runs another nvcc,
    then in /usr/local.
    """
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    homes = [Path(home)] if home else _toolkit_folders(environment)
    return next(filter(None, map(_toolkit_in, homes)), None)


def _toolkit_folders(environment: Mapping[str, str]) -> Iterator[Path]:
    if command := shutil.which("nvcc", path=environment.get("PATH", "")):
        yield Path(command).parent.parent
        yield Path(command).resolve().parent.parent
        plan = output([command, "--dryrun", "-x", "cu", "-c", os.devnull], errors=True)
        match = re.search(r"_HERE_=(.+)", plan)
        yield from [Path(match[1]).parent] if match else []
    yield Path("/usr/local/cuda")
    yield from sorted(Path("/usr/local").glob("cuda-*"), key=_numbers, reverse=True)


def _toolkit_in(home: Path) -> Toolkit | None:
    target = home / "targets" / "x86_64-linux"  # where conda's packages have both
    nvcc, libraries = home / "bin" / "nvcc", (home / "lib64", home / "lib", target / "lib")
    headers = (folder / "include" for folder in (home, target))
    include = next((path for path in headers if (path / "cuda_runtime.h").exists()), None)
    if include is None or not os.access(nvcc, os.X_OK):
        return None
    return Toolkit(nvcc, include, next((p for p in libraries if p.is_dir()), libraries[0]))


def _numbers(text: object) -> list[int]:
    """The numbers in a version, for sorting."""
    return [*map(int, re.findall(r"\d+", str(text)))]


def nvcc_version(environment: Mapping[str, str] = os.environ) -> str | None:
    """nvcc's CUDA release, such as 13.0; None without a toolkit that runs."""
    if (cuda_toolkit := toolkit(environment)) is None:
        return None
    text = output([str(cuda_toolkit.nvcc), "--version"])
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else None


def without_cuda(torchs: str | None, toolkit: str | None) -> str:
    """Why these CUDA versions of torch and nvcc cannot compile GPU kernels; empty if they can."""
    if torchs is None:
        return "torch is built without CUDA"
    if toolkit is None:
        return f"torch has CUDA {torchs}, but nvcc is missing"
    if toolkit.split(".")[0] != torchs.split(".")[0]:
        return f"torch has CUDA {torchs}, but nvcc is from CUDA {toolkit}"
    return ""


def cuda_to_compile_for() -> str | None:
    """torch's CUDA version if GPU kernels should be compiled, else None.

    FUSEDOPS_CUDA decides; without it, GPU kernels are compiled if torch and nvcc allow it. On a
    machine without a GPU, FUSEDOPS_SIMT=1 replaces GPU kernels with emulated ones. Raises
    RuntimeError if FUSEDOPS_CUDA=1 cannot be done.
    """
    import torch

    setting, version = os.environ.get("FUSEDOPS_CUDA", ""), torch.version.cuda
    if setting == "0" or (version is None and setting != "1"):
        return None
    reason = without_cuda(version, nvcc_version())
    if setting == "1" and reason:
        raise RuntimeError(f"FUSEDOPS_CUDA=1 needs a torch with CUDA and nvcc: {reason}")
    if not setting and os.environ.get("FUSEDOPS_SIMT") == "1" and not torch.cuda.is_available():
        return None
    if reason:
        print(f"fusedops is compiled without GPU kernels: {reason}", flush=True)
        return None
    return version


def output(command: list[str], errors: bool = False) -> str:
    """A command's output, or what it writes to stderr; empty if it cannot run or fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stderr if errors else run.stdout
