"""Finds the compiled library, `fusedops._C`, or substitutes plain PyTorch.

A compiled part fits one version of the package, one minor version of torch and one Python. It is in
the package's folder or in the cache folder of `fusedops build`; if both have one, the newer is
loaded. If none fits, `UNCOMPILED` gives the reason and `FIX` the remedy, and the first use warns.
FUSEDOPS_REQUIRE=compiled turns that into an error. FUSEDOPS_COMPILED=0 skips a compiled part.

`traced` tells whether a call must go through torch.ops instead of pybind11, and `overridden`
whether a tensor subclass or a mode overrides torch's functions.
"""

import importlib
import importlib.util
import json
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack, has_torch_function_variadic
from torch.utils._device import DeviceContext

from fusedops import references
from fusedops.cache import installed_cache_folder, version, versions_folder
from fusedops.notice import announce
from fusedops.toolchain import library_name, unsupported

MODULE = "fusedops._C"
PACKAGE = Path(__file__).parent
COMMAND = "fusedops build"
REPAIRS = (["build"], ["doctor"])  # subcommands that the messages tell users to run


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def repairing() -> bool:
    """Whether this process is `fusedops build` or `fusedops doctor`, started either way.

    They ignore FUSEDOPS_REQUIRE and FUSEDOPS_BACKEND, because they repair an installation that
    these settings reject.
    """
    started = sys.argv[:1] == ["-m"] and " -m fusedops " in f" {' '.join(sys.orig_argv)} "
    started = started or Path(sys.argv[0] if sys.argv else "").stem == "fusedops"
    return started and sys.argv[1:2] in REPAIRS


def _libraries() -> tuple[list[Path], str]:
    """Libraries for this torch and Python, newest first, and why the cache cannot be read.

    Computing the cache folder's name reads all sources, so it is done only if a cache exists.
    """
    name, reason = library_name(torch.__version__), ""
    places = [PACKAGE / name]
    try:
        if versions_folder().exists():
            places.insert(0, installed_cache_folder() / name)
    except (OSError, RuntimeError) as error:
        reason = f"the cache cannot be read: {error}"
    mtimes: dict[Path, float] = {}
    for place in places:
        try:
            mtimes[place] = place.lstat().st_mtime
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            reason = f"the cache cannot be read: {error}"
    return sorted(mtimes, key=lambda place: mtimes[place], reverse=True), reason


def _read(record: Path) -> dict[str, Any]:
    """The record that a build wrote. Raises ImportError if its library does not fit."""
    try:
        built = json.loads(record.read_text())
        compiled_for = _minor(built["torch"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImportError(f"its record {record.name} cannot be read: {error}") from error
    if compiled_for != _minor(torch.__version__):
        raise ImportError(
            f"compiled for torch {compiled_for}, but this is torch {_minor(torch.__version__)}"
        )
    if (of := built.get("fusedops", version())) != version():
        raise ImportError(f"compiled from fusedops {of}, but this is fusedops {version()}")
    return built


def _load(library: Path) -> Any:
    loader = ExtensionFileLoader(MODULE, str(library))
    spec = importlib.util.spec_from_file_location(MODULE, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _others() -> str:
    """Why no library in the package's folder fits this torch and this Python."""
    minors, suffix = set(), EXTENSION_SUFFIXES[0]
    library_names = [path.name for path in PACKAGE.glob("_C_torch*.so")]
    for name in library_names:
        if name.endswith(suffix):
            minors.add(name.removeprefix("_C_torch").removesuffix(suffix).replace("_", "."))
    if minors:
        listed = ", ".join(sorted(minors, key=lambda minor: [*map(int, minor.split("."))]))
        return f"compiled for torch {listed}, but this is torch {_minor(torch.__version__)}"
    if library_names:
        return f"not compiled for Python {sys.version_info.major}.{sys.version_info.minor}"
    return "not compiled on this machine"


def _found() -> tuple[Any, dict[str, Any], str, str]:
    """The compiled part and its record; if none fits, None, {}, the reason and the remedy."""
    if os.environ.get("FUSEDOPS_COMPILED", "") == "0":
        reason = "FUSEDOPS_COMPILED=0 hides the compiled part"
        return None, {}, reason, "Load it: unset FUSEDOPS_COMPILED"
    if reason := unsupported():
        return None, {}, reason, ""
    libraries, unreadable = _libraries()
    for library in libraries:
        try:
            built = _read(library.with_suffix(".json"))
            return _load(library), built, "", ""
        except ImportError as error:
            reason = reason or str(error)
    return None, {}, reason or unreadable or _others(), f"Compile it: {COMMAND}"


def _option(name: str, values: tuple[str, ...]) -> str:
    value = os.environ.get(name, "")
    if value not in ("", *values):
        raise ValueError(f"{name} must be {' or '.join(map(repr, values))} or empty, got {value!r}")
    return value


def _choose() -> tuple[Any, dict[str, Any], str, str]:
    required = _option("FUSEDOPS_REQUIRE", ("compiled",))
    _option("FUSEDOPS_COMPILED", ("0", "1"))
    compiled, built, reason, fix = _found()
    if compiled is None and required and not repairing():
        error = f"FUSEDOPS_REQUIRE=compiled, but fusedops has no compiled part: {reason}. {fix}"
        raise ImportError(error.strip())
    if compiled is None:
        compiled = importlib.import_module("fusedops.uncompiled")
        message = f"fusedops has no compiled part ({reason}), so plain PyTorch runs. {fix}"
        announce(message.strip())
    sys.modules[MODULE] = sys.modules["fusedops"]._C = compiled  # type: ignore[attr-defined]
    return compiled, built, reason, fix


# BUILD: the build's record; empty without a compiled part. UNCOMPILED: why there is none. FIX: how
# to get one, such as "Compile it: fusedops build"; empty if none can run here.
_C: Any
_C, BUILD, UNCOMPILED, FIX = _choose()
# The operators: through torch's dispatcher, or without a compiled part the references.
ops: Any = _C if UNCOMPILED else torch.ops.fusedops
_definitions = None if UNCOMPILED else references.register()


def traced(*tensors: Tensor | None) -> bool:
    """Whether torch.compile, a tensor subclass or a mode needs the call to go through torch.ops."""
    return torch.compiler.is_compiling() or (
        has_torch_function_variadic(*tensors) and not _only_a_default_device(tensors)
    )


def overridden(*tensors: Tensor | None) -> bool:
    """Whether a tensor subclass or a mode overrides torch functions of these tensors."""
    return has_torch_function_variadic(*tensors) and not _only_a_default_device(tensors)


def _only_a_default_device(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether all tensors are plain and the only mode is torch.set_default_device's.

    That mode changes only functions that create tensors.
    """
    plain = all(t is None or type(t) in (Tensor, torch.nn.Parameter) for t in tensors)
    modes = _get_current_function_mode_stack()
    return plain and all(isinstance(mode, DeviceContext) for mode in modes)
