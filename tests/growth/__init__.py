"""Measures growth: over repeated calls (measure.py), and within one call (peaks.py)."""
