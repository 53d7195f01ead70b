"""Runs the experiments that measure a step, and stores the numbers in an Evidence object."""
