"""Replaces parts of a model (sites) with fused kernels, and reports them.

Sites are recognised in three ways, each a subpackage on top of `core`: by running a module
(`modules`), by reading the lines of a forward (`lines`), and through transformers' hooks
(`models`). A fused module has one attribute of ours, `_fusedops` (`core/fused_state.py`).
"""

from fusedops.patching.core.thresholds import fuse_always
from fusedops.patching.patch import patch, patched, unpatch
from fusedops.patching.quantize import quantize
from fusedops.patching.report import CallCounts, PatchReport, Site, SiteCalls

__all__ = [
    "CallCounts",
    "PatchReport",
    "Site",
    "SiteCalls",
    "fuse_always",
    "patch",
    "patched",
    "quantize",
    "unpatch",
]
