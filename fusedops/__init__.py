"""Fused kernels for transformer models, `patch` to put them into a model, and a profiler."""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING

if find_spec("torch") is None:
    raise ModuleNotFoundError(
        "fusedops needs torch 2.11 or newer, which is not installed: pip install 'torch>=2.11'",
        name="torch",
    )

from fusedops import functional, integrations, nn, optim
from fusedops.allocator import keep_freed_memory
from fusedops.backends import backend
from fusedops.calibration.choice import load_chosen
from fusedops.environment import env_report
from fusedops.functional import clip_grad_norm_
from fusedops.patching import (
    PatchReport,
    Site,
    fuse_always,
    patch,
    patched,
    quantize,
    unpatch,
)
from fusedops.patching.models.attention.interface import register_attention
from fusedops.patching.verify import VerifyReport, verify

if TYPE_CHECKING:
    from fusedops.calibration.run import Calibration as Calibration
    from fusedops.calibration.run import calibrate as calibrate
    from fusedops.graphs import graph_step as graph_step
    from fusedops.graphs import warm as warm
    from fusedops.integrations.transformers import QuantizationConfig as QuantizationConfig
    from fusedops.integrations.transformers.latency import low_latency as low_latency
    from fusedops.profiling.compare import compare as compare
    from fusedops.profiling.planning import MemoryPlan as MemoryPlan
    from fusedops.profiling.planning import memory as memory
    from fusedops.profiling.recording import recording as recording
    from fusedops.profiling.run import profile as profile
    from fusedops.sweeping.run import sweep as sweep
    from fusedops.tuning.run import tune as tune

__version__ = "0.2.0"
__all__ = [
    "Calibration",
    "MemoryPlan",
    "PatchReport",
    "Site",
    "VerifyReport",
    "backend",
    "calibrate",
    "clip_grad_norm_",
    "compare",
    "env_report",
    "functional",
    "fuse_always",
    "graph_step",
    "keep_freed_memory",
    "low_latency",
    "memory",
    "nn",
    "optim",
    "patch",
    "patched",
    "profile",
    "quantize",
    "recording",
    "register_attention",
    "sweep",
    "tune",
    "unpatch",
    "verify",
    "warm",
]

integrations.install()
load_chosen()


# Imported on first use: QuantizationConfig needs transformers, and few runs profile or plan.
_LATER = {
    "Calibration": "fusedops.calibration.run",
    "MemoryPlan": "fusedops.profiling.planning",
    "QuantizationConfig": "fusedops.integrations.transformers",
    "calibrate": "fusedops.calibration.run",
    "compare": "fusedops.profiling.compare",
    "graph_step": "fusedops.graphs",
    "low_latency": "fusedops.integrations.transformers.latency",
    "memory": "fusedops.profiling.planning",
    "profile": "fusedops.profiling.run",
    "recording": "fusedops.profiling.recording",
    "sweep": "fusedops.sweeping.run",
    "tune": "fusedops.tuning.run",
    "warm": "fusedops.graphs",
}


def __getattr__(name: str):
    """Imports a name of _LATER on first use."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attribute = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = attribute
    return attribute
