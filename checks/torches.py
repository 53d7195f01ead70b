"""`python -m checks torches`: compiles every source against the headers of several torches.

The commands are those of the last build, with another torch's headers and -fsyntax-only; nvcc
compiles csrc/cuda besides. Wheels come from PyPI without their dependencies, and only their headers
stay, under build/. docs/compatibility.json has the result, docs/compatibility.md shows it.
"""

import argparse
import datetime
import os
import re
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from checks import compatibility
from checks.machine_code import nvcc
from checks.tree import ROOT
from fusedops import building

VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
INSTALLED = torch.__version__.partition("+")[0]
HEADERS = ROOT / "build" / "torches"
API = Path("torch") / "csrc" / "api" / "include"
# The headers of the installed torch, and those that are compiled beforehand.
OWN = re.compile(rf"-isystem \S+{os.sep}torch{os.sep}include\S*|-include \S+")


@dataclass(frozen=True)
class Unit:
    """A source as one compiler takes it, with one set of flags."""

    name: str
    command: list[str]

    def error(self) -> str:
        """The compiler's first error, empty where it takes the unit."""
        run = subprocess.run(self.command, cwd=ROOT, capture_output=True, text=True)
        if run.returncode == 0:
            return ""
        found = re.search(r"(?:fatal )?error: .*", run.stderr)
        return found[0] if found else run.stderr.strip()[-200:]


def headers(version: str) -> Path:
    """The include folder of a torch: of the installed one, or of a wheel that pip downloads."""
    if version == INSTALLED:
        return Path(torch.__file__).parent / "include"
    folder = HEADERS / version
    if not (folder / "complete").exists():
        with tempfile.TemporaryDirectory(dir=ROOT / "build") as made:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
            subprocess.run([*pip, "--quiet", "--dest", made, f"torch=={version}"], check=True)
            with zipfile.ZipFile(next(Path(made).glob("torch-*.whl"))) as wheel:
                members = (n for n in wheel.namelist() if n.startswith("torch/include/"))
                wheel.extractall(folder, members)
        (folder / "complete").touch()
    return folder / "torch" / "include"


def units(include: Path) -> Iterator[Unit]:
    """Every source by itself: with the build's flags, and csrc/cuda by nvcc where that is there."""
    simt = building.Torch(torch.__version__, torch.compiled_with_cxx11_abi(), None, True)
    folder = HEADERS / "units"
    steps = [*building.kernels(folder), *building.glue(simt, folder, 1), *building.emulated(folder)]
    for step in steps:
        if not step.made.endswith(".gch"):
            words = shlex.split(OWN.sub("", step.flags))
            more = ["-fsyntax-only", f"-I{include}", f"-I{include / API}", *step.sources]
            yield Unit(_name(step), [_compiler(), *words, *more])
    if nvcc.find() is not None:
        yield from _of_nvcc(include)


def _name(step: building.Step) -> str:
    source = Path(step.sources[0]).relative_to(ROOT).as_posix()
    isa = Path(step.made).stem.rpartition(".")[2]
    return f"{source} {isa}" if isa in building.INSTRUCTION_SETS else source


def _of_nvcc(include: Path) -> Iterator[Unit]:
    for suffix, flags in ((".cu", [*nvcc.flags(), "-arch=sm_90", "-ptx"]), (".cpp", nvcc.PARSE)):
        for source in nvcc.sources(suffix):
            paths = [f"-I{path}" for path in (ROOT, nvcc.stub(), include, include / API)]
            command = [str(nvcc.find()), *flags, *paths, "-o", os.devnull, str(source)]
            yield Unit(f"{source.relative_to(ROOT)} nvcc", command)


def check(version: str, jobs: int) -> dict[str, object]:
    """What docs/compatibility.json says of a torch."""
    found = list(units(headers(version)))
    with ThreadPoolExecutor(jobs) as pool:
        errors = dict(zip((u.name for u in found), pool.map(Unit.error, found), strict=True))
    return {
        "date": datetime.date.today().isoformat(),
        "compilers": [_gcc(), nvcc.version()] if nvcc.find() else [_gcc()],
        "units": len(found),
        "failed": {name: error for name, error in errors.items() if error},
    }


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _gcc() -> str:
    return "g++ " + subprocess.check_output([_compiler(), "-dumpfullversion"], text=True).strip()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="such as 2.11.0")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time")


def run(args: argparse.Namespace) -> int:
    """The exit status: 1 where a torch refuses a unit."""
    failures = [_report(version, args.jobs) for version in args.versions]  # each is reported
    return int(any(failures))


def _report(version: str, jobs: int) -> bool:
    """Checks a torch, writes and prints what was found. Returns whether a unit failed."""
    found = check(version, jobs)
    write(version, found)
    failed: dict[str, str] = found["failed"]  # type: ignore[assignment]
    print(f"torch {version}: {found['units']} units, {len(failed)} failed", flush=True)
    for name, error in failed.items():
        print(f"  {name}: {error}")
    return bool(failed)


def write(version: str, found: dict[str, object]) -> None:
    """Replaces what docs/compatibility.json says of one torch."""
    known = compatibility.load()
    compiled = known.get("compiled", {}) | {version: found}
    order: Sequence[str] = sorted(compiled, key=lambda v: [int(n) for n in v.split(".")])
    known["compiled"] = {version: compiled[version] for version in order}
    compatibility.save(known)
