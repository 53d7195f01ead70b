"""Byte formulas of AdamW's operators."""

from fusedops.costs.traffic import Formula, once

__all__ = ["TRAFFIC"]

# adamw_scale writes nothing if the norm is small enough.
TRAFFIC: dict[str, Formula] = {"adamw_step": once, "adamw_squares": once, "adamw_scale": once}
