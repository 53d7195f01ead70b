"""Finds norm modules, and their formula and rounding, by running them."""
