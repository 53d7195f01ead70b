"""Finds the compiled part, `fusedops._C`. Without one, plain PyTorch runs in its place.

A compiled part fits one minor version of torch, one C++ ABI and one Python. It is in the package's
folder, or in the cache folder of `fusedops build`. Where none fits, `UNCOMPILED` says why, the
first use warns, and FUSEDOPS_REQUIRE=compiled makes it an error. With FUSEDOPS_COMPILED=0 a
compiled part is not loaded.

Also says when a call must not take its short path.
"""

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack, has_torch_function_variadic
from torch.utils._device import DeviceContext

from fusedops.building import cache_folder, library_name
from fusedops.notice import announce

MODULE = "fusedops._C"
PACKAGE = Path(__file__).parent
COMMAND = "fusedops build"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _candidates() -> Iterator[tuple[Path, Path]]:
    """Libraries for this torch and Python, each with its record. The cache's name takes reading all
    sources, so it is looked up last.
    """
    name = library_name(torch.__version__)
    library = PACKAGE / name
    yield library, library.with_suffix(".json")
    library = cache_folder(torch.__version__, torch.compiled_with_cxx11_abi()) / name
    yield library, library.with_suffix(".json")


def _read(record: Path) -> dict[str, Any]:
    """What a build has recorded. Raises ImportError where that says that it does not fit."""
    try:
        built = json.loads(record.read_text())
        compiled_for = _minor(built["torch"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImportError(f"its record {record.name} cannot be read: {error}") from error
    if compiled_for != _minor(torch.__version__):
        raise ImportError(
            f"compiled for torch {compiled_for}, this is torch {_minor(torch.__version__)}"
        )
    abi = torch.compiled_with_cxx11_abi()
    if built.get("cxx11_abi", abi) != abi:
        raise ImportError(f"compiled for another C++ ABI than torch's, which is cxx11abi={abi:d}")
    return built


def _load(library: Path) -> Any:
    loader = ExtensionFileLoader(MODULE, str(library))
    spec = importlib.util.spec_from_file_location(MODULE, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _others() -> str:
    """Why the libraries in the package's folder are not for this torch or this Python."""
    minors, suffix = set(), EXTENSION_SUFFIXES[0]
    found = [path.name for path in PACKAGE.glob("_C*.so")]
    for name in found:
        if name.endswith(suffix) and name.startswith("_C_torch"):
            minors.add(name.removeprefix("_C_torch").removesuffix(suffix).replace("_", "."))
    if minors:
        listed = ", ".join(sorted(minors, key=lambda minor: [*map(int, minor.split("."))]))
        return f"compiled for torch {listed}, this is torch {_minor(torch.__version__)}"
    if found:
        return f"not compiled for Python {sys.version_info.major}.{sys.version_info.minor}"
    return "not compiled on this machine"


def _found() -> tuple[Any, dict[str, Any], str]:
    """The compiled part and its record, or None, an empty one, and the reason."""
    if os.environ.get("FUSEDOPS_COMPILED", "") == "0":
        return None, {}, "FUSEDOPS_COMPILED=0 hides the compiled part"
    reason = ""
    for library, record in _candidates():
        if not library.exists():
            continue
        try:
            built = _read(record)
            return _load(library), built, ""
        except ImportError as error:
            reason = reason or str(error)
    return None, {}, reason or _others()


def _option(name: str, values: tuple[str, ...]) -> str:
    value = os.environ.get(name, "")
    if value not in ("", *values):
        raise ValueError(f"{name} must be {' or '.join(map(repr, values))} or empty, got {value!r}")
    return value


def _choose() -> tuple[Any, dict[str, Any], str]:
    required = _option("FUSEDOPS_REQUIRE", ("compiled",))
    _option("FUSEDOPS_COMPILED", ("0", "1"))
    compiled, built, reason = _found()
    if compiled is None and required:
        raise ImportError(
            f"FUSEDOPS_REQUIRE=compiled, and fusedops has no compiled part: {reason}. "
            f"Compile it: {COMMAND}"
        )
    if compiled is None:
        compiled = importlib.import_module("fusedops.uncompiled.exports")
        announce(
            f"fusedops has no compiled part ({reason}), so PyTorch references run, and on GPUs the "
            f"Triton kernels. Compile it: {COMMAND}"
        )
    sys.modules[MODULE] = sys.modules["fusedops"]._C = compiled  # type: ignore[attr-defined]
    return compiled, built, reason


# BUILD: what the build has recorded, empty without one. UNCOMPILED: why there is no compiled part.
_C, BUILD, UNCOMPILED = _choose()


def traced(*tensors: Tensor | None) -> bool:
    """Whether torch.compile, a tensor subclass or a mode has to see the operator itself."""
    return torch.compiler.is_compiling() or (
        has_torch_function_variadic(*tensors) and not _only_a_default_device(tensors)
    )


def overridden(*tensors: Tensor | None) -> bool:
    """Whether a tensor subclass or a mode overrides torch functions of these tensors."""
    return has_torch_function_variadic(*tensors) and not _only_a_default_device(tensors)


def _only_a_default_device(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether plain tensors meet no mode but `torch.set_default_device`, which creates tensors."""
    plain = all(t is None or type(t) in (Tensor, torch.nn.Parameter) for t in tensors)
    modes = _get_current_function_mode_stack()
    return plain and all(isinstance(mode, DeviceContext) for mode in modes)
