"""Shared tools for patching: swapping classes, and running and inspecting model code."""
