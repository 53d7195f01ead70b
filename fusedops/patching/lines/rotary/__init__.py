"""Fuses calls of a model's own rotary functions."""
