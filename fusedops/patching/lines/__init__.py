"""Finds lines of a module's forward that fused functions can replace, and rewrites them."""
