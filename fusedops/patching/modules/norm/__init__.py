"""Norm modules: finds their formula and rounding by running them."""
