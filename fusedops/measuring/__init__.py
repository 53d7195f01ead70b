"""Measuring: what profile, sweep, tune and the benchmarks share to time and watch steps."""
