"""The report of `fusedops info`: versions, devices, and which backend each operator uses."""

import platform
import sys

import torch

from fusedops.backends import (
    BACKENDS,
    FAMILIES,
    cpu_name,
    forced,
    unavailable,
    uncompiled,
    version_of,
)
from fusedops.cache import version
from fusedops.extension import _C, BUILD, FIX, UNCOMPILED

__all__ = ["env_report"]


def env_report() -> str:
    """Versions, devices, instruction sets, and which backend each operator uses and why."""
    packages = ("torch", "triton", "transformers", "numpy")
    lines = [
        f"fusedops      {version()}, {_build()}",
        *_library(),
        f"python        {sys.version.split()[0]} on {platform.platform()}",
        *(f"{name:13} {version_of(name) or 'not installed'}" for name in packages),
        f"cpu           {cpu_name()}, {_threads()}, kernels use {_C.cpu_isa()}",
        *_devices(),
        f"forced        {forced() or 'nothing (FUSEDOPS_BACKEND)'}",
        "",
        "operator               cpu tensors   cuda tensors",
        *(_operator_line(op) for ops in FAMILIES.values() for op in ops),
        *_reasons(),
    ]
    return "\n".join(lines)


def _build() -> str:
    """Describes the compiled library, or says why it is missing and how to compile it."""
    if UNCOMPILED:
        return f"not compiled: {UNCOMPILED}. {FIX}".strip()
    flags = "".join(f", {name}={value!r}" for name, value in BUILD.get("flags", {}).items())
    return f"built for torch {BUILD['torch']}{flags}"


def _library() -> list[str]:
    """The line with the path of the compiled part; none without one."""
    return [] if UNCOMPILED else [f"library       {_C.__file__}"]


def _threads() -> str:
    count = torch.get_num_threads()
    return f"{count} thread{'s' * (count != 1)}"


def _operator_line(op: str) -> str:
    on_cpu = "composite" if unavailable(op, "cpu") else "cpu"
    on_cuda = next((name for name in ("cuda", "triton") if not unavailable(op, name)), "composite")
    if name := forced():
        on_cpu = on_cuda = name
    return f"{op:22} {on_cpu:13} {on_cuda if torch.cuda.is_available() else '-'}"


def _reasons() -> list[str]:
    """Lines that say why a backend cannot run, each reason once, with its operators."""
    ops = [op for family_ops in FAMILIES.values() for op in family_ops]
    ops_by_reason: dict[tuple[str, str], list[str]] = {}
    for name in BACKENDS:
        for op in ops:
            if reason := unavailable(op, name):
                if UNCOMPILED and reason == uncompiled():
                    reason = "not compiled"  # the report's first line gives the reason
                ops_by_reason.setdefault((name, reason), []).append(op)
    lines = [
        f"{name:9} {reason}{'' if blocked == ops else ': ' + ', '.join(blocked)}"
        for (name, reason), blocked in ops_by_reason.items()
    ]
    return ["", "cannot run", *lines] if lines else []


def _devices() -> list[str]:
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = [f"cuda:{i}        {name}" for i, name in enumerate(names)]
    return lines or ["cuda          no device"]
