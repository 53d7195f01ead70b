"""Byte formulas of the gated activations."""

from fusedops.costs.traffic import Formula, once

__all__ = ["TRAFFIC"]

TRAFFIC: dict[str, Formula] = {
    "gated_activation_forward": once,
    "gated_activation_backward": once,
    "gated_activation_quantized": once,
}
