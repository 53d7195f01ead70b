"""Formulas of each operator call's FLOP and bytes, one file a family."""
