"""Fused kernels for training and serving transformers, as drop-in torch modules."""

from importlib.metadata import version

from fusedops import functional, nn, optim
from fusedops.backends import backend, env_report
from fusedops.functional import clip_grad_norm_
from fusedops.memory import keep_freed_memory
from fusedops.patching import (
    PatchReport,
    Site,
    patch,
    patched,
    quantize,
    register_attention,
    unpatch,
)

__version__ = version("fusedops")
__all__ = [
    "PatchReport",
    "Site",
    "backend",
    "clip_grad_norm_",
    "env_report",
    "functional",
    "keep_freed_memory",
    "nn",
    "optim",
    "patch",
    "patched",
    "quantize",
    "register_attention",
    "unpatch",
]
