"""Loads the compiled part, `fusedops._C`, and refuses one that was built for another torch.

Also says when a call must not take its short path.
"""

import importlib
import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack, has_torch_function_variadic
from torch.utils._device import DeviceContext


def _rebuild() -> str:
    """The command that builds this package again: from its checkout, or from where it came."""
    checkout = Path(__file__).resolve().parents[1]
    source = f"-e {checkout}" if (checkout / "setup.py").exists() else "fusedops"
    return f"pip install --no-build-isolation --no-deps --force-reinstall {source}"


def _load():
    record = Path(__file__).with_name("_build_info.json")
    built = json.loads(record.read_text()) if record.exists() else {}
    if built and built["torch"] != torch.__version__:
        raise ImportError(
            f"fusedops was built for torch {built['torch']} and this is torch {torch.__version__}; "
            f"rebuild it: {_rebuild()}"
        )
    try:
        _C = importlib.import_module("fusedops._C")
    except ModuleNotFoundError as error:
        raise ImportError(f"fusedops is not compiled for {sys.version}: {_rebuild()}") from error
    return _C, built


_C, BUILD = _load()


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
