"""Collects the functions of fusedops._C in plain Python from all files of the package."""

import importlib
import pkgutil

from fusedops import uncompiled
from fusedops.uncompiled.library import EXPORTS, export


@export
def cpu_isa() -> str:
    """The instruction set of the CPU kernels."""
    return "none"


@export
def bfloat16_products(asked: bool | None) -> None:
    """Whether kernels multiply in bfloat16; there are no kernels here."""


for _file in pkgutil.walk_packages(uncompiled.__path__, f"{uncompiled.__name__}."):
    importlib.import_module(_file.name)

globals().update(EXPORTS)
