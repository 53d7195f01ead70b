"""Installs the package, and compiles its extension where a torch and a compiler are there.

Without them, as in pip's isolated environments, which hold no torch, the package is installed with
its sources: it runs, and `fusedops build` compiles it for the torch that it will run with.
FUSEDOPS_REQUIRE=compiled makes a missing extension an error; FUSEDOPS_COMPILED=0 compiles nothing.
What else the environment decides: fusedops/building.py.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()


def module(name, path):
    """A file of the package by itself: the package imports torch."""
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


building = module("building", ROOT / "fusedops" / "building.py")
REQUIRED = os.environ.get("FUSEDOPS_REQUIRE") == "compiled"


def not_compiled():
    """Why the extension is not compiled; empty where it is."""
    if os.environ.get("FUSEDOPS_COMPILED") == "0":
        return "FUSEDOPS_COMPILED=0"
    reason = building.unbuildable()
    if reason and REQUIRED:
        raise SystemExit(f"FUSEDOPS_REQUIRE=compiled: {reason}")
    return reason


class Compile(build_ext):
    """Compiles for the torch that is installed; where that fails, the package comes without."""

    def run(self):
        # An editable install keeps its objects, for the next one.
        into, work = Path(self.build_lib) / "fusedops", Path(self.build_temp)
        if self.inplace:
            into, work = ROOT / "fusedops", ROOT / "build" / "temp"
        try:
            building.build(into, work)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            if REQUIRED:
                raise SystemExit(f"FUSEDOPS_REQUIRE=compiled: {error}") from error
            self.warn(f"fusedops is installed without its compiled part: {error}")

    def get_outputs(self):
        return []

    def get_source_files(self):
        return []  # MANIFEST.in has them

    def get_output_mapping(self):
        return {}


class WithSources(build_py):
    """Puts csrc into the package, for `fusedops build`; an editable install has it beside."""

    def run(self):
        super().run()
        if not self.editable_mode:
            for name in building.sources("csrc/**/*"):
                if name.endswith(building.SUFFIXES):
                    to = Path(self.build_lib) / "fusedops" / name
                    to.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(ROOT / name, to)


extensions = [] if not_compiled() else [Extension("fusedops._C", [])]
setup(ext_modules=extensions, cmdclass={"build_ext": Compile, "build_py": WithSources})
