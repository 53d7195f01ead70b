"""Builds fusedops with nvcc against PyPI's CUDA builds of torch: `python -m checks cuda-build`.

Needs nvcc, but no GPU. Each torch gets an environment under build/cuda. One copy of the tree there
is compiled for all of them, as the wheel is: the kernels once, the code that calls them once per
torch. The next run installs nothing and compiles only changed files. In the first run pip downloads
about 3 GB per torch. checks/cuda_built.py then checks what the build can do.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

from checks.tree import ROOT, Tree
from fusedops import toolchain

VERSIONS = ("2.11.0", "2.13.0")
# What building and the checks import beside torch; the tests' records of calls import the last two.
PACKAGES = ("setuptools>=77", "ninja", "numpy", "pytest", "hypothesis")
ARCHITECTURE = "9.0a"


def environment(version: str, folder: Path) -> Path:
    """Returns the Python of an environment with PyPI's torch, which contains CUDA."""
    python = folder / "venv" / "bin" / "python"
    if not (folder / "installed").exists():
        shutil.rmtree(folder / "venv", ignore_errors=True)
        venv.create(folder / "venv", with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--no-cache-dir"]
        requirements = [f"torch=={version}", *PACKAGES]
        subprocess.run([*pip, *requirements], check=True, env=_from_pypi(os.environ.copy()))
        (folder / "installed").touch()
    return python


def _from_pypi(variables: dict[str, str]) -> dict[str, str]:
    """pip's environment without other sources of packages: those may have torch without CUDA."""
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        variables.pop(name, None)
    return variables | {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "https://pypi.org/simple"}


def build(pythons: dict[str, Path], folder: Path, jobs: int) -> Tree:
    """Compiles a copy of the tree for all torches, as the wheel is, and prints what it took."""
    torches = folder / "torches"
    shutil.rmtree(torches, ignore_errors=True)
    for version, python in pythons.items():
        (torches / version).mkdir(parents=True)
        (package,) = (python.parents[1] / "lib").glob("python3*/site-packages/torch")
        (torches / version / "torch").symlink_to(package)
    tree = Tree(
        folder / "tree",
        python=str(next(iter(pythons.values()))),
        FUSEDOPS_CUDA="1",
        FUSEDOPS_SIMT="0",
        FUSEDOPS_TORCHES=str(torches),
        MAX_JOBS=str(jobs),
        TORCH_CUDA_ARCH_LIST=os.environ.get("TORCH_CUDA_ARCH_LIST") or ARCHITECTURE,
        TRITON_INTERPRET="0",
    )
    tree.sync()
    start, before = time.monotonic(), _cpu_seconds()
    tree.build()
    wall, cpu = time.monotonic() - start, _cpu_seconds() - before
    print(f"built in {wall:.0f} s, {cpu:.0f} s of CPU time")
    for library in sorted((tree.folder / "fusedops").glob("_C_torch*.so")):
        print(f"  {library.name}: {library.stat().st_size / 1e6:.1f} MB")
    return tree


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def check(python: Path, tree: Tree) -> int:
    """Runs the checks with one torch. Returns their exit status."""
    paths = os.pathsep.join([str(tree.folder), str(tree.folder / "tests")])
    script = [str(python), "-P", str(ROOT / "checks" / "cuda_built.py")]
    environment = {k: v for k, v in tree.environment.items() if k != "FUSEDOPS_TORCHES"}
    environment |= {"PYTHONPATH": paths}
    return subprocess.run(script, env=environment, cwd=tree.folder, check=False).returncode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("versions", nargs="*", default=VERSIONS, help="torch versions, such as 2.11.0")
    add("--folder", type=Path, default=ROOT / "build" / "cuda", help="environments and trees")
    add("--jobs", type=int, default=os.cpu_count(), help="compilers to run at a time")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 1 if a build fails a check."""
    if toolchain.toolkit() is None:
        print("cuda-build needs nvcc and CUDA's headers: set CUDA_HOME", file=sys.stderr)
        return 1
    folder = args.folder.resolve()
    pythons = {version: environment(version, folder / version) for version in args.versions}
    tree = build(pythons, folder, args.jobs)
    statuses = [check(python, tree) for python in pythons.values()]
    return int(any(statuses))
