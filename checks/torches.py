"""Checks that every source compiles with several torch versions: `python -m checks torches`.

It runs the build's commands with -fsyntax-only, one unit per source; nvcc compiles csrc/cuda too.
pip downloads each torch without its dependencies. docs/compatibility.json stores the result;
docs/compatibility.md shows it.
"""

import argparse
import dataclasses
import datetime
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from checks import compatibility
from checks.machine_code import nvcc
from checks.packages import VERSIONS, package
from checks.tree import ROOT
from fusedops import building
from fusedops.toolchain import Torch

PACKAGES = ROOT / "build" / "torches"


@dataclasses.dataclass(frozen=True)
class Unit:
    """A source as one compiler compiles it, with one set of flags."""

    name: str
    command: list[str]

    def error(self) -> str:
        """Returns the compiler's first error; empty if the unit compiles."""
        run = subprocess.run(self.command, cwd=ROOT, capture_output=True, text=True)
        if run.returncode == 0:
            return ""
        message = re.search(r"(?:fatal )?error: .*", run.stderr)
        return message[0] if message else run.stderr.strip()[-200:]


def units(torch: Path) -> tuple[list[Unit], list[Unit]]:
    """Returns all units for a torch package: the precompiled headers, and every source by itself.

    They have the build's flags and each instruction set's. If nvcc is installed, it compiles
    csrc/cuda too.
    """
    against = dataclasses.replace(Torch.unpacked(torch), simt=True)
    folder = PACKAGES / "units" / against.name
    steps = [*building.kernels(against, folder), *building.glue(against, folder, 1)]
    steps += building.emulated(against, folder)
    pch = [step for step in steps if _is_header(step)]
    first = [Unit(str(Path(s.made).relative_to(folder)), _command(s, "-o", s.made)) for s in pch]
    sources = [Unit(_name(s), _command(s, "-fsyntax-only")) for s in steps if not _is_header(s)]
    if nvcc.find() is not None:
        sources += _nvcc_units(torch / "include")
    return first, sources


def _is_header(step: building.Step) -> bool:
    return step.made.endswith(".gch")


def _command(step: building.Step, *more: str) -> list[str]:
    return [_compiler(), *shlex.split(step.flags), *more, *step.sources]


def _name(step: building.Step) -> str:
    source = Path(step.sources[0]).relative_to(ROOT).as_posix()
    isa = Path(step.made).stem.rpartition(".")[2]
    return f"{source} {isa}" if isa in building.INSTRUCTION_SETS else source


def _nvcc_units(include: Path) -> Iterator[Unit]:
    api = include / "torch" / "csrc" / "api" / "include"
    for suffix, flags in ((".cu", [*nvcc.flags(), "-arch=sm_90", "-ptx"]), (".cpp", nvcc.PARSE)):
        for source in nvcc.sources(suffix):
            paths = [f"-I{path}" for path in (ROOT, nvcc.stub(), include, api)]
            command = [str(nvcc.find()), *flags, *paths, "-o", os.devnull, str(source)]
            yield Unit(f"{source.relative_to(ROOT)} nvcc", command)


def check(version: str, jobs: int) -> dict[str, object]:
    """Returns a torch's entry for docs/compatibility.json."""
    first, sources = units(package(version, PACKAGES))
    errors: dict[str, str] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for batch in (first, sources):
            errors |= dict(zip((u.name for u in batch), pool.map(Unit.error, batch), strict=True))
    return {
        "date": datetime.date.today().isoformat(),
        "compilers": [_gcc(), nvcc.version()] if nvcc.find() else [_gcc()],
        "units": len(sources),
        "failed": {name: error for name, error in errors.items() if error},
    }


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _gcc() -> str:
    return "g++ " + subprocess.check_output([_compiler(), "-dumpfullversion"], text=True).strip()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="such as 2.11.0")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="compilers to run at a time"
    )


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 1 if a unit does not compile for one of the torches."""
    failures = [_report(version, args.jobs) for version in args.versions]  # each is reported
    return int(any(failures))


def _report(version: str, jobs: int) -> bool:
    """Checks a torch; writes and prints the result. Returns whether a unit failed."""
    entry = check(version, jobs)
    write(version, entry)
    failed: dict[str, str] = entry["failed"]  # type: ignore[assignment]
    print(f"torch {version}: {entry['units']} units, {len(failed)} failed", flush=True)
    for name, error in failed.items():
        print(f"  {name}: {error}")
    return bool(failed)


def write(version: str, entry: dict[str, object]) -> None:
    """Replaces one torch's entry in docs/compatibility.json."""
    results = compatibility.load()
    compiled = results.get("compiled", {}) | {version: entry}
    order: Sequence[str] = sorted(compiled, key=lambda v: [int(n) for n in v.split(".")])
    results["compiled"] = {version: compiled[version] for version in order}
    compatibility.save(results)
