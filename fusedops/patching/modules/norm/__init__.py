"""Norm modules: which formula and rounding a module computes, found by running it."""
