"""Byte formulas of scaled_copy."""

from fusedops.costs.traffic import Formula, once

__all__ = ["TRAFFIC"]

TRAFFIC: dict[str, Formula] = {"scaled_copy_forward": once}
