"""Determines the formula and rounding of norm modules by running them, and fuses them."""
