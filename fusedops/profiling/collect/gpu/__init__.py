"""Collects evidence of a step on a GPU; `live.py` runs the steps."""
