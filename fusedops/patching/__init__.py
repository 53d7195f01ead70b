"""Finds sites in a model that fused kernels can take, swaps them, and reports."""

from fusedops.patching.interface import register_attention
from fusedops.patching.patch import patch, patched, unpatch
from fusedops.patching.quantize import quantize
from fusedops.patching.report import PatchReport, Site
from fusedops.patching.thresholds import fuse_always

__all__ = [
    "PatchReport",
    "Site",
    "fuse_always",
    "patch",
    "patched",
    "quantize",
    "register_attention",
    "unpatch",
]
