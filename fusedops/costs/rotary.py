"""Byte formulas of the rotary embedding."""

from fusedops.costs.traffic import Formula, once

__all__ = ["TRAFFIC"]

TRAFFIC: dict[str, Formula] = {"rotary_forward": once, "rotary_backward": once}
