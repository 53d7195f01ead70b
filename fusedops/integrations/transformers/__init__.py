"""Integration with transformers: quantized weights, a Trainer callback, low-latency generation.

Importing this package imports none of them, because the Trainer's modules take seconds to import.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusedops.integrations.transformers.quantization import QuantizationConfig, Quantizer
    from fusedops.integrations.transformers.trainer import FusedOpsCallback

__all__ = ["FusedOpsCallback", "QuantizationConfig", "Quantizer"]

MODULES = {
    "FusedOpsCallback": "trainer",
    "QuantizationConfig": "quantization",
    "Quantizer": "quantization",
}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
