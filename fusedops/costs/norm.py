"""Byte formulas of the norms."""

from fusedops.costs.traffic import Formula, Traffic, once

__all__ = ["TRAFFIC"]


def _backward_traffic(**_):
    return Traffic(unread=("bias",))  # it only gives dbias its dtype


TRAFFIC: dict[str, Formula] = {
    "norm_forward": once,
    "norm_backward": _backward_traffic,
    "norm_quantized": once,
    "dropout_mask": once,
}
