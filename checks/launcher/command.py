"""Compares and times launches through fusedops and through Triton: `python -m checks launcher`."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from checks.launcher import BUILD, ROOT
from checks.machine_code.launches import FAMILIES

MOST_US = 9.0  # from the call to the driver
PARTS = ("compare", "hostile", "timing")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)}; default: all")
    add("--triton", type=Path, metavar="FOLDER", action="append", default=[],
        help="a folder with another installed triton; may be repeated")  # fmt: skip
    add("--quick", action="store_true", help="a selection of the launches and arguments")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 1 if a launch differs, or takes the host too long."""
    print("Not run on a GPU: the driver is a stub, and the times are the host's alone.")
    wrong = []
    for path in [None, *args.triton]:
        for part in args.parts or PARTS:
            print(f"\n{part}, triton {version(path)}")
            wrong += REPORTS[part](args.quick, path)
    print(*wrong[:20], f"{len(wrong)} failures", sep="\n")
    return int(bool(wrong))


def compared(quick: bool, path: Path | None = None) -> list[str]:
    """Makes every launch of every family both ways; returns the differences."""
    found = child("compare", FAMILIES, quick, path=path)
    variants = sum(map(len, found["variants"].values()))
    print(
        f"{found['launches']} launches of {variants} variants of {len(found['variants'])} kernels"
    )
    return found["wrong"]


def examined(quick: bool, path: Path | None = None) -> list[str]:
    """Launches with hostile arguments; returns what is wrong."""
    found = child("hostile", FAMILIES, not quick, path=path)
    ours, theirs = (sum(keys[i] for keys in found["kernels"].values()) for i in (0, 1))
    print(
        f"{found['calls']} calls with {ours} keys of ours and {theirs} of Triton's, "
        f"{found['refused']} calls left to Triton, {found['launches']} calls made both ways"
    )
    return found["wrong"]


def timed(quick: bool, path: Path | None = None) -> list[str]:
    """Prints the host's times in microseconds; returns what is too slow."""
    times = child("timing", quick, path=path)
    print(f"{'launch':42} {'arguments':>9} {'Triton':>9} {'fusedops':>9}")
    for one in times:
        print(f"{one['launch']:42} {one['arguments']:9} {one['triton']:9.1f} {one['ours']:9.1f}")
    slow = [one for one in times if one["ours"] > MOST_US]
    return [f"{one['launch']}: {one['ours']:.1f} us, not {MOST_US:g}" for one in slow]


REPORTS = {"compare": compared, "hostile": examined, "timing": timed}


def version(path: Path | None) -> str:
    code = "import triton; print(triton.__version__)"
    return subprocess.check_output([sys.executable, "-c", code], env=environment(path), text=True)[
        :-1
    ]


def child(module: str, *todo: Any, path: Path | None = None) -> Any:
    """Runs one of this folder's modules in a process with the triton in folder `path`."""
    command = [sys.executable, "-m", f"checks.launcher.{module}", json.dumps(todo)]
    return json.loads(subprocess.check_output(command, env=environment(path), cwd=ROOT))


def environment(path: Path | None) -> dict[str, str]:
    first = [str(path.resolve(strict=True))] if path else []
    paths = os.pathsep.join([*first, str(ROOT), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(BUILD / "triton")}
    return os.environ | own | {"TRITON_DEFAULT_FP_FUSION": "1", "TRITON_INTERPRET": "0"}
