"""Collects the requirements on nvcc's machine code, from one file per operator family.

DEMANDS: by pattern of kernel names; the first that fits. NAMES: short names of template arguments.
"""

import importlib
from importlib.util import find_spec

from checks.machine_code.gates import Demand
from fusedops.backends import FAMILIES

DEMANDS: dict[str, Demand] = {}
NAMES: dict[str, str] = {}

for _family in FAMILIES:
    if find_spec(f"{__name__}.{_family}"):
        _module = importlib.import_module(f"{__name__}.{_family}")
        DEMANDS |= _module.DEMANDS
        NAMES |= getattr(_module, "NAMES", {})
