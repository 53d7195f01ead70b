"""Loads the compiled part, `fusedops._C`, and refuses one that was built for another torch."""

import importlib
import json
import sys
from pathlib import Path

import torch

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps fusedops"


def _load():
    record = Path(__file__).with_name("_build_info.json")
    built = json.loads(record.read_text()) if record.exists() else {}
    if built and built["torch"] != torch.__version__:
        raise ImportError(
            f"fusedops was built for torch {built['torch']} and this is torch {torch.__version__}; "
            f"rebuild it: {REBUILD}"
        )
    try:
        _C = importlib.import_module("fusedops._C")
    except ModuleNotFoundError as error:
        raise ImportError(f"fusedops is not compiled for {sys.version}: {REBUILD}") from error
    return _C, built


_C, BUILD = _load()
