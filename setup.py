"""Installs the package, and compiles its extension if torch and a compiler are installed.

pip's isolated environments have no torch. There, or without a compiler, setup installs the package
with its sources. The package then runs without the extension, and `fusedops build` compiles it for
the torch that it runs with. FUSEDOPS_REQUIRE=compiled makes a missing extension an error;
FUSEDOPS_COMPILED=0 skips the compilation. fusedops/building.py lists the other environment
variables.
"""

import importlib
import os
import shutil
import sys
import types
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()


def modules(*names):
    """Imports modules without the package's __init__.py, which imports torch."""
    package = sys.modules["fusedops"] = types.ModuleType("fusedops")
    package.__path__ = [str(ROOT / "fusedops")]
    return [importlib.import_module(f"fusedops.{name}") for name in names]


building, toolchain = modules("building", "toolchain")
# pip's isolated environment has no torch, even if one is installed.
NO_TORCH = (
    "this build environment has no torch. Run `fusedops build` after the installation, "
    "or install torch first and then run pip install --no-build-isolation"
)
REQUIRED = os.environ.get("FUSEDOPS_REQUIRE") == "compiled"


def not_compiled():
    """Why the extension is not compiled; empty if it is compiled."""
    if os.environ.get("FUSEDOPS_COMPILED") == "0":
        return "FUSEDOPS_COMPILED=0"
    reason = toolchain.unbuildable(NO_TORCH)
    if reason and REQUIRED:
        raise SystemExit(f"FUSEDOPS_REQUIRE=compiled: {reason}")
    return reason


def without_compiled_part(reason):
    """Prints the reason to stdout, which `pip install -v` shows."""
    print(f"fusedops is installed without its compiled part: {reason}", flush=True)


class Compile(build_ext):
    """Compiles for the installed torch; if that fails, installs without the extension."""

    def run(self):
        # An editable install keeps its objects for the next one.
        into, work = Path(self.build_lib) / "fusedops", Path(self.build_temp)
        if self.inplace:
            into, work = ROOT / "fusedops", ROOT / "build" / "temp"
        try:
            building.build(into, work)
        except Exception as error:  # importing a broken torch can raise anything
            reason = str(error) or type(error).__name__
            if REQUIRED:
                raise SystemExit(f"FUSEDOPS_REQUIRE=compiled: {reason}") from error
            without_compiled_part(reason)

    def get_outputs(self):
        return []

    def get_source_files(self):
        return []  # MANIFEST.in has them

    def get_output_mapping(self):
        return {}


class WithSources(build_py):
    """Copies csrc into the package, for `fusedops build`, except for an editable install.

    Removes an earlier build's files first: libraries for another torch, and old sources.
    """

    def run(self):
        package = Path(self.build_lib) / "fusedops"
        for old in package.glob("_C*"):
            old.unlink()
        shutil.rmtree(package / "csrc", ignore_errors=True)
        super().run()
        if REASON:
            without_compiled_part(REASON)
        if not self.editable_mode:
            for name in toolchain.sources("csrc/**/*"):
                if name.endswith(toolchain.SUFFIXES):
                    to = package / name
                    to.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(ROOT / name, to)


REASON = not_compiled()
extensions = [] if REASON else [Extension("fusedops._C", [])]
setup(ext_modules=extensions, cmdclass={"build_ext": Compile, "build_py": WithSources})
